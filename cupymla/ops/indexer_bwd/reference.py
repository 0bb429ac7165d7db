"""indexer_bwd in NumPy: what the operator means, in float64 or as a kernel rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .. import tensor_cores
from ..mla_reference import add_rows

Array = npt.NDArray[Any]
Precision = Literal["float64", "same"]

TILE_KEYS = 64
"""Entries that a kernel takes at a time."""

HEAD_BLOCK = 64
"""Heads whose products are one sum; dk is the sum of all these."""

_LARGEST_LOG2 = 14
"""Exponent of the largest fp16 operand of a query, once it is scaled."""


_BLOCK_ELEMENTS = 1 << 22
"""Of the largest temporaries of a block of queries."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some queries of one batch entry.

    Attributes:
        q: [n, H, D].
        weights: [n, H].
        keys: [n, topk, D], the key of each entry, zero where it is not valid.
        gradient: [n, topk], zero where an entry is not valid.
        valid: [n, topk] bool.
    """

    q: Array
    weights: Array
    keys: Array
    gradient: Array
    valid: Array


@dataclass(frozen=True, slots=True)
class _Step:
    """What these queries give: dq [n, H, D], dweights [n, H], and dk [n, topk, D] of each entry's key."""

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
    lists: Array | None = None,
    dk_dtype: str | None = None,
    precision: Precision = "float64",
) -> tuple[Array, Array, Array]:
    """dq, dk and dweights; arguments and shapes as the public function's. `deterministic` and `lists` change nothing.

    precision="float64": in float64 and returned in float64. "same": products as tensor cores round them; weights and
    gradients rounded to q's dtype where they enter a product; sums in float32, in a kernel's order but for dk; results
    rounded once.
    """
    real: Any = np.float64 if precision == "float64" else np.float32
    dq, dk, dweights = np.zeros(q.shape, real), np.zeros(k.shape, real), np.zeros(weights.shape, real)
    queries, topk = indices.shape[-2:]
    at_once = max(1, _BLOCK_ELEMENTS // max(1, topk * max(q.shape[-2:])))
    for lead in np.ndindex(q.shape[:-3]):
        keys = k[lead].astype(np.float64)
        for first in range(0, queries if topk and len(keys) else 0, at_once):
            some = (*lead, slice(first, first + at_once))
            position = np.arange(first, min(queries, first + at_once))[:, None]
            limit = np.minimum(len(keys), (q_start + position + 1) // k_stride) if causal else len(keys)
            length = topk if topk_length is None else topk_length[some][:, None]
            ids = indices[some].astype(np.int64)
            valid = (ids >= 0) & (ids < limit) & (np.arange(topk) < length)
            own = np.where(valid[..., None], keys[np.where(valid, ids, 0)], 0)
            gradient = np.where(valid, grad_logits[some], 0).astype(np.float64)
            rows = _Rows(q[some].astype(np.float64), weights[some].astype(np.float64), own, gradient, valid)
            with np.errstate(invalid="ignore", over="ignore"):
                step = _exact(rows, relu) if precision == "float64" else _same(rows, relu, q.dtype)
                # Zero times weights that are not finite is no zero.
                dq[some] = np.where(valid.any(-1)[:, None, None], step.dq, 0)
                dweights[some] = step.dweights
                _add_rows(dk[lead], ids[valid], step.dk[valid])
    if precision == "same":
        with np.errstate(over="ignore"):
            dq, dweights = dq.astype(q.dtype), dweights.astype(weights.dtype)
            dk = dk if dk_dtype == "float32" else dk.astype(k.dtype)
    return dq, dk, dweights


def _add_rows(sums: Array, ids: Array, rows: Array) -> None:
    """Add rows to those of `sums` that ids name: float32 one after the other; float64 likewise, but much faster."""
    if sums.dtype == np.float32:
        add_rows(sums, ids, rows)
        return
    places = ids[:, None] * sums.shape[-1] + np.arange(sums.shape[-1])
    sums += np.bincount(places.ravel(), rows.ravel(), sums.size).reshape(sums.shape)


def _exact(rows: _Rows, relu: bool) -> _Step:
    products = rows.q @ np.swapaxes(rows.keys, -1, -2)
    active = products > 0 if relu else np.ones(products.shape, bool)
    gradient, weights = rows.gradient[:, None, :], rows.weights[..., None]
    terms = np.where(rows.valid[:, None, :], gradient * (np.maximum(products, 0) if relu else products), 0)
    dq = weights * (np.where(active, gradient, 0) @ rows.keys)
    dk = rows.gradient[..., None] * (np.swapaxes(np.where(active, weights, 0), -1, -2) @ rows.q)
    return _Step(dq, terms.sum(-1), dk)


def _same(rows: _Rows, relu: bool, dtype: Any) -> _Step:
    single = np.float32
    columns = np.swapaxes(rows.keys, -1, -2)
    products = tensor_cores.product(rows.q, columns)
    active = products > 0 if relu else np.ones(products.shape, bool)
    gradient, weights = rows.gradient.astype(single), rows.weights.astype(single)
    terms = gradient[:, None, :] * (np.maximum(products, single(0)) if relu else products)
    terms = np.where(rows.valid[:, None, :], terms, single(0))
    operands, unit = _operands(gradient, dtype)
    chosen = np.where(active, operands[:, None, :], 0)
    sums = np.swapaxes(tensor_cores.product(columns, np.swapaxes(chosen, -1, -2)), -1, -2)
    dk = np.zeros(rows.keys.shape, single)
    for first in range(0, weights.shape[-1], HEAD_BLOCK):
        some = slice(first, first + HEAD_BLOCK)
        operands, weights_unit = _operands(weights[:, some], dtype)
        chosen = np.where(active[:, some], operands[..., None], 0)
        block = tensor_cores.product(np.swapaxes(chosen, -1, -2), rows.q[:, some])
        dk += block * weights_unit[..., None] * gradient[..., None]
    return _Step(sums * unit[..., None] * weights[..., None], _sum_entries(terms), dk)


def _operands(values: Array, dtype: Any) -> tuple[Array, Array]:
    """float32 values [n, any] as operands of q's dtype, in float64, and the unit [n, 1] that each row of them is in: a
    power of two for fp16."""
    unit = np.ones((len(values), 1), np.float32)
    if dtype != ml_dtypes.bfloat16:
        largest = np.where(np.isfinite(values), np.abs(values), 0).max(-1, keepdims=True, initial=0)
        exponent = np.maximum(np.frexp(largest)[1] - 1, -127)
        scale = np.clip(_LARGEST_LOG2 - exponent, -120, 120)
        unit = np.where(largest > 0, np.float32(2) ** -scale.astype(np.float32), unit)
    return (values / unit).astype(dtype).astype(np.float64), unit


def _sum_entries(terms: Array) -> Array:
    """Sums of float32 terms [n, H, topk] over entries: a thread's own first, then those of threads, then of warps."""
    *rows, entries = terms.shape
    tiles = -(-entries // TILE_KEYS)
    padded = np.zeros((*rows, tiles * TILE_KEYS), np.float32)
    padded[..., :entries] = terms
    parts = padded.reshape(*rows, tiles, 4, 2, 8)
    sums = np.zeros((*rows, 4, 8), np.float32)
    for tile, half in np.ndindex(tiles, 2):
        sums += parts[..., tile, :, half, :]
    while sums.shape[-1] > 1:
        sums = sums[..., ::2] + sums[..., 1::2]
    warps = sums[..., 0]
    total: Array = (warps[..., 0] + warps[..., 1]) + (warps[..., 2] + warps[..., 3])
    return total
