"""What bindings to kernels share: tensor maps of arguments, the record check."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from ..build.source import KernelSource
from ..errors import CompileError, DriverError, InputError
from ..tensormap import EncodedMap, TileMap, encoded


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
