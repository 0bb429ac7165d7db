"""attn_dist in NumPy: what the operator means, in float64 or as a kernel accumulates."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..mla_reference import Arithmetic, Precision, batched, blocks, natural, probabilities, quiet, select, transposed
from ..tensor_cores import toward_zero
from .spec import L1_EPSILON

Array = npt.NDArray[Any]


def attn_dist(
    q: Array,
    kv: Array,
    indices: Array,
    lse: Array,
    *,
    sm_scale: float | None = None,
    topk_length: Array | None = None,
    causal: bool = False,
    q_start: int = 0,
    k_stride: int = 1,
    lse_base: str = "e",
    normalize: str | None = None,
    precision: Precision = "float64",
) -> Array:
    """dist; arguments and shapes as the public function's.

    precision="float64": in float64 and returned in float64. precision="same": products, exponentials and sums in fp32,
    products as tensor cores round them, and every exponential one to two units in the last place too small:
    `ex2.approx` may be two off (PTX ISA), at the same place for all heads to the same side, and sums over heads have
    that error whole.
    """
    arithmetic = Arithmetic.of(precision, q.dtype)
    has_batch = q.ndim == 4
    keys, selection = select(kv, indices, has_batch, topk_length, causal, q_start, k_stride)
    queries, norms = batched(q, 4), batched(lse, 3)
    scale = arithmetic.real.type(q.shape[-1] ** -0.5 if sm_scale is None else sm_scale)
    dist = np.zeros((*queries.shape[:2], indices.shape[-1]), arithmetic.real)
    with quiet():
        for block in blocks(keys, selection, q.shape[-2], arithmetic, score_arrays=3, key_arrays=2):
            place = block.place
            scores = arithmetic.product(arithmetic.up(queries[place]), transposed(block.keys)) * scale
            norm = natural(arithmetic.up(norms[place]), lse_base)
            if precision == "same":
                exact = probabilities((scores - norm[..., None]).astype(np.float64), np.zeros(norm.shape), block.valid)
                weights = np.nextafter(toward_zero(exact), np.float32(0))
            else:
                weights = probabilities(scores, norm, block.valid)
            # Heads contiguous, for NumPy adds such as a tree: one by one, sums would hide what weights have in common.
            dist[block.entries] = np.ascontiguousarray(transposed(weights)).sum(axis=-1)
        if normalize == "l1":
            dist /= np.maximum(dist.sum(axis=-1, keepdims=True), L1_EPSILON)
    return dist if has_batch else dist[0]
