"""fp8 caches of sparse attention: numbers to codes and back, writers and readers of the pages that hold them."""

from __future__ import annotations

from typing import Any, Literal

from ..operator import operator
from .run import (
    CONCAT_AND_CACHE_MLA,
    DEQUANTIZE_FP8,
    GATHER_INDEXER_CACHE,
    GATHER_MLA_CACHE,
    HADAMARD,
    INDEXER_K_QUANT_AND_CACHE,
    QUANTIZE_FP8,
)

__all__ = [
    "concat_and_cache_mla",
    "dequantize_fp8",
    "gather_indexer_cache",
    "gather_mla_cache",
    "hadamard",
    "indexer_k_quant_and_cache",
    "quantize_fp8",
]


@operator(QUANTIZE_FP8)
def quantize_fp8(
    x: Any,
    *,
    group: int = 128,
    scale_rule: Literal["amax", "pow2"] = "amax",
    codes: Any = None,
    scales: Any = None,
    stream: object = None,
) -> tuple[Any, Any]:
    """Quantise floats to fp8 e4m3 with a scale for each group of neighbouring channels.

    A scale is max(amax, 1e-4) / 448 in fp32, amax the largest magnitude of its group. A code is x / scale, rounded to
    fp32 by IEEE division, then to e4m3 to nearest even, saturated to 448. NaN is left out of amax and has code 0x7F. An
    infinity counts as the largest finite number of x's dtype.

    Args:
        x: [..., D] float32, bfloat16 or float16, of one to four axes, D a multiple of `group`. The last axis is
            contiguous; other strides are free.
        group: channels that share a scale, a power of two from 16 to 256.
        scale_rule: "amax": as above. "pow2": that scale rounded up to a power of two.
        codes: array to write, [..., D] fp8 e4m3fn or uint8 for its bytes, the last axis contiguous.
        scales: array to write, [..., D / group] float32, of any strides.
        stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
            of x's framework by default. It means nothing on the CPU.

    Returns:
        (codes, scales) in x's framework: codes as fp8 e4m3fn, as uint8 in CuPy, which has no fp8; scales as float32.

    Raises:
        InputError: an argument cannot be used as it is; nothing was computed or written.
        UnsupportedError: there is no kernel for this on the arrays' device.

    Source: E4M3 is that of the OCP 8-bit Floating Point Specification v1.0; the scale rule is that of DeepSeek-V3.2's
    indexer keys, as DeepGEMM's tests cast them.
    """
    return QUANTIZE_FP8((x,), (group, scale_rule), (codes, scales), False, stream)  # type: ignore[no-any-return]


@operator(DEQUANTIZE_FP8)
def dequantize_fp8(codes: Any, scales: Any, *, group: int = 128, out: Any = None, stream: object = None) -> Any:
    """Turn fp8 e4m3 codes and their scales into bfloat16: one fp32 product each, rounded to nearest even.

    Args:
        codes: [..., D] fp8 e4m3fn or uint8 for its bytes, of one to four axes, D a multiple of `group`. The last axis
            is contiguous; other strides are free.
        scales: [..., D / group] float32, of any values and strides.
        group: channels that share a scale, a power of two from 16 to 256.
        out: array to write, [..., D] bfloat16, the last axis contiguous.
        stream: as for `quantize_fp8`.

    Returns:
        [..., D] bfloat16 in the framework of the codes. NaN stays NaN; which NaN is not promised.

    Raises:
        InputError: an argument cannot be used as it is; nothing was computed or written.
        UnsupportedError: there is no kernel for this on the arrays' device.

    Source: as for `quantize_fp8`.
    """
    return DEQUANTIZE_FP8((codes, scales), (group,), (out,), False, stream)


@operator(INDEXER_K_QUANT_AND_CACHE)
def indexer_k_quant_and_cache(
    k: Any,
    cache: Any,
    slot_mapping: Any,
    *,
    scale_rule: Literal["amax", "pow2"] = "amax",
    check_indices: bool = False,
    stream: object = None,
) -> Any:
    """Quantise keys of the lightning indexer and write them into their slots of a paged cache, in place.

    Codes and scales are those of `quantize_fp8(k, group=128)`. A block of `page` tokens holds page rows of 128 codes,
    then page fp32 scales: 132 bytes a token. Token t goes to block slot // page, place slot % page, slot =
    slot_mapping[t]; a slot outside the cache, such as -1, skips the token. Where two tokens name one slot, parts of
    either may be what stays there.

    Args:
        k: [T, 128] float32, bfloat16 or float16, the last axis contiguous.
        cache: [blocks, page, 132] or [blocks, page, 1, 132] fp8 e4m3fn or uint8, writable. A block's bytes are
            contiguous; the distance of blocks and the address are multiples of 4 bytes.
        slot_mapping: [T] int32 or int64, of any strides.
        scale_rule: as for `quantize_fp8`.
        check_indices: raise InputError for slots that are neither -1 nor in the cache; that waits for the GPU.
        stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
            of k's framework by default. It means nothing on the CPU.

    Returns:
        cache, the array that was given.

    Raises:
        InputError: an argument cannot be used as it is; nothing was written.
        UnsupportedError: there is no kernel for this on the arrays' device.

    Source: the layout is DeepGEMM's (`kv_cache_cast_to_fp8` of its tests); the function is vLLM's of that name.
    """
    return INDEXER_K_QUANT_AND_CACHE((k, cache, slot_mapping), (scale_rule,), (), check_indices, stream)


@operator(GATHER_INDEXER_CACHE)
def gather_indexer_cache(
    cache: Any,
    slots: Any = None,
    *,
    block_tables: Any = None,
    cu_lens: Any = None,
    rows: int | None = None,
    k: Any = None,
    k_scale: Any = None,
    check_indices: bool = False,
    stream: object = None,
) -> tuple[Any, Any]:
    """Read keys of the lightning indexer and their scales out of a paged cache, as `indexer_logits` takes them.

    Either `slots` names the places, or `block_tables` and `cu_lens` do, and `rows` says how many there are. Then
    request b has the rows from cu_lens[b] to cu_lens[b + 1], both clamped to [0, rows], and its position p is in block
    block_tables[b, p // page]. Rows of no request, positions past the table, and slots or blocks outside the cache give
    zeros, keys and scales. Nothing waits for the GPU.

    Args:
        cache: [blocks, page, 132] or [blocks, page, 1, 132], as for `indexer_k_quant_and_cache`.
        slots: [N] int32 or int64, of any strides.
        block_tables: [B, width] int32, of any strides.
        cu_lens: [B + 1] int32, which must not fall; where it does, rows may be those of any request.
        rows: N, where block tables are given; it may be more than cu_lens[B].
        k: array to write, [N, 128] fp8 e4m3fn or uint8, the last axis contiguous.
        k_scale: array to write, [N] float32, of any stride.
        check_indices: raise InputError for slots and used blocks that are neither -1 nor in the cache, and for lengths
            that fall or exceed rows; that waits for the GPU.
        stream: as for `indexer_k_quant_and_cache`.

    Returns:
        (k, k_scale): [N, 128] as fp8 e4m3fn, as uint8 in CuPy, which has no fp8, and [N] float32.

    Raises:
        InputError: an argument cannot be used as it is; nothing was computed or written.
        UnsupportedError: there is no kernel for this on the arrays' device.

    Source: as for `indexer_k_quant_and_cache`; with block tables it is vLLM's `cp_gather_indexer_k_quant_cache`.
    """
    arrays, outputs = (cache, slots, block_tables, cu_lens), (k, k_scale)
    return GATHER_INDEXER_CACHE(arrays, (rows,), outputs, check_indices, stream)  # type: ignore[no-any-return]


@operator(CONCAT_AND_CACHE_MLA)
def concat_and_cache_mla(
    kv_c: Any,
    k_pe: Any,
    cache: Any,
    slot_mapping: Any,
    *,
    cache_format: Literal["bf16", "v32_fp8", "v4_fp8"],
    scale_rule: Literal["amax", "pow2"] | None = None,
    check_indices: bool = False,
    stream: object = None,
) -> Any:
    """Write latents and rotary parts of keys into their slots of a paged cache, in place.

    Token t goes to block slot // page, place slot % page, slot = slot_mapping[t]; a slot outside the cache, such as -1,
    skips the token. Where two tokens name one slot, parts of either may be what stays there. A fp8 format holds kv_c as
    codes with a scale for each group of channels; codes, NaN and infinities are those of `quantize_fp8`. All that is
    bf16 is rounded to nearest even, and bf16 is copied.

    Args:
        kv_c: [T, 512], with "v4_fp8" [T, 448], float32, bfloat16 or float16, the last axis contiguous.
        k_pe: [T, 64] in the same dtype, the last axis contiguous; None for a bf16 cache with rows of 512.
        cache: [blocks, page, n] or [blocks, page, 1, n], writable, as `sparse_mla_decode` takes it: bfloat16 with n 576
            or 512, fp8 e4m3fn or uint8 with n 656 ("v32_fp8") or 584 ("v4_fp8"). A block's bytes are contiguous; the
            distance of blocks and the address are multiples of 16 bytes, with "v4_fp8" of 8.
        slot_mapping: [T] int32 or int64, of any strides.
        cache_format: "bf16"; "v32_fp8", groups of 128 channels and fp32 scales; "v4_fp8", groups of 64 channels and
            scales that are bytes of exponents.
        scale_rule: "amax", which only "v32_fp8" has: max(amax / 448, 2^-126), amax the largest magnitude of a group.
            "pow2": max(amax, 1e-4) / 448 rounded up to a power of two. None: "amax" for "v32_fp8", else "pow2".
        check_indices: raise InputError for slots that are neither -1 nor in the cache; that waits for the GPU.
        stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
            of kv_c's framework by default. It means nothing on the CPU.

    Returns:
        cache, the array that was given.

    Raises:
        InputError: an argument cannot be used as it is; nothing was written.
        UnsupportedError: there is no kernel for this on the arrays' device.

    Source: the function is vLLM's of that name, with its `fp8_ds_mla` and its cache of DeepSeek-V4; the layouts are
    FlashMLA's.
    """
    arrays = (kv_c, k_pe, cache, slot_mapping)
    return CONCAT_AND_CACHE_MLA(arrays, (cache_format, scale_rule), (), check_indices, stream)


@operator(GATHER_MLA_CACHE)
def gather_mla_cache(
    cache: Any,
    slots: Any = None,
    *,
    cache_format: Literal["bf16", "v32_fp8", "v4_fp8"],
    block_tables: Any = None,
    cu_lens: Any = None,
    rows: int | None = None,
    kv: Any = None,
    check_indices: bool = False,
    stream: object = None,
) -> Any:
    """Read rows of latents and rotary parts out of a paged cache, as bfloat16.

    A code times its scale is one fp32 product, rounded to nearest even; a scale may be any fp32 number. A byte of
    exponents that is 255 reads NaN, 0 reads 2^-127. Places are named as for `gather_indexer_cache`: by `slots`, or by
    `block_tables`, `cu_lens` and `rows`. Rows without a place in the cache are 0. Nothing waits for the GPU.

    Args:
        cache: as for `concat_and_cache_mla`.
        slots: [N] int32 or int64, of any strides.
        cache_format: as for `concat_and_cache_mla`.
        block_tables: [B, width] int32, of any strides.
        cu_lens: [B + 1] int32, which must not fall; where it does, rows may be those of any request.
        rows: N, where block tables are given; it may be more than cu_lens[B].
        kv: array to write, [N, d] bfloat16, the last axis contiguous.
        check_indices: raise InputError for slots and used blocks that are neither -1 nor in the cache, and for lengths
            that fall or exceed rows; that waits for the GPU.
        stream: as for `quantize_fp8`.

    Returns:
        [N, d] bfloat16: d is 576, with "v4_fp8" 512, with "bf16" that of the cache. NaN stays NaN; which NaN is not
        promised.

    Raises:
        InputError: an argument cannot be used as it is; nothing was computed or written.
        UnsupportedError: there is no kernel for this on the arrays' device.

    Source: as for `concat_and_cache_mla`.
    """
    arrays = (cache, slots, block_tables, cu_lens)
    return GATHER_MLA_CACHE(arrays, (cache_format, rows), (kv,), check_indices, stream)


@operator(HADAMARD)
def hadamard(x: Any, *, out: Any = None, stream: object = None) -> Any:
    """Rotate rows by the Hadamard matrix: out[i] = D^-1/2 sum over j of (-1)^popcount(i & j) x[j].

    The matrix is orthogonal and its own inverse. It spreads an outlier over all channels, so that fp8 loses less. Who
    rotates the indexer's queries rotates its keys, too: their products stay what they were. Sums are in fp32, always in
    the same order; the result is rounded once.

    Args:
        x: [..., D] float32, bfloat16 or float16, of one to four axes, D a power of two from 8 to 8192. The last axis is
            contiguous; other strides are free.
        out: array to write, [..., D] in x's dtype, the last axis contiguous.
        stream: as for `quantize_fp8`.

    Returns:
        [..., D] in x's dtype and framework.

    Raises:
        InputError: an argument cannot be used as it is; nothing was computed or written.
        UnsupportedError: there is no kernel for this on the arrays' device.

    Source: J. J. Sylvester's construction (1867), in its fast form by sums and differences of pairs; its use is that of
    DeepSeek-V3.2's indexer.
    """
    return HADAMARD((x,), (), (out,), False, stream)
