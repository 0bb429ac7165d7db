"""CuPy as far as the door sees it, over host memory: arrays known by their type's name, devices, streams."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
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


class ComputingArray(ndarray):
    """One with what the test kit computes on a GPU."""

    __module__ = "cupy"

    def __getitem__(self, key: Any) -> ComputingArray:
        return ComputingArray(self.host[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        self.host[key] = value.host if isinstance(value, ndarray) else value

    def __ne__(self, other: object) -> Any:
        return self.host != other

    def view(self, dtype: Any) -> ComputingArray:
        return ComputingArray(self.host.view(dtype))

    def reshape(self, shape: tuple[int, ...]) -> ComputingArray:
        return ComputingArray(self.host.reshape(shape))

    def fill(self, value: Any) -> None:
        self.host.fill(value)

    def get(self) -> np.ndarray:
        return self.host.copy()


ComputingArray.__name__ = "ndarray"


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


def computing(stand_in: Any) -> None:
    """Give a stand-in for the module what the test kit makes arrays with."""

    def strided(memory: ComputingArray, shape: tuple[int, ...], strides: tuple[int, ...]) -> ComputingArray:
        return ComputingArray(np.lib.stride_tricks.as_strided(memory.host, shape, strides))

    stand_in.array = lambda host: ComputingArray(np.array(host))
    stand_in.asarray = stand_in.array
    stand_in.full = lambda *args, **kwargs: ComputingArray(np.full(*args, **kwargs))
    stand_in.lib = SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=strided))
    stand_in.get_default_memory_pool = lambda: SimpleNamespace(free_all_blocks=lambda: None)


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    """Put a fresh fake where `import cupy` finds it."""
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake
