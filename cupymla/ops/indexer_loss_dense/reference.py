"""indexer_loss_dense in NumPy: what the operator means, in float64 or as kernels round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .. import tensor_cores
from ..indexer_logits.reference import indexer_logits, visible
from ..mla_reference import natural, quiet

Array = npt.NDArray[Any]
Precision = Literal["float64", "same"]

LEAST_MASS = 1e-10
"""Least divisor of a target, so that a row without mass stays zero."""

_BLOCK_ELEMENTS = 1 << 22
"""Of the largest temporaries of a block of queries."""

_LARGEST_LOG2 = 14
"""Exponent of the largest fp16 operand of a product, once it is scaled."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some queries of one batch entry: q [n, H, D], weights [n, H], MLA queries [n, Hq, d], seen [n, L] bool."""

    q: Array
    weights: Array
    mla_q: Array
    seen: Array


@dataclass(frozen=True, slots=True)
class _Step:
    """What they give: loss [n], dq [n, H, D], dweights [n, H], and dk [L, D] of them together."""

    loss: Array
    dq: Array
    dweights: Array
    dk: Array


def indexer_loss_dense(
    q: Array,
    k: Array,
    weights: Array,
    mla_q: Array,
    mla_kv: Array,
    *,
    mla_lse: Array | None = None,
    starts: Array | None = None,
    ends: Array | None = None,
    grad_loss: Array | None = None,
    causal: bool = False,
    q_start: int = 0,
    k_stride: int = 1,
    sm_scale: float | None = None,
    lse_base: str = "e",
    relu: bool = True,
    dk_dtype: str | None = None,
    precision: Precision = "float64",
) -> tuple[Array, Array, Array, Array]:
    """loss, dq, dk and dweights; arguments and shapes as the public function's.

    precision="float64": in float64 and returned in float64. "same": products as tensor cores round them, scores in a
    kernel's order, gradients rounded to q's dtype where they enter a product, all else in float32, sums over keys one
    after the other; results rounded once.
    """
    real: Any = np.float64 if precision == "float64" else np.float32
    loss = np.zeros(q.shape[:-2], real)
    dq, dk, dweights = np.zeros(q.shape, real), np.zeros(k.shape, real), np.zeros(weights.shape, real)
    queries, keys = q.shape[-3], k.shape[-2]
    scale = real(mla_q.shape[-1] ** -0.5 if sm_scale is None else sm_scale)
    at_once = max(1, _BLOCK_ELEMENTS // max(1, keys * max(q.shape[-2], mla_q.shape[-2])))
    for lead in np.ndindex(q.shape[:-3]):
        low, high = (None if array is None else array[lead][None] for array in (starts, ends))
        seen = visible(1, queries, keys, low, high, causal, q_start, k_stride)[0]
        for first in range(0, queries if keys else 0, at_once):
            some = (*lead, slice(first, first + at_once))
            rows = _Rows(q[some], weights[some], mla_q[some], seen[first : first + at_once])
            with quiet():
                lse = None if mla_lse is None else natural(mla_lse[some].astype(real), lse_base)
                target = _target(rows, mla_kv[lead], lse, scale, precision)
                slopes = np.ones(len(rows.seen), real) if grad_loss is None else grad_loss[some].astype(real)
                step = _step(rows, k[lead], target, slopes, relu, precision)
                dk[lead] += step.dk
            loss[some], dq[some], dweights[some] = step.loss, step.dq, step.dweights
    if precision == "same":
        with quiet():
            dq, dweights = dq.astype(q.dtype), dweights.astype(weights.dtype)
            dk = dk if dk_dtype == "float32" else dk.astype(k.dtype)
    return loss, dq, dk, dweights


def _wide(array: Array) -> Array:
    return array.astype(np.float32).astype(np.float64)


def _product(left: Array, right: Array, precision: Precision) -> Array:
    if precision == "same":
        return tensor_cores.product(left, right)
    result: Array = left @ right
    return result


def _total(terms: Array) -> Array:
    """Sums over the last axis; in float32 one after the other."""
    in_order = terms.dtype != np.float64 and terms.shape[-1]
    result: Array = np.add.accumulate(terms, -1)[..., -1] if in_order else terms.sum(-1)
    return result


def _log_sum(scores: Array, seen: Array) -> Array:
    """Log-sum-exp of the scores that are seen; +inf where there is none, so that nothing has a weight."""
    masked = np.where(seen, scores, -np.inf)
    largest = masked.max(-1)
    base = np.where(np.isneginf(largest), scores.dtype.type(0), largest)
    result: Array = base + np.log(_total(np.exp(masked - base[..., None])))
    return np.where(seen.any(-1), result, scores.dtype.type(np.inf))


def _target(rows: _Rows, latents: Array, lse: Array | None, scale: Any, precision: Precision) -> Array:
    """[n, L], 0 where a key is not seen."""
    scores = _product(_wide(rows.mla_q), _wide(latents).T, precision) * scale
    seen = np.broadcast_to(rows.seen[:, None], scores.shape)
    norm = _log_sum(scores, seen) if lse is None else lse
    weights = np.where(seen, np.exp(scores - norm[..., None]), scores.dtype.type(0))
    result: Array = _total(np.moveaxis(weights, 1, -1))
    return result


def _step(rows: _Rows, k: Array, target: Array, slopes: Array, relu: bool, precision: Precision) -> _Step:
    real = target.dtype.type
    seen = rows.seen
    scores = indexer_logits(rows.q, k, rows.weights, relu=relu, precision=precision)
    mass, lse = _total(target), _log_sum(scores, seen)
    p = target / np.maximum(mass, real(LEAST_MASS))[:, None]
    log_softmax = np.where(seen, scores - lse[:, None], real(0))
    terms = np.where(p != 0, p * (np.log(np.where(p != 0, p, real(1))) - log_softmax), real(0))
    whole = (mass / np.maximum(mass, real(LEAST_MASS)))[:, None]
    gradient = np.where(seen, (whole * np.exp(log_softmax) - p) * slopes[:, None], real(0))

    finite_keys: Any = np.isfinite(_wide(k)).all(-1)
    spoilt = ~(np.isfinite(_wide(rows.q)).all((-1, -2)) & np.isfinite(_wide(rows.weights)).all(-1))
    spoilt |= ~(np.isfinite(mass) & np.isfinite(lse) & np.isfinite(slopes)) | (seen & ~finite_keys).any(-1)
    spoilt &= seen.any(-1)
    left_out = spoilt | ~seen.any(-1)
    # What is spoilt takes no part in products: zero times it would be NaN where it must not be.
    q = np.where(left_out[:, None, None], 0, _wide(rows.q))
    weights = np.where(left_out[:, None], 0, rows.weights.astype(real))
    gradient = np.where(left_out[:, None], real(0), gradient)
    keys = np.where(finite_keys[:, None], _wide(k), 0)
    dq, dk, dweights = _gradients(q, weights, keys, gradient, relu, precision, rows.q.dtype)
    dq[spoilt] = dweights[spoilt] = np.nan
    dk[(spoilt[:, None] & seen).any(0)] = np.nan
    return _Step(np.where(seen.any(-1), _total(terms), real(0)), dq, dweights, dk)


def _gradients(
    q: Array, weights: Array, keys: Array, gradient: Array, relu: bool, precision: Precision, dtype: Any
) -> tuple[Array, Array, Array]:
    """dq [n, H, D], dk [L, D] and dweights [n, H] of a gradient [n, L] with respect to scores, all finite."""
    products = _product(q, keys.T, precision)
    active = products > 0 if relu else np.ones(products.shape, bool)
    dweights = _total(gradient[:, None] * (np.maximum(products, 0) if relu else products))
    by_row, unit = _operands(gradient, np.abs(gradient).max(-1, keepdims=True), dtype, precision)
    chosen = np.where(active, by_row[:, None], 0)
    dq = weights[..., None] * (_product(chosen, keys, precision) * unit[..., None])
    terms = gradient[:, None] * weights[..., None]
    all_terms, whole_unit = _operands(terms, np.abs(terms).max(initial=0), dtype, precision)
    chosen = np.where(active, all_terms, 0).reshape(-1, len(keys))
    return dq, _product(chosen.T, q.reshape(-1, q.shape[-1]), precision) * whole_unit, dweights


def _operands(values: Array, largest: Any, dtype: Any, precision: Precision) -> tuple[Array, Any]:
    """Values as operands of q's dtype, in float64, and the unit that they are in: a power of two for fp16."""
    unit = np.ones_like(largest)
    if precision == "float64":
        return values, unit
    if dtype != ml_dtypes.bfloat16:
        exponent = np.maximum(np.frexp(largest)[1] - 1, -127)
        scale = np.clip(_LARGEST_LOG2 - exponent, -120, 120)
        unit = np.where(largest > 0, np.float32(2) ** -scale.astype(np.float32), unit).astype(np.float32)
    return (values / unit).astype(dtype).astype(np.float64), unit
