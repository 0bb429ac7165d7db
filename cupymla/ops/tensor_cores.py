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


_KEPT = np.int64(-1 << 29)
"""Of the 52 bits of a float64's fraction those that float32 has as well, and all bits before them."""
_SMALLEST, _LARGEST = np.finfo(np.float32).tiny, np.finfo(np.float32).max


def product(left: Array, right: Array) -> Array:
    """left [..., m, k] times right [..., k, n], the operands exact in float64, as one chain of steps: float32."""
    shape = (*np.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1])
    total = np.zeros(shape, np.float32)
    for first in range(0, left.shape[-1], STEP):
        step = slice(first, first + STEP)
        exact = left[..., step].astype(np.float64) @ right[..., step, :].astype(np.float64)
        exact += total
        total = toward_zero(exact)
    return total


def toward_zero(array: Array) -> Array:
    """float64 rounded to float32 toward zero; NaN and infinities stay, and what float32 does not hold is infinite."""
    with np.errstate(over="ignore"):
        cut: Array = (array.view(np.int64) & _KEPT).view(np.float64).astype(np.float32)
    size = np.abs(cut)
    small = size <= _SMALLEST
    if (size < _LARGEST).all() and not (small.any() and array[small].any()):
        return cut
    with np.errstate(over="ignore"):
        nearest: Array = array.astype(np.float32)
    too_far = np.isfinite(nearest)
    too_far &= np.abs(nearest).astype(np.float64) > np.abs(array)
    # As integers, floats of either sign are ordered by their size.
    bits = nearest.view(np.int32)
    bits -= too_far
    return nearest
