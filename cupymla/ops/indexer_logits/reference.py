"""indexer_logits in NumPy: what the operator means, in float64 or as a kernel accumulates."""

from __future__ import annotations

from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .. import indexer_score, tensor_cores

Array = npt.NDArray[Any]
Precision = Literal["float64", "same", "rounded"]

_BLOCK_ELEMENTS = 1 << 23
"""Of the largest temporary of a block of queries."""


def indexer_logits(
    q: Array,
    k: Array,
    weights: Array,
    *,
    q_scale: Array | None = None,
    k_scale: Array | None = None,
    starts: Array | None = None,
    ends: Array | None = None,
    causal: bool = False,
    q_start: int = 0,
    k_stride: int = 1,
    relu: bool = True,
    precision: Precision = "rounded",
) -> Array:
    """logits; arguments and shapes as the public function's.

    precision="float64": in float64 and returned in float64. "rounded": every product q.k is its exact value rounded to
    fp32, and all else is what a kernel does, in its order (`indexer_score`). "same": the same with products as tensor
    cores round them: of 16-bit operands as `tensor_cores.product`, of fp8 as `_fp8_product`.
    """
    narrow = q.dtype.itemsize == 1
    if narrow:
        q, k = (array.view(ml_dtypes.float8_e4m3fn) for array in (q, k))
    has_batch = q.ndim == 4
    if not has_batch:
        q, k, weights = q[None], k[None], weights[None]
        q_scale, k_scale, starts, ends = (
            None if array is None else array[None] for array in (q_scale, k_scale, starts, ends)
        )
    batch, queries, heads, _ = q.shape
    keys = k.shape[-2]
    out = np.full((batch, queries, keys), -np.inf, np.float64 if precision == "float64" else np.float32)
    seen = visible(batch, queries, keys, starts, ends, causal, q_start, k_stride)
    step = max(1, _BLOCK_ELEMENTS // max(1, heads * keys * (32 if narrow and precision == "same" else 1)))
    for entry in range(batch):
        for first in range(0, queries, step):
            rows = slice(first, first + step)
            # From the first key that any of these queries sees to the last one: no others cost time.
            columns = np.flatnonzero(seen[entry, rows].any(axis=0))
            if not columns.size:
                continue
            span = slice(int(columns[0]), int(columns[-1]) + 1)
            out[entry, rows, span] = _block(
                q[entry, rows],
                k[entry, span],
                weights[entry, rows],
                None if q_scale is None else q_scale[entry, rows],
                None if k_scale is None else k_scale[entry, span],
                relu,
                precision,
            )
    out[~seen] = -np.inf
    return out if has_batch else out[0]


def visible(
    batch: int,
    queries: int,
    keys: int,
    starts: Array | None,
    ends: Array | None,
    causal: bool,
    q_start: int,
    k_stride: int,
) -> Array:
    """Which keys each query sees, [batch, queries, keys] bool."""
    key = np.arange(keys)
    seen = np.ones((batch, queries, keys), bool)
    if starts is not None:
        seen &= key >= starts[..., None]
    if ends is not None:
        seen &= key < ends[..., None]
    if causal:
        limit = (q_start + np.arange(queries, dtype=np.int64) + 1) // k_stride
        seen &= key < limit[:, None]
    return seen


def _block(
    q: Array,
    k: Array,
    weights: Array,
    q_scale: Array | None,
    k_scale: Array | None,
    relu: bool,
    precision: Precision,
) -> Array:
    wide_q, wide_k = q.astype(np.float32).astype(np.float64), k.astype(np.float32).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        if precision == "float64":
            products = wide_q @ wide_k.T
            factors = weights.astype(np.float64)
            if q_scale is not None:
                factors = factors * q_scale.astype(np.float64)
            if relu:
                products = np.maximum(products, 0)
            score: Array = np.einsum("th,thl->tl", factors, products)
            return score if k_scale is None else score * k_scale.astype(np.float64)
        if precision == "rounded":
            exact = (wide_q @ wide_k.T).astype(np.float32)
        elif q.dtype.itemsize == 1:
            exact = _fp8_product(wide_q, wide_k)
        else:
            exact = tensor_cores.product(wide_q, wide_k.T)
        factor = weights.astype(np.float32)
        if q_scale is not None:
            factor = factor * q_scale
        return indexer_score.scores(exact, factor, k_scale, relu)


_FP8_STEP = 32
_FP8_FRACTION_BITS = 13
_FP8_AT_ONCE = 1 << 13
"""Scores of all heads whose products are in hand at once: a processor's caches hold them."""


def _fp8_product(q: Array, k: Array) -> Array:
    """Products of fp8 operands as Hopper's tensor cores sum them, [T, H, L] float32.

    The products of thirty-two channels and the sum so far are cut, toward zero, to 13 bits below the leading bit of the
    largest among them, and added. Source: DeepSeek-V3 technical report, section 3.3.2, for products aligned by their
    largest exponent with about 14 bits kept.

    All of that is exact in float32: a product has eight bits, and a sum is a whole number of grains below 2**20.
    """
    queries, heads, channels = q.shape
    total = np.zeros((queries, heads, len(k)), np.float32)
    left, right = (np.ascontiguousarray(np.moveaxis(each, -1, 0), np.float32) for each in (q, k))
    keys = max(1, _FP8_AT_ONCE // heads)
    for query in range(queries):
        for start in range(0, len(k), keys):
            sums, span = total[query, :, start : start + keys], slice(start, start + keys)
            for first in range(0, channels, _FP8_STEP):
                step = slice(first, first + _FP8_STEP)
                terms = left[step, query, :, None] * right[step, None, span]
                largest = np.maximum(np.maximum(terms.max(axis=0), -terms.min(axis=0)), np.abs(sums))
                exponent = np.frexp(largest)[1] - 1 - _FP8_FRACTION_BITS
                terms *= np.ldexp(np.float32(1), -exponent)
                np.trunc(terms, out=terms)
                grains = terms.sum(axis=0) + np.trunc(np.ldexp(sums, -exponent))
                sums[...] = np.ldexp(grains, exponent)
    return total
