"""Argument checks that the operators of the lightning indexer share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import tensor
from ..errors import InputError
from ..tensor import View
from .arguments import Check
from .dtypes import dtype_got
from .mla import ROW_ALIGNMENT_BYTES, Layout

MAX_EXTENT = 2**31 - 1
"""Bound of a number of queries, of keys and of topk: ids are int32."""


class Door:
    """The checks of one call. The first array fixes the device and whether there is a batch axis.

    Every failure is an `InputError` that names the operator and the argument.
    """

    def __init__(self, operator: str) -> None:
        self.operator = operator
        self._first: View | None = None
        self._seen: list[tuple[str, View, bool]] = []

    def error(self, argument: str, expected: str, got: object) -> InputError:
        """A refusal, ready to be raised."""
        return InputError(argument, expected, got, operator=self.operator)

    def option(self, argument: str, check: Check, value: object) -> Any:
        """An option's value as its check gives it back."""
        try:
            return check(argument, value)
        except InputError as refused:
            raise self.error(refused.argument, refused.expected, refused.got) from None

    def view(self, array: object, argument: str, dtypes: Sequence[str], output: bool = False) -> View:
        """An array of one of these dtypes, on the device of the first one."""
        try:
            seen = tensor.view_output(array, argument) if output else tensor.view(array, argument)
        except InputError as refused:
            raise self.error(refused.argument, refused.expected, refused.got) from None
        if seen.dtype not in dtypes:
            got = seen.dtype if output else dtype_got(seen, argument, dtypes)
            raise self.error(argument, "dtype " + " or ".join(dtypes), got)
        if self._first is None:
            self._first = seen
        elif seen.device != self._first.device:
            raise self.error(argument, f"an array on {self._first.device}, as the first one", f"one on {seen.device}")
        self._seen.append((argument, seen, output))
        return seen

    def shaped(
        self,
        array: object,
        argument: str,
        shape: tuple[int, ...],
        dtypes: Sequence[str],
        layout: Layout = "free",
        output: bool = False,
    ) -> View | None:
        """An array whose shape is known, None where there is none; `layout` as in `check_layout`."""
        if array is None:
            return None
        seen = self.view(array, argument, dtypes, output)
        if seen.shape != shape:
            raise self.error(argument, f"shape {list(shape)}", list(seen.shape))
        self.check_layout(seen, argument, layout)
        return seen

    def check_layout(self, seen: View, argument: str, layout: Layout) -> None:
        """Refuse strides that kernels cannot follow.

        Args:
            seen: the array.
            argument: its parameter's name.
            layout: "rows": the last axis contiguous, other strides multiples of 16 bytes, a 16-byte address. "lists":
                the last axis contiguous. "free": any strides. None may be negative.
        """
        if 0 in seen.shape:
            return
        if layout != "free" and seen.shape[-1] > 1 and seen.strides[-1] != 1:
            raise self.error(argument, "a contiguous last axis", f"strides {list(seen.strides)}")
        for extent, stride in zip(seen.shape, seen.strides, strict=True):
            if extent > 1 and stride < 0:
                raise self.error(argument, "strides that are not negative", f"strides {list(seen.strides)}")
        for extent, stride in zip(seen.shape[:-1], seen.strides_bytes, strict=False):
            if layout == "rows" and extent > 1 and stride % ROW_ALIGNMENT_BYTES:
                expected = f"strides of a multiple of {ROW_ALIGNMENT_BYTES} bytes"
                raise self.error(argument, expected, f"{list(seen.strides_bytes)} bytes")
        alignment = ROW_ALIGNMENT_BYTES if layout == "rows" else seen.itemsize
        if seen.ptr % alignment:
            raise self.error(argument, f"an address that is a multiple of {alignment} bytes", hex(seen.ptr))

    def extent(self, seen: View, argument: str, axis: int, what: str, least: int = 0) -> int:
        """An extent of an array, within what kernels can count."""
        extent = seen.shape[axis]
        if not least <= extent <= MAX_EXTENT:
            raise self.error(argument, f"{least} to {MAX_EXTENT} {what}", extent)
        return extent

    def rank(self, seen: View, argument: str, spelled: str, rank: int) -> tuple[int, ...]:
        """The leading batch axis, as a tuple of one extent or of none, of an array of `rank` axes without it."""
        if seen.ndim not in (rank, rank + 1):
            raise self.error(argument, f"shape {spelled}, with or without a leading batch axis", list(seen.shape))
        return seen.shape[:-rank]

    def separate(self) -> None:
        """Refuse an output that shares memory with an input or with another output."""
        for index, (argument, seen, output) in enumerate(self._seen):
            for other, before, other_output in self._seen[:index]:
                if (output or other_output) and tensor.overlap(seen, before):
                    raise self.error(argument, "memory of its own", f"memory that overlaps argument '{other}'")


def batched_strides(seen: View | None, axes: int) -> tuple[int, ...]:
    """Strides in elements with the batch axis's in front, 0 without one; zeros without an array."""
    if seen is None:
        return (0,) * axes
    return seen.strides if seen.ndim == axes else (0, *seen.strides)
