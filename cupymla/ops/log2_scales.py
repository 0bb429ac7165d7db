"""What turns scores and an lse into units of log2 in a kernel, which subtracts one from the other there."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

_LEAST_PRECISE = 2.0**-126  # below it a float has fewer bits, and a score has no influence


class Log2Scales(NamedTuple):
    """Factors as kernels hold them.

    Attributes:
        score: of q.k, rounded to fp32.
        unit: of an lse, rounded to fp32; see `log2_lse` in cuda/common/log2_lse.cuh.
        unit_rest: what that rounding leaves.
    """

    score: float
    unit: float
    unit_rest: float


def log2_scales(sm_scale: float, lse_base: str) -> Log2Scales:
    """The factors for a scale and an lse to that base, "e" or "2".

    In fp32 the score's is off by its rounding, which times a score of thousands is far too much. The lse's is off by as
    much in proportion: what remains of the error is that of the difference, which is small where a weight is not.
    """
    exact = sm_scale * math.log2(math.e)
    score = float(np.float32(exact))
    bias = score / exact if abs(score) >= _LEAST_PRECISE else 1.0
    whole = (1.0 if lse_base == "2" else math.log2(math.e)) * bias
    unit = float(np.float32(whole))
    return Log2Scales(score, unit, whole - unit)
