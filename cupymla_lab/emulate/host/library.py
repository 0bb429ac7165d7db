"""Translated kernels and the model as shared libraries of the host, kept by content.

The model in `model/` is compiled as C++, with `model_host.hpp` in place of CUDA; or, to check what a GPU's compiler
makes of it, from its PTX.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from cupymla.build import cache, compiler
from cupymla.build.source import closure, cuda_root
from cupymla.errors import CompileError

from ...ptx import PtxError
from .. import by_content
from ..code import MODEL as FUNCTIONS
from ..program import MODEL, own_files
from ..translate import Site, Translation, translate
from .recompile import KernelShape, Unit, mangled, recompile

Model = Literal["native", "ptx"]

_HERE = Path(__file__).resolve().parent
_STANDARD = ("-std=c++17", "-fPIC", "-w", f"-I{_HERE}")
OPTIMISATION = "-Og"
"""Of kernels, functions of tens of thousands of lines: it compiles them in two thirds of the time that -O1 takes, and
what it makes runs hardly slower, as most of a run is the machine's. The tests, which run a kernel a few times, take
-O0: it halves that once more, and runs take a tenth to a third longer."""
_MODEL_FLAGS = ("-O2", "-DCUPYMLA_HOST_MACHINE", *_STANDARD, f"-I{_HERE / 'include'}")
# Functions of the CUDA runtime that device code may call, with the number of their parameters, each of which is a
# place, and what is done here. What is printed is not shown.
_RUNTIME = (
    ("vprintf", 3, ""),
    (
        "__assertfail",
        5,
        'machine::broken("assertion `%s\' of %s fails, %s:%u", *(const char**)p0, *(const char**)p3,'
        " *(const char**)p1, *(unsigned*)p2);",
    ),
)

_PARTS = (("races", "wgmma", "memory"), ("runtime", "grid", "copies", "waits", "warps"))
"""The machine's files by the compilations that they go into: one apiece would parse the headers eight times."""

_lock = threading.Lock()


def available() -> bool:
    """Whether kernels can run here: a C++ compiler, on x86-64."""
    there = shutil.which("c++") is not None or importlib.util.find_spec("ziglang") is not None
    return there and platform.machine() in ("x86_64", "AMD64")


def translated(ptx: str, name: str) -> Translation:
    """A translation of PTX, from the cache's folder where it was made before. Raises PtxError."""
    file = _folder() / f"translation-{by_content.digest(ptx, *own_files())}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(file.read_text(encoding="utf-8"))
        kept |= {field: tuple(kept[field]) for field in ("kernels", "lines")}
        return Translation(**{**kept, "name": name, "sites": tuple(Site(**site) for site in kept["sites"])})
    with _collector_at_rest():
        made = translate(ptx, name)
    with contextlib.suppress(OSError):
        cache.keep(file, lambda part: part.write_text(json.dumps(asdict(made)), encoding="utf-8"))
    return made


def library(
    translation: Translation, entry: str, model: Model = "native"
) -> tuple[Callable[[], ctypes.CDLL], KernelShape]:
    """What loads a kernel with the model and the machine, by itself, and what a launch has to know of it.

    Compiling it takes seconds, so it waits until somebody loads it. Raises PtxError and, when it is loaded,
    CompileError.
    """
    with _lock:
        everything = (*_headers(), *_writers(), *_parts(), *(member.digest for member in closure(MODEL)))
        key = by_content.digest(translation.text, entry, model, *everything, *_kernel_flags()[:-1])
        file = _folder() / f"kernel-{key}.so"
        facts = file.with_suffix(".json")
        made = None if facts.is_file() else _recompiled(translation, entry)
        if made is not None:
            kept = json.dumps(asdict(made.kernels[entry]))
            cache.keep(facts, lambda part: part.write_text(kept, encoding="utf-8"))
        shape = _shape(json.loads(facts.read_text(encoding="utf-8")))

    def load() -> ctypes.CDLL:
        with _lock:
            if not file.is_file():
                with _one_process(facts.with_suffix(".lock")):
                    if not file.is_file():
                        _build(translation, made or _recompiled(translation, entry), model, file)
            return _load(file)

    return load, shape


def _build(translation: Translation, unit: Unit, model: Model, file: Path) -> None:
    """Make a kernel's library."""
    text = unit.text + "".join(_stub(*function) for function in _RUNTIME)
    with _one_process(_folder() / "shared.lock"):
        shared = _shared(model)
        flags = (*_header_flags(), *_kernel_flags())
    objects = [_object(text, "unit", flags), *shared]
    link = (*_linker(), "-shared", "-o")
    cache.keep(file, lambda part: _run((*link, str(part), *map(str, objects)), translation.name))


def _recompiled(translation: Translation, entry: str) -> Unit:
    """A kernel as C++; errors name the lines of the PTX that was translated."""
    try:
        with _collector_at_rest():
            return recompile(translation.text, translation.name, only=entry)
    except PtxError as error:
        raise PtxError(error.name, translation.origin(error.line), error.what, error.instruction) from error


@contextlib.contextmanager
def _collector_at_rest() -> Iterator[None]:
    """A block that makes a hundred thousand objects which all live on: looking through them takes a fifth of it."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def cta_bytes(loaded: ctypes.CDLL) -> int:
    """`cta_bytes` of the model's launch facts, the second of them."""
    name = mangled("cupymla_fact_values")
    values = (ctypes.c_uint32 * 3).in_dll(loaded, name)
    return int(values[1])


def _load(file: Path) -> ctypes.CDLL:
    """A copy of the library: two programs of one kernel keep their own state."""
    with tempfile.NamedTemporaryFile(prefix="cupymla-", suffix=".so", delete=False) as copy:
        place = Path(copy.name)
    try:
        shutil.copyfile(file, place)
        return ctypes.CDLL(str(place))
    finally:
        place.unlink()


def _shape(facts: dict[str, object]) -> KernelShape:
    places, cluster = facts["parameters"], facts["cluster"]
    assert isinstance(places, list) and isinstance(facts["static_bytes"], int)
    x, y, z = cluster if isinstance(cluster, list) else (0, 0, 0)
    smallest, of_global, registers = facts["smallest_store"], facts["smallest_global_store"], facts["registers"]
    assert isinstance(smallest, int) and isinstance(of_global, int) and isinstance(registers, int)
    parameters = tuple((offset, size) for offset, size in places)
    extents = (x, y, z) if x else None
    return KernelShape(str(facts["symbol"]), parameters, facts["static_bytes"], extents, smallest, of_global, registers)


# The parts of a library -------------------------------------------------------------------------------------------


def _shared(model: Model) -> list[Path]:
    """The machine and the model, compiled side by side: whoever waits for them leaves a core idle."""
    _headers()  # which all of them ask for

    def machine(files: Sequence[str]) -> Path:
        text = "".join(f'#include "{name}.cpp"\n' for name in files)
        return _object(text, "machine", _MODEL_FLAGS, by_content.digests(_HERE / f"{name}.cpp" for name in files))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = pool.submit(_native if model == "native" else _from_ptx)
        return [*pool.map(machine, _PARTS), made.result()]


def _native() -> Path:
    """The model as C++."""
    lines = [f"#define {name} {mangled(name)}" for name in ("cupymla_emulate_launch", "cupymla_fact_values")]
    lines += ['#include "model_host.hpp"', '#include "model/model.cu"', *map(_wrapper, FUNCTIONS)]
    dispatch = mangled("cupymla_emulate_dispatch")
    lines += [
        f'extern "C" void {dispatch}(machine::Thread&, void*, void*);',
        'extern "C" void cupymla_emulate_dispatch(uint32_t number, const uint64_t* operands) {',
        f"  {dispatch}(*machine::current, &number, &operands);",
        "}",
    ]
    sources = tuple(member.digest for member in closure(MODEL))
    return _object("\n".join(lines), "model", (*_MODEL_FLAGS, f"-I{cuda_root()}", f"-I{_HERE.parent}"), sources)


def _wrapper(name: str) -> str:
    """A function of the model as recompiled code calls it: with the addresses of its result and parameters."""
    result, parameters = FUNCTIONS[name]
    names = [f"p{i}" for i in range(len(parameters))]
    heads = ["machine::Thread&", *(["void* result"] if result else []), *(f"void* {each}" for each in names)]
    loads = [f"machine::load<uint{bits}_t>({each})" for each, bits in zip(names, parameters, strict=True)]
    called = f"cupymla_emulate_{name}({', '.join(loads)})"
    body = f"machine::store<uint{result}_t>(result, {called})" if result else called
    return f'extern "C" void {mangled(f"cupymla_emulate_{name}")}({", ".join(heads)}) {{ {body}; }}'


@functools.lru_cache(maxsize=1)
def _from_ptx() -> Path:
    """The model as a GPU's compiler leaves it."""
    sources = (*_headers(), *_writers(), *(member.digest for member in closure(MODEL)), str(compiler.toolchain()))
    made = _folder() / f"model-ptx-{by_content.digest(*sources, *_kernel_flags()[:-1])}.o"
    if not made.is_file():
        text = re.sub(r"^\s*\.loc .*$", "", compiler.linked_ptx(MODEL), flags=re.MULTILINE)
        _make(made, recompile(text, "model").text, "model-ptx", _kernel_flags())
    return made


def _stub(name: str, count: int, body: str) -> str:
    """A function of the CUDA runtime, weak, for a kernel that calls it."""
    parameters = ", ".join(("machine::Thread&", *(f"void* p{place}" for place in range(count))))
    return f'\nextern "C" __attribute__((weak)) void {mangled(name)}({parameters}) {{ {body} }}\n'


def _kernel_flags() -> tuple[str, ...]:
    return OPTIMISATION, *_STANDARD


# Compiling ---------------------------------------------------------------------------------------------------------


def _object(text: str, name: str, flags: Sequence[str], sources: Sequence[str] = ()) -> Path:
    """An object file of a C++ text, kept by content. `sources`: digests of what it includes beside the headers here."""
    plain = [flag for flag in flags if not flag.startswith("-I")]
    made = _folder() / f"{name}-{by_content.digest(text, *_headers(), *sources, *plain)}.o"
    if not made.is_file():
        _make(made, text, name, flags)
    return made


def _make(made: Path, text: str, name: str, flags: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="cupymla-") as folder:
        command = _command(text, Path(folder), flags)
        cache.keep(made, lambda part: _run((*command, str(part)), name))


@contextlib.contextmanager
def _one_process(lock: Path) -> Iterator[None]:
    """Of those that share the folder one at a time is in the block; without locks there all are."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        lock.unlink(missing_ok=True)  # who waits for it finds what was made
        os.close(descriptor)


@functools.lru_cache(maxsize=1)
def _header_flags() -> tuple[str, ...]:
    """Where kernels find what they all include, parsed already: without it, that is most of a small kernel's time.

    GCC takes the folder's file in the header's place where compiler and flags are the same; whatever does not, reads
    the header.
    """
    folder = _folder() / f"header-{by_content.digest(*_headers(), *_kernel_flags()[:-1])}"
    folder.mkdir(exist_ok=True)
    parsed = folder / "runtime.hpp.gch"
    if not parsed.is_file():
        header = (*_compiler(), *_kernel_flags(), "-x", "c++-header", str(_HERE / "runtime.hpp"), "-o")
        cache.keep(parsed, lambda part: _run((*header, str(part)), "runtime.hpp"))
    return (f"-I{folder}",)


def _command(text: str, folder: Path, flags: Sequence[str]) -> tuple[str, ...]:
    source = folder / "source.cpp"
    source.write_text(text, encoding="utf-8")
    return (*_compiler(), *flags, "-c", str(source), "-o")


def _run(command: Sequence[str], name: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    except OSError as error:
        raise CompileError(name, f"needs a C++ compiler, {' '.join(command[:1])}", str(error)) from error
    if done.returncode:
        raise CompileError(name, "the C++ compiler rejects it", done.stderr[:4000])


@functools.lru_cache(maxsize=1)
def _compiler() -> tuple[str, ...]:
    """The C++ compiler: the machine's own, or the one in the wheel `ziglang`, which is clang. Raises CompileError."""
    if shutil.which("c++"):
        return ("c++",)
    if importlib.util.find_spec("ziglang"):
        return (sys.executable, "-m", "ziglang", "c++")
    raise CompileError("the host machine", "needs a C++ compiler: c++, or the package ziglang", "there is none")


@functools.lru_cache(maxsize=1)
def _linker() -> tuple[str, ...]:
    """The compiler as it links: by gold where both are there, which takes a third of the time of GNU's other linker."""
    both = shutil.which("c++") is not None and shutil.which("ld.gold") is not None
    return (*_compiler(), *(("-fuse-ld=gold",) if both else ()))


@functools.lru_cache(maxsize=1)
def _headers() -> tuple[str, ...]:
    """Digests of what decides on every object: the headers here, and the compiler."""
    found = subprocess.run(
        (*_compiler(), "--version"), capture_output=True, encoding="utf-8", errors="replace", check=False
    ).stdout
    return (*by_content.digests([*_HERE.glob("*.hpp"), *(_HERE / "include").rglob("*")]), found)


@functools.lru_cache(maxsize=1)
def _writers() -> tuple[str, ...]:
    """Digests of what makes C++ of PTX."""
    return by_content.digests([*_HERE.glob("*.py"), *(_HERE.parents[1] / "ptx").glob("*.py")])


@functools.lru_cache(maxsize=1)
def _parts() -> tuple[str, ...]:
    """Digests of the machine's parts."""
    return by_content.digests(_HERE.glob("*.cpp"))


@functools.lru_cache(maxsize=1)
def _folder() -> Path:
    return by_content.folder() or Path(tempfile.mkdtemp(prefix="cupymla-"))
