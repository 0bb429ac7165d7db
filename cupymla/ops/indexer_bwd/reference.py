"""indexer_bwd in NumPy: what the operator means, in float64 or as a kernel rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .. import tensor_cores

Array = npt.NDArray[Any]
Precision = Literal["float64", "same"]

TILE_KEYS = 64
"""Entries that a kernel takes at a time."""

HEAD_BLOCK = 64
"""Heads whose products are one sum; dk is the sum of all these."""

_LARGEST_LOG2 = 14
"""Exponent of the largest fp16 operand of a query, once it is scaled."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One query.

    Attributes:
        q: [H, D].
        weights: [H].
        keys: [n, D], the key of each entry, zero where it is not valid.
        gradient: [n], zero where an entry is not valid.
        valid: [n] bool.
    """

    q: Array
    weights: Array
    keys: Array
    gradient: Array
    valid: Array


@dataclass(frozen=True, slots=True)
class _Step:
    """What one query gives: dq [H, D], dweights [H], and dk [n, D] of each entry's key."""

    dq: Array
    dweights: Array
    dk: Array


def indexer_bwd(
    q: Array,
    k: Array,
    weights: Array,
    grad_logits: Array,
    indices: Array,
    *,
    topk_length: Array | None = None,
    causal: bool = False,
    q_start: int = 0,
    k_stride: int = 1,
    relu: bool = True,
    deterministic: bool = False,
    dk_dtype: str | None = None,
    precision: Precision = "float64",
) -> tuple[Array, Array, Array]:
    """dq, dk and dweights; arguments and shapes as the public function's. `deterministic` changes nothing here.

    precision="float64": in float64 and returned in float64. "same": products as tensor cores round them; weights and
    gradients rounded to q's dtype where they enter a product; sums in float32, in a kernel's order but for dk; results
    rounded once.
    """
    real: Any = np.float64 if precision == "float64" else np.float32
    dq, dk, dweights = np.zeros(q.shape, real), np.zeros(k.shape, real), np.zeros(weights.shape, real)
    has_batch = q.ndim == 4
    for place in np.ndindex(q.shape[:-2]):
        keys, sums = (k[place[0]], dk[place[0]]) if has_batch else (k, dk)
        limit = len(keys)
        if causal:
            limit = min(limit, (q_start + place[-1] + 1) // k_stride)
        length = indices.shape[-1] if topk_length is None else int(topk_length[place])
        ids = indices[place].astype(np.int64)
        valid = (ids >= 0) & (ids < limit) & (np.arange(len(ids)) < length)
        if not valid.any():
            continue
        own = np.zeros((len(ids), k.shape[-1]), np.float64)
        own[valid] = keys[ids[valid]].astype(np.float64)
        gradient = np.where(valid, grad_logits[place], 0).astype(np.float64)
        row = _Row(q[place].astype(np.float64), weights[place].astype(np.float64), own, gradient, valid)
        with np.errstate(invalid="ignore", over="ignore"):
            step = _exact(row, relu) if precision == "float64" else _same(row, relu, q.dtype)
            dq[place], dweights[place] = step.dq, step.dweights
            np.add.at(sums, ids[valid], step.dk[valid])
    if precision == "same":
        with np.errstate(over="ignore"):
            dq, dweights = dq.astype(q.dtype), dweights.astype(weights.dtype)
            dk = dk if dk_dtype == "float32" else dk.astype(k.dtype)
    return dq, dk, dweights


def _exact(row: _Row, relu: bool) -> _Step:
    products = row.q @ row.keys.T
    active = products > 0 if relu else np.ones(products.shape, bool)
    terms = np.where(row.valid, row.gradient * (np.maximum(products, 0) if relu else products), 0)
    dq = row.weights[:, None] * (np.where(active, row.gradient, 0) @ row.keys)
    dk = row.gradient[:, None] * (np.where(active, row.weights[:, None], 0).T @ row.q)
    return _Step(dq, terms.sum(-1), dk)


def _same(row: _Row, relu: bool, dtype: Any) -> _Step:
    single = np.float32
    products = tensor_cores.product(row.q, row.keys.T)
    active = products > 0 if relu else np.ones(products.shape, bool)
    gradient, weights = row.gradient.astype(single), row.weights.astype(single)
    terms = np.where(row.valid, gradient * (np.maximum(products, single(0)) if relu else products), single(0))
    operands, unit = _operands(gradient, dtype)
    sums = tensor_cores.product(row.keys.T, np.where(active, operands, 0).T).T
    dk = np.zeros(row.keys.shape, single)
    for first in range(0, len(weights), HEAD_BLOCK):
        some = slice(first, first + HEAD_BLOCK)
        operands, weights_unit = _operands(weights[some], dtype)
        products = tensor_cores.product(np.where(active[some], operands[:, None], 0).T, row.q[some])
        dk += products * weights_unit * gradient[:, None]
    return _Step(sums * unit * weights[:, None], _sum_entries(terms), dk)


def _operands(values: Array, dtype: Any) -> tuple[Array, Any]:
    """float32 values as operands of q's dtype, in float64, and the unit that they are in: a power of two for fp16."""
    unit = np.float32(1)
    if dtype != ml_dtypes.bfloat16:
        finite = np.abs(values[np.isfinite(values)])
        largest = finite.max(initial=0)
        if largest > 0:
            exponent = max(int(np.frexp(largest)[1]) - 1, -127)
            unit = np.float32(2.0 ** -max(-120, min(120, _LARGEST_LOG2 - exponent)))
    return (values / unit).astype(dtype).astype(np.float64), unit


def _sum_entries(terms: Array) -> Array:
    """Sums of float32 terms [H, n] over entries: a thread's own first, then those of threads, then of warps."""
    heads, entries = terms.shape
    tiles = -(-entries // TILE_KEYS)
    padded = np.zeros((heads, tiles * TILE_KEYS), np.float32)
    padded[:, :entries] = terms
    parts = padded.reshape(heads, tiles, 4, 2, 8)
    sums = np.zeros((heads, 4, 8), np.float32)
    for tile, half in np.ndindex(tiles, 2):
        sums += parts[:, tile, :, half]
    while sums.shape[-1] > 1:
        sums = sums[..., ::2] + sums[..., 1::2]
    warps = sums[..., 0]
    total: Array = (warps[:, 0] + warps[:, 1]) + (warps[:, 2] + warps[:, 3])
    return total
