"""Loading and launching translated kernels."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NoReturn, overload

from cupymla import driver, launch, tensormap
from cupymla.build import KernelSource, loader, ptx
from cupymla.build.cubin import Cubin, Image, Resources
from cupymla.errors import DriverError, InputError, UnsupportedError
from cupymla.launch import Geometry, Launcher, Parameter

from . import maps as tables
from .failures import EmulationError
from .host.machine import HostProgram
from .host.machine import load as load_host
from .maps import ForeignMap, KnownMap
from .program import REGISTER_FILE, Program, build, kept
from .settings import CHECKS, MODES, LaunchState, Report, Settings
from .translate import TARGET

_WAIT_SECONDS = 120.0
_MAP_BYTES = 16384
_HOPPER = (9, 0)
_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
# Registers are given to warps, 256 at a time, and a launch is refused as if its warps were a multiple of four
# (cuda_occupancy.h, CUDA 13.0).
_WARP_REGISTERS, _WARPS = 256, 4


class EmulatedKernel:
    """A translated kernel on one device.

    Attributes:
        function: the CUfunction handle, so that it may stand where a kernel of `cupymla.launch` does; launches go
            through `launch`, which resets the model and reads what it reports.
        program: what it was loaded from.
        facts: launch facts that its source states, as for any kernel here.
        parameters: bytes of each parameter.
    """

    def __init__(self, program: Program, entry: str, device: int) -> None:
        if entry not in program.kernels:
            raise InputError("entry", "one of " + ", ".join(program.kernels), repr(entry))
        _require_hopper(device)
        self.program = program
        self.facts = program.facts
        image = Image(program.cubin)
        self.parameters, self._registers = image.parameters(entry), image.registers(entry)
        self._device = device
        # Launches allow what they need themselves.
        cubin = Cubin(program.cubin, entry, TARGET, {}, self.parameters, Resources())
        self._kernel = loader.load(cubin, device)
        self.function = self._kernel.function
        with driver.on_device(device):
            self._state = _global(self._kernel.library, b"cupymla_emulate_launch", ctypes.sizeof(LaunchState))
            self._report, self._report_address = _mapped_report()
            self._finished = _new_event()
        self._ctas = 0
        self._memory = 0

    def tensor_map(self, request: tensormap.TileMap) -> tensormap.EncodedMap:
        """A tensor map as a parameter of this kernel. Raises InputError and DriverError like `tensormap.encode`."""
        with driver.on_device(self._device):
            return tensormap.encode(request)

    def launch(
        self,
        geometry: Geometry,
        parameters: Sequence[Parameter],
        stream: int = 0,
        settings: Settings | None = None,
        maps: Sequence[KnownMap | ForeignMap] = (),
    ) -> None:
        """Launch once and wait for the end.

        Args:
            geometry: grid, block, shared memory and cluster, as on Blackwell; `pdl` is left out, as what prepares the
                model comes before the kernel in the stream.
            parameters: as for `cupymla.launch.Launcher`.
            stream: stream address.
            settings: mode and checks.
            maps: tensor maps that the kernel reaches in other ways than as parameters of their own. Gathers and
                copies for a CTA pair need to know the request behind their map.

        Raises:
            InputError: the launch cannot be, or its block needs more registers than there are; see `threads` of `load`.
            EmulationError: the kernel did what the ISA does not allow, or stood still.
            DriverError: the driver refuses, or the kernel faulted.
        """
        self.start(geometry, parameters, stream, settings or Settings(), maps)
        self.finish()

    def start(
        self,
        geometry: Geometry,
        parameters: Sequence[Parameter],
        stream: int,
        settings: Settings,
        maps: Sequence[KnownMap | ForeignMap] = (),
    ) -> None:
        """Launch without waiting. A kernel object has one launch under way at a time."""
        if settings.resident_clusters:
            expected = "0 on a GPU, whose own scheduler says which clusters begin"
            raise InputError("resident_clusters", expected, settings.resident_clusters)
        if settings.races != "unchecked":
            raise InputError("races", "'unchecked' on a GPU, where they are not looked for", repr(settings.races))
        launch.check(geometry)
        self._require_registers(geometry.block)
        with driver.on_device(self._device):
            self._prepare(geometry, stream, settings, tables.table(parameters, maps))
            Launcher(self, replace(geometry, pdl=False), parameters)(stream)
            code = driver.function("cuEventRecord", ctypes.c_void_p, ctypes.c_void_p)(self._finished, stream)
            if code:
                raise driver.error(code, "recording the end of an emulated launch")

    def _require_registers(self, threads: int) -> None:
        """Raise InputError for a block whose warps do not fit the register file: the driver's error names no reason."""
        per_warp = -(-self._registers * 32 // _WARP_REGISTERS) * _WARP_REGISTERS
        if not per_warp:
            return
        most = REGISTER_FILE // per_warp // _WARPS * _WARPS * 32
        if threads > most:
            fewer = f"load(..., threads={threads}) leaves each thread fewer, and so does __launch_bounds__({threads})"
            takes = f"of {self._registers} registers each, which is what {self.program.name} was linked for"
            raise InputError("block", f"at most {most} threads {takes}; {fewer}", threads)

    def finish(self, seconds: float = _WAIT_SECONDS) -> None:
        """Wait for the launch under way. Raises EmulationError and DriverError like `launch`."""
        query = driver.function("cuEventQuery", ctypes.c_void_p)
        deadline, pause = time.monotonic() + seconds, 2e-5
        with driver.on_device(self._device):
            while True:
                code = query(self._finished)
                if code == 0:
                    break
                if code != 600:
                    self._raise_fault(code)
                if time.monotonic() > deadline:
                    self._raise_reported()
                    raise EmulationError(0)
                time.sleep(pause)
                pause = min(2 * pause, 1e-3)
        self._raise_reported()

    def _raise_fault(self, code: int) -> NoReturn:
        """Raise DriverError for a fault, after which the context is of no use, whatever the model reported before."""
        doing = f"running {self.program.name} emulated"
        try:
            self._raise_reported()
        except EmulationError as reported:
            raise driver.error(code, f"{doing}, after a report: {reported}") from reported
        raise driver.error(code, doing)

    def close(self) -> None:
        """Give the model's memory back."""
        with driver.on_device(self._device):
            if self._memory:
                _call("cuMemFree", ctypes.c_uint64(self._memory))
                self._memory = self._ctas = 0

    def _raise_reported(self) -> None:
        report = self._report
        if report.raised:
            site = self.program.site(report.site)
            raise EmulationError(report.code, tuple(report.values), report.cta, report.thread, site)

    def _prepare(
        self, geometry: Geometry, stream: int, settings: Settings, infos: ctypes.Array[tables.TileInfo]
    ) -> None:
        x, y, z = geometry.grid
        ctas = x * y * z
        bytes_per_cta = self.program.cta_bytes
        if ctas > self._ctas:
            self.close()
            address = ctypes.c_uint64()
            _call("cuMemAlloc", ctypes.byref(address), ctypes.c_size_t(ctas * bytes_per_cta + _MAP_BYTES))
            self._memory, self._ctas = address.value, ctas
        ctypes.memset(ctypes.addressof(self._report), 0, ctypes.sizeof(Report))
        state = LaunchState(
            failure=self._report_address,
            ctas=self._memory,
            cta_count=ctas,
            mode=MODES.index(settings.mode),
            seed=settings.seed & 0xFFFFFFFF,
            checks=sum(CHECKS[check] for check in set(settings.checks)),
            removed=settings.removed,
            stalls=settings.stalls,
            patience_ns=int(settings.patience_seconds * 1e9),
            maps=self._memory + self._ctas * bytes_per_cta,
            map_count=tables.count(infos),
        )
        if ctypes.sizeof(infos) > _MAP_BYTES:
            raise InputError("maps", f"at most {_MAP_BYTES // ctypes.sizeof(tables.TileInfo)} tensor maps", len(infos))
        place, table = ctypes.c_uint64(state.maps), ctypes.c_void_p(ctypes.addressof(infos))
        _call("cuMemcpyHtoDAsync", place, table, ctypes.c_size_t(ctypes.sizeof(infos)), ctypes.c_void_p(stream))
        where, size = ctypes.c_uint64(self._memory), ctypes.c_size_t(ctas * bytes_per_cta)
        _call("cuMemsetD8Async", where, ctypes.c_ubyte(0), size, ctypes.c_void_p(stream))
        # Pageable host memory is copied before the call returns, so the struct may go.
        target, source = ctypes.c_uint64(self._state), ctypes.c_void_p(ctypes.addressof(state))
        _call("cuMemcpyHtoDAsync", target, source, ctypes.c_size_t(ctypes.sizeof(state)), ctypes.c_void_p(stream))


Source = str | Path | KernelSource | Program


@overload
def load(
    source: Source, entry: str | None = None, device: int = 0, on: Literal["gpu"] = "gpu", threads: int = 0
) -> EmulatedKernel: ...
@overload
def load(
    source: Source, entry: str | None = None, device: int = 0, *, on: Literal["host"], threads: int = 0
) -> HostProgram: ...
@overload
def load(
    source: Source, entry: str | None = None, device: int = 0, *, on: Literal["gpu", "host", "auto"], threads: int = 0
) -> EmulatedKernel | HostProgram: ...
def load(
    source: Source,
    entry: str | None = None,
    device: int = 0,
    on: Literal["gpu", "host", "auto"] = "gpu",
    threads: int = 0,
) -> EmulatedKernel | HostProgram:
    """A kernel for Blackwell, translated, ready to be launched.

    Args:
        source: PTX text, the path of a file of it, a kernel's source to compile, or for a GPU a program that was
            built before.
        entry: the kernel; may be left out where there is one only, or where `source` names it.
        device: CUDA ordinal, on a GPU.
        on: "gpu" for a Hopper GPU, "host" for this machine's processor, "auto" for the GPU where `device` is a Hopper
            GPU, and the host elsewhere.
        threads: the largest CTA it is launched with, on a GPU; 0 takes what the kernel's own bounds say, and 512 where
            they say nothing.

    Returns:
        What has `launch(geometry, parameters, settings=..., maps=...)` and `tensor_map(request)`.

    Raises:
        PtxError: the PTX cannot be translated.
        InputError: no kernel of that name, or several and no name; no such file; a program for the host.
        UnsupportedError: the GPU is no Hopper GPU.
        CompileError, DriverError: like `program.build` and the loader, or there is no C++ compiler.
    """
    if on == "auto":
        on = fitting_machine(device)
    if on == "gpu":
        _require_hopper(device)
    if isinstance(source, Program):
        if on == "host":
            raise InputError("source", "PTX or a kernel's source for the host", "a program for a GPU")
        return EmulatedKernel(source, _only(entry, source.kernels), device)
    if isinstance(source, KernelSource) and on == "gpu":
        return EmulatedKernel(kept(source, threads), entry or source.entry, device)
    text, name, named = _ptx(source)
    if on == "host":
        return load_host(text, entry or named, name)
    program = build(text, name, threads)
    return EmulatedKernel(program, _only(entry or named, program.kernels), device)


def fitting_machine(device: int = 0) -> Literal["gpu", "host"]:
    """Where translated kernels run here: on the GPU where that is a Hopper, else on the processor."""
    return "gpu" if driver.available() and _capability(device) == _HOPPER else "host"


def _capability(device: int) -> tuple[int, int]:
    """The compute capability of the GPU itself; in `testing.translated`, `driver` tells that of what it passes for."""
    handle, found = ctypes.c_int(), ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
    numbers = []
    for attribute in _CAPABILITY:
        _call("cuDeviceGetAttribute", ctypes.byref(found), ctypes.c_int(attribute), handle)
        numbers.append(found.value)
    return numbers[0], numbers[1]


def _require_hopper(device: int) -> None:
    major, minor = _capability(device)
    if (major, minor) != _HOPPER:
        name = f"{driver.device_name(device)} (compute capability {major}.{minor})"
        instead = 'a Hopper GPU (compute capability 9.0), or the processor of this machine with on="host"'
        raise UnsupportedError("running a kernel that was translated to sm_90a", name, instead)


def _only(entry: str | None, kernels: Sequence[str]) -> str:
    if entry is None and len(kernels) != 1:
        raise InputError("entry", "a name, for there are " + ", ".join(kernels), None)
    return kernels[0] if entry is None else entry


def _ptx(source: str | Path | KernelSource) -> tuple[str, str, str | None]:
    """PTX, what errors call it, and the kernel if the source names one."""
    if isinstance(source, KernelSource):
        return ptx(source), str(source), source.entry
    if isinstance(source, str) and ("\n" in source or not source.endswith(".ptx")):
        return source, "<ptx>", None
    try:
        return Path(source).read_text(encoding="utf-8"), str(source), None
    except OSError as error:
        raise InputError("source", "PTX, or a file that can be read", f"{source} ({error})") from error


def _call(name: str, *arguments: ctypes._SimpleCData[int] | object) -> None:
    types = tuple(
        type(argument) if isinstance(argument, ctypes._SimpleCData) else ctypes.c_void_p for argument in arguments
    )
    code = driver.function(name, *types)(*arguments)
    if code:
        raise driver.error(code, f"{name} for an emulated launch")


def _global(library: int, name: bytes, size: int) -> int:
    address, bytes_ = ctypes.c_uint64(), ctypes.c_size_t()
    _call(
        "cuLibraryGetGlobal",
        ctypes.byref(address),
        ctypes.byref(bytes_),
        ctypes.c_void_p(library),
        ctypes.c_char_p(name),
    )
    if bytes_.value != size:
        raise DriverError(0, "size", f"{name.decode()} has {bytes_.value} bytes, not {size}", "loading the model")
    return address.value


def _mapped_report() -> tuple[Report, int]:
    """A report in host memory that the device writes to, and its device address. It lives as long as the process."""
    host, device = ctypes.c_void_p(), ctypes.c_uint64()
    portable_and_mapped = 3
    _call(
        "cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(ctypes.sizeof(Report)), ctypes.c_uint(portable_and_mapped)
    )
    _call("cuMemHostGetDevicePointer", ctypes.byref(device), host, ctypes.c_uint(0))
    return Report.from_address(host.value or 0), device.value


def _new_event() -> int:
    event = ctypes.c_void_p()
    without_timing = 2
    _call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(without_timing))
    return event.value or 0
