"""indexer_loss_dense: the warm-up of the lightning indexer, towards dense attention over all visible keys."""

from __future__ import annotations

from typing import Any, Literal

from ..operator import operator
from .run import CALLS

__all__ = ["indexer_loss_dense"]


@operator(CALLS)
def indexer_loss_dense(
    q: Any,
    k: Any,
    weights: Any,
    mla_q: Any,
    mla_kv: Any,
    *,
    mla_lse: Any = None,
    starts: Any = None,
    ends: Any = None,
    grad_loss: Any = None,
    causal: bool = False,
    q_start: int = 0,
    k_stride: int = 1,
    sm_scale: float | None = None,
    lse_base: Literal["e", "2"] = "e",
    relu: bool = True,
    dk_dtype: Literal["float32"] | None = None,
    loss: Any = None,
    dq: Any = None,
    dk: Any = None,
    dweights: Any = None,
    workspace: Any = None,
    stream: object = None,
) -> tuple[Any, Any, Any, Any]:
    """The KL divergence of the indexer's softmax over all visible keys from dense MLA attention, with its gradients.

    Of query t, over the keys s that it sees:

        target[s] = sum over MLA heads of exp(sm_scale * mla_q[t, h] . mla_kv[s] - mla_lse[t, h])
        p         = target / max(sum of target, 1e-10)
        score[s]  = sum over h of weights[t, h] * relu(q[t, h] . k[s])
        loss[t]   = sum of p * (log p - log softmax(score))          terms with p = 0 add 0

    dq, dk and dweights are the gradients of the sum over t of grad_loss[t] * loss[t]. The target is a constant. It is
    computed anew, for some queries at a time: memory does not grow with T x L. A query that sees no key has loss and
    gradient 0.

    A query is spoilt when its target's sum, its scores' log-sum-exp or its grad_loss is not finite, or when it has a
    number that is not finite in q or in weights, or sees one in k. Its dq and dweights are NaN, and so is dk of every
    key that it sees; no other query is touched.

    Args:
        q: [T, H, D] bfloat16 or float16, H 1 to 128, D 64 or 128: the indexer's. Every array may have a leading batch
            axis; then all have it.
        k: [L, D], q's dtype. The last axis of q, k, mla_q and mla_kv is contiguous, other strides are any multiple of
            16 bytes, the address is a multiple of 16 bytes.
        weights: [T, H] float32 or bfloat16, any strides. What the model multiplies them with is in them.
        mla_q: [T, Hq, d] in q's dtype, d 576 or 512, Hq at least 1: the queries of the main attention, absorbed.
        mla_kv: [L, d], q's dtype: the latents that they attend to.
        mla_lse: [T, Hq] float32, any strides: the log-sum-exp of each MLA head, as a forward returns it. It may count
            more than the visible keys, such as a sink or a window. By default it is computed, of the visible keys.
        starts: [T] int32, the first visible key of each query, clamped to [0, L]; 0 by default.
        ends: [T] int32, the key after the last visible one, clamped to [0, L]; L by default.
        grad_loss: [T] float32, any strides: the gradient of each row's loss; ones by default.
        causal: mask keys that are not complete at the query's position: query t sees keys
            s < (q_start + t + 1) // k_stride.
        q_start: position of query 0, for causal.
        k_stride: positions per key, for causal, >= 1.
        sm_scale: factor of the main attention's scores, |sm_scale| <= 2**126; d ** -0.5 by default.
        lse_base: "e" or "2": the base that mla_lse is in.
        relu: products below zero count as zero; a NaN stays.
        dk_dtype: dtype of dk: None for k's, or "float32".
        loss: array to write, [T] float32.
        dq: array to write, [T, H, D] of q's dtype, with strides as q's may have.
        dk: array to write, [L, D], with strides as k's may have. It is overwritten, not added to.
        dweights: array to write, [T, H] of weights' dtype, any strides.
        workspace: memory to work in, [n] uint8, contiguous, at an address that is a multiple of 16 bytes, n at least
            `indexer_loss_dense.workspace_bytes(...)` of the same arguments; what it holds means nothing, before and
            after. Calls that may run at the same time need one each. By default it comes from the allocator of q's
            framework.
        stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
            of q's framework by default. It means nothing on the CPU.

    Returns:
        (loss, dq, dk, dweights) in q's framework: loss [T] float32, the gradients as described above. All sums are
        float32 or wider. The same bits in every run.

    Raises:
        InputError: an argument cannot be used as it is; nothing was computed or written.
        UnsupportedError: there is no kernel for this on the arrays' device.

    Source: the dense warm-up stage of DeepSeek-V3.2, section 2.1.1.
    """
    arrays = (q, k, weights, mla_q, mla_kv, mla_lse, starts, ends, grad_loss)
    options = (causal, q_start, k_stride, sm_scale, lse_base, relu, dk_dtype)
    return CALLS(arrays, options, (loss, dq, dk, dweights, workspace), False, stream)  # type: ignore[no-any-return]
