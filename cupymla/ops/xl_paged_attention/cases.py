"""Problems for xl_paged_attention: what the tests, the demo and the benchmarks run.

Poison is the default: cache slots that no sequence uses, bias entries past a length and cache blocks without an owner
hold NaN, and block tables end in INT_MIN, INT_MAX, -1 and num_blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..case import Case, Choice
from .checks import FP8, ITEMSIZE
from .paging import elements_of_x, key_counts

Array = npt.NDArray[Any]

OUTPUTS = ("out", "lse")
"""The output parameters, in the order in which the call returns them."""

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
SPARE_BLOCKS = 3

_DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# Codes 0 .. this one are the non-negative values up to 3.0; uniform codes give magnitudes spread over the exponents.
_FP8_CODE_OF_3 = {"float8_e4m3fn": 0x44, "float8_e5m2": 0x42}
_FP8_NAN = 0x7F


@dataclass(frozen=True, slots=True, kw_only=True)
class XlCase(Case):
    """One call.

    Attributes:
        num_heads: query heads.
        num_kv_heads: cache heads.
        head_size: channels of a head.
        context_lens: one length per sequence, as passed (it may lie outside 0 .. capacity).
        block_size: tokens in a cache block.
        max_blocks: block-table columns; 0 for one more than the longest sequence needs.
        dtype: label of the query.
        kv_dtype: label of the cache's elements; "" for the query's. fp8 caches are passed as uint8.
        kv_layout: "vllm", "NHD" or "HND".
        bias: "none", "dense", "relative", "fused" or "alibi".
        bias_dtype: label of a dense or relative bias; "" for the query's.
        extent: distances of rel_bias or pos_emb.
        rel_extend: "zero" or "clamp".
        bias_scaled: whether the scale multiplies the bias.
        masked_bias: a dense bias with -inf in places and in all of the last row.
        offsets: pass pos_bias_u, and pos_bias_v with a fused bias.
        scale: the scale; None for the default.
        scales: "none", "number" or "head": k_scale and v_scale.
        lse_base: "e" or "2".
        shared: all sequences share the block of their first tokens.
        broken: table entries in the middle of contexts are out of range.
        strided: arrays are parts of larger ones.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    context_lens: tuple[int, ...]
    block_size: int = 16
    max_blocks: int = 0
    dtype: str = "bfloat16"
    kv_dtype: str = ""
    kv_layout: str = "vllm"
    bias: str = "none"
    bias_dtype: str = ""
    extent: int = 0
    rel_extend: str = "zero"
    bias_scaled: bool = True
    masked_bias: bool = False
    offsets: bool = False
    scale: float | None = None
    scales: str = "none"
    lse_base: str = "e"
    shared: bool = False
    broken: bool = False
    strided: bool = False

    @property
    def cache_dtype(self) -> str:
        """The label of the cache's elements."""
        return self.kv_dtype or self.dtype

    @property
    def table_columns(self) -> int:
        """Block-table columns."""
        return self.max_blocks or -(-max((0, *self.context_lens)) // self.block_size) + 1

    @property
    def counts(self) -> Array:
        """How many keys each sequence has."""
        return key_counts(np.array(self.context_lens, np.int64), self.table_columns, self.block_size, None)


def make(intent: str, tag: str = "", **fields: Any) -> XlCase:
    """A case whose name spells its sizes; `tag` ends the name."""
    case = XlCase(name="", intent=intent, **fields)
    heads = (
        f"mha{case.num_heads}" if case.num_heads == case.num_kv_heads else f"gqa{case.num_heads}-{case.num_kv_heads}"
    )
    low, high = min(case.context_lens, default=0), max(case.context_lens, default=0)
    context = f"c{high}" if low == high else f"c{low}-{high}"
    bias = {"none": "", "dense": "dense", "relative": f"rel{case.extent}", "fused": f"fused{case.extent}"}
    parts = [f"{heads}x{case.head_size}", f"b{len(case.context_lens)}", context, bias.get(case.bias, case.bias), tag]
    return XlCase(name="_".join(part for part in parts if part), intent=intent, **fields)


def inputs(case: XlCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Fresh arguments of xl_paged_attention, by parameter name; `xp` is numpy or cupy."""
    rng = xp.random.default_rng(seed)
    tables, used = _paging(case, np.random.default_rng(seed))
    k_cache, v_cache = _caches(case, rng, xp.asarray(used), xp)
    heads = (len(case.context_lens), case.num_heads, case.head_size)
    arguments: dict[str, Any] = {
        "query": _spread(_normal(rng, heads, case.dtype), case.strided, xp),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_tables": xp.asarray(tables)[:, : case.table_columns],
        "context_lens": xp.asarray(np.array(case.context_lens, np.int32)),
        "kv_layout": case.kv_layout,
        "bias_scaled": case.bias_scaled,
        "scale": case.scale,
        "return_lse": True,
        "lse_base": case.lse_base,
    }
    if case.offsets:
        arguments["pos_bias_u"] = _normal(rng, heads[1:], case.dtype)
    if case.cache_dtype in FP8:
        arguments["kv_dtype"] = case.cache_dtype
        arguments.update(_scales(case, xp))
    arguments.update(_bias(case, rng, xp))
    return arguments


def flops(case: XlCase) -> int:
    """Multiply-adds counted as two: q.k and p.v, and (q + v).p for the distances of a fused bias."""
    keys = int(case.counts.sum())
    total = 4 * keys * case.num_heads * case.head_size
    if case.bias == "fused":
        total += 2 * int(np.minimum(case.counts, case.extent).sum()) * case.num_heads * case.head_size
    return total


def bytes_moved(case: XlCase) -> int:
    """K + V + bias + query + out, each read or written once."""
    counts = case.counts
    item = ITEMSIZE[case.dtype]
    bias_item = ITEMSIZE[case.bias_dtype or case.dtype]
    reached = np.minimum(counts, case.extent)
    bias = {
        "none": 0,
        "dense": int(counts.sum()) * case.num_heads * bias_item,
        "relative": int(reached.sum()) * case.num_heads * bias_item,
        "fused": int(reached.max(initial=0)) * case.num_heads * case.head_size * item,
        "alibi": case.num_heads * 4,
    }[case.bias]
    cache = 2 * int(counts.sum()) * case.num_kv_heads * case.head_size * ITEMSIZE[case.cache_dtype]
    return cache + bias + 2 * len(counts) * case.num_heads * case.head_size * item


def _normal(rng: Any, shape: tuple[int, ...], dtype: str) -> Any:
    return rng.standard_normal(shape, dtype=np.float32).astype(_DTYPES[dtype])


def _paging(case: XlCase, rng: np.random.Generator) -> tuple[Array, Array]:
    """Block tables, and which (block, offset) of the cache some sequence uses."""
    needed = -(-case.counts // case.block_size)
    num_blocks = int(needed.sum()) + SPARE_BLOCKS
    tail = np.array([INT32_MIN, INT32_MAX, -1, num_blocks], np.int64)
    columns = case.table_columns + (5 if case.strided else 0)
    tables = np.resize(tail, (len(needed), columns)).astype(np.int32)
    blocks = rng.permutation(num_blocks)
    used = np.zeros((num_blocks, case.block_size), bool)
    taken = 0
    for row, (count, blocks_here) in enumerate(zip(case.counts, needed, strict=True)):
        tables[row, :blocks_here] = blocks[taken : taken + blocks_here]
        taken += blocks_here
        if case.shared and blocks_here:
            tables[row, 0] = blocks[0]
        positions = np.arange(count)
        used[tables[row, positions // case.block_size], positions % case.block_size] = True
        if case.broken:
            tables[row, 1:blocks_here:3] = np.resize(tail, len(range(1, blocks_here, 3)))
    return tables, used


def _caches(case: XlCase, rng: Any, used: Any, xp: Any) -> tuple[Any, Any]:
    """Both caches in the case's layout, NaN in the slots that nobody uses."""
    num_blocks = used.shape[0]
    shape = (num_blocks, case.block_size, case.num_kv_heads, case.head_size)
    laid = []
    for is_key in (True, False):
        if case.cache_dtype in FP8:
            codes = rng.integers(0, _FP8_CODE_OF_3[case.cache_dtype] + 1, size=shape).astype(np.uint8)
            signs = rng.integers(0, 2, size=shape).astype(np.uint8) << 7
            logical = xp.where(used[:, :, None, None], codes | signs, np.uint8(_FP8_NAN))
        else:
            values = rng.standard_normal(shape, dtype=np.float32)
            logical = xp.where(used[:, :, None, None], values, np.float32(np.nan)).astype(_DTYPES[case.dtype])
        laid.append(xp.ascontiguousarray(lay_out(logical, case.kv_layout, case.cache_dtype, is_key)))
    if not case.strided:
        return laid[0], laid[1]
    both = xp.empty((num_blocks, 2, laid[0][:1].size), laid[0].dtype)
    parts = []
    for index, cache in enumerate(laid):
        both[:, index] = cache.reshape(num_blocks, -1)
        parts.append(both[:, index].reshape(cache.shape))
    return parts[0], parts[1]


def lay_out(logical: Any, kv_layout: str, kv_dtype: str, is_key: bool) -> Any:
    """A cache [num_blocks, block_size, num_kv_heads, head_size] in a layout, as a view of permuted axes."""
    if kv_layout == "NHD":
        return logical
    if kv_layout == "HND":
        return logical.transpose(0, 2, 1, 3)
    if not is_key:
        return logical.transpose(0, 2, 3, 1)
    x = elements_of_x(kv_dtype)
    return logical.reshape(*logical.shape[:3], logical.shape[3] // x, x).transpose(0, 2, 3, 1, 4)


def _spread(array: Any, strided: bool, xp: Any) -> Any:
    """The array, or the same values as the middle part of a wider one."""
    if not strided:
        return array
    wide = xp.full((array.shape[0], 3, *array.shape[1:]), np.nan, array.dtype)
    wide[:, 1] = array
    return wide[:, 1]


def _scales(case: XlCase, xp: Any) -> dict[str, Any]:
    if case.scales == "number":
        return {"k_scale": 0.37, "v_scale": 1.7}
    if case.scales == "head":
        steps = xp.arange(case.num_kv_heads, dtype=np.float32)
        return {"k_scale": 0.25 + 0.125 * steps, "v_scale": 2.0 - 0.25 * steps}
    return {}


def _bias(case: XlCase, rng: Any, xp: Any) -> dict[str, Any]:
    counts = xp.asarray(case.counts)
    rows = (len(case.context_lens), case.num_heads)
    label = case.bias_dtype or case.dtype
    if case.bias == "dense":
        columns = case.table_columns * case.block_size
        bias = rng.standard_normal((*rows, columns), dtype=np.float32)
        if case.masked_bias:
            bias[:, :, ::3] = -np.inf
            bias[-1:] = -np.inf
        bias = xp.where(xp.arange(columns) < counts[:, None, None], bias, np.float32(np.nan))
        return {"matrix_bd": _spread(bias.astype(_DTYPES[label]), case.strided, xp)}
    if case.bias == "relative":
        bias = rng.standard_normal((*rows, case.extent), dtype=np.float32)
        bias = xp.where(xp.arange(case.extent) < counts[:, None, None], bias, np.float32(np.nan))
        return {"rel_bias": bias.astype(_DTYPES[label]), "rel_extend": case.rel_extend}
    if case.bias == "fused":
        table = rng.standard_normal((case.extent, case.num_heads, case.head_size), dtype=np.float32)
        longest = int(case.counts.max(initial=0))
        table = xp.where(xp.arange(case.extent)[:, None, None] < longest, table, np.float32(np.nan))
        fused = {"pos_emb": table.astype(_DTYPES[case.dtype]), "rel_extend": case.rel_extend}
        if case.offsets:
            fused["pos_bias_v"] = _normal(rng, (case.num_heads, case.head_size), case.dtype)
        return fused
    if case.bias == "alibi":
        return {"alibi_slopes": 2.0 ** -(1.0 + xp.arange(case.num_heads, dtype=np.float32))}
    return {}


CHOICES = {
    "xl_paged_attention": Choice("plan._CLUSTER_GAIN=-1e9"),
    "xl_attention_cluster": Choice("plan._CLUSTER_GAIN=1e9", intents=("cluster",)),
}


# Timing --------------------------------------------------------------------------------------------------------

_GQA: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}
_GQA_ONE: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 1, "head_size": 128}
_MHA_64: dict[str, Any] = {"num_heads": 16, "num_kv_heads": 16, "head_size": 64}
_MHA_128: dict[str, Any] = {"num_heads": 16, "num_kv_heads": 16, "head_size": 128}
_REL: dict[str, Any] = {"bias": "relative", "extent": 1024}
# 64 lengths that fill 1 .. 8192 evenly, in an order that mixes short and long neighbours.
_RAGGED = tuple(1 + (8191 * ((index * 37) % 64)) // 63 for index in range(64))

BENCH: tuple[XlCase, ...] = (
    make("speed", **_MHA_64, context_lens=(2048,) * 32, bias="dense"),
    make("speed", **_MHA_128, context_lens=_RAGGED, bias="dense"),
    make("speed", **_GQA, context_lens=(4096,) * 32, **_REL),
    make("speed", **_GQA, context_lens=(32768,) * 8, **_REL),
    make("speed", **_GQA_ONE, context_lens=(8192,), **_REL),
    make("speed", **_GQA_ONE, context_lens=(65536,), **_REL),
    make("speed", **_MHA_64, context_lens=(512,), bias="dense"),
    make("speed", "fp8", **_GQA, context_lens=(8192,) * 32, kv_dtype="float8_e4m3fn"),
    make("speed", **_GQA, context_lens=(4096,) * 32),
)

DEMO = make("shapes", **_MHA_64, context_lens=(2048,) * 4, bias="dense")
"""A problem of the timing cases' heads and lengths, which takes the references a second or two."""
