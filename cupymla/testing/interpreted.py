"""Operators on a machine without a GPU: their own plans and bindings, with an interpreter where the driver is.

    with interpreted(arch="sm_90a", multiprocessors=4) as machine:
        reports = machine.check("sparse_mla_fwd", case)

Inside the block, arrays of `machine.array` look like CuPy arrays of a CUDA device to the door, `cupymla.driver` answers
for a GPU of that target, kernels are compiled to PTX, and a launch runs them in `cupymla.interpret`. Everything else,
from argument checks to launch configurations and tensor maps, is the code that runs on a GPU.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from ..build import KernelSource
from ..interpret import GlobalMemory, Machine, Program, Races, Watcher, interpret, program_of
from ..launch import Geometry
from ..ptx.approximation import Approximation
from ..tensormap import TileMap
from .emulated import Device, DeviceArray, installed, kind_of
from .operators import Array
from .poison import span_bytes

_ALIGNMENT = 512  # of what CUDA allocators give

__all__ = ["DeviceArray", "Interpreted", "Kernel", "interpreted", "kind_of"]


class Kernel:
    """A kernel that is interpreted; stands for `cupymla.build.Kernel`.

    Attributes:
        program: the kernel.
        function: a number that launches know it by.
        source: what it was compiled from.
    """

    def __init__(self, program: Program, function: int, source: KernelSource) -> None:
        self.program = program
        self.function = function
        self.source = source

    @property
    def name(self) -> str:
        """Its entry."""
        return self.program.name

    @property
    def static_bytes(self) -> int:
        """Of shared memory."""
        return self.program.shared_bytes

    @property
    def parameter_bytes(self) -> tuple[int, ...]:
        """Of each parameter."""
        return tuple(parameter.size for parameter in self.program.parameters)

    @property
    def facts(self) -> MappingProxyType[str, int]:
        """The launch facts that the source states."""
        return MappingProxyType(self.program.facts)


class Interpreted(Device):
    """A GPU that is none.

    Attributes:
        launches: the geometry of every launch so far.
        launched: the kernel of each, by its entry's name.
        steps: instructions that the launches executed.
        seed: of the next launch's schedule; each launch takes one more.
        max_steps: after so many executed instructions a launch is taken to be endless.
        strict: whether ordinary reads of unwritten shared memory are a trap; if not they read NaN.
        approximation: where in its error ex2.approx lies.
        races: whether accesses to shared memory that nothing orders are a trap, see `interpret`.
        watch: makes who is told of every instruction, see `interpret`.
        ctas: the first so many of each launch are run, in whole clusters; None for all. What the others would have
            written is missing.
    """

    def __init__(self, arch: str, multiprocessors: int, seed: int, group: int, resident: int) -> None:
        super().__init__(arch, multiprocessors, seed)
        self._group = group
        self._resident = resident
        self._memory = GlobalMemory()
        self._ahead: Machine | None = None
        self.steps = 0
        self.max_steps = 50_000_000
        self.strict = True
        self.approximation: Approximation = "exact"
        self.races: Races = "unchecked"
        self.watch: Callable[[Program], Watcher] | None = None
        self.ctas: int | None = None

    @property
    def programs(self) -> list[Program]:
        """The kernels that were asked for, each once."""
        return list({id(kernel.program): kernel.program for kernel in self._kernels.values()}.values())

    def source(self, program: Program) -> KernelSource:
        """What a kernel that was asked for was compiled from."""
        return next(kernel.source for kernel in self._kernels.values() if kernel.program is program)

    def places(self, name: str) -> list[tuple[int, int]]:
        """Where the arrays of this name are, from their first byte to behind their last."""
        return [(b.base, b.base + b.size) for b in self._memory.buffers if b.name == name]

    def array(self, host: Array, writable: bool = False, name: str = "argument") -> DeviceArray:
        """A copy of a NumPy array, strides kept and gaps poisoned, as an array of the device.

        Args:
            host: what to copy.
            writable: whether kernels may write to it.
            name: for traps.
        """
        copy = _aligned(host)
        self._memory.add(name, copy, writable)
        return DeviceArray(copy)

    def empty(self, shape: tuple[int, ...], dtype: Any, name: str = "allocated") -> DeviceArray:
        """A fresh array, which a kernel must write before it may read it."""
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        host = _aligned_bytes(size).view(dtype).reshape(shape)
        self._memory.add(name, host, True, initialised=False)
        return DeviceArray(host)

    def kernel(self, source: KernelSource, device: int) -> Kernel:
        """In the place of `build.kernel`."""
        with self.real_cupy():
            program = program_of(source)
        with self._lock:
            number = 0x1000 + len(self._kernels)
            made = self._kernels[number] = Kernel(program, number, source)
        return made

    def execute(
        self, kernel: Kernel, geometry: Geometry, parameters: Sequence[bytes], maps: Mapping[int, TileMap]
    ) -> None:
        """Run a kernel to its end.

        Args:
            kernel: what `kernel` made.
            geometry: of the launch.
            parameters: the bytes of each.
            maps: what the parameters that are tensor maps were encoded from, by their number.
        """
        machine = interpret(
            kernel.program,
            geometry,
            parameters,
            self._memory,
            maps=maps,
            seed=self.seed,
            group=self._group,
            resident=self._resident,
            max_steps=self.max_steps,
            strict=self.strict,
            approximation=self.approximation,
            races=self.races,
            watch=self.watch,
            ahead=self._ahead,
            ctas=None if self.ctas is None else range(min(self.ctas, math.prod(geometry.grid))),
        )
        self._ahead = machine
        self.steps += machine.count

    def fill_zero(self, device: int, size_bytes: int, stream: int) -> None:
        """In the place of `driver.fill_zero`."""
        self._memory.store(device + np.arange(size_bytes), np.zeros((size_bytes, 1), np.uint8))


def _aligned_bytes(size: int) -> Array:
    """Fresh memory that lies as a GPU's does, of 0xFF bytes."""
    raw = np.full(size + _ALIGNMENT, 0xFF, np.uint8)
    first = -raw.ctypes.data % _ALIGNMENT
    return raw[first : first + size]


def _aligned(array: Array) -> Array:
    """A copy with the same strides, gaps poisoned, which lies as it would on a GPU. Axes of stride 0 stay so.

    Raises ValueError for negative strides.
    """
    strides, size = (None, array.nbytes) if array.flags.c_contiguous else (array.strides, span_bytes(array))
    # as_strided goes by the names of dtypes, which ml_dtypes' e5m2 has none of that NumPy knows.
    copy = np.ndarray(array.shape, array.dtype, _aligned_bytes(max(size, array.itemsize)), 0, strides)
    distinct = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in copy.strides)
    copy[distinct] = array[distinct]
    return copy


@contextlib.contextmanager
def interpreted(
    arch: str = "sm_90a", multiprocessors: int = 132, seed: int = 0, group: int = 128, resident: int = 2
) -> Iterator[Interpreted]:
    """A block in which operators run in the interpreter. One at a time in a process.

    Args:
        arch: the target that the GPU is taken to be.
        multiprocessors: how many SMs it is taken to have; plans depend on it.
        seed: of the schedules.
        group: threads that are simulated together, see `interpret`.
        resident: clusters that run at the same time.
    """
    with installed(Interpreted(arch, multiprocessors, seed, group, resident)) as machine:
        yield machine
