"""Running translated kernels: on the host's processor, or on a Hopper GPU."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from isa_oracle import COLUMNS, LANES, Array
from ptx_kernels import ARGUMENTS, REGISTERS, around, one_of

from cupymla import driver, tensormap
from cupymla.launch import Geometry
from cupymla_lab.emulate import EmulatedKernel, Settings, build, translate
from cupymla_lab.emulate.host.library import Model
from cupymla_lab.emulate.host.machine import HostMap, HostProgram

Where = Literal["host", "gpu"]


class Memory:
    """Memory that a kernel reads and writes: the array's own on the host, a copy of it on the device."""

    def __init__(self, array: Array, where: Where) -> None:
        self._array = np.ascontiguousarray(array)
        if where == "host":
            self._array = _aligned(self._array)
        self._where = where
        self._address = ctypes.c_uint64(self._array.ctypes.data)
        if where == "gpu":
            size = ctypes.c_size_t(max(self._array.nbytes, 16))
            with driver.on_device(0):
                allocate = driver.function("cuMemAlloc", ctypes.c_void_p, ctypes.c_size_t)
                _check(allocate(ctypes.addressof(self._address), size))
            self.fill()

    def fill(self) -> None:
        """Put the array's content there (again)."""
        if self._where == "gpu":
            with driver.on_device(0):
                copy = driver.function("cuMemcpyHtoD", ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t)
                _check(copy(self._address, self._array.ctypes.data, self._array.nbytes))

    @property
    def pointer(self) -> int:
        """The address."""
        return self._address.value

    @property
    def parameter(self) -> ctypes.c_uint64:
        """The address, as a kernel parameter."""
        return self._address

    def read(self) -> Array:
        """What it holds now."""
        if self._where == "host":
            return np.array(self._array)
        found = np.empty_like(self._array)
        with driver.on_device(0):
            copy = driver.function("cuMemcpyDtoH", ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t)
            _check(copy(found.ctypes.data, self._address, found.nbytes))
        return found

    def free(self) -> None:
        """Give it back."""
        if self._where == "gpu":
            with driver.on_device(0):
                _check(driver.function("cuMemFree", ctypes.c_uint64)(self._address))


def _aligned(array: Array) -> Array:
    """A copy at an address that a GPU's allocator could return."""
    raw = np.empty(array.nbytes + 256, np.uint8)
    start = -raw.ctypes.data % 256
    made: Array = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


def _check(code: int) -> None:
    if code:
        raise driver.error(code, "moving test data")


def tile_map(request: tensormap.TileMap, where: Where) -> Any:
    """A tensor map for either machine."""
    if where == "host":
        return HostMap(request)
    with driver.on_device(0):
        return tensormap.encode(request)


class Kernel:
    """A translated kernel on either machine."""

    def __init__(
        self, ptx: str, name: str, where: Where, threads: int = 0, entry: str | None = None, model: Model = "native"
    ) -> None:
        translation = translate(ptx, name)
        entry = entry or translation.kernels[0]
        self.sites = translation.sites
        self._host = HostProgram(translation, entry, model) if where == "host" else None
        self._gpu = EmulatedKernel(build(ptx, name, threads), entry, 0) if where == "gpu" else None

    def launch(
        self, geometry: Geometry, parameters: Sequence[Any], settings: Settings, maps: Sequence[Any] = ()
    ) -> None:
        """Run once. Raises EmulationError, and HostError or DriverError."""
        if self._host:
            self._host.launch(geometry, parameters, settings, maps)
        if self._gpu:
            with driver.on_device(0):
                if geometry.cluster == 1 and self._cluster > 8:
                    driver.allow(self._gpu.function, geometry.smem_bytes, self._cluster)
                self._gpu.launch(geometry, parameters, settings=settings, maps=maps)

    _cluster = 16


@functools.cache
def kernel(operations: tuple[str, ...], group: int, by: str, where: Where, model: Model) -> Kernel:
    """A kernel around operations, of which argument 7 chooses one."""
    text = around("cvt.u32.u64 %i, %a7;\n" + one_of(operations, "%i"), group, by)
    return Kernel(text, "around.ptx", where, model=model)


def run(
    operation: str, smem: Array, tmem: Array, arguments: list[int], group: int = 1, by: str = "thread",
    settings: Settings | None = None, where: Where = "host", model: Model = "native", among: tuple[str, ...] = (),
) -> tuple[Array, Array]:  # fmt: skip
    """Run an operation on state of one CTA or a pair.

    Args:
        operation: PTX, see `around`.
        smem: (CTAs, bytes) uint8, a multiple of 4 bytes.
        tmem: (CTAs, 128, 512) uint32.
        arguments: at most 7 numbers of 64 bits.
        group: CTAs.
        by: "thread" or "warps".
        settings: of the emulation.
        where: on which machine.
        model: on the host, the model as C++ or as a GPU's compiler leaves it.
        among: operations that are compiled with it, and it itself; without them, it alone.

    Returns:
        Tensor Memory afterwards, and the registers: (CTAs, 128 threads, 128) uint32.
    """
    together = among or (operation,)
    loaded = kernel(together, group, by, where, model)
    words = np.zeros(ARGUMENTS, np.uint64)
    words[: len(arguments)] = arguments
    assert not words[7]
    words[7] = together.index(operation)
    arrays = (smem, tmem, np.zeros_like(tmem), words, np.zeros((group, LANES, REGISTERS), np.uint32))
    memories = [Memory(array, where) for array in arrays]
    source, before, after, given, registers = memories
    size = ctypes.c_uint32(smem.shape[1])
    parameters: list[Any] = [source.parameter, size, before.parameter, after.parameter]
    parameters += [given.parameter, registers.parameter]
    geometry = Geometry((group, 1, 1), 128, smem.shape[1], cluster=group)
    try:
        loaded.launch(geometry, parameters, settings or Settings())
        return after.read(), registers.read()
    finally:
        for memory in memories:
            memory.free()


def blank(group: int = 1, bytes_: int = 65536) -> tuple[Array, Array]:
    """Shared memory of NaN bytes and Tensor Memory of a pattern that tells lanes and columns apart."""
    smem = np.full((group, bytes_), 0xFF, np.uint8)
    lane, column = np.meshgrid(np.arange(LANES), np.arange(COLUMNS), indexing="ij")
    pattern = (0x40000000 | lane << 12 | column).astype(np.uint32)
    return smem, np.repeat(pattern[None], group, axis=0)
