"""sparse_mla_bwd: gradients of sparse MLA attention."""

from __future__ import annotations

from typing import Any, Literal

from ..operator import operator
from .run import CALLS

__all__ = ["sparse_mla_bwd"]


@operator(CALLS)
def sparse_mla_bwd(
    q: Any,
    kv: Any,
    out: Any,
    dout: Any,
    lse: Any,
    indices: Any,
    *,
    sm_scale: float | None = None,
    topk_length: Any = None,
    attn_sink: Any = None,
    causal: bool = False,
    q_start: int = 0,
    k_stride: int = 1,
    lse_base: Literal["e", "2"] = "e",
    deterministic: bool = False,
    lists: Any = None,
    attn_dist: Any = None,
    dq: Any = None,
    dkv: Any = None,
    dkv_dtype: Literal["float32"] | None = None,
    attn_dist_sink: bool = False,
    d_sink: Any = None,
    workspace: Any = None,
    check_indices: bool = False,
    stream: object = None,
) -> tuple[Any, ...]:
    """Gradients of `sparse_mla_fwd` with respect to q, kv and attn_sink.

    With L = lse, or log(exp(lse) + exp(attn_sink)) when there is a sink, and t the token of a valid entry:

        P             = exp(sm_scale * q . kv[t] - L), 0 on invalid entries
        delta         = sum_d out * dout
        dS            = P * (dout . kv[t, :512] - delta) * sm_scale
        dq            = sum over entries of dS * kv[t]
        dkv[t]       += sum over heads of dS * q
        dkv[t, :512] += sum over heads of P * dout
        d_sink        = -(sum over queries of exp(attn_sink - L) * delta)

    `sparse_mla_fwd` says which entries are valid. A query without one contributes nothing, whatever its out, dout and
    lse hold. A token that no valid entry names gets a gradient of 0, whatever kv holds there.

    Args:
        q: [s_q, h_q, d_qk] bfloat16 or float16, d_qk 576 or 512. Every array may have a leading batch axis, except
            attn_sink and d_sink; then all have it, and indices count within their batch entry.
        kv: [s_kv, d_qk] or [s_kv, 1, d_qk], q's dtype.
        out: [s_q, h_q, 512], q's dtype: the forward's result, the sink's effect included.
        dout: [s_q, h_q, 512], q's dtype: the gradient with respect to out. The last axis of q, kv, out and dout is
            contiguous, other strides are any multiple of 16 bytes, addresses are multiples of 16 bytes.
        lse: [s_q, h_q] float32, any strides: the forward's, without the sink.
        indices: [s_q, topk] or [s_q, 1, topk] int32, topk >= 1; the last axis is contiguous.
        sm_scale: factor of the scores, |sm_scale| <= 2**126; d_qk ** -0.5 by default.
        topk_length: [s_q] int32, how many leading entries of each row of indices count; any values.
        attn_sink: [h_q] float32, the forward's; +-inf allowed.
        causal: mask keys past the query's own position.
        q_start: position of query 0, for causal.
        k_stride: positions per key, for causal, >= 1.
        lse_base: "e" or "2": the base lse is in.
        deterministic: give the same bits on every run.
        lists: what `invert_indices(indices, s_kv, topk_length=topk_length)` returns, of these very indices and lengths:
            saves a deterministic call on a GPU from finding by itself which entries name a token. Other lists give
            other sums. Not read by calls that do without: others, and those that pack neighbouring queries.
        attn_dist: array to write, [s_q, topk] float32, the last axis contiguous: receives what `attn_dist(q, kv,
            indices, lse)` returns, which is at hand here.
        dq: array to write, q's shape and dtype, with strides as q's may have.
        dkv: array to write, kv's shape, with strides as kv's may have. It is overwritten, not added to.
        dkv_dtype: dtype of dkv: None for kv's, or "float32", which spares the last rounding and, but for more than 64
            heads on Hopper, the workspace for sums.
        attn_dist_sink: let the sink have its part of each head's softmax in attn_dist, as it has in out; False without
            attn_sink. attn_dist is then that of the lse log(exp(lse) + exp(attn_sink)).
        d_sink: array to write, [h_q] float32; only with attn_sink.
        workspace: memory to work in, [n] uint8, contiguous, at an address that is a multiple of 16 bytes, n at least
            `sparse_mla_bwd.workspace_bytes(...)` of the same arguments; what it holds means nothing, before and after.
            Calls that may run at the same time need one each. By default it comes from the allocator of q's framework.
        check_indices: raise InputError for an index outside [-1, s_kv) within topk_length, and for lists of other
            indices. Reads them, so a call on a GPU waits for it and cannot be captured into a graph.
        stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
            of q's framework by default. It means nothing on the CPU.

    Returns:
        (dq, dkv), or (dq, dkv, d_sink) when attn_sink is given, in q's framework.

    Raises:
        InputError: an argument cannot be used as it is; nothing was computed or written.
        UnsupportedError: there is no kernel for this on the arrays' device.

    Source: FlashAttention-2's backward (arXiv:2307.08691, algorithm 2), with one array for keys and values.
    """
    inputs = (q, kv, out, dout, lse, indices, topk_length, attn_sink, lists)
    options = (causal, q_start, k_stride, sm_scale, lse_base, deterministic, dkv_dtype, attn_dist_sink)
    return CALLS(inputs, options, (attn_dist, dq, dkv, d_sink, workspace), check_indices, stream)  # type: ignore[no-any-return]
