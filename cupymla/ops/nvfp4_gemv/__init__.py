"""`nvfp4_gemv` and its companions: products with block-scaled 4-bit matrices, and the formats they are in."""

from __future__ import annotations

from ..operator import operator
from . import run
from .run import dequantize_nvfp4, quantize_nvfp4, swizzle_scales, unswizzle_scales

nvfp4_gemv = operator(run.nvfp4_gemv, run.prepare)

__all__ = ["dequantize_nvfp4", "nvfp4_gemv", "quantize_nvfp4", "swizzle_scales", "unswizzle_scales"]
