"""The caches in NumPy: what quantisers, writers and readers mean. They are exact, so there is one precision."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .formats import E4M3, E4M3_MAX, LEAST_AMAX, encoded, rounded_up

Array = npt.NDArray[Any]


def quantize_fp8(
    x: Array, *, group: int = 128, scale_rule: str = "amax", precision: str = "float64"
) -> tuple[Array, Array]:
    """codes as E4M3 and scales in float32; arguments and shapes as the public function's.

    `precision` changes nothing.
    """
    *rows, channels = x.shape
    largest = np.float32(float(ml_dtypes.finfo(x.dtype).max))
    values = np.clip(x.astype(np.float32), -largest, largest).reshape(*rows, channels // group, group)
    magnitudes = np.where(np.isnan(values), np.float32(0), np.abs(values))
    amax = magnitudes.max(axis=-1, initial=np.float32(0))
    scales = np.maximum(amax, np.float32(LEAST_AMAX)) / np.float32(E4M3_MAX)
    if scale_rule == "pow2":
        scales = rounded_up(scales)
    with np.errstate(invalid="ignore"):
        return encoded(values / scales[..., None]).reshape(x.shape), scales


def dequantize_fp8(codes: Array, scales: Array, *, group: int = 128) -> Array:
    """codes * scales, one float32 product each, as bfloat16; E4M3 codes may come as bytes."""
    *rows, channels = codes.shape
    values = codes.view(E4M3).astype(np.float32).reshape(*rows, channels // group, group)
    with np.errstate(over="ignore", invalid="ignore"):
        out: Array = (values * scales[..., None]).astype(ml_dtypes.bfloat16).reshape(codes.shape)
    return out
