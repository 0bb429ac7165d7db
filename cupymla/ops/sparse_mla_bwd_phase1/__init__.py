"""sparse_mla_bwd_phase1: the first phase of the sparse MLA backward, on its own."""

from __future__ import annotations

from typing import Any

from ..operator import operator
from .run import CALLS

__all__ = ["sparse_mla_bwd_phase1"]


@operator(CALLS)
def sparse_mla_bwd_phase1(
    q: Any,
    kv: Any,
    out: Any,
    dout: Any,
    indices: Any,
    *,
    topk_length: Any = None,
    causal: bool = False,
    q_start: int = 0,
    k_stride: int = 1,
    p: Any = None,
    delta: Any = None,
    check_indices: bool = False,
    stream: object = None,
) -> tuple[Any, Any]:
    """The score of every top-k entry and the row sums of out * dout: the first step of the backward.

        p     = q . kv[t], without a scale; -inf on invalid entries
        delta = sum_d out * dout, of every query, also without a valid entry

    `sparse_mla_fwd` says which entries are valid.

    Args:
        q: [s_q, h_q, d_qk] bfloat16 or float16, d_qk 576 or 512. Every array may have a leading batch axis; then all
            have it, and indices count within their batch entry.
        kv: [s_kv, d_qk] or [s_kv, 1, d_qk], q's dtype.
        out: [s_q, h_q, 512], q's dtype: the forward's result.
        dout: [s_q, h_q, 512], q's dtype: the gradient with respect to out. The last axis of q, kv, out and dout is
            contiguous, other strides are any multiple of 16 bytes, addresses are multiples of 16 bytes.
        indices: [s_q, topk] or [s_q, 1, topk] int32, topk >= 1; the last axis is contiguous.
        topk_length: [s_q] int32, how many leading entries of each row of indices count; any values.
        causal: mask keys past the query's own position.
        q_start: position of query 0, for causal.
        k_stride: positions per key, for causal, >= 1.
        p: array to write, [s_q, h_q, topk] float32, the last axis contiguous.
        delta: array to write, [s_q, h_q] float32, any strides.
        check_indices: raise InputError for an index outside [-1, s_kv) within topk_length. Reads the
            indices, so a call on a GPU waits for it and cannot be captured into a graph.
        stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
            of q's framework by default. It means nothing on the CPU.

    Returns:
        (p, delta) in q's framework, float32.

    Raises:
        InputError: an argument cannot be used as it is; nothing was computed or written.
        UnsupportedError: there is no kernel for this on the arrays' device.

    Source: FlashAttention-2's backward (arXiv:2307.08691, algorithm 2), its lines up to the scores.
    """
    inputs = (q, kv, out, dout, indices, topk_length)
    options = (causal, q_start, k_stride)
    return CALLS(inputs, options, (p, delta), check_indices, stream)  # type: ignore[no-any-return]
