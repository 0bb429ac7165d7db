"""indexer_logits: what the lightning indexer thinks of every key."""

from __future__ import annotations

from typing import Any

from ..operator import operator
from .run import CALLS

__all__ = ["indexer_logits"]


@operator(CALLS)
def indexer_logits(
    q: Any,
    k: Any,
    weights: Any,
    *,
    q_scale: Any = None,
    k_scale: Any = None,
    starts: Any = None,
    ends: Any = None,
    causal: bool = False,
    q_start: int = 0,
    k_stride: int = 1,
    relu: bool = True,
    logits: Any = None,
    stream: object = None,
) -> Any:
    """Score every key for each query with the lightning indexer's heads.

        logits[t, s] = k_scale[s] * sum over h of weights[t, h] * q_scale[t, h] * relu(q[t, h] . k[s])

    Keys that a query does not see get -inf. A score has the same bits whatever T, L and the batch are, on one kind of
    GPU. The CPU gives the same bits wherever the tensor cores' sums q . k are exact.

    Args:
        q: [T, H, D] fp8 e4m3fn, bfloat16 or float16, H 1 to 128, D 64 or 128. uint8 is taken as the bytes of fp8. Every
            array may have a leading batch axis; then all have it.
        k: [L, D], q's dtype. The last axis of q and k is contiguous, other strides are any multiple of 16 bytes, the
            address is a multiple of 16 bytes.
        weights: [T, H] float32 or bfloat16, any strides. What the model multiplies them with is in them.
        q_scale: [T, H] float32, any strides, with fp8 only; ones by default.
        k_scale: [L] float32, any strides, with fp8 only; ones by default.
        starts: [T] int32, the first visible key of each query, clamped to [0, L]; 0 by default.
        ends: [T] int32, the key after the last visible one, clamped to [0, L]; L by default.
        causal: mask keys that are not complete at the query's position: query t sees keys
            s < (q_start + t + 1) // k_stride.
        q_start: position of query 0, for causal.
        k_stride: positions per key, for causal, >= 1.
        relu: products below zero count as zero; a NaN stays.
        logits: array to write, [T, L] float32, the last axis contiguous.
        stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
            of q's framework by default. It means nothing on the CPU.

    Returns:
        logits in q's framework, [T, L] float32. With fp8 the error is at most 2**-11 of the sum of |w qs ks q k|, the
        tensor cores' own; else 2**-14 of it.

    Raises:
        InputError: an argument cannot be used as it is; nothing was computed or written.
        UnsupportedError: there is no kernel for this on the arrays' device.

    Source: the lightning indexer of DeepSeek-V3.2, section 2.1.
    """
    arrays = (q, k, weights, q_scale, k_scale, starts, ends)
    return CALLS(arrays, (causal, q_start, k_stride, relu), (logits,), False, stream)
