"""indexer_bwd: gradients of the lightning indexer's scores at the keys that it selected."""

from __future__ import annotations

from typing import Any, Literal

from ..operator import operator
from .run import CALLS

__all__ = ["indexer_bwd"]


@operator(CALLS)
def indexer_bwd(
    q: Any,
    k: Any,
    weights: Any,
    grad_logits: Any,
    indices: Any,
    *,
    topk_length: Any = None,
    causal: bool = False,
    q_start: int = 0,
    k_stride: int = 1,
    relu: bool = True,
    deterministic: bool = False,
    lists: Any = None,
    dk_dtype: Literal["float32"] | None = None,
    dq: Any = None,
    dk: Any = None,
    dweights: Any = None,
    workspace: Any = None,
    check_indices: bool = False,
    stream: object = None,
) -> tuple[Any, Any, Any]:
    """Gradients of a loss with respect to q, k and weights, from its gradient with respect to scores at selected keys.

    A score is the sum over h of weights[t, h] * relu(z), z = q[t, h] . k[s]. With g = grad_logits, over valid entries:

        dweights[t, h] = sum over s of g * relu(z)
        dq[t, h]       = weights[t, h] * sum over s of g * [z > 0] * k[s]
        dk[s]          = sum over t, h of g * weights[t, h] * [z > 0] * q[t, h]

    The derivative of relu at 0, and at NaN, is 0. A row without a valid entry gives zeros, and so does a key that no
    valid entry names. Nothing of T x L is held.

    Args:
        q: [T, H, D] bfloat16 or float16, H 1 to 128, D 64 or 128. Every array may have a leading batch axis; then all
            have it, and indices count within their batch entry.
        k: [L, D], q's dtype. The last axis of q and k is contiguous, other strides are any multiple of 16 bytes, the
            address is a multiple of 16 bytes.
        weights: [T, H] float32 or bfloat16, any strides. What the model multiplies them with is in them.
        grad_logits: [T, topk] float32, the last axis contiguous: what `indexer_loss` returns, times the loss's own
            gradient. Values at invalid entries are not looked at.
        indices: [T, topk] int32, the selected keys, the last axis contiguous. An entry is valid when it is in [0, L)
            and the causal mask shows it; a key that is named twice counts twice.
        topk_length: [T] int32, entries of each row that count, clamped to [0, topk]; all by default.
        causal: mask keys that are not complete at the query's position: query t sees keys
            s < (q_start + t + 1) // k_stride.
        q_start: position of query 0, for causal.
        k_stride: positions per key, for causal, >= 1.
        relu: products below zero count as zero; without it [z > 0] is 1.
        deterministic: give the same bits on every run. A call on a GPU then sums dk in 32-bit integers, whose unit is
            2^-30 of what all entries may add to the key, in a channel. Up to 2^29 entries in a batch entry.
        lists: what `invert_indices(indices, L, topk_length=topk_length)` returns, so that a call can be given what
            `sparse_mla_bwd` is. Only `check_indices` reads it: integers have one sum in every order.
        dk_dtype: dtype of dk: None for k's, or "float32".
        dq: array to write, [T, H, D] of q's dtype, with strides as q's may have.
        dk: array to write, [L, D], with strides as k's may have. It is overwritten, not added to.
        dweights: array to write, [T, H] of weights' dtype, any strides.
        workspace: memory to work in, [n] uint8, contiguous, at an address that is a multiple of 16 bytes, n at least
            `indexer_bwd.workspace_bytes(...)` of the same arguments; what it holds means nothing, before and after.
            Calls that may run at the same time need one each. By default it comes from the allocator of q's framework.
        check_indices: look at the entries that count and raise InputError for one that is neither -1 nor in [0, L), and
            for lists of other indices. Waits for the stream.
        stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
            of q's framework by default. It means nothing on the CPU.

    Returns:
        (dq, dk, dweights) in q's framework. Sums are float32, or those integers.

    Raises:
        InputError: an argument cannot be used as it is; nothing was computed or written.
        UnsupportedError: there is no kernel for this on the arrays' device.

    Source: derivatives of the index score of DeepSeek-V3.2, section 2.1, for its sparse training stage.
    """
    arrays = (q, k, weights, grad_logits, indices, topk_length, lists)
    options = (causal, q_start, k_stride, relu, deterministic, dk_dtype)
    return CALLS(arrays, options, (dq, dk, dweights, workspace), check_indices, stream)  # type: ignore[no-any-return]
