"""How far `ex2.approx` may stray from the correctly rounded result, for machines that run kernels without a GPU.

Hardware's bits are not documented, their error is: two units in the last place over the full range. A kernel has to be
right wherever in that range they are, also where all of them are off to one side.

Source: PTX ISA 9.0, "ex2" (the error, and which results are exact); CUDA C++ Programming Guide, "Intrinsic Functions".
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

Approximation = Literal["exact", "above", "below", "scattered"]
"""Correctly rounded; the largest error upwards or downwards, everywhere; an error that depends on the argument."""

APPROXIMATIONS: tuple[Approximation, ...] = get_args(Approximation)
ULPS = 2

_MULTIPLIER = np.uint32(0x9E3779B1)  # of Fibonacci hashing: 2**32 over the golden ratio
_LEAST_NORMAL = np.float32(2.0**-126)

Floats = npt.NDArray[np.float32]


def strayed(argument: Floats, exact: Floats, approximation: Approximation) -> Floats:
    """What hardware might make of 2**argument, of which `exact` is the correctly rounded value.

    Where the ISA says what the result is (2**0, infinities, zero, NaN) it stays, and so do subnormal ones.
    """
    if approximation == "exact":
        return exact
    if approximation == "scattered":
        mixed = argument.view(np.uint32) * _MULTIPLIER
        steps = (mixed >> np.uint32(16)).astype(np.int32) % np.int32(2 * ULPS + 1) - np.int32(ULPS)
    else:
        steps = np.full(exact.shape, ULPS if approximation == "above" else -ULPS, np.int32)
    kept = (argument == 0) | ~np.isfinite(exact) | (exact < _LEAST_NORMAL * np.float32(2))
    bits = exact.view(np.int32)
    # Past the largest number lies infinity, which is within the error as well.
    return np.minimum(np.where(kept, bits, bits + steps), np.where(kept, bits, np.int32(0x7F800000))).view(np.float32)
