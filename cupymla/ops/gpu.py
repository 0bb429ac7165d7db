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

    def __init__(self, like: View, wanted: Sequence[tuple[View | None, tuple[int, ...], str]], stream: int) -> None:
        self._like = like
        allocations: list[Allocation | None] = []
        views: list[View] = []
        for given, shape, dtype in wanted:
            if given is not None:
                allocations.append(None)
                views.append(given)
            else:
                made = tensor.allocate(like, shape, dtype, stream)
                allocations.append(made)
                views.append(made.view)
        self._allocations = allocations
        self.views: Any = tuple(views)

    def require_mutable(self) -> None:
        """Raise UnsupportedError when an output would be an array that cannot be written a second time."""
        if self._like.framework == "jax" and any(made is not None for made in self._allocations):
            raise UnsupportedError(
                "a prepared call with JAX arrays",
                str(self._like.device),
                "a plain call",
            )

    def finish(self) -> Any:
        """The arrays to return, as a tuple. To be called once, after the launch (see `tensor.Allocation`)."""
        return tuple(
            [
                view.owner if made is None else made.finish()
                for view, made in zip(self.views, self._allocations, strict=True)
            ]
        )


def check_record(source: KernelSource, facts: Mapping[str, int], record: type[ctypes.Structure]) -> None:
    """Raise CompileError unless the parameter record has the size that the kernel was compiled with."""
    expected = facts["parameter_bytes"]
    if ctypes.sizeof(record) != expected:
        raise CompileError(source.path, f"parameter record of {expected} bytes, Python's has {ctypes.sizeof(record)}")
