"""The lightning indexer on paged keys, for decoding: all scores, and the keys that it selects."""

from __future__ import annotations

from typing import Any, Literal

from ..operator import operator
from .run import PAGED_INDEXER_LOGITS, PAGED_INDEXER_TOPK

__all__ = ["paged_indexer_logits", "paged_indexer_topk"]


@operator(PAGED_INDEXER_LOGITS)
def paged_indexer_logits(
    q: Any,
    k_cache: Any,
    weights: Any,
    block_tables: Any,
    context_lens: Any,
    *,
    q_scale: Any = None,
    relu: bool = True,
    max_context: int | None = None,
    logits: Any = None,
    check_indices: bool = False,
    stream: object = None,
) -> Any:
    """Score the keys of each request, which lie in pages, for its queries.

    The score of a query and a key has the same bits as in `indexer_logits`. Keys that a query does not see, and those
    of a block that is not in the cache, get -inf. Lengths and tables are read on the GPU: one CUDA graph serves all of
    them, and the time of scoring follows the lengths.

    Args:
        q: [B, n, H, D] fp8 e4m3fn, bfloat16 or float16, n queries of each of B requests, H 1 to 128, D 64 or 128. uint8
            is taken as the bytes of fp8. The last axis is contiguous, other strides are any multiple of 16 bytes, the
            address is a multiple of 16 bytes.
        k_cache: keys. With fp8 [blocks, page, D + 4] or [blocks, page, 1, D + 4], fp8 or uint8: a block's bytes are
            contiguous, page rows of D codes, then page fp32 scales ("indexer_fp8"); the distance of blocks and the
            address are multiples of 4 bytes, and of 16 bytes for speed. Else [blocks, page, D] or [blocks, page, 1, D]
            in q's dtype, with strides as q's.
        weights: [B, n, H] float32 or bfloat16, any strides. What the model multiplies them with is in them.
        block_tables: [B, width] int32, any strides. Position p of request b is in block block_tables[b, p // page].
        context_lens: int32, any strides. [B]: query j sees the first context_lens[b] - n + 1 + j keys. [B, n]: it sees
            context_lens[b, j] keys. Clamped to [0, width * page], and to max_context.
        q_scale: [B, n, H] float32, any strides, with fp8 only; ones by default.
        relu: products below zero count as zero; a NaN stays.
        max_context: a bound of the lengths, which the caller knows: it decides how much work is laid out.
        logits: array to write, [B, n, width * page] float32, the last axis contiguous.
        check_indices: raise InputError for blocks of seen keys that are neither -1 nor in the cache; that waits for the
            GPU.
        stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
            of q's framework by default. It means nothing on the CPU.

    Returns:
        logits in q's framework, [B, n, width * page] float32, with the errors of `indexer_logits`.

    Raises:
        InputError: an argument cannot be used as it is; nothing was computed or written.
        UnsupportedError: there is no kernel for this on the arrays' device.

    Source: the lightning indexer of DeepSeek-V3.2, section 2.1; the pages are DeepGEMM's (`kv_cache_cast_to_fp8` of its
    tests).
    """
    arrays = (q, k_cache, weights, block_tables, context_lens, q_scale)
    return PAGED_INDEXER_LOGITS(arrays, (relu, max_context), (logits,), check_indices, stream)


@operator(PAGED_INDEXER_TOPK)
def paged_indexer_topk(
    q: Any,
    k_cache: Any,
    weights: Any,
    block_tables: Any,
    context_lens: Any,
    topk: int,
    *,
    q_scale: Any = None,
    relu: bool = True,
    positions: Literal["slot", "token"] = "slot",
    max_context: int | None = None,
    return_values: bool = False,
    return_lse: bool = False,
    lse_base: Literal["e", "2"] = "e",
    indices: Any = None,
    count: Any = None,
    values: Any = None,
    lse: Any = None,
    workspace: Any = None,
    check_indices: bool = False,
    stream: object = None,
) -> tuple[Any, ...]:
    """Select each query's keys, which lie in pages, with the lightning indexer.

    The selection is that of `topk` from the scores of `paged_indexer_logits`, bit for bit: the larger score first, of
    equal ones the earlier token; a NaN is never selected. Lengths and tables are read on the GPU: one CUDA graph serves
    all of them, and time follows the lengths.

    Args:
        q: [B, n, H, D] fp8 e4m3fn, bfloat16 or float16, n queries of each of B requests, H 1 to 128, D 64 or 128. uint8
            is taken as the bytes of fp8. The last axis is contiguous, other strides are any multiple of 16 bytes, the
            address is a multiple of 16 bytes.
        k_cache: keys, as of `paged_indexer_logits`: [blocks, page, D + 4] in fp8, else [blocks, page, D] in q's dtype.
        weights: [B, n, H] float32 or bfloat16, any strides. What the model multiplies them with is in them.
        block_tables: [B, width] int32, any strides. Position p of request b is in block block_tables[b, p // page]. A
            block that is not in the cache hides its keys.
        context_lens: int32, any strides. [B]: query j sees the first context_lens[b] - n + 1 + j keys. [B, n]: it sees
            context_lens[b, j] keys. Clamped to [0, width * page], and to max_context.
        topk: how many keys of each query, at least 1; it may be more than it sees.
        q_scale: [B, n, H] float32, any strides, with fp8 only; ones by default.
        relu: products below zero count as zero; a NaN stays.
        positions: what ids are: "slot", block * page + offset, or "token", the position in the request.
        max_context: a bound of the lengths, which the caller knows: it decides how much work and memory is laid out.
        return_values: return the selected scores, too.
        return_lse: return the logarithm of the sum of the selected scores' exponentials, too.
        lse_base: "e" or "2", the base of that logarithm.
        indices: array to write, [B, n, topk] int32, the last axis contiguous.
        count: array to write, [B, n] int32.
        values: array to write, [B, n, topk] float32, the last axis contiguous; with return_values only.
        lse: array to write, [B, n] float32; with return_lse only.
        workspace: memory to work in, [m] uint8, contiguous, at an address that is a multiple of 16 bytes, m at least
            `paged_indexer_topk.workspace_bytes(...)` of the same arguments: at most 192 MiB, or what the scores of one
            request take. What it holds means nothing, before and after. Allocated by default.
        check_indices: raise InputError for blocks of seen keys that are neither -1 nor in the cache; that waits for the
            GPU.
        stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
            of q's framework by default. It means nothing on the CPU.

    Returns:
        (indices, count), and values and lse behind them where asked for, in q's framework. Token positions ascend, so
        slots need not; entries left over come last and hold -1, their values -inf. count says how many ids there are.
        lse is +inf where nothing is selected.

    Raises:
        InputError: an argument cannot be used as it is; nothing was computed or written.
        UnsupportedError: there is no kernel for this on the arrays' device.

    Source: the lightning indexer of DeepSeek-V3.2, section 2.1; the pages are DeepGEMM's (`kv_cache_cast_to_fp8` of its
    tests).
    """
    arrays = (q, k_cache, weights, block_tables, context_lens, q_scale)
    options = (topk, relu, positions, max_context, return_values, return_lse, lse_base)
    outputs = (indices, count, values, lse, workspace)
    return PAGED_INDEXER_TOPK(arrays, options, outputs, check_indices, stream)  # type: ignore[no-any-return]
