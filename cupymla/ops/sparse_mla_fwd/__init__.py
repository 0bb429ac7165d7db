"""sparse_mla_fwd: sparse MLA attention, forward."""

from __future__ import annotations

from typing import Any, Literal

from ..operator import operator
from .run import CALLS

__all__ = ["sparse_mla_fwd"]


@operator(CALLS)
def sparse_mla_fwd(
    q: Any,
    kv: Any,
    indices: Any,
    *,
    sm_scale: float | None = None,
    topk_length: Any = None,
    attn_sink: Any = None,
    causal: bool = False,
    q_start: int = 0,
    k_stride: int = 1,
    lse_base: Literal["e", "2"] = "e",
    out: Any = None,
    max_logits: Any = None,
    lse: Any = None,
    workspace: Any = None,
    check_indices: bool = False,
    stream: object = None,
) -> tuple[Any, Any, Any]:
    """Attention of each query to the keys that its row of `indices` names.

    Entry j of query s names token t = indices[s, j]. It is valid when 0 <= t < s_kv, j < topk_length[s], and, if
    causal, t <= trunc((q_start + s + 1 - k_stride) / k_stride). Invalid entries may hold any int32 and are never
    followed. A token named twice counts twice.

        score = sm_scale * q . kv[t]
        lse   = log(sum exp(score))
        out   = sum exp(score - lse) * kv[t, :512] * exp(lse) / (exp(lse) + exp(attn_sink))

    A query without a valid entry gets out 0, max_logits -inf and lse +inf.

    Args:
        q: [s_q, h_q, d_qk] bfloat16 or float16, d_qk 576 or 512. Every array may have a leading batch axis, except
            attn_sink; then all have it, and indices count within their batch entry.
        kv: [s_kv, d_qk] or [s_kv, 1, d_qk], q's dtype. The last axis of q and kv is contiguous, other strides are any
            multiple of 16 bytes, the address is a multiple of 16 bytes.
        indices: [s_q, topk] or [s_q, 1, topk] int32, topk >= 1; the last axis is contiguous.
        sm_scale: factor of the scores, |sm_scale| <= 2**126; d_qk ** -0.5 by default.
        topk_length: [s_q] int32, how many leading entries of each row of indices count; any values.
        attn_sink: [h_q] float32, a score per head that takes part in the softmax and has value 0; +-inf allowed. It
            changes out alone.
        causal: mask keys past the query's own position.
        q_start: position of query 0, for causal.
        k_stride: positions per key, for causal, >= 1.
        lse_base: "e" or "2": lse in natural units or as a base-2 logarithm.
        out: array to write, [s_q, h_q, 512] in q's dtype, with strides as q's may have.
        max_logits: array to write, [s_q, h_q] float32, any strides.
        lse: array to write, [s_q, h_q] float32, any strides.
        workspace: memory to work in, [n] uint8, contiguous, at an address that is a multiple of 16 bytes, n at least
            `sparse_mla_fwd.workspace_bytes(...)` of the same arguments, which is 0 for most; what it holds means
            nothing, before and after. Calls that may run at the same time need one each. By default it comes from the
            allocator of q's framework.
        check_indices: raise InputError for an index outside [-1, s_kv) within topk_length. Reads the
            indices, so a call on a GPU waits for it and cannot be captured into a graph.
        stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
            of q's framework by default. It means nothing on the CPU.

    Returns:
        (out, max_logits, lse) in q's framework: out in q's dtype; max_logits, the largest score of each head in
        natural units, and lse, without the sink, float32.

    Raises:
        InputError: an argument cannot be used as it is; nothing was computed or written.
        UnsupportedError: there is no kernel for this on the arrays' device.

    Source: multi-head latent attention in its absorbed form, DeepSeek-V2 (arXiv:2405.04434) section 2.1; token
    selection, DeepSeek-V3.2; the interface follows FlashMLA's sparse prefill.
    """
    inputs = (q, kv, indices, topk_length, attn_sink)
    options = (causal, q_start, k_stride, sm_scale, lse_base)
    return CALLS(inputs, options, (out, max_logits, lse, workspace), check_indices, stream)  # type: ignore[no-any-return]
