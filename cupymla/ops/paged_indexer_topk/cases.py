"""Problems of paged_indexer_topk; see `cupymla.ops.case`.

Values are small integers, whose scores are exact on every machine, so that there is one right selection. What is wanted
is wanted in the order of `OUTPUTS`: no lse without values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..case import Case, all_on, spread
from .reference import lengths

OUTPUTS = ("indices", "count", "values", "lse")
"""The output parameters, in the order in which the call returns them."""

_DTYPES: dict[str, Any] = {"fp8": ml_dtypes.float8_e4m3fn, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}
_SHORT_LENGTH = 1024
_GAP_BYTES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedCase(Case):
    """One problem.

    Attributes:
        requests, queries: B and n.
        keys: L, that a request has room for; a multiple of the page.
        topk: entries of each query.
        page: keys of a block.
        heads, channels: H and D.
        dtype: of q and the keys, a key of `_DTYPES`.
        lens: "full": L keys; "hostile": any, many out of range; "one_long": L keys of the first request, a few of the
            others; "empty": none.
        by_query: whether each query has a length of its own.
        tables: "good", or "hostile": some blocks are not in the cache.
        values: "exact" for small integers; "ties": with few scores that differ; "negative": exact, none above 0;
            "hostile": some keys are NaN, or have infinite scales or, with 16 bits, channels; "normal".
        scales: whether there are q_scale and, in the cache, other scales than 1.
        bf16_weights: whether weights are bf16.
        strided: whether arrays have gaps, and blocks of fp8 lie at odd multiples of 4 bytes.
        relu, positions, max_context, return_values, return_lse, lse_base: the options.
    """

    requests: int
    queries: int
    keys: int
    topk: int
    page: int = 16
    heads: int = 16
    channels: int = 128
    dtype: str = "fp8"
    lens: str = "full"
    by_query: bool = False
    tables: str = "good"
    values: str = "exact"
    scales: bool = False
    bf16_weights: bool = False
    strided: bool = False
    relu: bool = True
    positions: str = "slot"
    max_context: int | None = None
    return_values: bool = False
    return_lse: bool = False
    lse_base: str = "e"


_OPTIONS = {
    "relu": True,
    "positions": "slot",
    "max_context": None,
    "return_values": False,
    "return_lse": False,
    "lse_base": "e",
}


def _case(
    requests: int, queries: int, keys: int, topk: int, name: str = "", intent: str = "shapes", **traits: Any
) -> Any:
    made = PagedCase(name="", intent=intent, requests=requests, queries=queries, keys=keys, topk=topk, **traits)
    size = f"h{made.heads}{'' if made.channels == 128 else f'_d{made.channels}'}_b{requests}_n{queries}_l{keys}_k{topk}"
    words = [made.dtype, size, *([f"page{made.page}"] if made.page != 64 else []), *([name] if name else [])]
    sizes: dict[str, Any] = {"requests": requests, "queries": queries, "keys": keys, "topk": topk}
    return PagedCase(name="_".join(words), intent=intent, **sizes, **traits)


DEMO = _case(4, 1, 4096, 512, page=64, heads=32, scales=True)
"""A problem which takes the references a second or two."""


def _timed(requests: int, keys: int, name: str = "", queries: int = 1, **traits: Any) -> Any:
    sizes = {"page": 64, "heads": 64, "scales": True, "values": "normal", **traits}
    return _case(requests, queries, keys, 2048, name, "speed", **sizes)


BENCH: tuple[PagedCase, ...] = (
    *(_timed(requests, keys) for keys in (4096, 32768, 131072) for requests in (1, 8, 32, 128)),
    _timed(32, 131072, "mixed", lens="one_long"),
    _timed(8, 32768, queries=4),
)


def context_lens(case: PagedCase, rng: Any) -> Any:
    """Lengths, [B] or [B, n] int32."""
    shape = (case.requests, case.queries) if case.by_query else (case.requests,)
    if case.lens == "hostile":
        lens = rng.integers(-case.keys // 4, case.keys * 5 // 4 + 1, shape).astype(np.int32)
        flat = lens.reshape(-1)
        # Nothing, one key, all, and what no sum may go past.
        for place, extreme in enumerate((0, 1, case.keys, -(2**31), 2**31 - 1)[: len(flat) // 2]):
            flat[2 * place] = extreme
        return lens
    if case.lens == "empty":
        return np.zeros(shape, np.int32)
    lens = np.full(shape, case.keys, np.int32)
    if case.lens == "one_long":
        lens[1:] = min(_SHORT_LENGTH, case.keys // 8)
    return lens


def inputs(case: PagedCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Fresh arguments of `paged_indexer_topk`, by parameter name; fp8 as bytes."""
    rng = np.random.default_rng(seed)
    width = case.keys // case.page
    lens = context_lens(case, rng)
    used = lengths(lens, case.queries, case.keys).max(axis=-1, initial=0)
    held = -(-used // case.page)  # blocks of each request
    blocks = int(held.sum()) + 2
    tables = rng.integers(0, blocks, (case.requests, width)).astype(np.int32)
    order = rng.permutation(blocks)
    places = np.cumsum(held) - held
    for request in range(case.requests):
        first, count = int(places[request]), int(held[request])
        tables[request, :count] = order[first : first + count]
    if case.tables == "hostile":
        bad = rng.choice(np.array([-1, blocks, -(2**31), 2**31 - 1], np.int32), tables.shape)
        tables = np.where(rng.random(tables.shape) < 0.2, bad, tables).astype(np.int32)
    headed = (case.requests, case.queries, case.heads)
    weights = rng.integers(-8, 0 if case.values == "negative" else 9, headed).astype(np.float32)
    if case.values == "normal":
        weights = rng.standard_normal(headed).astype(np.float32)
    q = _draw(rng, (*headed, case.channels), case)
    arguments: dict[str, Any] = {
        "q": q,
        "k_cache": _cache(case, blocks, rng, xp),
        "weights": weights.astype(ml_dtypes.bfloat16) if case.bf16_weights else weights,
        "block_tables": tables,
        "context_lens": lens,
        "topk": case.topk,
    }
    if case.scales:
        arguments["q_scale"] = np.exp2(rng.integers(-9, -3, headed)).astype(np.float32)
    arguments |= {name: getattr(case, name) for name, usual in _OPTIONS.items() if getattr(case, name) != usual}
    if case.strided:
        for name in ("q", "weights", "q_scale", "block_tables", "context_lens"):
            if name in arguments:
                arguments[name] = spread(arguments[name], rows=name == "q")
    return all_on(xp, arguments)


def _draw(rng: np.random.Generator, shape: tuple[int, ...], case: PagedCase) -> Any:
    if case.values == "normal":
        made = rng.standard_normal(shape, dtype=np.float32) * np.float32(60 if case.dtype == "fp8" else 1)
    elif case.values == "ties":
        made = (rng.integers(0, 40, shape) == 0).astype(np.float32)
    else:
        made = rng.integers(-4, 5, shape).astype(np.float32)
    narrow = np.clip(made, -448, 448).astype(_DTYPES[case.dtype])
    return narrow.view(np.uint8) if case.dtype == "fp8" else narrow


def _cache(case: PagedCase, blocks: int, rng: np.random.Generator, xp: Any) -> Any:
    """Pages; large ones are drawn where they are to be."""
    if case.dtype != "fp8":
        keys = _draw(rng, (blocks, case.page, case.channels), case)
        if case.values == "hostile":
            for number, row in enumerate(keys.reshape(-1, case.channels)[::5]):
                row[number % case.channels] = (np.nan, np.inf, -np.inf)[number % 3]
        return spread(keys, rows=True) if case.strided else keys
    size = case.page * case.channels
    # Blocks that are no multiples of 16 bytes apart, where arrays have gaps.
    block_bytes = size + case.page * 4 + (_GAP_BYTES if case.strided else 0)
    if case.values == "normal":
        return _random_pages(case, blocks, xp)
    memory = np.zeros((blocks, block_bytes), np.uint8)
    codes = _draw(rng, (blocks, size), case)
    scales = np.ones((blocks, case.page), np.float32)
    if case.scales:
        scales = np.exp2(rng.integers(-9, -3, scales.shape)).astype(np.float32)
    if case.values == "hostile":
        codes[:, :: 7 * case.channels + 3] = 0x7F
        scales.reshape(-1)[::6] = rng.choice(np.array([np.inf, -np.inf, np.nan], np.float32), scales.size // 6 + 1)[
            : len(scales.reshape(-1)[::6])
        ]
    memory[:, :size] = codes
    memory[:, size : size + case.page * 4] = scales.view(np.uint8)
    shape, strides = (blocks, case.page, case.channels + 4), (block_bytes, case.channels + 4, 1)
    return np.lib.stride_tricks.as_strided(memory, shape, strides)


def _random_pages(case: PagedCase, blocks: int, xp: Any) -> Any:
    """Codes of any bits but the highest exponents, and scales of 2^-6 to 2^-5, drawn in parts."""
    rng = xp.random.default_rng(blocks)
    size = case.page * case.channels
    memory = xp.empty((blocks, size + case.page * 4), np.uint8)
    for first in range(0, blocks, 65536):
        rows = memory[first : first + 65536]
        words = rng.integers(0, 2**31 - 1, (len(rows), size // 4), dtype=np.int32)
        rows[:, :size] = words.view(np.uint8) & np.uint8(0xBF)
        scales = rng.random((len(rows), case.page), dtype=np.float32) * np.float32(2**-6) + np.float32(2**-6)
        rows[:, size:] = scales.view(np.uint8)
    return memory.reshape(blocks, case.page, case.channels + 4)


def scored_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `paged_indexer_logits` among the inputs of a call."""
    own = ("topk", "positions", "return_values", "return_lse", "lse_base")
    return {name: value for name, value in arguments.items() if name not in own}


def _keys_seen(case: PagedCase) -> float:
    """Of all requests together."""
    if case.lens == "empty":
        return 0.0
    if case.lens == "one_long" and case.requests:
        return float(case.keys + (case.requests - 1) * min(_SHORT_LENGTH, case.keys // 8))
    return float(case.requests * case.keys) * (0.5 if case.lens == "hostile" else 1.0)


def flops(case: PagedCase) -> float:
    """The products of all heads with all keys that are seen; of any lengths, with half of them."""
    return 2.0 * _keys_seen(case) * case.queries * case.heads * case.channels


def bytes_moved(case: PagedCase) -> float:
    """Keys that are seen, q and weights read, results written."""
    item = 1 if case.dtype == "fp8" else 2
    key = case.channels * item + 4 * (case.dtype == "fp8")
    rows = float(case.requests * case.queries)
    read = case.heads * (case.channels * item + 4 + 4 * case.scales)
    written = case.topk * (4 + 4 * case.return_values) + 4 + 4 * case.return_lse
    return _keys_seen(case) * key + rows * (read + written)
