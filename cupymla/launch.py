"""Launching a kernel: everything is laid out once, and a launch is one store and one driver call.

The only caller of cuLaunchKernelEx. Source of the layouts: `CUlaunchConfig`, `CUlaunchAttribute` and
`CUlaunchAttributeValue` in cuda.h (CUDA 12.9), which the driver's ABI keeps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from . import driver
from .errors import InputError


@dataclass(frozen=True, slots=True)
class Geometry:
    """How many threads a launch has and how they are grouped.

    Attributes:
        grid: (x, y, z) in CTAs, always, with or without clusters. A zero launches nothing.
        block: threads per CTA, along x.
        smem_bytes: dynamic shared memory per CTA.
        cluster: CTAs per cluster, along x; divides grid[0].
        pdl: programmatic dependent launch: the kernel may start before the one ahead of it in the stream has ended,
            and waits for its results with `griddepcontrol.wait`.
        cooperative: all CTAs are resident at once, so that they may wait for each other.
        clustered: a launch with clusters though they have one CTA each. Without clusters `st.async` and bulk copies
            from shared memory to shared memory are illegal instructions (seen on an H100 and an H200).
    """

    grid: tuple[int, int, int]
    block: int
    smem_bytes: int
    cluster: int = 1
    pdl: bool = False
    cooperative: bool = False
    clustered: bool = False


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: 4 bytes id, 4 bytes padding, a 64-byte union of which at most three words are used here."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig, 56 bytes: three extents each of grid and block, shared memory, stream, attributes."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


_COOPERATIVE = 2
_CLUSTER_DIMENSION = 4
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_INVALID_CLUSTER_SIZE = 912  # CUDA_ERROR_INVALID_CLUSTER_SIZE


class Kernel(Protocol):
    """A loaded kernel, as far as a launch is concerned."""

    @property
    def function(self) -> int:
        """CUfunction handle."""


class AtAddress(Protocol):
    """A parameter that lies in memory of its own, such as an encoded tensor map."""

    @property
    def address(self) -> int:
        """Where its bytes begin."""


Parameter: TypeAlias = "AtAddress | ctypes.Structure | ctypes._SimpleCData[Any]"
"""What a kernel parameter is read from at each launch."""


def _address(parameter: Parameter) -> int:
    if isinstance(parameter, (ctypes.Structure, ctypes._SimpleCData)):
        return ctypes.addressof(parameter)
    return parameter.address


class Launcher:
    """One kernel, one geometry, one list of parameters.

    Parameters are read at each call from the objects that were given here, so their fields may be changed between
    calls, and the kernel sees what they hold when the call is made. One thread at a time may use a launcher.

    Raises InputError for a geometry that cannot be launched, and DriverError.
    """

    __slots__ = (
        *("_attributes", "_config", "_config_address", "_function", "_geometry", "_launch", "_parameters"),
        *("_slots", "_slots_address"),
    )

    def __init__(self, kernel: Kernel, geometry: Geometry, parameters: Sequence[Parameter]) -> None:
        check(geometry)
        self._parameters: list[Parameter] = list(parameters)
        self._slots = (ctypes.c_void_p * len(self._parameters))(*map(_address, self._parameters))
        chosen = _attributes(geometry)
        attributes = (LaunchAttribute * len(chosen))(*chosen)
        self._geometry = geometry
        self._config = LaunchConfig(
            geometry.grid,
            (geometry.block, 1, 1),
            geometry.smem_bytes,
            None,
            ctypes.addressof(attributes) if chosen else None,
            len(chosen),
        )
        self._attributes = attributes
        # ctypes passes a c_void_p on as it is, where an int would be converted on each call.
        self._config_address = ctypes.c_void_p(ctypes.addressof(self._config))
        self._slots_address = ctypes.c_void_p(ctypes.addressof(self._slots))
        self._function = ctypes.c_void_p(kernel.function)
        if 0 in geometry.grid:
            self._launch = _launch_nothing
        else:
            driver.allow(kernel.function, geometry.smem_bytes, geometry.cluster)
            self._launch = driver.function("cuLaunchKernelEx", *(ctypes.c_void_p,) * 4)

    def replace(self, index: int, parameter: Parameter) -> None:
        """Put another object in a parameter's place, from the next call on."""
        if self._parameters[index] is not parameter:
            self._parameters[index] = parameter
            self._slots[index] = _address(parameter)

    def __call__(self, stream: int) -> None:
        """Launch on a stream of the current context. A grid with a zero extent launches nothing. Raises DriverError."""
        self._config.stream = stream
        code = self._launch(self._config_address, self._function, self._slots_address, None)
        if code:
            raise driver.error(code, f"launching {self._geometry} on stream {stream:#x}")


def active_clusters(kernel: Kernel, geometry: Geometry) -> int:
    """How many clusters of a geometry, whatever its grid, run on the current device at once; 0 for none of that size.

    A cluster lives in one GPC, so that they rarely fill all multiprocessors. Raises InputError and DriverError.
    """
    check(geometry)
    driver.allow(kernel.function, geometry.smem_bytes, geometry.cluster)
    chosen = _attributes(geometry)
    attributes = (LaunchAttribute * len(chosen))(*chosen)
    grid, block = (geometry.cluster, 1, 1), (geometry.block, 1, 1)
    config = LaunchConfig(grid, block, geometry.smem_bytes, None, ctypes.addressof(attributes), len(chosen))
    count = ctypes.c_int()
    ask = driver.function("cuOccupancyMaxActiveClusters", *(ctypes.c_void_p,) * 3)
    code = ask(ctypes.addressof(count), ctypes.c_void_p(kernel.function), ctypes.addressof(config))
    if code == _INVALID_CLUSTER_SIZE:
        return 0
    if code:
        raise driver.error(code, f"asking how many clusters of {geometry.cluster} CTAs run at once")
    return count.value


def _launch_nothing(*_: object) -> int:
    """What stands in for the driver's entry point when the grid is empty, which the driver would refuse."""
    return 0


def _attributes(geometry: Geometry) -> list[LaunchAttribute]:
    attributes = []
    if geometry.cluster > 1 or geometry.clustered:
        attributes.append(_attribute(_CLUSTER_DIMENSION, geometry.cluster, 1, 1))
    if geometry.pdl:
        attributes.append(_attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 1))
    if geometry.cooperative:
        attributes.append(_attribute(_COOPERATIVE, 1))
    return attributes


def _attribute(identifier: int, *words: int) -> LaunchAttribute:
    attribute = LaunchAttribute(identifier)
    attribute.value[: len(words)] = words
    return attribute


def check(geometry: Geometry) -> None:
    """Raise InputError where a launch is past limits that every compute capability shares.

    Source: CUDA C++ Programming Guide, "Technical Specifications".
    """
    x, y, z = geometry.grid
    if not (0 <= x < 2**31 and 0 <= y < 2**16 and 0 <= z < 2**16):
        raise InputError("grid", "extents from 0 to 2**31 - 1, 65535 and 65535", geometry.grid)
    if not 1 <= geometry.block <= 1024:
        raise InputError("block", "1 to 1024 threads", geometry.block)
    if not 0 <= geometry.smem_bytes < 2**31:
        raise InputError("smem_bytes", "a number of bytes", geometry.smem_bytes)
    if not 1 <= geometry.cluster <= 16:
        raise InputError("cluster", "1 to 16 CTAs", geometry.cluster)
    if x % geometry.cluster:
        raise InputError("grid", f"a multiple of the cluster's {geometry.cluster} CTAs along x", geometry.grid)
