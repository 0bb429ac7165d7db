"""The accuracy criterion: what makes a kernel's result right.

For each output, against the reference in float64 and the same-precision reference:

1. NaN, +inf and -inf stand in exactly the places where the float64 result has them once it is rounded to the output's
   dtype, so an overflow to inf counts as right exactly where the dtype cannot hold the value.
2. The largest absolute error is at most 2 x (that of the same-precision reference) + rounding. Storing a value of
   magnitude a in a dtype with p significant bits moves it by up to half a unit in the last place, that is
   2**(floor(log2 a) - p); `rounding` is that, at the largest finite magnitude of the output. It keeps the bound above
   zero where the reference happens to hit representable values.
3. 1 - 2<x,y> / (<x,x> + <y,y>) is at most 1e-5 over the finite elements: a small systematic error, such as a scale
   that is off by 1%, hides below an absolute bound but not here. Two zero results are alike.

Outputs of integer or boolean dtype have to be equal, and so have the bits of a function that is exact.

Source: the error criterion is the one FlashAttention's tests use (kernel within twice the error of a reference of the
same precision); the similarity is the Dice coefficient of two vectors, as DeepSeek's kernel tests use it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

SIMILARITY_LIMIT = 1e-5

_BLOCK = 1 << 18
"""Elements that are compared at a time: the float64 arrays of it all are then small, whatever an output's size."""


class Mismatch(AssertionError):
    """A result breaks the accuracy criterion; the message says where, what was expected and what came."""


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
    return _dissimilarity(lambda: ((a, b) for _, a, b in _blocks(x, y)))


def _dissimilarity(pairs: Callable[[], Iterable[tuple[Array, Array]]]) -> float:
    """That of two arrays, given block by block, as often as it is asked for."""
    scale = max((max(np.max(np.abs(a)), np.max(np.abs(b))) for a, b in pairs()), default=0.0)
    if scale == 0:
        return 0.0
    apart = together = 0.0
    for a, b in pairs():
        # Scaled to 1, so that squares neither overflow nor vanish. |a-b|^2 has no cancellation, unlike the formula.
        x, y = a / scale, b / scale
        apart += float(np.dot(x - y, x - y))
        together += float(np.dot(x, x) + np.dot(y, y))
    return apart / together


def _blocks(*arrays: Array) -> Iterator[tuple[Any, ...]]:
    """Elements of arrays of one shape, some at a time: which is the first of them, then flat float64 arrays."""
    flat = [array.reshape(-1) for array in arrays]
    for first in range(0, flat[0].size, _BLOCK):
        yield first, *(array[first : first + _BLOCK].astype(np.float64) for array in flat)


class _Worst:
    """The largest of numbers that come block by block, and where the first such stands."""

    def __init__(self) -> None:
        self.value = 0.0
        self.flat = 0

    def see(self, first: int, values: Array) -> None:
        place = int(np.argmax(values))
        if values[place] > self.value:
            self.value, self.flat = float(values[place]), first + place


class _Wrong:
    """How many of elements that come block by block are wrong, and where the first of them stands."""

    def __init__(self) -> None:
        self.count = 0
        self.flat = 0

    def see(self, first: int, wrong: Array) -> None:
        count = int(np.count_nonzero(wrong))
        if count and not self.count:
            self.flat = first + int(np.argmax(wrong))
        self.count += count


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

    def stored(values: Array) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            rounded: Array = values.astype(got.dtype).astype(np.float64)
        return rounded

    places: dict[str, Callable[[Array], Array]] = {"NaN": np.isnan, "+inf": np.isposinf, "-inf": np.isneginf}
    misplaced = {name: _Wrong() for name in places}
    error, reference_error, magnitude = _Worst(), _Worst(), _Worst()
    for first, actual, like, expected in _blocks(got, same, exact):
        kept = stored(expected)
        for name, where in places.items():
            misplaced[name].see(first, where(actual) != where(kept))
        finite = np.isfinite(kept)
        error.see(first, np.abs(np.where(finite, actual, 0) - np.where(finite, expected, 0)))
        usable = finite & np.isfinite(like)
        reference_error.see(first, np.abs(np.where(usable, like, 0) - np.where(usable, expected, 0)))
        magnitude.see(first, np.abs(np.where(finite, expected, 0)))
    for name, wrong in misplaced.items():
        if wrong.count:
            return _failed(output, f"{name} in the wrong places, {_show(wrong, stored(exact), got)}")

    def finite_pairs() -> Iterator[tuple[Array, Array]]:
        for _, actual, expected in _blocks(got, exact):
            finite = np.isfinite(stored(expected))
            yield np.where(finite, actual, 0), np.where(finite, expected, 0)

    limit = 2 * reference_error.value + half_ulp(magnitude.value, got.dtype)
    unlike = _dissimilarity(finite_pairs)
    failure = None
    if error.value > limit:
        count = sum(int(np.count_nonzero(np.abs(actual - expected) > limit)) for actual, expected in finite_pairs())
        worst = f"{count} of {exact.size} elements off by more than {limit:.3g}"
        failure = f"{output}: {worst}, the worst by {error.value:.3g} {_at(error.flat, exact, got)}"
    elif unlike > SIMILARITY_LIMIT:
        failure = f"{output}: dissimilarity {unlike:.3g}, at most {SIMILARITY_LIMIT:g} (a systematic error)"
    return Report(output, error.value, reference_error.value, limit, unlike, failure)


def compare_bits(output: str, got: Array, wanted: Array) -> Report:
    """Judge an output of a function that is exact: its bits have to be those of `wanted`, any NaN for any NaN."""
    if (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
        return _failed(output, f"{got.dtype} of shape {got.shape}, expected {wanted.dtype} of shape {wanted.shape}")
    wrong = _Wrong()
    for first in range(0, got.size, _BLOCK):
        mine, theirs = (array.reshape(-1)[first : first + _BLOCK] for array in (got, wanted))
        unlike = mine.view(f"u{mine.dtype.itemsize}") != theirs.view(f"u{mine.dtype.itemsize}")
        if is_float(got.dtype):
            unlike &= ~(np.isnan(mine) & np.isnan(theirs))
        wrong.see(first, unlike)
    if wrong.count:
        return _failed(output, f"other bits, {_show(wrong, wanted, got)}")
    return Report(output, 0.0, 0.0, 0.0, 0.0)


def _compare_exactly(output: str, got: Array, exact: Array) -> Report:
    wrong = _Wrong()
    wrong.see(0, (got != exact).reshape(-1))
    if wrong.count:
        return _failed(output, f"not equal, {_show(wrong, exact, got)}")
    return Report(output, 0.0, 0.0, 0.0, 0.0)


def _at(flat: int, expected: Array, got: Array) -> str:
    index = tuple(int(i) for i in np.unravel_index(flat, expected.shape))
    return f"at {list(index)}: expected {expected[index]}, got {got[index]}"


def _show(wrong: _Wrong, expected: Array, got: Array) -> str:
    return f"{wrong.count} of {got.size} elements, the first {_at(wrong.flat, expected, got)}"


def _failed(output: str, what: str) -> Report:
    return Report(output, math.inf, 0.0, 0.0, math.inf, f"{output}: {what}")


def require(reports: Mapping[str, Report] | list[Report]) -> None:
    """Raise Mismatch with every failure, if there is one."""
    rows = reports.values() if isinstance(reports, Mapping) else reports
    failures = [report.failure for report in rows if report.failure]
    if failures:
        raise Mismatch("\n".join(failures))
