"""fp8 caches of sparse attention: numbers to codes and back, writers and readers of the pages that hold them."""

from __future__ import annotations

from typing import Any, Literal

from ..operator import operator
from .run import DEQUANTIZE_FP8, QUANTIZE_FP8

__all__ = ["dequantize_fp8", "quantize_fp8"]


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
