"""Sizes, weights and prompts of the decode loop, and the projections that both frameworks share.

One layer of sparse attention whose weights are made, not learned. Its key of a token is made of the token before it,
and its value of the token itself. So a query finds the places where the current token came before, and answers with
what came next there. A prompt goes round a cycle of tokens, and so must what is decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

D_ROPE, D_INDEX, D_VALUE = 64, 128, 512
"""Channels of rotary parts, of the indexer's keys, and of what attention returns; the operators fix them."""

PAGE = 64
WIDTH, VOCABULARY = 64, 4096
ROOM = 32
"""So many tokens at least fit behind a prompt."""

SHARPNESS = 16.0
"""The score of a key that matches."""


@dataclass(frozen=True)
class Shape:
    """A model's attention.

    Attributes:
        cache_format: of its latents.
        latent: channels of a token's latent, without the rotary part.
        heads, index_heads: of attention and of the indexer.
        topk: tokens that the indexer selects.
        window: newest tokens that are attended to from a cache of their own, 0 for none. With one there is a sink.
    """

    cache_format: str
    latent: int
    heads: int
    index_heads: int
    topk: int
    window: int = 0

    @property
    def d_qk(self) -> int:
        """Channels of a query and of a key."""
        return self.latent + D_ROPE

    @property
    def token_bytes(self) -> int:
        """Of a token in the cache."""
        return {"v32_fp8": 656, "v4_fp8": 584}[self.cache_format]


@dataclass(frozen=True)
class Size:
    """How much is decoded.

    Attributes:
        batches: numbers of requests, one after the other.
        context: the most tokens of a prompt; the fewest are half as many.
        steps: tokens decoded.
        period: tokens of a prompt's cycle; more than are selected, so that a wrong selection misses the right ones.
        checked: requests of which float64 decodes every token.
    """

    batches: tuple[int, ...]
    context: int
    steps: int
    period: int
    checked: int


SHAPES = {
    "v3.2": Shape("v32_fp8", 512, heads=128, index_heads=64, topk=2048),
    # Without the compressor: its cache holds a latent of every token here.
    "v4": Shape("v4_fp8", 448, heads=64, index_heads=64, topk=512, window=128),
}
SIZES = {
    "small": Size((3,), context=150, steps=6, period=60, checked=3),
    "full": Size((1, 8, 32), context=32768, steps=32, period=3000, checked=2),
}


def shape_of(name: str, size: str) -> Shape:
    """A model's attention, with fewer heads and tokens where the size is small."""
    shape = SHAPES[name]
    if size == "full":
        return shape
    return replace(shape, heads=4, index_heads=4, topk=32, window=16 if shape.window else 0)


@dataclass(frozen=True)
class Weights:
    """A layer's weights, float32.

    Attributes:
        embedding: [VOCABULARY, WIDTH], rows of length 1.
        query: [WIDTH, heads * d_qk], of a token.
        index_query: [WIDTH, index heads * 128], of a token.
        value: [WIDTH, latent], the second half of a token's latent; its first columns are 0.
        key: [WIDTH, latent + 64 + 128], what the token before gives: the first half of the latent, the rotary part, the
            indexer's key.
        head: [512, VOCABULARY], from attention's mean over heads to logits.
        index_weights: [index heads].
        sink: [heads].
    """

    embedding: Any
    query: Any
    index_query: Any
    value: Any
    key: Any
    head: Any
    index_weights: Any
    sink: Any

    def on(self, put: Callable[[Any], Any]) -> Weights:
        """The same with each array as `put` makes it."""
        return Weights(*(put(getattr(self, field.name)) for field in fields(self)))


def weights_of(shape: Shape, seed: int) -> Weights:
    """Weights by which a query finds its token among those before others."""
    rng = np.random.default_rng(seed)

    def rows(columns: int) -> Array:
        """[WIDTH, columns] with orthonormal rows: it keeps scalar products."""
        made: Array = np.linalg.qr(rng.standard_normal((columns, WIDTH)))[0].T
        return made

    def differing(matrix: Array, heads: int) -> Array:
        """A matrix for each head, side by side, which differ by a tenth."""
        noise = 0.1 * matrix.shape[1] ** -0.5 * rng.standard_normal((WIDTH, heads, matrix.shape[1]))
        made: Array = (matrix[:, None] + noise).reshape(WIDTH, -1)
        return made

    embedding = rng.standard_normal((VOCABULARY, WIDTH))
    embedding /= np.linalg.norm(embedding, axis=-1, keepdims=True)
    half = shape.latent // 2
    nothing = np.zeros((WIDTH, half))
    key, value, rope, index = rows(half), rows(half), 0.5 * rows(D_ROPE), rows(D_INDEX)
    head = np.zeros((D_VALUE, VOCABULARY))
    head[half : shape.latent] = value.T @ embedding.T
    made = Weights(
        embedding=embedding,
        query=SHARPNESS * shape.d_qk**0.5 * differing(np.concatenate([key, nothing, rope], -1), shape.heads),
        index_query=differing(index, shape.index_heads),
        value=np.concatenate([nothing, value], -1),
        key=np.concatenate([key, nothing, rope, index], -1),
        head=head,
        index_weights=rng.uniform(0.5, 1.5, shape.index_heads) / shape.index_heads,
        sink=rng.standard_normal(shape.heads),
    )
    return made.on(lambda array: array.astype(np.float32))


class Prompts:
    """Prompts of a batch, and where their tokens lie in the caches.

    Attributes:
        lengths: [B] int32, tokens of each.
        tables: [B, width] int32: block of each PAGE positions, in no order.
        blocks: of a cache.
    """

    def __init__(self, size: Size, batch: int, seed: int) -> None:
        self._size = size
        self._cycles: list[Array] = []
        self._starts: list[int] = []
        lengths = []
        for number in range(batch):
            rng = np.random.default_rng((seed, number))  # whatever else is in the batch
            self._cycles.append(rng.permutation(VOCABULARY)[: size.period])
            self._starts.append(int(rng.integers(size.period)))
            lengths.append(rng.integers(size.context // 2, size.context + 1))
        self.lengths = np.array(lengths, np.int32)
        width = -(-(size.context + max(size.steps, ROOM)) // PAGE)
        self.blocks = batch * width
        order = np.random.default_rng(seed).permutation(self.blocks)
        self.tables = order.reshape(batch, width).astype(np.int32)

    @property
    def batch(self) -> int:
        """How many there are."""
        return len(self.lengths)

    def tokens(self, request: int, positions: Array) -> Array:
        """The tokens of a request at these positions, -1 among them, for as far as its cycle goes: for ever."""
        place = self._starts[request] + positions
        found: Array = self._cycles[request][place % self._size.period].astype(np.int32)
        return found

    def prompt(self, request: int) -> tuple[Array, Array, Array, Array]:
        """Tokens, tokens before them, positions and slots, int32, of what is written before decoding begins.

        That is a prompt without its last token. It is padded to the context: padding has slot -1.
        """
        positions = np.arange(self._size.context, dtype=np.int32)
        slots = slots_at(np, self.tables[request : request + 1], positions[None])[0]
        slots[self.lengths[request] - 1 :] = -1
        return self.tokens(request, positions), self.tokens(request, positions - 1), positions, slots

    def newest(self) -> tuple[Array, Array]:
        """[B] int32: the last token of each prompt, and the one before it."""
        ends = self.lengths - 1
        last, before = (
            np.array([self.tokens(b, ends[b] - back) for b in range(self.batch)], np.int32) for back in (0, 1)
        )
        return last, before

    def continued(self) -> Array:
        """[steps, B] int32: how the cycles go on."""
        steps = np.arange(self._size.steps)
        return np.stack([self.tokens(b, self.lengths[b] + steps) for b in range(self.batch)], -1)


# Projections, in whichever framework `xp` is --------------------------------------------------------------------------
# A CUDA graph takes no constants from the host: all that they need is made where the arrays are.

Product = Callable[[Any, Any], Any]
"""What multiplies two matrices."""


class Keys(NamedTuple):
    """What the caches are given of tokens [n]: latent [n, latent], rope [n, 64], index [n, 128]."""

    latent: Any
    rope: Any
    index: Any


def keys_of(xp: Any, shape: Shape, weights: Weights, product: Product, token: Any, before: Any, positions: Any) -> Keys:
    """Of tokens [n] at positions [n], before which others stand; in the weights' dtype."""
    made = product(weights.embedding[before], weights.key)
    return Keys(
        latent=made[:, : shape.latent] + product(weights.embedding[token], weights.value),
        rope=rotated(xp, made[:, shape.latent : shape.d_qk], positions),
        index=made[:, shape.d_qk :],
    )


def queries_of(
    xp: Any, shape: Shape, weights: Weights, product: Product, token: Any, positions: Any
) -> tuple[Any, Any]:
    """q [n, heads, d_qk] and the indexer's q [n, index heads, 128] of tokens [n] at positions [n]."""
    here = weights.embedding[token]
    q = product(here, weights.query).reshape(-1, shape.heads, shape.d_qk)
    index_q = product(here, weights.index_query).reshape(-1, shape.index_heads, D_INDEX)
    return rotated(xp, q, positions, shape.latent), index_q


def rotated(xp: Any, x: Any, positions: Any, first: int = 0) -> Any:
    """Rotary positions on the last axis of x [n, ..., channels], from channel `first` on; positions [n]."""
    channel = xp.arange(x.shape[-1])
    half = (x.shape[-1] - first) // 2
    place = channel - first
    rates = xp.where(place < 0, 0.0, xp.exp(-(place % half) * (np.log(10000.0) / half))).astype(x.dtype)
    angles = positions.astype(x.dtype).reshape(-1, *[1] * (x.ndim - 1)) * rates
    partner = xp.where(place < 0, channel, xp.where(place < half, channel + half, channel - half))
    return x * xp.cos(angles) + x[..., partner] * (xp.sin(angles) * xp.where(place < half, -1, 1).astype(x.dtype))


def slots_at(xp: Any, tables: Any, positions: Any) -> Any:
    """Slots, int32, of positions [B] or [B, n] of the requests of tables [B, width]; -1 for negative positions."""
    batch, width = tables.shape
    first = xp.arange(batch, dtype=np.int32).reshape(-1, *[1] * (positions.ndim - 1)) * width
    blocks = tables.reshape(-1)[first + xp.maximum(positions, 0) // PAGE]
    return xp.where(positions >= 0, blocks * PAGE + positions % PAGE, -1).astype(np.int32)


def window_positions(xp: Any, shape: Shape, lengths: Any) -> Any:
    """[B, window]: positions of the newest tokens, negative ones where a request has fewer."""
    return lengths[:, None] - shape.window + xp.arange(shape.window, dtype=np.int32)
