"""`nvfp4_gemv` and its related functions: products with block-scaled 4-bit matrices, and the formats they are in."""

from __future__ import annotations

from .run import dequantize_nvfp4, nvfp4_gemv, quantize_nvfp4, swizzle_scales, unswizzle_scales

__all__ = ["dequantize_nvfp4", "nvfp4_gemv", "quantize_nvfp4", "swizzle_scales", "unswizzle_scales"]
