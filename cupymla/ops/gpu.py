"""What bindings to kernels share: launches, tensor maps of arguments, the record check."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from ..build.source import KernelSource
from ..errors import CompileError, DriverError, InputError
from ..launch import Launcher
from ..tensormap import EncodedMap, TileMap, encoded

Results = Sequence[tuple[tuple[int, ...], str] | None]
"""Shape and dtype label of each result, in the order of their names; None for one that the call does not want."""


class Launches:
    """Loaded kernels with everything that one problem fixes, launched one after the other. One thread at a time may use
    them. Where numbers may stand in the places of arrays, `scale(*numbers)` sets those.

    Attributes:
        launcher: the main one, by default the last; None where there is nothing to launch.
        workspace_bytes: what they need beside a call's arrays.
    """

    workspace_bytes = 0

    def __init__(self, *launchers: Launcher | None) -> None:
        self._launchers = [launcher for launcher in launchers if launcher is not None]
        self.launcher = self._launchers[-1] if self._launchers else None

    def point(self, views: Any, results: Sequence[int], workspace: int) -> None:
        """Set every address: those that the views have by now, of the results, and of the workspace."""
        raise NotImplementedError

    def launch(self, stream: int) -> None:
        """Run on `stream`, with the device's context current. Raises DriverError."""
        for launcher in self._launchers:
            launcher(stream)


def tiles(request: TileMap, argument: str, operator: str) -> EncodedMap:
    """The tensor map of an operator's argument.

    A driver may refuse strides of 0, which broadcast axes have: no document promises them. Raises InputError for that,
    and DriverError.
    """
    try:
        return encoded(request)
    except DriverError as refused:
        if 0 not in request.strides_bytes:
            raise
        wanted = "an array without broadcast axes, as this driver refuses strides of 0 in a tensor map: make a copy"
        raise InputError(argument, wanted, f"strides of {request.strides_bytes} bytes", operator) from refused


def check_record(source: KernelSource, facts: Mapping[str, int], record: type[ctypes.Structure]) -> None:
    """Raise CompileError unless the parameter record has the size that the kernel was compiled with."""
    expected, got = facts["parameter_bytes"], ctypes.sizeof(record)
    if got != expected:
        mirrored = f"its mirrored struct {record.__module__}.{record.__qualname__} has {got}"
        hint = "the tests of plans compare fields; a folder of sources with another record wants its own checkout"
        raise CompileError(source.path, f"parameter record of {expected} bytes, {mirrored}; {hint}")
