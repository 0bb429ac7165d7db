"""Translated kernels on the host's processor: compiled as C++ and run thread by thread, without any GPU.

The kernel is the very PTX that would be assembled for a GPU, the model is compiled from the same source. What the
hardware adds (mbarriers, TMA, warp collectives) is `runtime.cpp`'s, `warps.cpp`'s and `copies.cpp`'s. Needs g++ or
whatever else `c++` is, on x86-64.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import re
from collections.abc import Sequence

from cupymla import arch
from cupymla.errors import InputError
from cupymla.launch import Geometry, Parameter, check
from cupymla.tensormap import TileMap

from ...ptx import Places
from ...ptx.approximation import APPROXIMATIONS
from ...ptx.races import RACES
from .. import maps as tables
from ..failures import EmulationError, HostError
from ..maps import ELEMENT_BYTES, ForeignMap, KnownMap
from ..settings import CHECKS, MODES, LaunchState, Report, Settings
from ..translate import Translation
from .library import Model, available, cta_bytes, library, translated
from .memory import Arrays
from .recompile import mangled

_SWITCHES = 100_000_000

# `Number` of runtime.hpp: what reductions by a tensor map take its elements for.
NUMBERS = {"uint32": 0, "int32": 1, "uint64": 2, "int64": 3, "float32": 4, "float64": 5, "float16": 6, "bfloat16": 7}


class _Request(ctypes.Structure):
    """`LaunchRequest` of runtime.cpp."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32 * 3),
        ("static_bytes", ctypes.c_uint32),
        ("dynamic_bytes", ctypes.c_uint32),
        ("dependent", ctypes.c_uint32),
        ("parameter_bytes", ctypes.c_uint32),
        ("resident", ctypes.c_uint32),
        ("approximation", ctypes.c_uint32),
        ("races", ctypes.c_uint32),
        ("unit", ctypes.c_uint32),
        ("grid_unit", ctypes.c_uint32),
        ("mode", ctypes.c_uint32),
        ("registers", ctypes.c_uint32),
        ("strict", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("limit", ctypes.c_uint64),
        ("patience", ctypes.c_uint64),
        ("relaxed", ctypes.c_char_p),
        ("regions", ctypes.c_void_p),
        ("beside", ctypes.c_void_p),
        ("watched", ctypes.c_void_p),
        ("watcher", ctypes.c_void_p),
        ("region_count", ctypes.c_uint32),
        ("beside_count", ctypes.c_uint32),
        ("launch", ctypes.c_uint32),
        ("watched_count", ctypes.c_uint32),
        ("lets_in_early", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
        ("turns", ctypes.c_uint64),
    )


class _HostMap(ctypes.Structure):
    """`TileMap` of copies.cpp."""

    _fields_ = (
        ("magic", ctypes.c_uint64),
        ("pointer", ctypes.c_uint64),
        ("shape", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 4),
        ("rank", ctypes.c_uint32),
        ("element_bits", ctypes.c_uint32),
        ("swizzle", ctypes.c_uint32),
        ("box", ctypes.c_uint32 * 5),
        ("nan", ctypes.c_uint16),
        ("number", ctypes.c_uint16),
    )


class HostMap:
    """A tensor map for the host machine, to be passed where a GPU's kernel takes an encoded one.

    Attributes:
        address: of its 128 bytes.
        request: what it was made from.
    """

    def __init__(self, request: TileMap) -> None:
        self.request = request
        rank = len(request.shape)
        element = ELEMENT_BYTES[request.dtype]
        self._map = _HostMap(
            0x70614D656C69546D, request.ptr, rank=rank, element_bits=8 * element, swizzle=request.swizzle
        )
        self._map.nan = request.fill == "nan"
        self._map.number = NUMBERS.get(request.dtype, 0)
        self._map.shape[:rank] = request.shape
        self._map.strides[: rank - 1] = request.strides_bytes
        self._map.box[:rank] = request.box
        if request.swizzle and request.box[0] * element > request.swizzle:
            raise InputError("box", f"rows of at most {request.swizzle} bytes", request.box[0] * element)
        self._bytes = ctypes.create_string_buffer(bytes(self._map).ljust(128, b"\0"), 128)
        self.address = ctypes.addressof(self._bytes)


class HostProgram:
    """A translated kernel as a shared library.

    Args:
        translation: the module.
        entry: which of its kernels.
        model: "native" is the model compiled as C++; "ptx" is its PTX, recompiled like the kernel, and slow.

    Attributes:
        translation: what it was made from.
        entry: the kernel.
        shape: its parameters and static shared memory.
    """

    def __init__(self, translation: Translation, entry: str, model: Model = "native") -> None:
        if entry not in translation.kernels:
            raise InputError("entry", "one of " + ", ".join(translation.kernels), repr(entry))
        self.translation = translation
        self.entry = entry
        self._model = model
        self._load, self.shape = library(translation, entry, model)

    @functools.cached_property
    def _library(self) -> ctypes.CDLL:
        """Of the first launch."""
        return self._load()

    @functools.cached_property
    def _state(self) -> LaunchState:
        return LaunchState.in_dll(self._library, mangled("cupymla_emulate_launch"))

    def tensor_map(self, request: TileMap) -> HostMap:
        """A tensor map as a parameter of this kernel. Raises InputError."""
        return HostMap(request)

    def launch(
        self,
        geometry: Geometry,
        parameters: Sequence[Parameter],
        settings: Settings | None = None,
        maps: Sequence[KnownMap | ForeignMap] = (),
        switches: int = 0,
        arrays: Arrays | None = None,
    ) -> int:
        """Run once, to the end.

        Args:
            geometry: grid, block, shared memory and cluster, as on Blackwell. With `pdl` a thread's use of global
                memory before its griddepcontrol.wait is an error.
            parameters: as for `cupymla.launch.Launcher`; pointers are host addresses, tensor maps are `HostMap`s.
            settings: mode, checks and seed; the seed also decides in which order threads run.
            maps: tensor maps that the kernel reaches in other ways than as parameters of their own.
            switches: how often threads may take turns before the kernel is given up; 0 for a generous number.
            arrays: all global memory that the kernel may use; None lets it use any.

        Returns:
            How often threads took turns.

        Raises:
            InputError: a launch that a GPU of the kernel's target would refuse.
            EmulationError: the kernel did what the ISA does not allow, or stood still.
            HostError: it did what no GPU allows.
        """
        chosen = settings or Settings()
        self._check(geometry)
        if chosen.races != "unchecked" and self._model == "ptx":
            raise InputError("races", "'unchecked' with the model as PTX", repr(chosen.races))
        ctas = geometry.grid[0] * geometry.grid[1] * geometry.grid[2]
        # Zeros that take no memory until they are written: most kernels have no use for what the model keeps of a CTA.
        memory = mmap.mmap(-1, ctas * cta_bytes(self._library))
        report = Report()
        ctypes.memset(ctypes.addressof(self._state), 0, ctypes.sizeof(LaunchState))
        self._state.failure = ctypes.addressof(report)
        self._state.ctas = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
        self._state.cta_count = ctas
        self._state.mode = MODES.index(chosen.mode)
        self._state.seed = chosen.seed & 0xFFFFFFFF
        self._state.checks = sum(CHECKS[check] for check in set(chosen.checks))
        self._state.removed = chosen.removed
        self._state.stalls = chosen.stalls
        self._state.patience_ns = int(chosen.patience_seconds * 1e9)
        infos = tables.table(parameters, maps)
        self._state.maps = ctypes.addressof(infos)
        self._state.map_count = tables.count(infos)
        packed = self._pack(parameters)
        message, turns = self._execute(geometry, packed, chosen, switches or _SWITCHES, arrays or Arrays())
        if report.raised:
            site = self.translation.site(report.site)
            raise EmulationError(report.code, tuple(report.values), report.cta, report.thread, site)
        if message:
            raise HostError(self._told(message))
        return turns

    def _told(self, message: str) -> str:
        """A message in which lines are those of the PTX that was translated, the last one with its CUDA place."""
        lines, places = self.translation.lines, Places(self.translation.text)

        def told(found: re.Match[str]) -> str:
            line = int(found[1])
            place = places.of(line)
            return f"PTX line {lines[line - 1] if line <= len(lines) else line}" + (f" ({place})" if place else "")

        return re.sub(r"PTX line (\d+)", told, message)

    def _check(self, geometry: Geometry) -> None:
        check(geometry)
        limit, static = _most_shared_bytes(self.translation.source), self.shape.static_bytes
        if geometry.smem_bytes + static > limit:
            beside = f" beside {static} of the kernel's own" if static else ""
            raise InputError("smem_bytes", f"at most {limit - static} bytes{beside}", geometry.smem_bytes)
        cluster = self.shape.cluster or (geometry.cluster, 1, 1)
        if any(extent % ctas for extent, ctas in zip(geometry.grid, cluster, strict=True)):
            raise InputError("grid", f"multiples of the cluster's {list(cluster)} CTAs", list(geometry.grid))

    def _pack(self, parameters: Sequence[Parameter]) -> ctypes.Array[ctypes.c_char]:
        places = self.shape.parameters
        if len(parameters) != len(places):
            raise InputError("parameters", f"{len(places)} of them", len(parameters))
        end = max((offset + size for offset, size in places), default=0)
        packed = ctypes.create_string_buffer(end + 128)
        for number, (parameter, (offset, size)) in enumerate(zip(parameters, places, strict=True)):
            if isinstance(parameter, ctypes.Structure | ctypes._SimpleCData):
                if ctypes.sizeof(parameter) != size:
                    raise InputError("parameters", f"{size} bytes as number {number}", ctypes.sizeof(parameter))
                source = ctypes.addressof(parameter)
            else:
                source = parameter.address
            ctypes.memmove(ctypes.addressof(packed) + offset, source, size)
        return packed

    def _execute(
        self,
        geometry: Geometry,
        packed: ctypes.Array[ctypes.c_char],
        settings: Settings,
        switches: int,
        arrays: Arrays,
    ) -> tuple[str, int]:
        request = _Request(block=geometry.block, static_bytes=self.shape.static_bytes, limit=switches)
        request.seed, request.resident = settings.seed + 1, settings.resident_clusters
        request.approximation = APPROXIMATIONS.index(settings.approximation)
        request.races, request.unit = RACES.index(settings.races), self.shape.smallest_store
        request.grid_unit = self.shape.smallest_global_store
        request.mode, request.registers = MODES.index(settings.mode), self.shape.registers
        request.strict = "written" in settings.checks
        request.patience = int(settings.patience_seconds * 1e9)
        request.relaxed = bytes(1) + bytes(_is_relaxed(site.text) for site in self.translation.sites)
        request.dynamic_bytes = geometry.smem_bytes
        # The model as PTX keeps its state in what it takes for global memory.
        request.dependent = geometry.pdl and self._model == "native"
        request.parameter_bytes = ctypes.sizeof(packed)
        request.grid[:] = geometry.grid
        request.cluster[:] = self.shape.cluster or (geometry.cluster, 1, 1)
        if settings.races != "unchecked":
            arrays.remember()
        arrays.launch += 1
        regions = arrays.table()
        beside = sorted(arrays.beside) if geometry.pdl else []
        numbers = (ctypes.c_uint32 * len(beside))(*beside)
        request.regions, request.region_count = ctypes.addressof(regions), len(regions)
        request.beside, request.beside_count = ctypes.addressof(numbers), len(beside)
        request.launch = arrays.launch
        watched, watcher = arrays.watched()
        request.watched, request.watched_count = ctypes.addressof(watched), len(watched)
        request.watcher = ctypes.cast(watcher, ctypes.c_void_p)
        message = ctypes.create_string_buffer(1024)
        entry = ctypes.cast(getattr(self._library, mangled(self.entry)), ctypes.c_void_p)
        pointers = (entry, ctypes.byref(request), ctypes.addressof(packed), ctypes.addressof(message))
        run = self._library.cupymla_run
        run.argtypes = (*(ctypes.c_void_p,) * 4, ctypes.c_uint64)
        run(*pointers, ctypes.sizeof(message))
        # A kernel that lets the next one in before it has waited itself leaves those ahead of it to that one too.
        arrays.beside = frozenset({arrays.launch, *(beside if request.lets_in_early else ())})
        return message.value.decode(), request.turns


def _most_shared_bytes(target: str) -> int:
    """Shared memory that a CTA may have; of a target that no kernel here is compiled for, what Blackwell has."""
    return next((each for each in arch.ARCHES if each.name == target), arch.named("sm_100f")).smem_bytes


def _is_relaxed(instruction: str) -> bool:
    return "barrier.cluster.arrive.relaxed" in instruction or "cp.async.bulk.wait_group.read" in instruction


def load(ptx: str, entry: str | None = None, name: str = "<ptx>") -> HostProgram:
    """Translate PTX for sm_100f and make it ready to run on the host.

    Args:
        ptx: the text.
        entry: the kernel; may be left out where there is one only.
        name: what errors call it.

    Raises:
        PtxError: the PTX cannot be translated or recompiled.
        InputError: no kernel of that name, or several and no name.
        CompileError: there is no C++ compiler, or none of NVRTC for the model.
    """
    translation = translated(ptx, name)
    if entry is None:
        if len(translation.kernels) != 1:
            raise InputError("entry", "a name, for there are " + ", ".join(translation.kernels), None)
        entry = translation.kernels[0]
    return HostProgram(translation, entry)


__all__ = ["HostError", "HostMap", "HostProgram", "available", "load"]
