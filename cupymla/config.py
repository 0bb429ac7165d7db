"""The only module that touches the process environment.

Every variable is read when it is needed, never at import, so a test or a notebook can change it. `VARIABLES` is
what the README's table and `python -m cupymla doctor` print.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from .errors import InputError

VARIABLES: dict[str, str] = {
    "CUPYMLA_CACHE_DIR": "folder of compiled kernels (default: the user's cache folder, then a temporary one)",
    "CUPYMLA_READONLY_CACHE": "further cache folders, separated by ':', that are searched and never written",
    "CUPYMLA_CUTLASS": "folder holding CUTLASS's `cutlass/` and `cute/` headers",
    "CUPYMLA_COMPILER": "nvrtc (default) or nvcc",
    "CUPYMLA_NVCC": "path of the nvcc to use when CUPYMLA_COMPILER=nvcc (default: the one on PATH)",
    "CUPYMLA_FAIL_ON_SPILL": "1: a kernel that spills registers is a CompileError",
    "CUPYMLA_QUIET": "1: say nothing on stderr about compilations that take over a second",
}


def value(name: str) -> str | None:
    """What one of `VARIABLES` is set to; None when it is unset or empty."""
    return os.environ.get(name) or None


def unknown() -> list[str]:
    """Variables named as ours that nothing reads, such as a misspelt one."""
    return sorted(name for name in os.environ if name.startswith("CUPYMLA_") and name not in VARIABLES)


def _flag(name: str) -> bool:
    word = value(name)
    if word is None or word == "0":
        return False
    if word == "1":
        return True
    raise InputError(name, "'0' or '1'", repr(word))


def _folder(name: str, path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as refused:
        raise InputError(name, "a folder", f"{path!r} ({refused})") from refused


def cache_dir() -> Path | None:
    """The cache folder the user asked for, or None for the default. Raises InputError for a home that nobody has."""
    folder = value("CUPYMLA_CACHE_DIR")
    return _folder("CUPYMLA_CACHE_DIR", folder) if folder else None


def readonly_caches() -> tuple[Path, ...]:
    """Cache folders that are only read, in the order they are searched. Raises InputError as `cache_dir`."""
    folders = value("CUPYMLA_READONLY_CACHE") or ""
    return tuple(_folder("CUPYMLA_READONLY_CACHE", part) for part in folders.split(os.pathsep) if part)


def cutlass_dir() -> Path | None:
    """The header folder the user insists on, or None to search the usual places. Raises InputError as `cache_dir`."""
    folder = value("CUPYMLA_CUTLASS")
    return _folder("CUPYMLA_CUTLASS", folder) if folder else None


def compiler() -> Literal["nvrtc", "nvcc"]:
    """Which compiler back end to use. Raises InputError on any other word."""
    word = value("CUPYMLA_COMPILER")
    if word in (None, "nvrtc"):
        return "nvrtc"
    if word == "nvcc":
        return "nvcc"
    raise InputError("CUPYMLA_COMPILER", "'nvrtc' or 'nvcc'", repr(word))


def check() -> None:
    """Read all that is set, but for the path of nvcc. Raises InputError for what nothing could be done with."""
    for read in (cache_dir, readonly_caches, cutlass_dir, compiler, fail_on_spill, quiet):
        read()


def nvcc() -> str:
    """The nvcc executable, a path or a name to be found on PATH."""
    return value("CUPYMLA_NVCC") or "nvcc"


def cupy_cache_dir() -> str | None:
    """CuPy's own cache folder where the user names one, else None."""
    return os.environ.get("CUPY_CACHE_DIR")


def set_cupy_cache_dir(folder: Path) -> None:
    """Name CuPy's cache folder for this process and those it starts; the only variable that is ever set."""
    os.environ["CUPY_CACHE_DIR"] = str(folder)


def compiler_environment() -> dict[str, str]:
    """The environment for nvcc: this process's, less the variables by which nvcc takes flags nobody sees."""
    hidden = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
    return {name: value for name, value in os.environ.items() if name not in hidden}


def fail_on_spill() -> bool:
    """Whether a register spill fails the build."""
    return _flag("CUPYMLA_FAIL_ON_SPILL")


def quiet() -> bool:
    """Whether the build service keeps silent about slow compilations."""
    return _flag("CUPYMLA_QUIET")
