"""Argument validation of the functions on rows of channels: `quantize_fp8`, `dequantize_fp8` and `hadamard`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from ...errors import InputError, shown
from ...tensor import Device, View
from ..arguments import Arguments, Choice, NoOptions, option, whole
from ..indexer_validation import FP8, Validation
from .formats import SCALE_RULES

FLOATS = ("float32", "bfloat16", "float16")
"""Of x; the place of a dtype is its FloatType in cuda/mla_cache/sm80/floats.cuh."""

MAX_RANK = 4
MIN_GROUP, MAX_GROUP = 16, 256


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """A power of two of these bounds, both included; a bool is none."""

    low: int
    high: int

    def __call__(self, argument: str, value: object) -> int:
        """The value as int. Raises InputError."""
        expected = f"a power of two from {self.low} to {self.high}"
        number = whole(value)
        if number is None:
            raise InputError(argument, expected, shown(value))
        if not self.low <= number <= self.high or number & (number - 1):
            raise InputError(argument, expected, number)
        return number


@dataclass(frozen=True, slots=True)
class Problem:
    """All that a plan of a function on rows may depend on.

    Attributes:
        rows: extents of the axes before the channels.
        channels: extent of the last axis.
        dtype: of the floats: of x, or of what is made.
        options: the function's.
        device: where every array is.
    """

    rows: tuple[int, ...]
    channels: int
    dtype: str
    options: Any
    device: Device

    @property
    def shape(self) -> tuple[int, ...]:
        """Of an array of channels."""
        return (*self.rows, self.channels)


class CodesChecks(Validation):
    """The checks of a function of fp8 codes."""

    def codes(self, array: Any, argument: str, shape: tuple[int, ...]) -> View | None:
        """An array of codes to write, seen as fp8 also where it is bytes."""
        seen = self.shaped(array, argument, shape, FP8, "lists", output=True)
        return None if seen is None else replace(seen, dtype=FP8[0])


class RowsChecks(CodesChecks):
    """The checks of a function on rows."""

    def rows(self, array: Any, argument: str, dtypes: tuple[str, ...]) -> View:
        """An array [..., D] of one to four axes, the last one contiguous, the others of any strides."""
        seen = self.view(array, argument, dtypes)
        if not 1 <= seen.ndim <= MAX_RANK:
            raise self.error(argument, f"shape [..., D] of 1 to {MAX_RANK} axes", list(seen.shape))
        self.check_layout(seen, argument, "lists")
        self.extent(seen, argument, -1, "channels, D in [..., D]")
        return seen

    def whole_groups(self, seen: View, argument: str, group: int) -> int:
        """How many groups a row has."""
        if seen.shape[-1] % group:
            raise self.error(argument, f"D a multiple of group {group} in shape [..., D]", list(seen.shape))
        return seen.shape[-1] // group


# quantize_fp8 --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Views:
    """The arrays of `quantize_fp8`."""

    x: View
    codes: View | None = None
    scales: View | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `quantize_fp8`.

    Attributes:
        group: channels that share a scale.
        scale_rule: "amax" or "pow2".
    """

    group: int = option(128, PowerOfTwo(MIN_GROUP, MAX_GROUP))
    scale_rule: Literal["amax", "pow2"] = option("amax", Choice(SCALE_RULES))


ARGUMENTS = Arguments("quantize_fp8", Views, Options, results=("codes", "scales"))


def read(
    x: Any, *, group: Any = 128, scale_rule: Any = "amax", codes: Any = None, scales: Any = None
) -> tuple[Views, Problem]:
    """Check a call of `quantize_fp8`. Raises InputError."""
    checks = RowsChecks(ARGUMENTS.operator)
    seen = checks.rows(x, "x", FLOATS)
    options = checks.chosen(ARGUMENTS, group, scale_rule)
    groups = checks.whole_groups(seen, "x", options.group)
    views = Views(
        x=seen,
        codes=checks.codes(codes, "codes", seen.shape),
        scales=checks.shaped(scales, "scales", (*seen.shape[:-1], groups), ("float32",), output=True),
    )
    checks.separate()
    return views, Problem(seen.shape[:-1], seen.shape[-1], seen.dtype, options, seen.device)


# dequantize_fp8 ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class DequantizeViews:
    """The arrays of `dequantize_fp8`."""

    codes: View
    scales: View
    out: View | None = None


@dataclass(frozen=True, slots=True)
class DequantizeOptions:
    """The options of `dequantize_fp8`.

    Attributes:
        group: channels that share a scale.
    """

    group: int = option(128, PowerOfTwo(MIN_GROUP, MAX_GROUP))


DEQUANTIZE = Arguments("dequantize_fp8", DequantizeViews, DequantizeOptions, results=("out",))


def read_dequantize(codes: Any, scales: Any, *, group: Any = 128, out: Any = None) -> tuple[DequantizeViews, Problem]:
    """Check a call of `dequantize_fp8`. Raises InputError."""
    checks = RowsChecks(DEQUANTIZE.operator)
    seen = checks.rows(codes, "codes", FP8)
    options = checks.chosen(DEQUANTIZE, group)
    shape = (*seen.shape[:-1], checks.whole_groups(seen, "codes", options.group))
    factors = checks.given(scales, "scales", shape, ("float32",))
    target = checks.shaped(out, "out", seen.shape, ("bfloat16",), "lists", output=True)
    checks.separate()
    views = DequantizeViews(seen, factors, target)
    return views, Problem(seen.shape[:-1], seen.shape[-1], "bfloat16", options, seen.device)


# hadamard ------------------------------------------------------------------------------------------------------------

MIN_HADAMARD, MAX_HADAMARD = 8, 8192


@dataclass(slots=True)
class HadamardViews:
    """The arrays of `hadamard`."""

    x: View
    out: View | None = None


HADAMARD = Arguments("hadamard", HadamardViews, NoOptions, results=("out",))


def read_hadamard(x: Any, *, out: Any = None) -> tuple[HadamardViews, Problem]:
    """Check a call of `hadamard`. Raises InputError."""
    checks = RowsChecks(HADAMARD.operator)
    seen = checks.rows(x, "x", FLOATS)
    channels = seen.shape[-1]
    if not MIN_HADAMARD <= channels <= MAX_HADAMARD or channels & (channels - 1):
        expected = f"D a power of two from {MIN_HADAMARD} to {MAX_HADAMARD} in shape [..., D]"
        raise checks.error("x", expected, list(seen.shape))
    target = checks.shaped(out, "out", seen.shape, (seen.dtype,), "lists", output=True)
    checks.separate()
    return HadamardViews(seen, target), Problem(seen.shape[:-1], channels, seen.dtype, NoOptions(), seen.device)
