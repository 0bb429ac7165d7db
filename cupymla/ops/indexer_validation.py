"""Argument checks that the operators of the lightning indexer share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import InputError
from ..tensor import View
from . import workspace as workspaces
from .checks import Checks
from .mla import ROW_ALIGNMENT_BYTES, Layout, attributed

FP8 = ("float8_e4m3fn", "uint8")
"""fp8 e4m3fn, where the framework has it, or its bytes."""

MAX_EXTENT = 2**31 - 1
"""Bound of a number of queries, of keys and of topk: ids are int32."""


class Validation(Checks):
    """The checks of one call. The first array fixes the device and whether there is a batch axis."""

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
        seen = self.view(array, argument, dtypes, output=output)
        if seen.shape != shape:
            raise self.error(argument, f"shape {list(shape)}", list(seen.shape))
        self.check_layout(seen, argument, layout)
        return seen

    def given(
        self, array: object, argument: str, shape: tuple[int, ...], dtypes: Sequence[str], layout: Layout = "free"
    ) -> View:
        """The same of an array that must be there."""
        seen = self.shaped(array, argument, shape, dtypes, layout)
        if seen is None:
            raise self.error(argument, f"an array of shape {list(shape)}", None)
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

    def extent(self, seen: View, argument: str, axis: int, what: str, least: int = 0, most: int = MAX_EXTENT) -> int:
        """An extent of an array, within what kernels can count."""
        extent = seen.shape[axis]
        if not least <= extent <= most:
            raise self.error(argument, f"{least} to {most} {what}", extent)
        return extent

    def workspace(self, array: Any, like: View) -> View | None:
        """A caller's workspace, which shares no memory with another array; see `workspace.read`."""
        try:
            seen = workspaces.read(array, like)
        except InputError as refused:
            raise attributed(refused, self.operator) from None
        if seen is not None:
            self._seen.append(("workspace", seen, True))
        return seen

    def rank(self, seen: View, argument: str, spelled: str, rank: int) -> tuple[int, ...]:
        """The leading batch axis, as a tuple of one extent or of none, of an array of `rank` axes without it."""
        if seen.ndim not in (rank, rank + 1):
            raise self.error(argument, f"shape {spelled}, with or without a leading batch axis", list(seen.shape))
        return seen.shape[:-rank]
