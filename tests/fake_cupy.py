"""CuPy as far as the door sees it, over host memory: arrays known by their type's name, devices, streams."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest


class Pointer:
    """`array.data`."""

    def __init__(self, ptr: int, device_id: int) -> None:
        self.ptr = ptr
        self.device_id = device_id


class ndarray:
    """A CuPy array that never had a GPU."""

    __module__ = "cupy"

    def __init__(self, host: np.ndarray, device: int = 0) -> None:
        self.host = host
        self.data = Pointer(host.ctypes.data, device)
        self.shape = host.shape
        self.strides = host.strides
        self.dtype = host.dtype


class Entered:
    """A device or a stream as a context manager; the innermost entered one is current."""

    def __init__(self, stack: list[Any], value: Any) -> None:
        self.stack = stack
        self.value = value
        self.ptr = value

    def __enter__(self) -> Entered:
        self.stack.append(self.value)
        return self

    def __exit__(self, *exception: object) -> None:
        self.stack.pop()


class FakeCupy(ModuleType):
    """The module. `made` lists (device, stream, shape, dtype) of every array it allocated."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.devices = [0]
        self.streams = [0]
        self.made: list[tuple[int, int, tuple[int, ...], np.dtype]] = []
        cuda: Any = ModuleType("cupy.cuda")
        cuda.Device = lambda index: Entered(self.devices, index)
        cuda.runtime = ModuleType("cupy.cuda.runtime")
        cuda.runtime.getDevice = lambda: self.devices[-1]
        cuda.get_current_stream = lambda index=-1: Entered(self.streams, self.streams[-1])
        cuda.Stream = type("Stream", (), {"null": Entered(self.streams, 0), "from_external": self._from_external})
        self.cuda = cuda

    def _from_external(self, stream: Any) -> Entered:
        version, address = stream.__cuda_stream__()
        assert version == 0
        return Entered(self.streams, address)

    def ndarray(self, shape: tuple[int, ...], dtype: Any) -> ndarray:
        """A new array on the current device, from the current stream's pool."""
        dtype = np.dtype(dtype)
        if dtype.isbuiltin != 1 and dtype.name != "bfloat16":
            raise TypeError(f"CuPy has no {dtype}")
        self.made.append((self.devices[-1], self.streams[-1], shape, dtype))
        return ndarray(np.empty(shape, dtype), self.devices[-1])


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    """Put a fresh fake where `import cupy` finds it."""
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake
