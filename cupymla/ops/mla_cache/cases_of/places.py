"""Arrays that the cases of writers and readers share: values, caches, slots and block tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...case import Case, spread
from ..cases import VALUES

OUTSIDE = (-1, -2, -(2**31), 2**31 - 1)
"""Slots that no cache has."""

FEW = 32
"""So many tokens or less have slots anywhere, as the newest token of each request does."""

PAGE = 64
"""Slots of a block in benchmarks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCase(Case):
    """A problem with a cache, and slots of it.

    Attributes:
        page, blocks: of the cache.
        outside: share of slots that the cache does not have.
        slots: their dtype.
        gap: bytes between blocks.
        four: whether the cache has an axis of one head.
    """

    page: int = PAGE
    blocks: int = 1
    outside: float = 0.0
    slots: str = "int64"
    gap: int = 0
    four: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCase(CacheCase):
    """A problem of a writer.

    Attributes:
        tokens: T.
        dtype: of what is written.
        values: what numbers are like, see `KINDS`.
        padding: channels behind each row of what is written that are not part of it.
    """

    tokens: int
    dtype: str = "bfloat16"
    values: str = "normal"
    padding: int = 0

    @property
    def slot_bytes(self) -> int:
        """What names a token's place, in bytes."""
        return np.dtype(self.slots).itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherCase(CacheCase):
    """A problem of a reader.

    Attributes:
        rows: how many slots there are, or rows of requests.
        by: "slots", "tables", or "hostile": tables that name blocks which the cache does not have.
        apart: whether there are gaps between slots.
    """

    rows: int
    by: str = "slots"
    apart: bool = False

    @property
    def slot_bytes(self) -> int:
        """What names a row's place, in bytes; tables do not count."""
        return np.dtype(self.slots).itemsize if self.by == "slots" else 0


def words_of(case: CacheCase, sizes: str, *words: str) -> str:
    """A case's name, of its sizes, its page and those of other words that are not empty."""
    page = f"page{case.page}" if case.page != PAGE else ""
    return "_".join(word for word in (sizes, page, *words) if word)


def dtype_of(name: str) -> Any:
    """A NumPy dtype, bfloat16 among them."""
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def _powers(rng: Any, xp: Any, shape: tuple[int, ...]) -> Any:
    """Groups whose largest magnitude is 448 times a power of two, or the float16 next to that on either side."""
    exponents = rng.integers(-12, 7, (*shape[:-1], shape[-1] // 64)).astype(np.float32)
    beside = rng.integers(-1, 2, exponents.shape).astype(np.float32) * np.float32(2.0**-8)
    x = rng.integers(-256, 257, shape).astype(np.float32)
    x[..., ::64] = 448 + 448 * beside
    return x * xp.exp2(xp.repeat(exponents, 64, axis=-1))


def _huge(rng: Any, xp: Any, shape: tuple[int, ...]) -> Any:
    """Numbers near the largest of their dtype, which is past float16 and rounds to an infinity in bfloat16."""
    signs = rng.integers(0, 2, shape).astype(np.float32) * 2 - 1
    return signs * np.float32(np.finfo(np.float32).max) * (1 - rng.random(shape, dtype=np.float32) * np.float32(0.5))


KINDS = {**VALUES, "powers": _powers, "huge": _huge}
"""What numbers are like; see there."""


def numbers(rng: Any, xp: Any, rows: int, channels: int, kind: str, dtype: str, padding: int = 0) -> Any:
    """Rows of numbers, behind each of which `padding` channels lie that are not part of it."""
    wide = KINDS[kind](rng, xp, (rows, channels))
    with np.errstate(over="ignore"):
        return padded(wide.astype(dtype_of(dtype)), padding)


def padded(rows: Any, padding: int) -> Any:
    """The same rows with so many elements behind each."""
    return spread(rows, True, padding) if padding else rows


def random_blocks(rng: Any, xp: Any, case: CacheCase, token_bytes: int) -> Any:
    """A cache [blocks, page, bytes] of any bytes, or [blocks, page, 1, bytes]; blocks lie `gap` bytes apart."""
    block = case.page * token_bytes + case.gap
    memory = rng.integers(0, 256, (case.blocks, block), dtype=np.int32).astype(np.uint8)
    shape = (case.blocks, case.page, *([1] if case.four else []), token_bytes)
    steps = (block, *([token_bytes] if case.four else []), token_bytes, 1)
    return xp.lib.stride_tricks.as_strided(memory, shape, steps)


def blocks_for(tokens: int, page: int = PAGE) -> int:
    """So many blocks hold so many tokens."""
    return max(1, -(-tokens // page))


def slots_of(rng: Any, xp: Any, case: CacheCase, count: int) -> Any:
    """Different slots of a cache, a share of them replaced by what is none.

    Few are anywhere; more are those of whole blocks in any order, as a prefill's.
    """
    blocks, page = case.blocks, case.page
    if count > FEW:
        order = xp.argsort(rng.random(blocks, dtype=np.float32))
        slots = (order[:, None] * page + xp.arange(page)).reshape(-1)
    else:
        slots = xp.argsort(rng.random(blocks * page, dtype=np.float32))
    slots = xp.resize(slots, count) if slots.size else xp.zeros(count, np.int64)
    if case.outside:
        bad = xp.asarray([*OUTSIDE, blocks * page, blocks * page + 7])
        chosen = rng.random(count, dtype=np.float32) < case.outside
        slots = xp.where(chosen, bad[rng.integers(0, len(bad), count)], slots)
    return slots.astype(case.slots)


def places_of(rng: Any, xp: Any, case: GatherCase) -> dict[str, Any]:
    """The arguments of a reader that name places, by name."""
    if case.by != "slots":
        return _tables(rng, xp, case)
    slots = slots_of(rng, xp, case, case.rows)
    return {"slots": spread(slots, False) if case.apart else slots}


def _tables(rng: Any, xp: Any, case: GatherCase) -> dict[str, Any]:
    """Block tables and cumulated lengths of three requests, of which one is empty, for so many rows and three more.

    Hostile tables name blocks that there are not, and a request is longer than its table.
    """
    rows, width = case.rows, blocks_for(case.rows, case.page)
    order = xp.resize(xp.argsort(rng.random(case.blocks, dtype=np.float32)), (3, width)).astype(np.int32)
    if case.by == "hostile":
        order[:, ::3] = -1
        order[0, 1::3] = case.blocks
        width = max(1, width // 2)
    first = rows // 3
    lens = xp.asarray([0, first, first, rows], dtype=np.int32)
    return {"block_tables": order[:, :width], "cu_lens": lens, "rows": rows + 3}
