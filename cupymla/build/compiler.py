"""Turns a translation unit into a cubin, with NVRTC (CuPy's bindings) or nvcc behind one flag table."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .. import arch as arches
from .. import config
from ..errors import CompileError, UnsupportedError
from .cubin import Resources, whole_bytes
from .folders import temporary_folder
from .source import KernelSource, Tree, package_folder, trees

Backend = Literal["nvrtc", "nvcc"]


@dataclass(frozen=True, slots=True)
class Flag:
    """One compiler option in both spellings; empty where a back end does it anyway or has no such thing."""

    meaning: str
    nvrtc: tuple[str, ...]
    nvcc: tuple[str, ...]


FLAGS: tuple[Flag, ...] = (
    Flag("C++17", ("-std=c++17",), ("-std=c++17",)),
    Flag("exactly this target", ("-arch={arch}",), ("-arch={arch}", "-cubin")),
    Flag("host-only constexpr functions may be called", ("-default-device",), ("--expt-relaxed-constexpr",)),
    Flag("line numbers for profilers and sanitizers", ("-lineinfo",), ("-lineinfo",)),
    Flag("registers, stack and spills in the log", ("--ptxas-options=-v",), ("-Xptxas=-v",)),
)

# The first CUDA release whose compiler knows a target.
FIRST_RELEASE: dict[str, tuple[int, int]] = {
    "sm_89": (11, 8),
    "sm_90": (11, 8),
    "sm_90a": (12, 0),
    "sm_100f": (12, 9),
}

# Front-end diagnostics that are mistakes when they point into our own files: lost or overflowing values (61-63, 68,
# 69, 175), dead or ineffective code (111, 128, 174, 186), unused or unset variables (177, 549, 550), a missing
# return (940), host functions called from device code (20011-20015), run-time initialisers of globals (20054).
MISTAKES = frozenset(
    {61, 62, 63, 68, 69, 111, 128, 174, 175, 177, 186, 549, 550, 940, 20011, 20012, 20013, 20014, 20015, 20054}
)
_WARNING = re.compile(
    r"^(?P<file>[^\n(]+)\((?P<line>\d+)\): warning #(?P<number>\d+)(?:-D)?: (?P<text>.*)$", re.MULTILINE
)

# ptxas notes these and goes on; each means that a Hopper pipeline no longer overlaps: wgmma serialised (C7510-C7514),
# setmaxnreg ignored (C7508), a wait put in front of an accumulator that is read too early (C7517), or a fence that was
# missing in front of a product.
_LOST_OVERLAP = re.compile(r"Potential Performance Loss|warpgroup\.(wait|arrive) is injected")

_FUNCTION = re.compile(r"(?:Function properties for|Compiling entry function) '?(?P<name>[\w$]+)'?")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+) bytes smem")

SAY_AFTER_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Which compiler, and which of the headers that come with it.

    Attributes:
        backend: "nvrtc" or "nvcc".
        version: its full version, such as "12.9.86".
        headers: versions of the CCCL and CUDA headers it reads, or empty when they are part of its release.
    """

    backend: Backend
    version: str
    headers: str

    def __str__(self) -> str:
        return " ".join(filter(None, (self.backend, self.version, self.headers)))

    @property
    def release(self) -> tuple[int, int]:
        """The CUDA release, such as (12, 9)."""
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a compiler returned: the cubin, the PTX it was assembled from, its log, the kernel's resources, seconds."""

    data: bytes
    ptx: str
    log: str
    resources: Resources
    seconds: float


def flags(backend: Backend, arch: str) -> tuple[str, ...]:
    """The options for a target without include folders and definitions, as they enter cache keys."""
    return tuple(part.format(arch=arch) for flag in FLAGS for part in getattr(flag, backend))


def _define(name: str, value: str | int) -> str:
    return f"-D{name}={value}"


# NVRTC ---------------------------------------------------------------------------------------------------------


def _give_cupy_a_cache() -> None:
    """CuPy makes its cache folder when it is imported, and cannot be imported where that fails, as in a read-only home.

    It is then pointed to a temporary folder, unless the user has named one.
    """
    if "cupy" in sys.modules or config.cupy_cache_dir() is not None:
        return
    try:
        # A home that is not there is no place to create one, even for a user who could.
        home = Path.home().resolve(strict=True)
        (home / ".cupy" / "kernel_cache").mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        ours = temporary_folder()
        config.set_cupy_cache_dir(ours / "cupy" if ours else Path(tempfile.mkdtemp(prefix="cupymla-")))


def _nvrtc() -> Any:
    try:
        _give_cupy_a_cache()
        from cupy.cuda import nvrtc
    except OSError as error:
        what = "CuPy cannot be imported: set CUPY_CACHE_DIR to a folder that it can make and write to"
        raise CompileError("NVRTC", f"{what} ({error})") from error
    except ImportError as error:
        what = "NVRTC is reached through CuPy, which is missing: pip install 'cupymla[cuda12]' or 'cupymla[cuda13]'"
        what += ", or set CUPYMLA_COMPILER=nvcc where a CUDA toolkit is installed"
        raise CompileError("NVRTC", f"{what} ({error})") from error
    return nvrtc


def _first_number(file: Path, macro: str) -> str:
    found = re.search(rf"#\s*define\s+{macro}\s+(\d+)", file.read_text(encoding="utf-8")) if file.is_file() else None
    return found[1] if found else "unknown"


def header_folders() -> tuple[Tree, ...]:
    """The CCCL and CUDA headers NVRTC is given. Raises CompileError naming what is missing.

    CCCL comes from CuPy's own copy, else from a CUDA toolkit; CUDA's headers from wherever cuda-pathfinder finds
    them.
    """
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError as error:
        what = "cuda-pathfinder, which finds CUDA's headers, is missing: pip install cuda-pathfinder"
        raise CompileError("headers", f"{what} ({error})") from error

    cupy = package_folder("cupy")
    bundled = cupy / "_core" / "include" / "cupy" / "_cccl" / "libcudacxx" if cupy else None
    cccl = bundled if bundled and bundled.is_dir() else find_nvidia_header_directory("cccl")
    cuda = find_nvidia_header_directory("cudart")
    for what, folder, cure in (
        ("CCCL", cccl, "pip install 'cupymla[cuda12]'"),
        ("CUDA", cuda, "pip install 'cuda-toolkit[cudart]' or install a CUDA toolkit"),
    ):
        if folder is None:
            raise CompileError("headers", f"{what} headers were not found: {cure}")
    return Tree("cccl", Path(str(cccl))), Tree("cuda-headers", Path(str(cuda)))


@functools.lru_cache(maxsize=1)
def _nvrtc_toolchain() -> Toolchain:
    cccl, cuda = header_folders()
    version = _nvrtc_version()
    cccl_version = _first_number(cccl.folder / "cuda" / "std" / "__cccl" / "version.h", "CCCL_VERSION")
    cuda_version = _first_number(cuda.folder / "cuda.h", "CUDA_VERSION")
    return Toolchain("nvrtc", version, f"cccl {cccl_version} cuda {cuda_version}")


def _nvrtc_version() -> str:
    """The full version: the API tells major and minor only, while generated PTX names the build."""
    nvrtc = _nvrtc()
    try:
        program = nvrtc.createProgram("", "version.cu", (), ())
    except Exception as error:
        # The library is loaded by the first call, and CuPy installed by itself brings none.
        cure = "pip install 'cupymla[cuda12]' or 'cupymla[cuda13]', or install a CUDA toolkit"
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CompileError("NVRTC", f"its library cannot be loaded: {cure} ({reason})") from error
    try:
        nvrtc.compileProgram(program, ())
        ptx = bytes(nvrtc.getPTX(program)).decode(errors="replace")
    finally:
        nvrtc.destroyProgram(program)
    found = re.search(r"release [\d.]+, V([\d.]+)", ptx)
    return found[1] if found else ".".join(str(part) for part in nvrtc.getVersion())


# From CUDA 13 on CUTLASS 4.2 asks for these below "cccl/", as a toolkit lays them out; CuPy's copy has no such level.
_CUTLASS_STD = tuple(
    f"cuda/std/{name}" for name in ("cassert", "cstddef", "cstdint", "limits", "tuple", "type_traits", "utility")
)


def _run_nvrtc(source: KernelSource, options: Sequence[str]) -> tuple[bytes, str, str, bool]:
    """Cubin (empty for a virtual target), PTX, log, and whether it went well."""
    nvrtc = _nvrtc()
    folders = [tree.folder for tree in (*trees(source), *header_folders())]
    arguments = (*options, *(f"-I{folder}" for folder in folders))
    forwarders = {f"cccl/{name}".encode(): f"#include <{name}>\n".encode() for name in _CUTLASS_STD}
    text, file = source.file.read_text(encoding="utf-8"), str(source.file.absolute())
    program = nvrtc.createProgram(text, file, tuple(forwarders.values()), tuple(forwarders))
    try:
        try:
            nvrtc.compileProgram(program, arguments)
        except nvrtc.NVRTCError as error:
            return b"", "", nvrtc.getProgramLog(program) or str(error), False
        log, ptx = nvrtc.getProgramLog(program), bytes(nvrtc.getPTX(program)).decode().rstrip("\0")
        if any(option.startswith("-arch=compute_") for option in options):
            return b"", ptx, log, True
        # CuPy takes the image for text and drops its last byte, which is zero.
        image = bytes(nvrtc.getCUBIN(program))
        return image.ljust(whole_bytes(image), b"\0"), ptx, log, True
    finally:
        nvrtc.destroyProgram(program)


# nvcc ----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def _nvcc_toolchain(program: str) -> Toolchain:
    try:
        text = subprocess.run(
            [program, "--version"], capture_output=True, encoding="utf-8", errors="replace", check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError("nvcc", f"{program} does not run: set CUPYMLA_NVCC or use NVRTC ({error})") from error
    found = re.search(r"release [\d.]+, V([\d.]+)", text)
    if not found:
        raise CompileError("nvcc", f"{program} --version names no release", text)
    return Toolchain("nvcc", found[1], "")


def _run_nvcc(source: KernelSource, options: Sequence[str]) -> tuple[bytes, str, str, bool]:
    """Cubin, PTX, log, and whether it went well."""
    try:
        place = tempfile.TemporaryDirectory(prefix="cupymla-")
    except OSError as error:
        what = "nvcc needs a folder for temporary files: set TMPDIR to one with room, or use NVRTC"
        raise CompileError("nvcc", f"{what} ({error})") from error
    with place as folder:
        output = Path(folder) / "kernel.cubin"
        includes = [f"-I{tree.folder}" for tree in trees(source)]
        kept = ["-keep", f"-keep-dir={folder}"]
        command = [config.nvcc(), *options, *kept, *includes, "-o", str(output), str(source.file.absolute())]
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            env=config.compiler_environment(),
        )
        log = done.stdout + done.stderr
        if done.returncode:
            return b"", "", log, False
        (ptx,) = Path(folder).glob("*.ptx")
        return output.read_bytes(), ptx.read_text(encoding="utf-8"), log, True


# Both ----------------------------------------------------------------------------------------------------------


def toolchain() -> Toolchain:
    """The compiler that CUPYMLA_COMPILER asks for. Raises CompileError saying what to install when it is missing."""
    return _nvcc_toolchain(config.nvcc()) if config.compiler() == "nvcc" else _nvrtc_toolchain()


def check_arch(arch: str, chain: Toolchain) -> None:
    """Raises InputError for a target this package does not know, UnsupportedError for one the compiler does not."""
    arches.named(arch)
    first = FIRST_RELEASE.get(arch)
    if first and chain.release < first:
        raise UnsupportedError(
            f"target {arch}", f"{chain.backend} {chain.version}", f"CUDA {first[0]}.{first[1]} or later"
        )


def resources(log: str, entry: str) -> Resources:
    """Resources of a kernel from a ptxas log; frames and spills of functions it may call are added to its own."""
    stack = stores = loads = registers = smem = 0
    current = ""
    for line in log.splitlines():
        if name := _FUNCTION.search(line):
            current = name["name"]
        if frame := _FRAME.search(line):
            stack, stores, loads = stack + int(frame[1]), stores + int(frame[2]), loads + int(frame[3])
        if current == entry and (used := _USED.search(line)):
            registers = int(used[1])
            shared = _SMEM.search(line)
            smem = int(shared[1]) if shared else 0
    return Resources(registers, stores, loads, stack, smem)


def defects(log: str, own: Sequence[Path]) -> list[str]:
    """What a log reports that may not be shipped: mistakes in files under `own`, and lost overlap."""
    found = [line.strip() for line in log.splitlines() if _LOST_OVERLAP.search(line)]
    for warning in _WARNING.finditer(log):
        inside = any(Path(warning["file"]).is_relative_to(folder) for folder in own)
        if inside and "third_party" not in warning["file"] and int(warning["number"]) in MISTAKES:
            found.append(f"{warning['file']}({warning['line']}): {warning['text']}")
    return found


@contextmanager
def _announced(source: KernelSource) -> Iterator[None]:
    """One line on stderr once a compilation has taken a second, finished by the time it took."""
    started = time.monotonic()
    said = threading.Event()

    def say() -> None:
        said.set()
        print(f"cupymla: compiling {source} ...", end="", file=sys.stderr, flush=True)

    timer = threading.Timer(SAY_AFTER_SECONDS, say)
    timer.daemon = True
    if not config.quiet():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if said.is_set():
            print(f" {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)


def relocatable(source: KernelSource, registers: int) -> Compiled:
    """Compile a unit into an object that kernels compiled elsewhere are linked with; it needs no entry.

    Args:
        source: what to compile; its entry is not looked for.
        registers: the most that its functions may use per thread.

    Raises CompileError and UnsupportedError like `compile`.
    """
    return _compile(source, (f"-maxrregcount={registers}", "-rdc=true"))


def linked_ptx(source: KernelSource) -> str:
    """The PTX of a unit whose functions kernels compiled elsewhere will call. Raises CompileError, UnsupportedError."""
    return _compile(source, ("-rdc=true",), ptx_only=True).ptx


def ptx(source: KernelSource) -> str:
    """The PTX that `compile` assembles, without the two thirds of its time that assembling takes.

    Raises CompileError and UnsupportedError like `compile`, but for what only the assembler sees.
    """
    return _compile(source, (), ptx_only=True).ptx


def compile(source: KernelSource) -> Compiled:
    """Compile one kernel with the configured compiler.

    Raises CompileError with the compiler's log when it does not compile, or when the log reports a mistake in our
    files or a pipeline that ptxas serialised; UnsupportedError when the compiler does not know the target.
    """
    return _compile(source, ())


def _compile(source: KernelSource, extra: tuple[str, ...], ptx_only: bool = False) -> Compiled:
    """`ptx_only`: NVRTC stops at PTX; nvcc, which is not what tests compile with, goes on."""
    chain = toolchain()
    check_arch(source.arch, chain)
    target = source.arch.replace("sm_", "compute_") if ptx_only and chain.backend == "nvrtc" else source.arch
    options = (*flags(chain.backend, target), *extra, *(_define(*pair) for pair in source.defines))
    run = _run_nvcc if chain.backend == "nvcc" else _run_nvrtc
    started = time.monotonic()
    with _announced(source):
        data, ptx, text, succeeded = run(source, options)
    seconds = time.monotonic() - started
    file, log = str(source.file.absolute()), text.strip("\0\n ")
    if not succeeded:
        raise CompileError(file, f"{chain.backend} {chain.version} rejects it for {source.arch}", log)
    found = defects(log, [tree.folder for tree in trees(source) if tree.label != "cutlass"])
    if found:
        raise CompileError(file, "compiles with defects:\n  " + "\n  ".join(found), log)
    return Compiled(data, ptx, log, resources(log, source.entry), seconds)
