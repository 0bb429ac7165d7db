"""Operators' sm_100f kernels on a Hopper GPU: their own plans and bindings, each launch translated (docs/emulation.md).

    with translated("sm_100f") as machine:
        machine.settings = Settings("random", seed=1)
        cupymla.sparse_mla_fwd(...)         # CuPy arrays, as ever

Inside the block `cupymla.driver` answers for a GPU of that target, kernels are compiled for it, translated and linked
with the model, and a launch runs them in the emulator and waits for the end. Arrays, streams, copies and tensor maps
are the GPU's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from unittest import mock

from cupymla import arch as arches
from cupymla import build, driver, tensormap
from cupymla.build import KernelSource, content_hash
from cupymla.errors import DriverError
from cupymla.launch import LaunchConfig
from cupymla.tensormap import TileMap

from .emulate import EmulatedKernel, Settings, load
from .emulated import geometry_of, requested, value_of

_loaded: dict[tuple[KernelSource, str, int], EmulatedKernel] = {}
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that is emulated; stands for `cupymla.build.Kernel`.

    Attributes:
        emulated: the translation, loaded.
    """

    emulated: EmulatedKernel

    @property
    def function(self) -> int:
        """CUfunction handle."""
        return self.emulated.function

    @property
    def facts(self) -> Mapping[str, int]:
        """The launch facts that the source states."""
        return MappingProxyType(self.emulated.facts)


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A kernel parameter where it lies, and the request behind it if it is a tensor map."""

    address: int
    request: TileMap | None


class Translated:
    """A Hopper GPU that passes for one of another target.

    Attributes:
        settings: mode, seed and checks of the next launches.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._kernels: dict[int, Kernel] = {}
        self._maps: dict[bytes, TileMap] = {}
        self._function = driver.function
        # The emulator launches through the driver as well, in the thread that asked for the launch.
        self._inside = threading.local()

    def kernel(self, source: KernelSource, device: int) -> Kernel:
        """In the place of `build.kernel`."""
        key = source, content_hash(source), device
        with _lock:
            if key not in _loaded:
                _loaded[key] = load(source, device=device)
            emulated = _loaded[key]
        made = self._kernels[emulated.function] = Kernel(emulated)
        return made

    def function(self, name: str, *argtypes: Any) -> Callable[..., int]:
        """In the place of `driver.function`."""
        real: Callable[..., int] = self._function(name, *argtypes)
        if name == "cuTensorMapEncodeTiled":
            return lambda *arguments: self._encode(real, *arguments)
        if name == "cuLaunchKernelEx":
            return lambda *arguments: self._launch(real, *arguments)
        return real

    def close(self) -> None:
        """Give back what the kernels of this machine keep between launches.

        After a fault the driver refuses that too, and what is then raised is to be the fault.
        """
        for kernel in self._kernels.values():
            with contextlib.suppress(DriverError):
                kernel.emulated.close()

    def _encode(self, real: Callable[..., int], address: int, dtype: int, rank: int, ptr: int, *rest: Any) -> int:
        code = real(address, dtype, rank, ptr, *rest)
        if not code:
            self._maps[ctypes.string_at(address, tensormap.BYTES)] = requested(dtype, rank, ptr, *rest)
        return code

    def _launch(self, real: Callable[..., int], config: Any, function: Any, slots: Any, extra: object) -> int:
        if getattr(self._inside, "emulator", False):
            return real(config, function, slots, extra)
        kernel = self._kernels[value_of(function)]
        wanted = LaunchConfig.from_address(value_of(config))
        sizes = kernel.emulated.parameters
        places = (ctypes.c_void_p * len(sizes)).from_address(value_of(slots))
        parameters = [self._parameter(place or 0, size) for place, size in zip(places, sizes, strict=True)]
        self._inside.emulator = True
        try:
            kernel.emulated.launch(geometry_of(wanted), parameters, wanted.stream or 0, self.settings)
        finally:
            self._inside.emulator = False
        return 0

    def _parameter(self, place: int, size: int) -> _Parameter:
        content = ctypes.string_at(place, size) if size == tensormap.BYTES else b""
        return _Parameter(place, self._maps.get(content))


@contextlib.contextmanager
def translated(arch: str = "sm_100f", settings: Settings | None = None) -> Iterator[Translated]:
    """A block in which operators run translated. One at a time in a process; needs a Hopper GPU.

    Args:
        arch: the target that the GPU is taken to be.
        settings: mode, seed and checks of the launches.
    """
    made = Translated(settings or Settings())
    target = arches.named(arch)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(driver, "arch_of", lambda device: target))
        stack.enter_context(mock.patch.object(driver, "compute_capability", lambda index: target.capability))
        stack.enter_context(mock.patch.object(driver, "function", made.function))
        stack.enter_context(mock.patch.object(build, "kernel", made.kernel))
        # Maps that were encoded before are not known here.
        tensormap._cache.clear()
        stack.callback(tensormap._cache.clear)
        stack.callback(made.close)
        yield made
