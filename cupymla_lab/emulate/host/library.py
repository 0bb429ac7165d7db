"""Translated kernels and the model as shared libraries of the host, kept by content.

The model in `model/` is compiled as C++, with `model_host.hpp` in place of CUDA; or, to check what a GPU's compiler
makes of it, from its PTX.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from cupymla.build import cache, compiler
from cupymla.build.source import closure, cuda_root
from cupymla.errors import CompileError

from ...ptx import PtxError
from .. import by_content
from ..code import MODEL as FUNCTIONS
from ..program import MODEL
from ..translate import Translation
from .recompile import KernelShape, Unit, mangled, recompile

Model = Literal["native", "ptx"]

_HERE = Path(__file__).resolve().parent
_STANDARD = ("-std=c++17", "-fPIC", "-w", f"-I{_HERE}")
_KERNEL_FLAGS = ("-O1", *_STANDARD)
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

_lock = threading.Lock()


def available() -> bool:
    """Whether kernels can run here: a C++ compiler, on x86-64."""
    return shutil.which("c++") is not None and platform.machine() in ("x86_64", "AMD64")


def library(translation: Translation, entry: str, model: Model = "native") -> tuple[ctypes.CDLL, KernelShape]:
    """A kernel with the model and the machine, loaded by itself, and what a launch has to know of it.

    Raises PtxError and CompileError.
    """
    with _lock:
        key = by_content.digest(translation.text, entry, model, *_sources(), *_KERNEL_FLAGS[:-1])
        file = _folder() / f"kernel-{key}.so"
        facts = file.with_suffix(".json")
        if not (file.is_file() and facts.is_file()):
            unit = _recompiled(translation, entry)
            text = unit.text + "".join(_stub(*function) for function in _RUNTIME)
            with tempfile.TemporaryDirectory(prefix="cupymla-") as folder:
                kernel = Path(folder) / "kernel.o"
                _run((*_command(text, Path(folder), (*_header_flags(), *_KERNEL_FLAGS)), str(kernel)), translation.name)
                objects = [kernel, *_machine(), _native() if model == "native" else _from_ptx()]
                cache.keep(facts, lambda part: part.write_text(json.dumps(asdict(unit.kernels[entry]))))
                link = ("c++", "-shared", "-o")
                cache.keep(file, lambda part: _run((*link, str(part), *map(str, objects)), translation.name))
        return _load(file), _shape(json.loads(facts.read_text()))


def _recompiled(translation: Translation, entry: str) -> Unit:
    """A kernel as C++; errors name the lines of the PTX that was translated."""
    try:
        return recompile(translation.text, translation.name, only=entry)
    except PtxError as error:
        raise PtxError(error.name, translation.origin(error.line), error.what, error.instruction) from error


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


def _machine() -> list[Path]:
    """The parts of the machine."""
    names = ("runtime", "warps", "wgmma", "copies", "races", "waits", "grid")
    return [_object((_HERE / f"{name}.cpp").read_text(), name, _MODEL_FLAGS) for name in names]


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
    return _object("\n".join(lines), "model", (*_MODEL_FLAGS, f"-I{cuda_root()}", f"-I{_HERE.parent}"))


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
    made_of = by_content.digest(*_sources(), str(compiler.toolchain()), *_KERNEL_FLAGS[:-1])
    made = _folder() / f"model-ptx-{made_of}.o"
    with _one_process():
        if not made.is_file():
            text = re.sub(r"^\s*\.loc .*$", "", compiler.linked_ptx(MODEL), flags=re.MULTILINE)
            _make(made, recompile(text, "model").text, "model-ptx", _KERNEL_FLAGS)
    return made


def _stub(name: str, count: int, body: str) -> str:
    """A function of the CUDA runtime, weak, for a kernel that calls it."""
    parameters = ", ".join(("machine::Thread&", *(f"void* p{place}" for place in range(count))))
    return f'\nextern "C" __attribute__((weak)) void {mangled(name)}({parameters}) {{ {body} }}\n'


# Compiling ---------------------------------------------------------------------------------------------------------


def _object(text: str, name: str, flags: Sequence[str]) -> Path:
    """An object file of a C++ text, kept by content."""
    plain = [flag for flag in flags if not flag.startswith("-I")]
    made = _folder() / f"{name}-{by_content.digest(text, *_sources(), *plain)}.o"
    if not made.is_file():
        with _one_process():
            if not made.is_file():
                _make(made, text, name, flags)
    return made


def _make(made: Path, text: str, name: str, flags: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="cupymla-") as folder:
        command = _command(text, Path(folder), flags)
        cache.keep(made, lambda part: _run((*command, str(part)), name))


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Of those that share the folder one makes what all kernels need; without locks there each makes it."""
    descriptor = os.open(_folder(), os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@functools.lru_cache(maxsize=1)
def _header_flags() -> tuple[str, ...]:
    """Where kernels find what they all include, parsed already: without it, that is most of a small kernel's time.

    GCC takes the folder's file in the header's place where compiler and flags are the same; whatever does not, reads
    the header.
    """
    folder = _folder() / f"header-{by_content.digest(*_sources(), *_KERNEL_FLAGS[:-1])}"
    folder.mkdir(exist_ok=True)
    parsed = folder / "runtime.hpp.gch"
    with _one_process():
        if not parsed.is_file():
            header = ("c++", *_KERNEL_FLAGS, "-x", "c++-header", str(_HERE / "runtime.hpp"), "-o")
            cache.keep(parsed, lambda part: _run((*header, str(part)), "runtime.hpp"))
    return (f"-I{folder}",)


def _command(text: str, folder: Path, flags: Sequence[str]) -> tuple[str, ...]:
    source = folder / "source.cpp"
    source.write_text(text)
    return ("c++", *flags, "-c", str(source), "-o")


def _run(command: Sequence[str], name: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CompileError(name, "needs a C++ compiler called c++", str(error)) from error
    if done.returncode:
        raise CompileError(name, "the C++ compiler rejects it", done.stderr[:4000])


@functools.lru_cache(maxsize=1)
def _sources() -> tuple[str, ...]:
    """Digests of all that decides what a library does, besides the kernel: this package's part, the compiler."""
    parser = _HERE.parents[1] / "ptx"
    files = [*_HERE.rglob("*.?pp"), *_HERE.glob("*.py"), *(_HERE / "include").rglob("*"), *parser.glob("*.py")]
    version = subprocess.run(("c++", "-dumpfullversion"), capture_output=True, text=True, check=False).stdout
    return (*by_content.digests(files), *(member.digest for member in closure(MODEL)), version)


@functools.lru_cache(maxsize=1)
def _folder() -> Path:
    return by_content.folder() or Path(tempfile.mkdtemp(prefix="cupymla-"))
