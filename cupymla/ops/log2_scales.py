"""What turns scores into units of log2 in a kernel, an lse into them, and such sums into an lse."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

_LEAST_PRECISE = 2.0**-126  # below it a float has fewer bits, and a score has no influence


class Log2Scales(NamedTuple):
    """Factors as kernels hold them.

    Attributes:
        score: turns q.k into units of log2, rounded to fp32.
        unit: turns the one into the other of an lse and units of log2, rounded to fp32.
        unit_rest: what that rounding leaves.
    """

    score: float
    unit: float
    unit_rest: float


def log2_scales(sm_scale: float, lse_base: str) -> Log2Scales:
    """The factors for a kernel that takes an lse to that base, "e" or "2"; see `log2_lse` in cuda/common/math.cuh.

    In fp32 the score's is off by its rounding, which times a score of thousands is far too much. The lse's is off by as
    much in proportion: what remains of the error is that of the difference, which is small where a weight is not.
    """
    score, bias = _score(sm_scale)
    return Log2Scales(score, *_parts(bias if lse_base == "2" else bias * math.log2(math.e)))


def lse_scales(sm_scale: float, lse_base: str) -> Log2Scales:
    """The factors for a kernel that gives an lse to that base: what the score's is off by is taken out again."""
    score, bias = _score(sm_scale)
    return Log2Scales(score, *_parts(1 / bias if lse_base == "2" else math.log(2.0) / bias))


def _score(sm_scale: float) -> tuple[float, float]:
    """The score's factor, and how many times what it should be it is."""
    exact = sm_scale * math.log2(math.e)
    rounded = float(np.float32(exact))
    return rounded, rounded / exact if abs(rounded) >= _LEAST_PRECISE else 1.0


def _parts(whole: float) -> tuple[float, float]:
    unit = float(np.float32(whole))
    return unit, whole - unit
