"""sparse_mla_bwd in NumPy: the gradients of sparse_mla_fwd, and where a kernel of the same precision rounds.

Queries are taken in blocks, so the temporaries stay bounded; dkv is accumulated in full beside them. The CPU path of
the operator uses float64: 25 GFLOP/s on one core, scatter included (measured 2026-11).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..mla import D_V
from ..mla_reference import (
    Arithmetic,
    Block,
    Precision,
    add_rows,
    batched,
    blocks,
    natural,
    probabilities,
    quiet,
    select,
    sink_share,
    stored,
    transposed,
)

Array = npt.NDArray[Any]


def sparse_mla_bwd(
    q: Array,
    kv: Array,
    out: Array,
    dout: Array,
    lse: Array,
    indices: Array,
    *,
    sm_scale: float | None = None,
    topk_length: Array | None = None,
    attn_sink: Array | None = None,
    causal: bool = False,
    q_start: int = 0,
    k_stride: int = 1,
    lse_base: str = "e",
    deterministic: bool = False,
    lists: Array | None = None,
    attn_dist: Array | None = None,
    dkv_dtype: str | None = None,
    attn_dist_sink: bool = False,
    precision: Precision = "float64",
) -> tuple[Array, ...]:
    """(dq, dkv), and d_sink when there is a sink; arguments and shapes as the public function's.

    `attn_dist` is filled when given. With `attn_dist_sink` as well, P is made with the lse that has the sink, which
    "same" rounds to fp32. `deterministic` and `lists` change nothing here: the result is always the same bits.

    precision="float64": everything in float64 and returned in float64, nothing rounded.

    precision="same": the roundings of a kernel. Products, softmax, delta and sums in fp32; P and dS (which includes
    sm_scale) rounded to q's dtype before they enter the products that make dkv and dq; dq rounded once to q's dtype,
    dkv to kv's, or fp32 when `dkv_dtype` asks for it; d_sink fp32.
    """
    arithmetic = Arithmetic.of(precision, q.dtype)
    has_batch = q.ndim == 4
    keys, selection = select(kv, indices, has_batch, topk_length, causal, q_start, k_stride)
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    sink = None if attn_sink is None else arithmetic.up(attn_sink)
    queries, outs, douts = (batched(array, 4) for array in (q, out, dout))
    norms = batched(lse, 3)
    dq = np.zeros(queries.shape, arithmetic.real)
    dkv = np.zeros(keys.shape, arithmetic.real)
    d_sink = np.zeros(q.shape[-2], arithmetic.real)
    dist = None if attn_dist is None else batched(attn_dist, 3)
    with quiet():
        for block in blocks(keys, selection, q.shape[-2], arithmetic, score_arrays=5, key_arrays=5):
            place = block.place
            rows = _Rows(
                arithmetic.up(queries[place]),
                arithmetic.up(outs[place]),
                arithmetic.up(douts[place]),
                natural(arithmetic.up(norms[place]), lse_base),
            )
            step = _differentiate(rows, block, scale, sink, arithmetic, attn_dist_sink and dist is not None)
            dq[place] = step.dq
            add_rows(dkv[block.batch], block.tokens[block.valid], step.dkeys[block.valid])
            d_sink += step.d_sink
            if dist is not None:
                dist[place] = 0
                dist[block.entries] = step.dist
    dq, dkv = dq if has_batch else dq[0], dkv.reshape(kv.shape)
    if precision == "same":
        dq, dkv = stored(dq, q.dtype), stored(dkv, np.float32 if dkv_dtype == "float32" else kv.dtype)
    return (dq, dkv) if sink is None else (dq, dkv, d_sink)


@dataclass(frozen=True, slots=True)
class _Rows:
    """A block's queries in the arithmetic's dtype; lse in natural units."""

    q: Array
    out: Array
    dout: Array
    lse: Array


@dataclass(frozen=True, slots=True)
class _Step:
    """What one block of queries adds: dkeys [queries, width, d_qk] is what each entry gives to its token."""

    dq: Array
    dkeys: Array
    d_sink: Array
    dist: Array


def _differentiate(
    rows: _Rows, block: Block, scale: float, sink: Array | None, arithmetic: Arithmetic, counts_sink: bool
) -> _Step:
    factor = arithmetic.real.type(scale)
    lse = np.logaddexp(rows.lse, sink) if sink is not None and counts_sink else rows.lse
    p = probabilities(arithmetic.product(rows.q, transposed(block.keys)) * factor, lse, block.valid)
    dist = p.sum(axis=1)
    delta = np.sum(rows.out * rows.dout, axis=-1)
    d_sink = np.zeros(rows.q.shape[1], arithmetic.real)
    if sink is not None:
        p = p if counts_sink else p * sink_share(rows.lse, sink)[..., None]
        # exp(sink - L) is what sink_share leaves of 1, here without the subtraction.
        weights = sink_share(np.broadcast_to(sink, rows.lse.shape), rows.lse)
        d_sink = -np.sum(np.where(block.occupied[:, None], weights * delta, 0), axis=0)
    ds = p * (arithmetic.product(rows.dout, transposed(block.values)) - delta[..., None]) * factor
    # Zero times a NaN or Inf that dout holds for an empty row is no zero.
    ds = arithmetic.rounded(np.where(block.valid[:, None, :], ds, 0))
    dkeys = arithmetic.product(transposed(ds), rows.q)
    dkeys[..., :D_V] += arithmetic.product(transposed(arithmetic.rounded(p)), rows.dout)
    return _Step(arithmetic.product(ds, block.keys), dkeys, d_sink, dist)
