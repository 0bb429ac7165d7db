"""indexer_loss in NumPy: what the operator means, in float64 or as a kernel accumulates."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .. import indexer_score, tensor_cores

Array = npt.NDArray[Any]
Precision = Literal["float64", "same"]

LEAST_MASS = 1e-10
"""Least divisor of a target, so that a row without mass stays zero."""


def indexer_loss(
    q: Array,
    k: Array,
    weights: Array,
    indices: Array,
    target: Array,
    *,
    topk_length: Array | None = None,
    lse: Array | None = None,
    causal: bool = False,
    q_start: int = 0,
    k_stride: int = 1,
    relu: bool = True,
    precision: Precision = "float64",
) -> tuple[Array, Array]:
    """loss and grad_logits; arguments and shapes as the public function's.

    precision="float64": in float64 and returned in float64. "same": products as tensor cores round them, scores in a
    kernel's order (`indexer_score`), and everything after in float32.
    """
    real: Any = np.float64 if precision == "float64" else np.float32
    loss, grad = np.zeros(q.shape[:-2], real), np.zeros(indices.shape, real)
    has_batch = q.ndim == 4
    for place in np.ndindex(q.shape[:-2]):
        own_keys = k[place[0]] if has_batch else k
        length = indices.shape[-1] if topk_length is None else int(topk_length[place])
        ids = indices[place][: max(0, length)].astype(np.int64)
        limit = len(own_keys)
        if causal:
            limit = min(limit, (q_start + place[-1] + 1) // k_stride)
        (valid,) = np.nonzero((ids >= 0) & (ids < limit))
        if not valid.size:
            continue
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            scores = _scores(q[place], own_keys[ids[valid]], weights[place], relu, precision)
            loss[place], grad[(*place, valid)] = _row(
                scores, target[place][valid].astype(real), None if lse is None else real(lse[place])
            )
    return loss, grad


def _scores(q: Array, keys: Array, weights: Array, relu: bool, precision: Precision) -> Array:
    """Of one query [H, D] and some keys [n, D]."""
    wide_q, wide_keys = (array.astype(np.float32).astype(np.float64) for array in (q, keys))
    if precision == "float64":
        products = wide_q @ wide_keys.T
        scores: Array = weights.astype(np.float64) @ (np.maximum(products, 0) if relu else products)
        return scores
    return indexer_score.scores(tensor_cores.product(wide_q, wide_keys.T), weights.astype(np.float32), None, relu)


def _row(scores: Array, target: Array, lse: Any) -> tuple[Any, Array]:
    """Loss and gradient of the valid entries of a row, in the scores' dtype."""
    real = scores.dtype.type
    mass = target.sum()
    if mass == 0:
        return real(0), np.zeros_like(scores)
    p = target / np.maximum(mass, real(LEAST_MASS))
    if lse is None:
        largest = scores.max()
        lse = largest + np.log(np.exp(scores - largest).sum())
    log_softmax = scores - lse
    some = p != 0
    loss = (p[some] * (np.log(p[some]) - log_softmax[some])).sum()
    return loss, p.sum() * np.exp(log_softmax) - p
