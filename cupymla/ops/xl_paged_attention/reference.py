"""xl_paged_attention in NumPy: what the operator means, to the last mask, and where a same-precision kernel rounds.

Arguments are trusted: they went through `spec.read`. Sequences of similar length are taken together and the context
is walked in chunks with a running maximum, so memory stays bounded whatever the batch and the context.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .. import tensor_cores
from . import bias as forms
from .paging import key_counts, tokens, typed

Array = npt.NDArray[Any]
Precision = Literal["float64", "same"]

_CHUNK = 1024
_BLOCK_ELEMENTS = 1 << 22


def xl_paged_attention(
    query: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    context_lens: Array,
    *,
    scale: float | None = None,
    pos_bias_u: Array | None = None,
    matrix_bd: Array | None = None,
    rel_bias: Array | None = None,
    rel_extend: str = "zero",
    pos_bias_v: Array | None = None,
    pos_emb: Array | None = None,
    alibi_slopes: Array | None = None,
    bias_scaled: bool = True,
    kv_layout: str = "vllm",
    kv_dtype: str | None = None,
    k_scale: float | Array = 1.0,
    v_scale: float | Array = 1.0,
    return_lse: bool = False,
    lse_base: str = "e",
    precision: Precision = "float64",
) -> Any:
    """Out [num_seqs, num_heads, head_size], or (out, lse [num_seqs, num_heads]); arguments as the public function's.

    precision="float64": everything in float64, results in float64, not rounded.

    precision="same": the roundings of a kernel for the query's dtype, results in the dtypes of the public function.
    q + u and q + v are added in fp32 and rounded once to the query's dtype, to be operands of a matrix product;
    products with keys accumulate in fp32 as tensor cores do (`ops/tensor_cores.py`); scores, bias, softmax and the sum
    of P are fp32; P is rounded to V's dtype before it meets V (to the query's dtype when the cache is fp8, whose values
    are exact in it); k_scale multiplies scores and v_scale the result, in fp32; out is rounded once. With fp32 queries
    nothing is rounded below fp32.
    """
    work = np.dtype(np.float64 if precision == "float64" else np.float32)
    operand = query.dtype if precision == "same" and query.dtype.itemsize == 2 else None
    paged = _Paged(
        tokens(typed(k_cache, kv_dtype), kv_layout), tokens(typed(v_cache, kv_dtype), kv_layout), block_tables, work
    )
    columns = None if matrix_bd is None else matrix_bd.shape[2]
    counts = key_counts(context_lens, block_tables.shape[1], paged.block_size, columns)

    block: forms.BiasBlock | None = None
    if matrix_bd is not None:
        block = forms.dense(matrix_bd, work)
    elif rel_bias is not None:
        block = forms.relative(rel_bias, rel_extend, work)
    elif pos_emb is not None:
        block = forms.fused(shifted(query, pos_bias_v, work, operand), pos_emb, rel_extend, work)
    elif alibi_slopes is not None:
        block = forms.alibi(alibi_slopes, work)

    call = _Call(
        query=shifted(query, pos_bias_u, work, operand),
        paged=paged,
        counts=counts,
        scale=work.type(query.shape[2] ** -0.5 if scale is None else scale),
        bias=block,
        bias_scaled=bias_scaled,
        k_scale=per_head(k_scale, paged.num_kv_heads, work),
        operand=operand,
    )
    out, lse = call.attend()
    out *= np.repeat(per_head(v_scale, paged.num_kv_heads, work), query.shape[1] // paged.num_kv_heads)[:, None]
    if lse_base == "2":
        lse /= work.type(math.log(2.0))
    if precision == "same":
        with np.errstate(over="ignore"):
            out = out.astype(query.dtype)
    return (out, lse) if return_lse else out


def shifted(query: Array, offset: Array | None, work: np.dtype[Any], operand: np.dtype[Any] | None) -> Array:
    """Query + offset in `work` precision, rounded to `operand` unless that is None."""
    moved: Array = query.astype(work)
    if offset is None:
        return moved
    moved = moved + offset.astype(work)
    return moved if operand is None else moved.astype(operand).astype(work)


def per_head(scale: float | Array, num_kv_heads: int, work: npt.DTypeLike) -> Array:
    """A cache scale as one number per KV head."""
    return np.broadcast_to(np.asarray(scale, dtype=work), (num_kv_heads,))


class _Paged:
    """The cache and its table: keys and values by (sequence, position)."""

    def __init__(self, keys: Array, values: Array, block_tables: Array, work: npt.DTypeLike) -> None:
        self.num_blocks, self.block_size, self.num_kv_heads = keys.shape[:3]
        self._keys, self._values, self._tables, self._work = keys, values, block_tables, work

    def gather(self, sequences: Array, counts: Array, positions: Array) -> tuple[Array, Array, Array]:
        """Keys and values [n, num_kv_heads, t, head_size], zero where no key exists, and existence [n, t]."""
        entries = self._tables[sequences][:, positions // self.block_size].astype(np.int64)
        exists = (positions < counts[:, None]) & (entries >= 0) & (entries < self.num_blocks)
        rows = np.where(exists, entries, 0)
        gathered = []
        for cache in (self._keys, self._values):
            if self.num_blocks:
                block = cache[rows, positions % self.block_size].astype(self._work)
            else:
                block = np.zeros((*rows.shape, *cache.shape[2:]), self._work)
            block = block.reshape(*rows.shape, self.num_kv_heads, -1)
            block[~exists] = 0
            gathered.append(block.transpose(0, 2, 1, 3))
        return gathered[0], gathered[1], exists


@dataclass(frozen=True)
class _Call:
    """One call's arrays in working precision; `query` already holds u."""

    query: Array
    paged: _Paged
    counts: Array
    scale: Any
    bias: forms.BiasBlock | None
    bias_scaled: bool
    k_scale: Array
    operand: np.dtype[Any] | None

    def attend(self) -> tuple[Array, Array]:
        """Out and natural-log lse of every sequence."""
        out = np.zeros_like(self.query)
        lse = np.full(self.query.shape[:2], np.inf, self.query.dtype)
        with np.errstate(all="ignore"):
            for sequences in self._groups():
                out[sequences], lse[sequences] = self._attend_group(sequences)
        return out, lse

    def _groups(self) -> Iterator[Array]:
        """Sequences of similar length together, few enough that one chunk of their keys fits the block."""
        order = np.argsort(self.counts, kind="stable")
        order = order[self.counts[order] > 0]
        start = 0
        while start < len(order):
            length = min(int(self.counts[order[-1]]), _CHUNK)
            step = max(1, _BLOCK_ELEMENTS // (length * self.query[0].size))
            yield order[start : start + step]
            start += step

    def _attend_group(self, sequences: Array) -> tuple[Array, Array]:
        """The running-maximum softmax over chunks of the context."""
        counts = self.counts[sequences]
        query = self.query[sequences]
        n, num_heads, head_size = query.shape
        grouped = (n, self.paged.num_kv_heads, num_heads // self.paged.num_kv_heads)
        top = np.full(grouped, -np.inf, query.dtype)
        total = np.zeros(grouped, query.dtype)
        out = np.zeros((*grouped, head_size), query.dtype)
        longest = int(counts.max())
        for start in range(0, longest, _CHUNK):
            positions = np.arange(start, min(start + _CHUNK, longest))
            keys, values, exists = self.paged.gather(sequences, counts, positions)
            scores = self._scores(query.reshape(*grouped, head_size), keys, sequences, counts, positions)
            scores = np.where(exists[:, None, None, :], scores, -np.inf)
            new_top = np.maximum(top, scores.max(axis=-1))
            # A row whose keys are all masked so far keeps weight zero instead of exp(-inf - -inf).
            shift = np.where(np.isneginf(new_top), 0, new_top)
            weights = np.exp(scores - shift[..., None])
            carry = np.exp(top - shift)
            total = total * carry + weights.sum(axis=-1)
            if self.operand is not None:
                weights = weights.astype(self.operand).astype(query.dtype)
            out = out * carry[..., None] + weights @ values
            top = new_top
        empty = total == 0
        out /= np.where(empty, 1, total)[..., None]
        lse = np.where(empty, np.inf, top + np.log(total))
        return out.reshape(n, num_heads, head_size), lse.reshape(n, num_heads)

    def _scores(self, query: Array, keys: Array, sequences: Array, counts: Array, positions: Array) -> Array:
        """scale * (q.k + bias), or scale * q.k + bias: [n, num_kv_heads, group, t]."""
        product = np.matmul if self.operand is None else tensor_cores.product
        dots = product(query, keys.swapaxes(-1, -2)) * self.k_scale[:, None, None]
        scores: Array
        if self.bias is None:
            scores = self.scale * dots
            return scores
        block = self.bias(sequences, counts, positions).reshape(dots.shape)
        scores = self.scale * (dots + block) if self.bias_scaled else self.scale * dots + block
        return scores
