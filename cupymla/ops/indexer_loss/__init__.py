"""indexer_loss: how far the lightning indexer is from the attention that it learns from."""

from __future__ import annotations

from typing import Any

from ..operator import operator
from .run import CALLS

__all__ = ["indexer_loss"]


@operator(CALLS)
def indexer_loss(
    q: Any,
    k: Any,
    weights: Any,
    indices: Any,
    target: Any,
    *,
    topk_length: Any = None,
    lse: Any = None,
    causal: bool = False,
    q_start: int = 0,
    k_stride: int = 1,
    relu: bool = True,
    loss: Any = None,
    grad_logits: Any = None,
    check_indices: bool = False,
    stream: object = None,
) -> Any:
    """The KL divergence of the indexer's softmax over selected keys from a target, and its gradient.

    Over the valid entries s of a row, with score[s] = sum over h of weights[t, h] * relu(q[t, h] . k[indices[t, s]]):

        p           = target / max(sum of target, 1e-10)
        loss[t]     = sum of p * (log p - log softmax(score))        terms with p = 0 add 0
        grad_logits = (sum of p) * softmax(score) - p                the gradient with respect to the scores

    A row without valid entries, or without target, has loss and gradient 0. Nothing of T x L is held.

    Args:
        q: [T, H, D] bfloat16 or float16, H 1 to 128, D 64 or 128. Every array may have a leading batch axis; then all
            have it.
        k: [L, D], q's dtype. The last axis of q and k is contiguous, other strides are any multiple of 16 bytes, the
            address is a multiple of 16 bytes.
        weights: [T, H] float32 or bfloat16, any strides. What the model multiplies them with is in them.
        indices: [T, topk] int32, the selected keys, the last axis contiguous. An entry is valid when it is in [0, L)
            and the causal mask shows it; a key that is named twice counts twice.
        target: [T, topk] float32, not negative, the last axis contiguous: what `attn_dist` returns, normalised or not,
            or sums of it over ranks. Values at invalid entries are not looked at.
        topk_length: [T] int32, entries of each row that count, clamped to [0, topk]; all by default.
        lse: [T] float32, the natural log-sum-exp of each row's valid scores, where it is known.
        causal: mask keys that are not complete at the query's position: query t sees keys
            s < (q_start + t + 1) // k_stride.
        q_start: position of query 0, for causal.
        k_stride: positions per key, for causal, >= 1.
        relu: products below zero count as zero; a NaN stays.
        loss: array to write, [T] float32.
        grad_logits: array to write, [T, topk] float32, the last axis contiguous.
        check_indices: look at the entries that count and raise InputError for one that is neither -1 nor in [0, L).
            Waits for the stream.
        stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
            of q's framework by default. It means nothing on the CPU.

    Returns:
        loss [T] and grad_logits [T, topk], float32, in q's framework. Invalid entries have gradient 0. The same bits in
        every run.

    Raises:
        InputError: an argument cannot be used as it is; nothing was computed or written.
        UnsupportedError: there is no kernel for this on the arrays' device.

    Source: the sparse training stage of DeepSeek-V3.2, section 2.1.1.
    """
    arrays = (q, k, weights, indices, target, topk_length, lse)
    return CALLS(arrays, (causal, q_start, k_stride, relu), (loss, grad_logits), check_indices, stream)
