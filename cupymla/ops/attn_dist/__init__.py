"""attn_dist: the attention distribution over a query's top-k entries, summed over heads."""

from __future__ import annotations

from typing import Any, Literal

from ..operator import operator
from .run import CALLS

__all__ = ["attn_dist"]


@operator(CALLS)
def attn_dist(
    q: Any,
    kv: Any,
    indices: Any,
    lse: Any,
    *,
    sm_scale: float | None = None,
    topk_length: Any = None,
    causal: bool = False,
    q_start: int = 0,
    k_stride: int = 1,
    lse_base: Literal["e", "2"] = "e",
    normalize: Literal["l1"] | None = None,
    dist: Any = None,
    check_indices: bool = False,
    stream: object = None,
) -> Any:
    """The attention weight of each top-k entry, summed over heads: the target of a lightning indexer's KL loss.

        dist = sum over heads of exp(sm_scale * q . kv[t] - lse), 0 on invalid entries

    `sparse_mla_fwd` says which entries are valid. With the lse that sparse_mla_fwd returns, a row sums to h_q, or to 0
    without a valid entry. Raw sums are the default because tensor-parallel ranks add theirs first.

    Args:
        q: [s_q, h_q, d_qk] bfloat16 or float16, d_qk 576 or 512. Every array may have a leading batch axis; then all
            have it, and indices count within their batch entry.
        kv: [s_kv, d_qk] or [s_kv, 1, d_qk], q's dtype. The last axis of q and kv is contiguous, other strides are any
            multiple of 16 bytes, the address is a multiple of 16 bytes.
        indices: [s_q, topk] or [s_q, 1, topk] int32, topk >= 1; the last axis is contiguous.
        lse: [s_q, h_q] float32, any strides: the forward's, or one that counts further keys or a sink: dist is then
            the entries' part of that softmax.
        sm_scale: factor of the scores, |sm_scale| <= 2**126; d_qk ** -0.5 by default.
        topk_length: [s_q] int32, how many leading entries of each row of indices count; any values.
        causal: mask keys past the query's own position.
        q_start: position of query 0, for causal.
        k_stride: positions per key, for causal, >= 1.
        lse_base: "e" or "2": the base lse is in.
        normalize: None, or "l1": divide each row by max(its sum, 1e-10).
        dist: array to write, [s_q, topk] float32, the last axis contiguous.
        check_indices: raise InputError for an index outside [-1, s_kv) within topk_length. Reads the
            indices, so a call on a GPU waits for it and cannot be captured into a graph.
        stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
            of q's framework by default. It means nothing on the CPU.

    Returns:
        dist in q's framework, [s_q, topk] float32.

    Raises:
        InputError: an argument cannot be used as it is; nothing was computed or written.
        UnsupportedError: there is no kernel for this on the arrays' device.

    Source: the indexer's training objective, DeepSeek-V3.2 section 2.1 (main attention summed over heads, then
    L1-normalised along the sequence).
    """
    inputs = (q, kv, indices, lse, topk_length)
    options = (causal, q_start, k_stride, sm_scale, lse_base, normalize)
    return CALLS(inputs, options, (dist,), check_indices, stream)
