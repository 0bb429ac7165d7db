"""`nvfp4_gemv` and its companions: products with block-scaled 4-bit matrices, and the formats they are in."""

from __future__ import annotations

import functools

from ..operator import operator
from . import run, spec

nvfp4_gemv = operator(run.nvfp4_gemv, run.prepare)
quantize_nvfp4 = run.companion(run.quantize_nvfp4, spec.read_quantize, run.quantize)
dequantize_nvfp4 = run.companion(run.dequantize_nvfp4, spec.read_dequantize, run.dequantize)
swizzle_scales = run.companion(run.swizzle_scales, spec.read_swizzle, run.swizzle)
unswizzle_scales = run.companion(
    run.unswizzle_scales, spec.read_unswizzle, functools.partial(run.swizzle, backwards=True)
)

__all__ = ["dequantize_nvfp4", "nvfp4_gemv", "quantize_nvfp4", "swizzle_scales", "unswizzle_scales"]
