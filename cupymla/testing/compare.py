"""The comparison law: what makes a kernel's result right.

For each output, against the reference in float64 and the same-precision reference:

1. NaN, +inf and -inf stand in exactly the places where the float64 result has them once it is rounded to the output's
   dtype, so an overflow to inf counts as right exactly where the dtype cannot hold the value.
2. The largest absolute error is at most 2 x (that of the same-precision reference) + rounding. Storing a value of
   magnitude a in a dtype with p significant bits moves it by up to half a unit in the last place, that is
   2**(floor(log2 a) - p); `rounding` is that, at the largest finite magnitude of the output. It keeps the bound above
   zero where the reference happens to hit representable values.
3. 1 - 2<x,y> / (<x,x> + <y,y>) is at most 1e-5 over the finite elements: a small systematic error, such as a scale
   that is off by 1%, hides below an absolute bound but not here. Two zero results are alike.

Outputs of integer or boolean dtype have to be equal.

Source: the error law is the one FlashAttention's tests use (kernel within twice the error of a reference of the same
precision); the similarity is the Dice coefficient of two vectors, as DeepSeek's kernel tests use it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

SIMILARITY_LIMIT = 1e-5


class Mismatch(AssertionError):
    """A result breaks the comparison law; the message says where, what was expected and what came."""


@dataclass(frozen=True, slots=True)
class Report:
    """How one output compares.

    Attributes:
        output: its name.
        error: largest absolute error against float64, over finite elements.
        reference_error: the same of the same-precision reference.
        limit: what `error` may be.
        dissimilarity: 1 - 2<x,y> / (<x,x> + <y,y>).
        failure: what is wrong, None when nothing is.
    """

    output: str
    error: float
    reference_error: float
    limit: float
    dissimilarity: float
    failure: str | None = None


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is a float, those of ml_dtypes included, for which NumPy's own kinds are no guide."""
    try:
        ml_dtypes.finfo(dtype)
    except ValueError:
        return False
    return True


def significant_bits(dtype: np.dtype[Any]) -> int:
    """Bits of precision of a float dtype, the hidden one included: 53, 24, 11, 8 (bfloat16), 4 or 3 (fp8)."""
    return int(ml_dtypes.finfo(dtype).nmant) + 1


def half_ulp(magnitude: float, dtype: np.dtype[Any]) -> float:
    """The largest error of rounding a value of that magnitude to `dtype`; 0 for a magnitude of 0."""
    if magnitude == 0:
        return 0.0
    return math.ldexp(1.0, math.floor(math.log2(magnitude)) - significant_bits(dtype))


def dissimilarity(x: Array, y: Array) -> float:
    """1 - 2<x,y> / (<x,x> + <y,y>) in float64: 0 for equal arrays, two zero arrays among them; 2 for opposite ones."""
    a, b = x.astype(np.float64).ravel(), y.astype(np.float64).ravel()
    # Scaled to 1, so that squares neither overflow nor vanish. |a-b|^2 has no cancellation, unlike the formula.
    scale = max(np.max(np.abs(a), initial=0.0), np.max(np.abs(b), initial=0.0))
    if scale == 0:
        return 0.0
    a, b = a / scale, b / scale
    return float(np.dot(a - b, a - b) / (np.dot(a, a) + np.dot(b, b)))


def compare(output: str, got: Array, same: Array, exact: Array) -> Report:
    """Judge one output.

    Args:
        output: its name, for messages.
        got: what the kernel wrote, in the output's dtype.
        same: the same-precision reference, of got's shape.
        exact: the float64 reference, of got's shape.
    """
    if got.shape != exact.shape:
        return _failed(output, f"shape {got.shape}, expected {exact.shape}")
    if not is_float(got.dtype):
        return _compare_exactly(output, got, exact)
    with np.errstate(over="ignore", invalid="ignore"):
        stored = exact.astype(got.dtype).astype(np.float64)
    actual, like = got.astype(np.float64), same.astype(np.float64)
    for name, where in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = where(actual) != where(stored)
        if np.any(wrong):
            return _failed(output, f"{name} in the wrong places, {_show(wrong, stored, actual)}")
    finite = np.isfinite(stored)
    usable = finite & np.isfinite(like)
    errors = np.where(finite, np.abs(np.where(finite, actual, 0) - np.where(finite, exact, 0)), 0.0)
    reference_errors = np.where(usable, np.abs(np.where(usable, like, 0) - np.where(usable, exact, 0)), 0.0)
    magnitude = float(np.max(np.abs(np.where(finite, exact, 0.0)), initial=0.0))
    error, reference_error = float(np.max(errors, initial=0.0)), float(np.max(reference_errors, initial=0.0))
    limit = 2 * reference_error + half_ulp(magnitude, got.dtype)
    unlike = dissimilarity(np.where(finite, actual, 0.0), np.where(finite, exact, 0.0))
    failure = None
    if error > limit:
        worst = f"{int(np.sum(errors > limit))} of {errors.size} elements off by more than {limit:.3g}"
        failure = f"{output}: {worst}, the worst by {error:.3g} {_at(int(np.argmax(errors)), exact, actual)}"
    elif unlike > SIMILARITY_LIMIT:
        failure = f"{output}: dissimilarity {unlike:.3g}, at most {SIMILARITY_LIMIT:g} (a systematic error)"
    return Report(output, error, reference_error, limit, unlike, failure)


def _compare_exactly(output: str, got: Array, exact: Array) -> Report:
    wrong = got != exact
    if np.any(wrong):
        return _failed(output, f"not equal, {_show(wrong, exact, got)}")
    return Report(output, 0.0, 0.0, 0.0, 0.0)


def _at(flat: int, expected: Array, got: Array) -> str:
    index = tuple(int(i) for i in np.unravel_index(flat, expected.shape))
    return f"at {list(index)}: expected {expected[index]}, got {got[index]}"


def _show(wrong: Array, expected: Array, got: Array) -> str:
    return f"{int(np.sum(wrong))} of {wrong.size} elements, the first {_at(int(np.argmax(wrong)), expected, got)}"


def _failed(output: str, what: str) -> Report:
    return Report(output, math.inf, 0.0, 0.0, math.inf, f"{output}: {what}")


def require(reports: Mapping[str, Report] | list[Report]) -> None:
    """Raise Mismatch with every failure, if there is one."""
    rows = reports.values() if isinstance(reports, Mapping) else reports
    failures = [report.failure for report in rows if report.failure]
    if failures:
        raise Mismatch("\n".join(failures))
