"""sparse_mla_bwd_phase1 in NumPy: what the operator means, in float64 or as a kernel accumulates."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..mla_reference import Arithmetic, Precision, batched, blocks, quiet, select, transposed

Array = npt.NDArray[Any]


def sparse_mla_bwd_phase1(
    q: Array,
    kv: Array,
    out: Array,
    dout: Array,
    indices: Array,
    *,
    topk_length: Array | None = None,
    causal: bool = False,
    q_start: int = 0,
    k_stride: int = 1,
    precision: Precision = "float64",
) -> tuple[Array, Array]:
    """(p, delta); arguments and shapes as the public function's.

    precision="float64": in float64 and returned in float64. precision="same": products and sums in fp32.
    """
    arithmetic = Arithmetic.of(precision, q.dtype)
    has_batch = q.ndim == 4
    keys, selection = select(kv, indices, has_batch, topk_length, causal, q_start, k_stride)
    queries, outs, douts = (batched(array, 4) for array in (q, out, dout))
    p = np.full((*queries.shape[:3], indices.shape[-1]), -np.inf, arithmetic.real)
    delta = np.zeros(queries.shape[:3], arithmetic.real)
    with quiet():
        for block in blocks(keys, selection, q.shape[-2], arithmetic, score_arrays=2, key_arrays=2):
            place = block.place
            scores = arithmetic.product(arithmetic.up(queries[place]), transposed(block.keys))
            p[block.entries] = np.where(block.valid[:, None, :], scores, -np.inf)
            delta[place] = np.sum(arithmetic.up(outs[place]) * arithmetic.up(douts[place]), axis=-1)
    return (p, delta) if has_batch else (p[0], delta[0])
