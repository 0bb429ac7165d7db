"""CuPy as far as argument validation sees it, over host memory: arrays known by their type's name, devices, streams."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupymla_lab.emulated import Emulated, kind_of


class Pointer:
    """`array.data`, or a place in an allocation: adding to it makes another one, or moves this one where it is done in
    place."""

    def __init__(self, ptr: int, device_id: int, memory: np.ndarray | None = None) -> None:
        self.ptr = ptr
        self.device_id = device_id
        self.memory = memory

    def __add__(self, offset: int) -> Pointer:
        return Pointer(self.ptr + offset, self.device_id, self.memory)

    def __iadd__(self, offset: int) -> Pointer:
        self.ptr += offset
        return self


class ndarray:
    """A CuPy array that never had a GPU."""

    __module__ = "cupy"

    def __init__(self, host: np.ndarray, device: int = 0, data: Pointer | None = None) -> None:
        self.host = host
        self.data = Pointer(host.ctypes.data, device) if data is None else data
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

    def copy(self) -> ComputingArray:
        return ComputingArray(self.host.copy())


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
    """The module. `made` lists (device, stream, shape, dtype) of every array it allocated, `allocated` the (device,
    stream, bytes) of allocations without an array."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.devices = [0]
        self.streams = [0]
        self.made: list[tuple[int, int, tuple[int, ...], np.dtype]] = []
        self.allocated: list[tuple[int, int, int]] = []
        cuda: Any = ModuleType("cupy.cuda")
        cuda.Device = lambda index: Entered(self.devices, index)
        cuda.runtime = ModuleType("cupy.cuda.runtime")
        cuda.runtime.getDevice = lambda: self.devices[-1]
        cuda.alloc = self._alloc
        cuda.get_current_stream = lambda index=-1: Entered(self.streams, self.streams[-1])
        cuda.Stream = type("Stream", (), {"null": Entered(self.streams, 0), "from_external": self._from_external})
        self.cuda = cuda
        self.ndarray: Any = kind_of(self._ndarray)

    def _from_external(self, stream: Any) -> Entered:
        version, address = stream.__cuda_stream__()
        assert version == 0
        return Entered(self.streams, address)

    def _alloc(self, size: int) -> Pointer:
        """Memory on the current device, from the current stream's pool, which lies as CuPy's pools give it."""
        self.allocated.append((self.devices[-1], self.streams[-1], size))
        memory = np.empty(size + 512, np.uint8)
        first = -memory.ctypes.data % 512
        return Pointer(memory.ctypes.data + first, self.devices[-1], memory[first : first + size])

    def _ndarray(self, shape: tuple[int, ...], dtype: Any, memptr: Pointer | None = None) -> ndarray:
        """An array in an allocation, or a new one on the current device, from the current stream's pool."""
        dtype = np.dtype(dtype)
        if dtype.isbuiltin != 1 and dtype.name != "bfloat16":
            raise TypeError(f"CuPy has no {dtype}")
        if memptr is not None:
            assert memptr.memory is not None
            host = np.ndarray(shape, dtype, memptr.memory, memptr.ptr - memptr.memory.ctypes.data)
            return ndarray(host, memptr.device_id, memptr)
        self.made.append((self.devices[-1], self.streams[-1], shape, dtype))
        return ndarray(np.empty(shape, dtype), self.devices[-1])


def computing(machine: Emulated) -> None:
    """Give a machine's stand-in for the module what the test kit makes arrays with. Kernels may use these arrays."""

    def known(host: np.ndarray[Any, Any]) -> ComputingArray:
        kept.append(host)  # so that no later array lies where this one was
        machine._arrays.add("array", host.ctypes.data, host.nbytes)
        return ComputingArray(host)

    def strided(memory: ComputingArray, shape: tuple[int, ...], strides: tuple[int, ...]) -> ComputingArray:
        return ComputingArray(np.lib.stride_tricks.as_strided(memory.host, shape, strides))

    kept: list[np.ndarray[Any, Any]] = []
    stand_in: Any = machine._cupy
    stand_in.array = lambda host: known(np.array(host))
    stand_in.asarray = stand_in.array
    stand_in.full = lambda *args, **kwargs: known(np.full(*args, **kwargs))
    stand_in.lib = SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=strided))
    stand_in.get_default_memory_pool = lambda: SimpleNamespace(free_all_blocks=lambda: None)


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    """Put a fresh fake where `import cupy` finds it."""
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake
