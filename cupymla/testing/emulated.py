"""Operators' sm_100a kernels on a machine without a GPU: their own plans and bindings, with the host emulator where
the driver is (docs/emulation.md).

    with emulated("sm_100a", multiprocessors=4, settings=Settings("random", seed=1)) as machine:
        reports = machine.check("sparse_mla_fwd", case)

Arrays and driver are those of `interpreted`. Arrays lie between guard bytes, so that a write past one of them shows.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..build import KernelSource, content_hash, ptx
from ..emulate import Settings, Site
from ..emulate.host.machine import HostArray, HostMap, HostProgram, load
from ..launch import Geometry
from ..tensormap import TileMap
from .interpreted import DeviceArray, Interpreted, Kernel, installed
from .operators import Array
from .poison import Guarded, span_bytes

_programs: dict[tuple[KernelSource, str], HostProgram] = {}
_lock = threading.Lock()


class _Placed:
    """A kernel parameter by its bytes."""

    def __init__(self, content: bytes) -> None:
        self._content = ctypes.create_string_buffer(content, len(content))
        self.address = ctypes.addressof(self._content)


class Emulated(Interpreted):
    """A Blackwell GPU that is none.

    Attributes:
        settings: mode and checks of all launches; the seed of a launch is `seed`, which each launch raises by one.
        sites: instructions of the kernel launched last, for `cupymla.emulate.mutation`.
    """

    def __init__(self, arch: str, multiprocessors: int, settings: Settings) -> None:
        super().__init__(arch, multiprocessors, settings.seed, group=0, resident=0)
        self.settings = settings
        self.sites: tuple[Site, ...] = ()
        self._guards: list[tuple[str, Guarded]] = []
        self._hosts: dict[int, HostProgram] = {}

    def array(self, host: Array, writable: bool = False, name: str = "argument") -> DeviceArray:
        """A copy of a NumPy array, strides kept, gaps poisoned and guarded, as an array of the device."""
        room = self._guarded(name, span_bytes(host))
        copy: Array = np.ndarray(host.shape, host.dtype, room, 0, host.strides)
        copy[...] = host
        self._memory.add(name, copy, writable)
        return DeviceArray(copy)

    def empty(self, shape: tuple[int, ...], dtype: Any, name: str = "allocated") -> DeviceArray:
        """A fresh array, all bytes 0xFF, guarded."""
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        host = self._guarded(name, size)[:size].view(dtype).reshape(shape)
        self._memory.add(name, host, True, initialised=False)
        return DeviceArray(host)

    def kernel(self, source: KernelSource, device: int) -> Kernel:
        """In the place of `build.kernel`."""
        made = super().kernel(source, device)
        key = source, content_hash(source)
        with _lock, self.real_cupy():
            if key not in _programs:
                _programs[key] = load(ptx(source), source.entry, str(source))
            self._hosts[made.function] = _programs[key]
        return made

    def execute(
        self, kernel: Kernel, geometry: Geometry, parameters: Sequence[bytes], maps: Mapping[int, TileMap]
    ) -> None:
        """Run a kernel to its end. Raises EmulationError, HostError, and Mismatch for a write beside an array."""
        values = [
            HostMap(maps[number]) if number in maps else _Placed(content) for number, content in enumerate(parameters)
        ]
        self.sites = self._hosts[kernel.function].translation.sites
        arrays = [HostArray(b.name, b.base, b.size, b.writable, b.written) for b in self._memory.buffers]
        self._hosts[kernel.function].launch(geometry, values, replace(self.settings, seed=self.seed), arrays=arrays)
        if self.settings.races == "unchecked":
            for buffer in self._memory.buffers:
                buffer.written = None  # nobody has looked at what the kernel writes
        for name, memory in self._guards:
            memory.check(f"{kernel.program.name}, {name}")

    def _guarded(self, name: str, size: int) -> Array:
        """Bytes, all 0xFF, between guard zones; those behind them begin where the next 16 bytes do."""
        made = Guarded(np, (-(-max(size, 1) // 16) * 16,), np.uint8)
        self._guards.append((name, made))
        inside: Array = made.array
        return inside


@contextlib.contextmanager
def emulated(arch: str = "sm_100a", multiprocessors: int = 148, settings: Settings | None = None) -> Iterator[Emulated]:
    """A block in which operators run in the host emulator. One at a time in a process.

    Args:
        arch: the target that the GPU is taken to be.
        multiprocessors: how many SMs it is taken to have; plans depend on it.
        settings: mode, checks and first seed of the launches.
    """
    with installed(Emulated(arch, multiprocessors, settings or Settings())) as machine:
        yield machine
