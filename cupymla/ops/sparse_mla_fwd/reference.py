"""sparse_mla_fwd in NumPy: what the operator means, and where a kernel of the same precision rounds.

Queries are taken in blocks, so the working set stays bounded. The CPU path of the operator uses float64: its error is
that of rounding the result, and fp32 would be less than twice as fast (measured 2026-11: one core does 30 GFLOP/s in
all, 64 in the float64 products alone and 105 in fp32's).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..mla import D_V
from ..mla_reference import (
    Arithmetic,
    Block,
    Precision,
    batched,
    blocks,
    in_base,
    quiet,
    select,
    sink_share,
    stored,
    transposed,
)

Array = npt.NDArray[Any]


def sparse_mla_fwd(
    q: Array,
    kv: Array,
    indices: Array,
    *,
    sm_scale: float | None = None,
    topk_length: Array | None = None,
    attn_sink: Array | None = None,
    causal: bool = False,
    q_start: int = 0,
    k_stride: int = 1,
    lse_base: str = "e",
    precision: Precision = "float64",
) -> tuple[Array, Array, Array]:
    """(out, max_logits, lse); arguments and shapes as the public function's.

    precision="float64": everything in float64 and returned in float64, nothing rounded.

    precision="same": the roundings of a kernel. q.k, softmax and sums in fp32; P = exp(score - row maximum) rounded to
    q's dtype before it meets V; the division by the fp32 row sum and the sink's factor come after; out rounded once to
    q's dtype, max_logits and lse fp32.
    """
    arithmetic = Arithmetic.of(precision, q.dtype)
    has_batch = q.ndim == 4
    queries = batched(q, 4)
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    keys, selection = select(kv, indices, has_batch, topk_length, causal, q_start, k_stride)
    out = np.zeros((*queries.shape[:3], D_V), arithmetic.real)
    max_logits = np.zeros(queries.shape[:3], arithmetic.real)
    lse = np.zeros(queries.shape[:3], arithmetic.real)
    with quiet():
        for block in blocks(keys, selection, q.shape[-2], arithmetic, score_arrays=3, key_arrays=3):
            place = block.place
            out[place], max_logits[place], lse[place] = _attend(queries[place], block, scale, attn_sink, arithmetic)
        lse = in_base(lse, lse_base)
    if not has_batch:
        out, max_logits, lse = out[0], max_logits[0], lse[0]
    if precision == "float64":
        return out, max_logits, lse
    return stored(out, q.dtype), max_logits, lse


def _attend(
    q: Array, block: Block, scale: float, attn_sink: Array | None, arithmetic: Arithmetic
) -> tuple[Array, Array, Array]:
    scores = arithmetic.product(arithmetic.up(q), transposed(block.keys)) * arithmetic.real.type(scale)
    scores = np.where(block.valid[:, None, :], scores, -np.inf)
    highest = scores.max(axis=-1)
    # Without a valid entry, or with none that scores more than -inf, subtracting the maximum would make NaN of -inf.
    hopeless = np.isneginf(highest)
    weights = np.exp(scores - np.where(hopeless, 0, highest)[..., None])
    total = weights.sum(axis=-1)
    lse = np.where(block.occupied[:, None], highest + np.log(total), np.inf)
    share = 1 / total
    if attn_sink is not None:
        sink = arithmetic.up(attn_sink)
        share = np.where(hopeless & (sink > -np.inf), 0, sink_share(lse, sink) / total)
    out = arithmetic.product(arithmetic.rounded(weights), block.values) * share[..., None]
    return np.where(block.occupied[:, None, None], out, 0), highest, lse
