"""Operators' kernels on a machine without a GPU: their own plans and bindings, with the host machine of
`cupymla_lab.emulate` where the driver is (docs/emulation.md).

    with emulated("sm_90a", multiprocessors=4, settings=Settings("random", seed=1)) as machine:
        reports = machine.check("sparse_mla_fwd", case)

Inside the block, arrays of `machine.array` look like CuPy arrays of a CUDA device, `cupymla.driver` answers for a
GPU of that target, kernels are compiled to PTX, and a launch runs them on this machine's processor. Everything
else, from argument checks to launch configurations and tensor maps, is the code that runs on a GPU. Arrays lie between
guard bytes, and the machine knows them, so that an access past one of them shows.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar
from unittest import mock

import numpy as np

from cupymla import arch as arches
from cupymla import build, driver, tensormap
from cupymla.build import KernelSource, content_hash, ptx
from cupymla.launch import Geometry, LaunchAttribute, LaunchConfig
from cupymla.ops.case import Case
from cupymla.tensor import make
from cupymla.tensormap import TileMap
from cupymla.testing.compare import Report
from cupymla.testing.operators import Array
from cupymla.testing.poison import span_bytes

from .emulate import HostError, Settings, Site
from .emulate.host.machine import HostMap, HostProgram, load
from .emulate.host.memory import Arrays, Watcher
from .guarded import Guarded
from .subjects import Subject

_CLUSTER_DIMENSION, _COOPERATIVE, _PROGRAMMATIC = 4, 2, 6
_MAP_MARK = b"emulated tensor map "
_CONTEXT = 0xC0
_ALIGNMENT = 512  # of what CUDA allocators give
_FREE_SMEM_BYTES, _PORTABLE_CLUSTER = 48 * 1024, 8  # what a kernel may use without leave
_HOPPER, _BLACKWELL = (9, 0), (10, 0)

_programs: dict[tuple[KernelSource, str], HostProgram] = {}
_lock = threading.Lock()


class _Pointer:
    """`array.data`."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr
        self.device_id = 0


class DeviceArray:
    """Host memory that passes for a CuPy array of device 0.

    Attributes:
        host: the memory.
    """

    __module__ = "cupy"

    def __init__(self, host: Array) -> None:
        self.host = host
        self.data = _Pointer(host.ctypes.data)
        self.shape = host.shape
        self.strides = host.strides
        self.dtype = host.dtype

    def get(self) -> Array:
        """A copy as NumPy array."""
        copy: Array = self.host.copy()
        return copy


DeviceArray.__name__ = "ndarray"

_Machine = TypeVar("_Machine", bound="Device")


class _Entered:
    """A device or a stream as a context manager."""

    ptr = 0

    def __enter__(self) -> _Entered:
        return self

    def __exit__(self, *exception: object) -> None:
        return None


class Device:
    """A GPU that is none: what the driver answers for it, and its arrays.

    Attributes:
        launches: the geometry of every launch so far.
        launched: the kernel of each, by its entry's name.
        seed: of the next launch's schedule; each launch takes one more.
    """

    def __init__(self, arch: str, multiprocessors: int, seed: int) -> None:
        self._arch = arches.named(arch)
        self._multiprocessors = multiprocessors
        self._kernels: dict[int, Any] = {}
        self._allowed: dict[int, tuple[int, int]] = {}
        self._maps: list[TileMap] = []
        self._lock = threading.Lock()
        self._cupy = self._stand_in()
        self._real_cupy = sys.modules.get("cupy")
        self.seed = seed
        self.launches: list[Geometry] = []
        self.launched: list[str] = []

    # What a test does ------------------------------------------------------------------------------------------

    def array(self, host: Array, writable: bool = False, name: str = "argument") -> DeviceArray:
        """A copy of a NumPy array, strides kept and gaps poisoned, as an array of the device.

        Args:
            host: what to copy.
            writable: whether kernels may write to it.
            name: for messages.
        """
        raise NotImplementedError

    def empty(self, shape: tuple[int, ...], dtype: Any, name: str = "allocated") -> DeviceArray:
        """A fresh array, which a kernel must write before it may read it."""
        raise NotImplementedError

    def arguments(self, inputs: Mapping[str, Any], written: Collection[str] = ()) -> dict[str, Any]:
        """NumPy arguments as arrays of the device, by name; everything else as it is.

        Args:
            inputs: arguments by parameter.
            written: those that kernels may write to.
        """
        return {n: self.array(v, n in written, n) if isinstance(v, np.ndarray) else v for n, v in inputs.items()}

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call an operator. Its bindings are remembered per thread, so that each call has a thread of its own."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function, *args, **kwargs).result()

    def run(self, subject: Subject, inputs: dict[str, Any]) -> tuple[Array, ...]:
        """An operator on NumPy inputs: all that it returns, as NumPy arrays."""
        return tuple(array for name, array in self.results(subject, inputs).items() if name not in subject.written)

    def results(self, subject: Subject, inputs: dict[str, Any]) -> dict[str, Array]:
        """What an operator returns, then what it writes beside it, by name."""
        given = self.arguments(inputs, subject.written)
        made = subject.named(self.call(subject.call, **given))
        made |= {name: given[name] for name in subject.written_in(inputs)}
        return {name: array.get() for name, array in made.items()}

    def check(self, operator: str, case: Case, seed: int = 0) -> list[Report]:
        """Run an operator's case and compare each output with the references."""
        subject = Subject(operator)
        inputs = subject.cases.inputs(case, seed)
        return subject.reports(inputs, self.results(subject, inputs))

    # What the driver does --------------------------------------------------------------------------------------

    def kernel(self, source: KernelSource, device: int) -> Any:
        """In the place of `build.kernel`: has `function`, `facts`, `name`, `static_bytes` and `parameter_bytes`."""
        raise NotImplementedError

    def function(self, name: str, *argtypes: Any) -> Callable[..., int]:
        """In the place of `driver.function`."""
        entry_points: dict[str, Callable[..., int]] = {
            "cuLaunchKernelEx": self._launch,
            "cuOccupancyMaxActiveClusters": self._active_clusters,
            "cuTensorMapEncodeTiled": self._encode,
        }
        return entry_points[name]

    def _launch(self, config: Any, function: Any, slots: Any, extra: object) -> int:
        wanted = LaunchConfig.from_address(value_of(config))
        geometry = geometry_of(wanted)
        kernel = self._kernels[value_of(function)]
        self._require_launchable(kernel, geometry)
        sizes = kernel.parameter_bytes
        places = (ctypes.c_void_p * len(sizes)).from_address(value_of(slots))
        parameters = [ctypes.string_at(place or 0, size) for place, size in zip(places, sizes, strict=True)]
        maps = {
            number: self._maps[int(content[len(_MAP_MARK) :].rstrip(b"\0"))]
            for number, content in enumerate(parameters)
            if content.startswith(_MAP_MARK)
        }
        self.execute(kernel, geometry, parameters, maps)
        self.seed += 1
        self.launches.append(geometry)
        self.launched.append(kernel.name)
        return 0

    def _require_launchable(self, kernel: Any, geometry: Geometry) -> None:
        """Raise HostError for a launch that the driver would refuse on this target.

        Source: CUDA C++ Programming Guide, "Technical Specifications", "Thread Block Clusters".
        """
        arch, smem = self._arch, kernel.static_bytes + geometry.smem_bytes
        if smem > arch.smem_bytes:
            raise HostError(f"{kernel.name}: {smem} bytes of shared memory where {arch.name} has {arch.smem_bytes}")
        if arch.capability < _HOPPER and (geometry.cluster > 1 or geometry.pdl):
            raise HostError(f"{kernel.name}: a cluster or a dependent launch on {arch.name}")
        allowed, cluster = self._allowed.get(kernel.function, (0, 0))
        if geometry.smem_bytes > max(allowed, _FREE_SMEM_BYTES) or geometry.cluster > max(cluster, _PORTABLE_CLUSTER):
            raise HostError(f"{kernel.name}: a launch with more than the kernel was allowed: {geometry}")

    def _allow(self, function: int, smem_bytes: int, cluster: int) -> None:
        """In the place of `driver.allow`."""
        old = self._allowed.get(function, (0, 0))
        self._allowed[function] = max(old[0], smem_bytes), max(old[1], cluster)

    def _active_clusters(self, count: Any, function: Any, config: Any) -> int:
        size = geometry_of(LaunchConfig.from_address(value_of(config))).cluster
        ctypes.c_int.from_address(value_of(count)).value = self._multiprocessors // size
        return 0

    def execute(
        self, kernel: Any, geometry: Geometry, parameters: Sequence[bytes], maps: Mapping[int, TileMap]
    ) -> None:
        """Run a kernel to its end.

        Args:
            kernel: what `kernel` made.
            geometry: of the launch.
            parameters: the bytes of each.
            maps: what the parameters that are tensor maps were encoded from, by their number.
        """
        raise NotImplementedError

    def fill_zero(self, device: int, size_bytes: int, stream: int) -> None:
        """In the place of `driver.fill_zero`."""
        raise NotImplementedError

    def _encode(self, address: int, dtype: int, rank: int, ptr: int, *rest: Any) -> int:
        request = requested(dtype, rank, ptr, *rest)
        content = _MAP_MARK + str(len(self._maps)).encode()
        self._maps.append(request)
        ctypes.memmove(address, content.ljust(tensormap.BYTES, b"\0"), tensormap.BYTES)
        return 0

    def copy_to_host(self, host: int, device: int, size_bytes: int, stream: int) -> None:
        """In the place of `driver.copy_to_host`."""
        ctypes.memmove(host, device, size_bytes)

    @contextlib.contextmanager
    def own_cupy(self) -> Iterator[None]:
        """A block in which this device's arrays come out of the module `cupy`."""
        sys.modules["cupy"] = self._cupy
        try:
            yield
        finally:
            _install_cupy(self._real_cupy)

    @contextlib.contextmanager
    def real_cupy(self) -> Iterator[None]:
        """A block in which `cupy` is the real one, through which the compiler is reached."""
        _install_cupy(self._real_cupy)
        try:
            yield
        finally:
            self._real_cupy = sys.modules.get("cupy")
            sys.modules["cupy"] = self._cupy

    def replacements(self) -> dict[str, Any]:
        """What stands in for functions of `cupymla.driver`, by name."""
        return {
            "arch_of": lambda device: self._arch,
            "compute_capability": lambda index: self._arch.capability,
            "has_dependent_launch": lambda index: self._arch.capability >= (9, 0),
            "multiprocessor_count": lambda index: self._multiprocessors,
            "device_name": lambda index: f"emulated {self._arch.name}",
            "function": self.function,
            "prefer_shared_memory": lambda function: None,
            "allow": self._allow,
            "current_context": lambda: _CONTEXT,
            "primary_context": lambda index: _CONTEXT,
            "is_current": lambda index: True,
            "on_device": lambda index: _Entered(),
            "beside_captures": _Entered,
            "order": lambda first, then: None,
            "capture_id": lambda stream: None,
            "stream_id": lambda stream: stream,
            "wait": lambda stream: None,
            "pointer_device": lambda address: 0,
            "copy_to_host": self.copy_to_host,
            "fill_zero": self.fill_zero,
        }

    def _stand_in(self) -> ModuleType:
        """A module that passes for CuPy as far as arrays, devices and streams go."""
        module: Any = ModuleType("cupy")
        module.ndarray = kind_of(lambda shape, dtype: self.empty(shape, np.dtype(dtype)))
        module.cuda = ModuleType("cupy.cuda")
        module.cuda.Device = lambda index: _Entered()
        module.cuda.runtime = ModuleType("cupy.cuda.runtime")
        module.cuda.runtime.getDevice = lambda: 0
        module.cuda.get_current_stream = lambda index=-1: _Entered()
        module.cuda.Stream = type("Stream", (), {"null": _Entered(), "from_external": lambda stream: _Entered()})
        return module  # type: ignore[no-any-return]


class _Placed:
    """A kernel parameter by its bytes."""

    def __init__(self, content: bytes) -> None:
        self._content = ctypes.create_string_buffer(content, len(content))
        self.address = ctypes.addressof(self._content)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that is emulated; stands for `cupymla.build.Kernel`.

    Attributes:
        host: the kernel as it runs here.
        function: a number that launches know it by.
        source: what it was compiled from.
    """

    host: HostProgram
    function: int
    source: KernelSource

    @property
    def name(self) -> str:
        """Its entry."""
        return self.host.entry

    @property
    def facts(self) -> MappingProxyType[str, int]:
        """The launch facts that the source states."""
        return MappingProxyType(dict(self.host.translation.facts))

    @property
    def static_bytes(self) -> int:
        """Of shared memory."""
        return self.host.shape.static_bytes

    @property
    def parameter_bytes(self) -> tuple[int, ...]:
        """Of each parameter."""
        return tuple(size for _, size in self.host.shape.parameters)


class Emulated(Device):
    """A GPU that is none, whose kernels run on this machine's processor.

    Attributes:
        settings: mode and checks of all launches; the seed of a launch is `seed`, which each launch raises by one.
        sites: instructions of the kernel launched last, for `cupymla_lab.emulate.mutation`.
        turns: how often threads took turns in the launches so far.
        most_turns: after so many turns a launch is taken to be endless; 0 for a generous number.
    """

    def __init__(self, arch: str, multiprocessors: int, settings: Settings) -> None:
        super().__init__(arch, multiprocessors, settings.seed)
        self.settings = settings
        self.sites: tuple[Site, ...] = ()
        self.turns = 0
        self.most_turns = 0
        self._arrays = Arrays()
        self._guards: list[tuple[str, Guarded]] = []

    @property
    def kernels(self) -> list[Kernel]:
        """The kernels that were asked for, each once."""
        return list({id(kernel.host): kernel for kernel in self._kernels.values()}.values())

    def array(self, host: Array, writable: bool = False, name: str = "argument") -> DeviceArray:
        """A copy of a NumPy array, strides kept, gaps poisoned and guarded, as an array of the device."""
        size = span_bytes(host)
        room = self._guarded(name, size)
        copy: Array = np.ndarray(host.shape, host.dtype, room, 0, host.strides)
        copy[...] = host
        self._arrays.add(name, room.ctypes.data, size, writable)
        return DeviceArray(copy)

    def empty(self, shape: tuple[int, ...], dtype: Any, name: str = "allocated") -> DeviceArray:
        """A fresh array, all bytes 0xFF, guarded, which a kernel must write before it may read it."""
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        room = self._guarded(name, size)
        self._arrays.add(name, room.ctypes.data, size, True, initialised=False)
        return DeviceArray(room[:size].view(dtype).reshape(shape))

    def allow_unwritten(self) -> None:
        """Let kernels read shared memory that nothing has written; it is NaN."""
        checks = tuple(check for check in self.settings.checks if check != "written")
        self.settings = replace(self.settings, checks=checks)

    def watch(self, array: DeviceArray, watcher: Watcher) -> None:
        """Have somebody told of each use of an array by the kernels, who may change what is there."""
        self._arrays.watch(array.data.ptr, span_bytes(array.host), watcher)

    def watch_memory(self, base: int, size: int, watcher: Watcher) -> None:
        """The same for memory by its address."""
        self._arrays.watch(base, size, watcher)

    def kernel(self, source: KernelSource, device: int) -> Kernel:
        """In the place of `build.kernel`."""
        key = source, content_hash(source)
        with _lock, self.real_cupy():
            if key not in _programs:
                _programs[key] = self.load(source)
            host = _programs[key]
        with self._lock:
            number = 0x1000 + len(self._kernels)
            made = self._kernels[number] = Kernel(host, number, source)
        return made

    def load(self, source: KernelSource) -> HostProgram:
        """A kernel ready to run, once for all machines. Raises CompileError, PtxError and InputError."""
        return load(ptx(source), source.entry, str(source))

    def execute(
        self, kernel: Kernel, geometry: Geometry, parameters: Sequence[bytes], maps: Mapping[int, TileMap]
    ) -> None:
        """Run a kernel to its end. Raises EmulationError, HostError, and Mismatch for a write beside an array."""
        values = [
            HostMap(maps[number]) if number in maps else _Placed(content) for number, content in enumerate(parameters)
        ]
        self.sites = kernel.host.translation.sites
        settings = replace(self.settings, seed=self.seed)
        self.turns += kernel.host.launch(geometry, values, settings, switches=self.most_turns, arrays=self._arrays)
        for name, memory in self._guards:
            memory.check(f"{kernel.name}, {name}")

    def fill_zero(self, device: int, size_bytes: int, stream: int) -> None:
        """In the place of `driver.fill_zero`."""
        ctypes.memset(device, 0, size_bytes)
        self._arrays.initialise(device, size_bytes)

    def _guarded(self, name: str, size: int) -> Array:
        """Bytes, all 0xFF, between guard zones; those behind them begin where the next 16 bytes do."""
        made = Guarded(np, (-(-max(size, 1) // 16) * 16,), np.uint8, _ALIGNMENT)
        self._guards.append((name, made))
        inside: Array = made.array
        return inside


def kind_of(make: Callable[..., Any]) -> type:
    """A class whose arrays a function makes, whether the class is called or its `__new__`."""
    return type("ndarray", (), {"__new__": lambda kind, *arguments: make(*arguments)})


def _install_cupy(module: ModuleType | None) -> None:
    """Make a module the one that `import cupy` gives; with None the next import finds it anew."""
    sys.modules.pop("cupy", None)
    if module is not None:
        sys.modules["cupy"] = module


def requested(dtype: int, rank: int, ptr: int, *rest: Any) -> TileMap:
    """The request behind the arguments of cuTensorMapEncodeTiled, all but the first."""
    shape, strides, box, _, _, swizzle, promotion, fill = rest
    return TileMap(
        ptr,
        next(name for name, (code, _) in tensormap._TYPES.items() if code == dtype),
        tuple(shape),
        tuple(strides)[: rank - 1],
        tuple(box),
        {code: span for span, code in tensormap._SWIZZLES.items()}[swizzle],
        {code: span for span, code in tensormap._L2_PROMOTIONS.items()}[promotion],
        {code: name for name, code in tensormap._FILLS.items()}[fill],
    )


def value_of(pointer: Any) -> int:
    """The address or number in a ctypes pointer."""
    return int(getattr(pointer, "value", pointer) or 0)


def geometry_of(config: LaunchConfig) -> Geometry:
    """What a launch configuration asks for."""
    cluster, cooperative, pdl, clustered = 1, False, False, False
    if config.attribute_count:
        attributes = (LaunchAttribute * config.attribute_count).from_address(config.attributes)
        for attribute in attributes:
            if attribute.id == _CLUSTER_DIMENSION:
                cluster = attribute.value[0]
                clustered = cluster == 1
            elif attribute.id == _COOPERATIVE:
                cooperative = bool(attribute.value[0])
            elif attribute.id == _PROGRAMMATIC:
                pdl = bool(attribute.value[0])
    x, y, z = config.grid
    return Geometry((x, y, z), config.block[0], config.smem_bytes, cluster, pdl, cooperative, clustered)


def strict_settings(arch: str) -> Settings:
    """Settings that look for all that kernels for a target may not do; those for Blackwell load more than they use."""
    plain = Settings(races="hardware")
    written = arches.named(arch).capability < _BLACKWELL
    return replace(plain, checks=(*plain.checks, "written")) if written else plain


@contextlib.contextmanager
def emulated(
    arch: str = "sm_90a", multiprocessors: int = 132, settings: Settings | None = None, seed: int = 0
) -> Iterator[Emulated]:
    """A block in which operators run on this machine's processor. One at a time in a process.

    Args:
        arch: the target that the GPU is taken to be.
        multiprocessors: how many SMs it is taken to have; plans depend on it.
        settings: mode, checks and first seed of the launches; mode random with races looked for, without them.
        seed: the first one, without settings.
    """
    chosen = settings or replace(strict_settings(arch), mode="random", seed=seed)
    with installed(Emulated(arch, multiprocessors, chosen)) as machine:
        yield machine


@contextlib.contextmanager
def installed(made: _Machine) -> Iterator[_Machine]:
    """A block in which a machine stands in the driver's place. One at a time in a process.

    Raises:
        RuntimeError: another replacement of a function of the driver is still there at the end. Who takes it back
            later puts this machine's function into the driver for good.
    """
    replacements = made.replacements()
    with contextlib.ExitStack() as stack:
        for name, replacement in replacements.items():
            stack.enter_context(mock.patch.object(driver, name, replacement, create=True))
        stack.enter_context(mock.patch.object(build, "kernel", made.kernel))
        stack.enter_context(made.own_cupy())
        # An allocation each, so that a kernel that leaves one array's memory is noticed.
        stack.enter_context(mock.patch.object(make, "TOGETHER_BYTES", 0))
        tensormap._cache.clear()
        stack.callback(tensormap._cache.clear)
        yield made
        left = [name for name, replacement in replacements.items() if getattr(driver, name) is not replacement]
        if left:
            raise RuntimeError(f"replaced within the block and not taken back: {', '.join(left)}")
