"""NumPy arithmetic the MLA references share: blocks of queries, the valid entries, the gather, where a kernel rounds.

Arguments are trusted: they went through an operator's `spec.read`, or come from a test.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from . import tensor_cores
from .mla import D_V

Array = npt.NDArray[Any]
Precision = Literal["float64", "same"]

WORKING_SET_BYTES = 256 << 20
"""What the temporaries of one block of queries may take; a single query whose entries need more still gets it."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How a reference computes.

    Attributes:
        real: dtype of products, sums and softmax statistics.
        operand: dtype a kernel rounds P and dS to before they enter a second matrix product; None for no rounding.
    """

    real: np.dtype[Any]
    operand: np.dtype[Any] | None

    @classmethod
    def of(cls, precision: Precision, dtype: np.dtype[Any]) -> Arithmetic:
        """float64 without roundings, or fp32 with operands rounded to `dtype`."""
        if precision == "float64":
            return cls(np.dtype(np.float64), None)
        return cls(np.dtype(np.float32), dtype)

    def up(self, array: Array) -> Array:
        """An array in `real`; exact for the 16-bit dtypes."""
        if array.dtype == ml_dtypes.bfloat16:
            # By way of fp32, which is twice as fast as ml_dtypes' own conversion to float64.
            array = array.astype(np.float32)
        return array.astype(self.real, copy=False)

    def product(self, left: Array, right: Array) -> Array:
        """left [..., m, k] times right [..., k, n].

        In fp32 as a tensor core does it (`tensor_cores.product`). That is where a kernel's scores lose most of their
        accuracy: 36 steps of truncation on 576 channels.
        """
        if self.operand is None:
            result: Array = left @ right
            return result
        return tensor_cores.product(left, right).astype(self.real, copy=False)

    def rounded(self, array: Array) -> Array:
        """What a second matrix product reads: `array` after a round trip through the operand dtype."""
        return array if self.operand is None else array.astype(self.operand).astype(self.real)


@dataclass(frozen=True, slots=True)
class Selection:
    """What decides which entries are valid; see `valid_entries`. `topk_length` is [batch, s_q] or None."""

    indices: Array
    topk_length: Array | None
    causal: bool
    q_start: int
    k_stride: int
    s_kv: int

    def valid(self, batch: int, queries: slice) -> Array:
        """Mask [queries, topk]."""
        lengths = None if self.topk_length is None else self.topk_length[batch, queries]
        limits = None
        if self.causal:
            positions = np.arange(queries.start, queries.stop, dtype=np.int64) + self.q_start
            limits = causal_limit(positions, self.k_stride)
        return valid_entries(self.indices[batch, queries], self.s_kv, lengths, limits)

    def shortened(self) -> Selection:
        """The same without the entries that lie past every `topk_length`; one is left."""
        if self.topk_length is None:
            return self
        longest = max(1, int(self.topk_length.max(initial=0)))
        return replace(self, indices=self.indices[..., :longest])


@dataclass(frozen=True, slots=True)
class Block:
    """Queries of one batch entry that are computed together, with the keys of their entries.

    Attributes:
        batch: batch entry.
        queries: which of its queries.
        valid: [queries, width], the top-k entries that count. `width` ends with the last of them, or is 1.
        tokens: [queries, width], their indices; 0 in invalid entries.
        keys: [queries, width, d_qk] in the arithmetic's dtype; zeros in invalid entries.
        occupied: [queries], whether any entry is valid.
    """

    batch: int
    queries: slice
    valid: Array
    tokens: Array
    keys: Array
    occupied: Array

    @property
    def values(self) -> Array:
        """[queries, width, 512]."""
        return self.keys[..., :D_V]

    @property
    def place(self) -> tuple[int, slice]:
        """Where the block lies in an array [batch, s_q, ...]."""
        return self.batch, self.queries

    @property
    def entries(self) -> tuple[int, slice, EllipsisType, slice]:
        """Where it lies in an array [batch, s_q, ..., topk]; no entry behind it is valid."""
        return self.batch, self.queries, ..., slice(self.valid.shape[-1])


def causal_limit(positions: Array, k_stride: int) -> Array:
    """Last key a query at each position may see, trunc((position + 1 - k_stride) / k_stride).

    Truncation is toward zero, as C divides: the first k_stride - 1 positions see key 0.
    """
    numerators = positions.astype(np.int64) + 1 - k_stride
    limits: Array = np.sign(numerators) * (np.abs(numerators) // k_stride)
    return limits


def valid_entries(indices: Array, s_kv: int, topk_length: Array | None, limits: Array | None) -> Array:
    """The entries that count, [queries, topk].

    Args:
        indices: [queries, topk] int32, any values.
        s_kv: tokens there are.
        topk_length: [queries], entries at or past it do not count; None for all.
        limits: [queries], the last key each query may see; None for no such limit.
    """
    valid: Array = (indices >= 0) & (indices < s_kv)
    if topk_length is not None:
        valid &= np.arange(indices.shape[-1]) < topk_length[:, None]
    if limits is not None:
        valid &= indices <= limits[:, None]
    return valid


def batched(array: Array, rank: int) -> Array:
    """`array` with a leading batch axis of 1 when it has one axis fewer than `rank`."""
    return array if array.ndim == rank else array[None]


def batched_rows(array: Array, has_batch: bool) -> Array:
    """kv or indices as [batch, rows, last], the optional axis of extent 1 taken out."""
    rows = array[..., 0, :] if array.ndim == (4 if has_batch else 3) else array
    return rows if has_batch else rows[None]


def select(
    kv: Array,
    indices: Array,
    has_batch: bool,
    topk_length: Array | None,
    causal: bool,
    q_start: int,
    k_stride: int,
) -> tuple[Array, Selection]:
    """kv as [batch, s_kv, d_qk] and the selection, from arguments with or without their optional axes."""
    keys = batched_rows(kv, has_batch)
    lengths = None if topk_length is None else batched(topk_length, 2)
    rows = batched_rows(indices, has_batch)
    return keys, Selection(rows, lengths, causal, q_start, k_stride, keys.shape[1])


def blocks(
    kv: Array, selection: Selection, heads: int, arithmetic: Arithmetic, score_arrays: int, key_arrays: int
) -> Iterator[Block]:
    """Blocks of queries, in order. Their time and memory follow the valid entries, not topk.

    Args:
        kv: [batch, s_kv, d_qk].
        selection: the entries.
        heads: query heads.
        arithmetic: how the caller computes.
        score_arrays: temporaries of shape [queries, heads, width] the caller holds at a time.
        key_arrays: those of shape [queries, width, d_qk].
    """
    selection = selection.shortened()
    batch, s_q, longest = selection.indices.shape
    per_query = longest * (heads * score_arrays + kv.shape[2] * key_arrays) * arithmetic.real.itemsize
    step = max(1, WORKING_SET_BYTES // per_query)
    for entry in range(batch):
        for first in range(0, s_q, step):
            queries = slice(first, min(first + step, s_q))
            valid = selection.valid(entry, queries)
            valid = valid[:, : _width(valid)]
            tokens = np.where(valid, selection.indices[entry, queries, : valid.shape[-1]], 0)
            keys = _gather(kv[entry], tokens, valid, arithmetic)
            occupied: Array = np.any(valid, axis=-1)
            yield Block(entry, queries, valid, tokens, keys, occupied)


def _width(valid: Array) -> int:
    """How many leading entries hold every valid one; at least 1, so that a maximum over them exists."""
    used = np.flatnonzero(valid.any(axis=0))
    return int(used[-1]) + 1 if used.size else 1


def _gather(kv: Array, tokens: Array, valid: Array, arithmetic: Arithmetic) -> Array:
    """Rows of kv at valid entries, zeros at the others, whatever the row a safe index happened to name holds."""
    if kv.shape[0] == 0:
        return np.zeros((*tokens.shape, kv.shape[1]), arithmetic.real)
    # NumPy gathers plain 16-bit integers faster than the element types of ml_dtypes.
    bits = kv.view(np.uint16) if kv.dtype.itemsize == 2 else kv
    rows = bits[tokens]
    rows[~valid] = 0
    return arithmetic.up(rows.view(kv.dtype))


def transposed(array: Array) -> Array:
    """The last two axes exchanged."""
    return np.swapaxes(array, -1, -2)


def natural(lse: Array, base: str) -> Array:
    """A log-sum-exp in natural units."""
    return lse * lse.dtype.type(math.log(2)) if base == "2" else lse


def in_base(lse: Array, base: str) -> Array:
    """A natural log-sum-exp in the base asked for."""
    return lse * lse.dtype.type(math.log2(math.e)) if base == "2" else lse


def probabilities(scores: Array, lse: Array, valid: Array) -> Array:
    """exp(scores - lse) on valid entries and 0 elsewhere; scores [queries, heads, topk], lse [queries, heads].

    The mask, not the arithmetic, makes the zeros: an empty row's lse is +inf by convention and its scores are 0.
    """
    result: Array = np.where(valid[:, None, :], np.exp(scores - lse[..., None]), scores.dtype.type(0))
    return result


def sink_share(lse: Array, attn_sink: Array) -> Array:
    """exp(lse) / (exp(lse) + exp(sink)), the share of the softmax that the sink leaves; the sink may be +-inf."""
    result: Array = 1 / (1 + np.exp(attn_sink - lse))
    return result


def quiet() -> np.errstate:
    """Inf and NaN in selected rows, and infinite sinks, are data here, not accidents."""
    return np.errstate(over="ignore", invalid="ignore", divide="ignore")


def stored(array: Array, dtype: Any) -> Array:
    """A result in the dtype it is documented to have; values past its range become infinite."""
    with quiet():
        return array.astype(dtype)


def add_rows(sums: Array, ids: Array, rows: Array) -> None:
    """Add rows to those of `sums` that ids name, one after the other: as `np.add.at` does, which takes four times as
    long for rows."""
    for place, row in zip(ids, rows, strict=True):
        sums[place] += row


def numpy_dtype(label: str) -> np.dtype[Any]:
    """NumPy dtype of a label of `tensor.View`."""
    return np.dtype(ml_dtypes.bfloat16) if label == "bfloat16" else np.dtype(label)
