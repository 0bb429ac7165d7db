"""What this machine has of what cupymla uses, and what to do about the rest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module, metadata
from typing import Literal

from .. import config
from ..errors import CupymlaError

INSTALL_CUDA = "pip install 'cupymla[cuda12]' (or cupymla[cuda13] with a CUDA 13 driver)"
KERNELS = f"{INSTALL_CUDA} to compile kernels and run them on a GPU"
ON_CPU = "arrays on the CPU run the NumPy references"
MEND = "mend what the message names"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's report.

    Attributes:
        name: what was looked for.
        state: "ok", "missing", or "optional" for what is not there and need not be: a GPU, and what extras bring.
        found: what is there, in words.
        advice: what to do, or what there is to gain; empty when there is nothing.
        needed: whether its absence makes the doctor's exit status 1: something is broken, or set to a wrong value.
    """

    name: str
    state: Literal["ok", "missing", "optional"]
    found: str
    advice: str = ""
    needed: bool = False

    def as_dict(self) -> dict[str, object]:
        """The line as `doctor --json` prints it."""
        return asdict(self)


def version_of(*packages: str) -> str | None:
    """Name and version of the first of these distributions that is installed."""
    for name in packages:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return None


def _settings() -> Check:
    from ..build.precompile import check_settings

    check_settings()
    named = [name for name in config.VARIABLES if config.value(name)]
    unread = config.unknown()
    return Check("settings", "ok", ", ".join(named) or "none", f"nothing reads {', '.join(unread)}" if unread else "")


def _python() -> Check:
    return Check("Python", "ok", sys.version.split()[0])


def _packages() -> Check:
    """What `pip install cupymla` brings; without it nothing works."""
    found = []
    for module in ("numpy", "ml_dtypes", "cuda.bindings", "cuda.pathfinder"):
        import_module(module)
        name = module.replace(".", "-").replace("_", "-")
        found.append(version_of(name) or name)
    return Check("packages", "ok", ", ".join(found))


def _driver() -> Check:
    from .. import driver

    if not driver.available():
        return Check("driver", "optional", "no usable CUDA driver", "install NVIDIA's driver to use a GPU")
    from ..bench.machine import driver_text

    major, minor = driver.version()
    return Check("driver", "ok", f"{driver_text()}, CUDA {major}.{minor}")


def _gpu() -> Check:
    from .. import driver

    count = driver.device_count()
    if not count:
        return Check("GPU", "optional", "none", ON_CPU)
    names = []
    for index in range(count):
        major, minor = driver.compute_capability(index)
        names.append(f"{driver.device_name(index)} (compute capability {major}.{minor})")
    return Check("GPU", "ok", "; ".join(names))


def _cupy_version() -> str | None:
    return version_of("cupy-cuda12x", "cupy-cuda13x", "cupy")


def _compiler() -> Check:
    from ..build import compiler

    name = "nvcc" if config.compiler() == "nvcc" else "NVRTC"
    if name == "NVRTC" and _cupy_version() is None:
        return Check(name, "optional", "not installed", KERNELS)
    try:
        chain = compiler.toolchain()
    except CupymlaError as error:
        return Check(name, "missing", str(error).splitlines()[0], INSTALL_CUDA, needed=True)
    if chain.release < (12, 9):
        return Check(name, "missing", f"{chain}: too old for sm_100f", f"12.9 or newer: {INSTALL_CUDA}", needed=True)
    return Check(name, "ok", str(chain))


def _cutlass() -> Check:
    from ..build import source

    found = source.find_cutlass()
    if found is not None:
        return Check("CUTLASS", "ok", f"{found[1]} ({found[0]})")
    # A wheel has them. A checkout needs them as soon as there is something to compile with.
    if _compiler().state == "ok":
        return Check("CUTLASS", "missing", "no headers", source.CUTLASS_HELP, needed=True)
    return Check("CUTLASS", "optional", "no headers", f"to compile kernels: {source.CUTLASS_HELP}")


def _cupy() -> Check:
    from .. import driver

    found = _cupy_version()
    if found is None:
        return Check("CuPy", "optional", "not installed", KERNELS)
    if found.startswith("cupy-cuda13x") and driver.available() and driver.version() < (13, 0):
        return Check("CuPy", "missing", f"{found} needs a CUDA 13 driver", "pip install 'cupymla[cuda12]'", needed=True)
    return Check("CuPy", "ok", found)


def _cache() -> Check:
    from ..build import cache, folders

    folder = folders.location()
    if folder is None:
        advice = "set CUPYMLA_CACHE_DIR to a folder that only you can write to"
        return Check(
            "cache", "missing", "no folder that can be trusted; kernels are compiled anew", advice, needed=True
        )
    count, size = cache.size()
    return Check("cache", "ok", f"{folder}: {count} kernels, {size / 2**20:.1f} MiB")


def _extra(package: str, extra: str, gain: str) -> Check:
    found = version_of(package)
    if found is None:
        return Check(package, "optional", "not installed", f"pip install 'cupymla[{extra}]' {gain}")
    return Check(package, "ok", found)


def examine() -> list[Check]:
    """Look at everything; a check that cannot even be made is reported as missing, whatever it stumbled on."""
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("Python", _python),
        ("packages", _packages),
        ("settings", _settings),
        ("GPU", _gpu),
        ("driver", _driver),
        ("compiler", _compiler),
        ("CUTLASS", _cutlass),
        ("CuPy", _cupy),
        ("cache", _cache),
        ("jax", lambda: _extra("jax", "jax", "for JAX arrays and functions")),
        ("torch", lambda: _extra("torch", "torch", "for torch tensors and operators")),
        ("rich", lambda: _extra("rich", "cli", "for progress bars")),
        ("matplotlib", lambda: _extra("matplotlib", "cli", "for plots")),
    ]
    found: list[Check] = []
    for name, check in checks:
        try:
            made = check()
        except ImportError as error:
            text = f"a Python package is missing: {error}"
            made = Check(name, "missing", text, f"pip install cupymla; for kernels {INSTALL_CUDA}", needed=True)
        except Exception as error:
            text = str(error) if isinstance(error, CupymlaError) else f"{type(error).__name__}: {error}"
            made = Check(name, "missing", text, MEND, needed=True)
        said = next((before for before in found if before.needed and before.found == made.found), None)
        found.append(made if said is None else replace(made, found=f"see {said.name}"))
    return found


def healthy(checks: list[Check]) -> bool:
    """Whether nothing that is needed is missing. A GPU is not needed, nor what an extra brings."""
    return not any(check.needed and check.state == "missing" for check in checks)


def summary(checks: Sequence[Check]) -> str:
    """What works here, in a line."""
    broken = [check.name for check in checks if check.needed and check.state == "missing"]
    if broken:
        return f"To be mended: {', '.join(broken)}."
    there = {check.name for check in checks if check.state == "ok"}
    compiles = {"CUTLASS"} < there and bool({"NVRTC", "nvcc"} & there)
    parts = ["arrays on the CPU, by the NumPy references"]
    if compiles:
        parts.append("compiling kernels")
    if compiles and {"GPU", "CuPy"} <= there:
        parts.append("arrays on the GPU")
    return f"Works here: {'; '.join(parts)}."
