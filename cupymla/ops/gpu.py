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
        views: where to write, in the order of `wanted`.
    """

    __slots__ = ("_allocations", "_like", "views")

    def __init__(
        self, like: View, wanted: Sequence[tuple[View | None, tuple[int, ...], str]], stream: int | None
    ) -> None:
        """`stream` is the one the arrays are written on, where it is not the current stream of `like`."""
        self._like = like
        allocate = tensor.allocate
        made = [
            Allocation(given) if given is not None else allocate(like, shape, dtype, stream)
            for given, shape, dtype in wanted
        ]
        self._allocations = made
        self.views: Any = tuple([allocation.view for allocation in made])

    def require_mutable(self) -> None:
        """Raise UnsupportedError when an output would be an array that cannot be written a second time."""
        if not all(allocation.repeatable for allocation in self._allocations):
            raise UnsupportedError(
                f"a prepared call that allocates {self._like.framework} arrays",
                str(self._like.device),
                "a plain call",
            )

    def finish(self) -> Any:
        """The arrays to return, as a tuple. To be called once, after the launch (see `tensor.Allocation`)."""
        return tuple([allocation.finish() for allocation in self._allocations])


def check_record(source: KernelSource, facts: Mapping[str, int], record: type[ctypes.Structure]) -> None:
    """Raise CompileError unless the parameter record has the size that the kernel was compiled with."""
    expected = facts["parameter_bytes"]
    if ctypes.sizeof(record) != expected:
        raise CompileError(source.path, f"parameter record of {expected} bytes, Python's has {ctypes.sizeof(record)}")
