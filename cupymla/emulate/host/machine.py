"""Translated kernels on the host's processor: compiled as C++ and run thread by thread, without any GPU.

The kernel and the model are the very PTX that would be assembled for a GPU. What the hardware adds (mbarriers, TMA,
warp collectives) is `runtime.cpp`'s. Needs g++ or whatever else `c++` is, on x86-64.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from ...build import cache, compiler
from ...errors import CompileError, CupymlaError, InputError
from ...launch import Geometry, Parameter
from ...tensormap import TileMap
from .. import maps as tables
from ..failures import EmulationError
from ..maps import ELEMENT_BYTES, KnownMap
from ..program import MODEL
from ..run import CHECKS, MODES, LaunchState, Report, Settings
from ..translate import Translation, translate
from .recompile import KernelShape, mangled, recompile

_HERE = Path(__file__).resolve().parent
_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-w", f"-I{_HERE}")
_SWITCHES = 400_000_000


class HostError(CupymlaError, RuntimeError):
    """A kernel did what no GPU allows, such as an access outside shared memory, or never ended."""


class _Request(ctypes.Structure):
    """`LaunchRequest` of runtime.cpp."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32 * 3),
        ("static_bytes", ctypes.c_uint32),
        ("dynamic_bytes", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("limit", ctypes.c_uint64),
    )


class _HostMap(ctypes.Structure):
    """`TileMap` of runtime.cpp."""

    _fields_ = (
        ("magic", ctypes.c_uint64),
        ("pointer", ctypes.c_uint64),
        ("shape", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 4),
        ("rank", ctypes.c_uint32),
        ("element_bytes", ctypes.c_uint32),
        ("swizzle", ctypes.c_uint32),
        ("box", ctypes.c_uint32 * 5),
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
        self._map = _HostMap(0x70614D656C69546D, request.ptr, rank=rank, element_bytes=element, swizzle=request.swizzle)
        self._map.shape[:rank] = request.shape
        self._map.strides[: rank - 1] = request.strides_bytes
        self._map.box[:rank] = request.box
        if request.swizzle and request.box[0] * element > request.swizzle:
            raise InputError("box", f"rows of at most {request.swizzle} bytes", request.box[0] * element)
        self._bytes = ctypes.create_string_buffer(bytes(self._map).ljust(128, b"\0"), 128)
        self.address = ctypes.addressof(self._bytes)


def available() -> bool:
    """Whether kernels can run here: a C++ compiler, on x86-64."""
    return shutil.which("c++") is not None and platform.machine() in ("x86_64", "AMD64")


def _compile(text: str, name: str) -> Path:
    """An object file of a C++ text, kept by content."""
    runtime = (_HERE / "runtime.hpp").read_bytes()
    key = hashlib.sha256(text.encode() + runtime + " ".join(_FLAGS[:-1]).encode()).hexdigest()[:32]
    folder = _folder()
    made = folder / f"{name}-{key}.o"
    if not made.is_file():
        source = folder / f"{name}-{key}.{os.getpid()}.cpp"
        source.write_text(text)
        part = source.with_suffix(".part")
        _run(("c++", *_FLAGS, "-c", "-o", str(part), str(source)), name)
        part.replace(made)
        source.unlink()
    return made


@functools.lru_cache(maxsize=1)
def _folder() -> Path:
    kept = cache.location()
    if kept is None:
        return Path(tempfile.mkdtemp(prefix="cupymla-"))
    folder = kept / "host"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _run(command: Sequence[str], name: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(name, "the C++ compiler rejects it", done.stderr[:4000])


_lock = threading.Lock()


@functools.lru_cache(maxsize=1)
def _model() -> Path:
    text = re.sub(r"^\s*\.loc .*$", "", compiler.ptx(MODEL, linked=True), flags=re.MULTILINE)
    return _compile(recompile(text, "model").text, "model")


class HostProgram:
    """A translated kernel as a shared library.

    Attributes:
        translation: what it was made from.
        entry: the kernel.
        shape: its parameters and static shared memory.
    """

    def __init__(self, translation: Translation, entry: str) -> None:
        if entry not in translation.kernels:
            raise InputError("entry", "one of " + ", ".join(translation.kernels), repr(entry))
        self.translation = translation
        self.entry = entry
        with _lock:
            unit = recompile(translation.text, translation.name, only=entry)
            self.shape: KernelShape = unit.kernels[entry]
            stubs = "\n".join(_stub(name, count) for name, count in (("vprintf", 3), ("__assertfail", 5)))
            objects = [
                _compile(unit.text + stubs, "kernel"),
                _compile((_HERE / "runtime.cpp").read_text(), "runtime"),
                _model(),
            ]
            with tempfile.NamedTemporaryFile(prefix="cupymla-", suffix=".so", delete=False) as file:
                library = Path(file.name)
            _run(("c++", "-shared", "-o", str(library), *map(str, objects)), translation.name)
            self._library = ctypes.CDLL(str(library))
            library.unlink()
        self._state = LaunchState.in_dll(self._library, mangled("cupymla_emulate_launch"))
        self._cta_bytes = _fact(self._library)

    def launch(
        self,
        geometry: Geometry,
        parameters: Sequence[Parameter],
        settings: Settings | None = None,
        maps: Sequence[KnownMap] = (),
        switches: int = 0,
    ) -> None:
        """Run once, to the end.

        Args:
            geometry: grid, block, shared memory and cluster, as on Blackwell.
            parameters: as for `cupymla.launch.Launcher`; pointers are host addresses, tensor maps are `HostMap`s.
            settings: mode, checks and seed; the seed also decides in which order threads run.
            maps: tensor maps that the kernel reaches in other ways than as parameters of their own.
            switches: how often threads may take turns before the kernel is given up; 0 for a generous number.

        Raises:
            EmulationError: the kernel did what the ISA does not allow, or stood still.
            HostError: it did what no GPU allows.
        """
        chosen = settings or Settings()
        ctas = geometry.grid[0] * geometry.grid[1] * geometry.grid[2]
        memory = (ctypes.c_ubyte * (ctas * self._cta_bytes + 256))()
        report = Report()
        ctypes.memset(ctypes.addressof(self._state), 0, ctypes.sizeof(LaunchState))
        self._state.failure = ctypes.addressof(report)
        self._state.ctas = -(-ctypes.addressof(memory) // 256) * 256
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
        message = self._execute(geometry, self._pack(parameters), chosen.seed, switches or _SWITCHES)
        if report.raised:
            site = self.translation.site(report.site)
            raise EmulationError(report.code, tuple(report.values), report.cta, report.thread, site)
        if message:
            raise HostError(message)

    def _pack(self, parameters: Sequence[Parameter]) -> ctypes.Array[ctypes.c_char]:
        places = self.shape.parameters
        if len(parameters) != len(places):
            raise InputError("parameters", f"{len(places)} of them", len(parameters))
        end = max((offset + size for offset, size in places), default=0)
        packed = ctypes.create_string_buffer(end + 128)
        for parameter, (offset, size) in zip(parameters, places, strict=True):
            if isinstance(parameter, ctypes.Structure | ctypes._SimpleCData):
                source = ctypes.addressof(parameter)
            else:
                source = parameter.address
            ctypes.memmove(ctypes.addressof(packed) + offset, source, size)
        return packed

    def _execute(self, geometry: Geometry, packed: ctypes.Array[ctypes.c_char], seed: int, switches: int) -> str:
        request = _Request(block=geometry.block, static_bytes=self.shape.static_bytes, seed=seed + 1, limit=switches)
        request.dynamic_bytes = geometry.smem_bytes
        request.grid[:] = geometry.grid
        request.cluster[:] = self.shape.cluster or (geometry.cluster, 1, 1)
        message = ctypes.create_string_buffer(1024)
        entry = ctypes.cast(getattr(self._library, mangled(self.entry)), ctypes.c_void_p)
        pointers = (entry, ctypes.byref(request), ctypes.addressof(packed), ctypes.addressof(message))
        run = self._library.cupymla_run
        run.argtypes = (*(ctypes.c_void_p,) * 4, ctypes.c_uint64)
        run(*pointers, ctypes.sizeof(message))
        return message.value.decode()


def _stub(name: str, count: int) -> str:
    """A function of the CUDA runtime that device code may call and nothing here needs: weak, and it does nothing."""
    parameters = ", ".join(("machine::Thread&", *("void*",) * count))
    return f'\nextern "C" __attribute__((weak)) void {mangled(name)}({parameters}) {{}}\n'


def _fact(library: ctypes.CDLL) -> int:
    """`cta_bytes` of the model's launch facts, the second of them."""
    values = (ctypes.c_uint32 * 3).in_dll(library, mangled("cupymla_fact_values"))
    return int(values[1])


def load(ptx: str, entry: str | None = None, name: str = "<ptx>") -> HostProgram:
    """Translate PTX for sm_100a and make it ready to run on the host.

    Args:
        ptx: the text.
        entry: the kernel; may be left out where there is one only.
        name: what errors call it.

    Raises:
        PtxError: the PTX cannot be translated or recompiled.
        InputError: no kernel of that name, or several and no name.
        CompileError: there is no C++ compiler, or none of NVRTC for the model.
    """
    translation = translate(ptx, name)
    if entry is None:
        if len(translation.kernels) != 1:
            raise InputError("entry", "a name, for there are " + ", ".join(translation.kernels), None)
        entry = translation.kernels[0]
    return HostProgram(translation, entry)
