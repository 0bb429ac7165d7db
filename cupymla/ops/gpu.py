"""What the operators' bindings to their kernels share: outputs in the caller's framework, and the record check."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from .. import tensor
from ..build.source import KernelSource
from ..errors import CompileError, UnsupportedError
from ..tensor import Allocation, View


class OutputArrays:
    """The arrays one call writes: the caller's where given, else fresh ones in the framework of `like`.

    Attributes:
        pointers: their addresses, in the order of `wanted`.
        layouts: the strides of those given, None for the fresh ones, which are C-contiguous; None when all are fresh.
    """

    __slots__ = ("_allocations", "_arrays", "_like", "layouts", "pointers")

    def __init__(
        self,
        like: View,
        wanted: Sequence[tuple[tuple[int, ...], str]],
        given: tuple[View | None, ...],
        stream: int | None,
        current: bool = False,
    ) -> None:
        """Take or make the arrays.

        Args:
            like: a view of one of the caller's arrays.
            wanted: shape and dtype label of each array.
            given: the caller's array for each, or None.
            stream: the one the arrays are written on, where it is not the current stream of `like`.
            current: whether the device of `like` is known to be the current one.
        """
        self._like = like
        self.layouts: tuple[tuple[int, ...] | None, ...] | None = None
        self._arrays: list[Any] | None = None
        all_fresh = given.count(None) == len(given)
        if all_fresh and current and stream is None and like.framework == "cupy":
            self._arrays, self.pointers = tensor.cupy_arrays(wanted)
            return
        self._allocations = [
            tensor.allocate(like, shape, dtype, stream) if array is None else array
            for (shape, dtype), array in zip(wanted, given, strict=True)
        ]
        self.pointers = [array.ptr for array in self._allocations]
        if not all_fresh:
            self.layouts = tuple([None if array is None else array.strides for array in given])

    @property
    def views(self) -> tuple[View, ...]:
        """Where to write, in the order of `wanted`."""
        if self._arrays is not None:
            return tuple(tensor.view(array, "output") for array in self._arrays)
        return tuple(array.view if isinstance(array, Allocation) else array for array in self._allocations)

    def require_mutable(self) -> None:
        """Raise UnsupportedError when an output would be an array that cannot be written a second time."""
        if self._arrays is None and any(
            isinstance(array, Allocation) and not array.repeatable for array in self._allocations
        ):
            wanted = f"a prepared call that allocates {self._like.framework} arrays"
            raise UnsupportedError(wanted, str(self._like.device), "a plain call")

    def finish(self) -> Any:
        """The arrays to return, as a tuple. To be called once, after the launch (see `tensor.Allocation`)."""
        if self._arrays is not None:
            return tuple(self._arrays)
        return tuple([array.finish() if isinstance(array, Allocation) else array.owner for array in self._allocations])


def check_record(source: KernelSource, facts: Mapping[str, int], record: type[ctypes.Structure]) -> None:
    """Raise CompileError unless the parameter record has the size that the kernel was compiled with."""
    expected = facts["parameter_bytes"]
    if ctypes.sizeof(record) != expected:
        raise CompileError(source.path, f"parameter record of {expected} bytes, Python's has {ctypes.sizeof(record)}")
