"""Matrix products in NumPy as a GPU's tensor cores round them, for the references in a kernel's precision.

The products of sixteen k are added exactly, and each such sum is added to the accumulator with truncation toward zero:
half a unit in the last place a step on average, all in one direction. Source: Fasi, Higham, Mikaitis and Pranesh,
"Numerical behavior of NVIDIA tensor cores", PeerJ Computer Science 7:e330 (2021), for the truncation; PTX ISA, "mma"
and "wgmma", for sixteen k to a step of 16-bit operands.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

STEP = 16
"""k of one instruction."""


def product(left: Array, right: Array) -> Array:
    """left [..., m, k] times right [..., k, n], the operands exact in float64, as one chain of steps: float32."""
    shape = (*np.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1])
    total = np.zeros(shape, np.float32)
    for first in range(0, left.shape[-1], STEP):
        step = slice(first, first + STEP)
        exact = left[..., step].astype(np.float64) @ right[..., step, :].astype(np.float64)
        total = toward_zero(total + exact)
    return total


def toward_zero(array: Array) -> Array:
    """float64 rounded to float32 toward zero; NaN and infinities stay, and what float32 does not hold is infinite."""
    with np.errstate(over="ignore"):
        nearest = array.astype(np.float32)
    too_far = (np.abs(nearest) > np.abs(array)) & np.isfinite(nearest)
    result: Array = np.where(too_far, np.nextafter(nearest, np.float32(0)), nearest)
    return result
