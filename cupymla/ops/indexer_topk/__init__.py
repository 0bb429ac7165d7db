"""indexer_topk: the keys that the lightning indexer selects, without a matrix of scores."""

from __future__ import annotations

from typing import Any, Literal

from ..operator import operator
from .run import CALLS

__all__ = ["indexer_topk"]


@operator(CALLS)
def indexer_topk(
    q: Any,
    k: Any,
    weights: Any,
    topk: int,
    *,
    q_scale: Any = None,
    k_scale: Any = None,
    starts: Any = None,
    ends: Any = None,
    causal: bool = False,
    q_start: int = 0,
    k_stride: int = 1,
    relu: bool = True,
    return_values: bool = False,
    return_lse: bool = False,
    lse_base: Literal["e", "2"] = "e",
    indices: Any = None,
    count: Any = None,
    values: Any = None,
    lse: Any = None,
    workspace: Any = None,
    stream: object = None,
) -> tuple[Any, ...]:
    """Select each query's keys with the lightning indexer, without holding all scores.

    The selection is that of `topk(indexer_logits(...), topk)`, bit for bit: the larger score first, of equal ones the
    smaller key; a NaN is never selected. Scores are made and selected from for some rows at a time.

    Args:
        q: [T, H, D] fp8 e4m3fn, bfloat16 or float16, H 1 to 128, D 64 or 128. uint8 is taken as the bytes of fp8. Every
            array may have a leading batch axis; then all have it.
        k: [L, D], q's dtype. The last axis of q and k is contiguous, other strides are any multiple of 16 bytes, the
            address is a multiple of 16 bytes.
        weights: [T, H] float32 or bfloat16, any strides. What the model multiplies them with is in them.
        topk: how many keys of each query, at least 1; it may be more than L.
        q_scale: [T, H] float32, any strides, with fp8 only; ones by default.
        k_scale: [L] float32, any strides, with fp8 only; ones by default.
        starts: [T] int32, the first visible key of each query, clamped to [0, L]; 0 by default.
        ends: [T] int32, the key after the last visible one, clamped to [0, L]; L by default.
        causal: mask keys that are not complete at the query's position: query t sees keys
            s < (q_start + t + 1) // k_stride.
        q_start: position of query 0, for causal.
        k_stride: positions per key, for causal, >= 1.
        relu: products below zero count as zero; a NaN stays.
        return_values: return the selected scores, too.
        return_lse: return the logarithm of the sum of the selected scores' exponentials, too.
        lse_base: "e" or "2", the base of that logarithm.
        indices: array to write, [T, topk] int32, the last axis contiguous.
        count: array to write, [T] int32.
        values: array to write, [T, topk] float32, the last axis contiguous; with return_values only.
        lse: array to write, [T] float32; with return_lse only.
        workspace: memory to work in, [n] uint8, contiguous, at an address that is a multiple of 16 bytes, n at least
            `indexer_topk.workspace_bytes(...)` of the same arguments: at most 192 MiB, or what one row of scores takes.
            What it holds means nothing, before and after. Allocated by default.
        stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
            of q's framework by default. It means nothing on the CPU.

    Returns:
        (indices, count), and values and lse behind them where asked for, in q's framework. Ids of keys ascend; entries
        left over come last and hold -1, their values -inf. count says how many ids there are, which is what
        `topk_length` of sparse attention wants. lse is +inf where nothing is selected.

    Raises:
        InputError: an argument cannot be used as it is; nothing was computed or written.
        UnsupportedError: there is no kernel for this on the arrays' device.

    Source: the lightning indexer of DeepSeek-V3.2, section 2.1.
    """
    arrays = (q, k, weights, q_scale, k_scale, starts, ends)
    options = (topk, causal, q_start, k_stride, relu, return_values, return_lse, lse_base)
    outputs = (indices, count, values, lse, workspace)
    return CALLS(arrays, options, outputs, False, stream)  # type: ignore[no-any-return]
