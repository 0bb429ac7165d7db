"""What this machine has of what cupymla uses, and what to do about the rest."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Literal

from .. import config
from ..errors import CupymlaError

INSTALL_CUDA = "pip install 'cupymla[cuda12]' (or cupymla[cuda13] with a CUDA 13 driver)"
ON_CPU = "arrays on the CPU run the NumPy references, and kernels can be compiled all the same"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's report.

    Attributes:
        name: what was looked for.
        state: "ok", "missing", or "optional" for what is not there and need not be.
        found: what is there, in words.
        advice: what to do; empty when nothing has to be done.
        needed: whether its absence makes the doctor's exit status 1.
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
    config.check()
    named = [name for name in config.VARIABLES if config.value(name)]
    return Check("settings", "ok", ", ".join(named) or "none")


def _python() -> Check:
    return Check("Python", "ok", sys.version.split()[0])


def _driver() -> Check:
    from .. import driver

    if not driver.available():
        return Check("driver", "missing", "no usable CUDA driver", f"install NVIDIA's driver to use a GPU; {ON_CPU}")
    from ..bench.machine import driver_text

    major, minor = driver.version()
    return Check("driver", "ok", f"{driver_text()}, CUDA {major}.{minor}")


def _gpu() -> Check:
    from .. import driver

    count = driver.device_count()
    if not count:
        return Check("GPU", "missing", "none", ON_CPU)
    names = []
    for index in range(count):
        major, minor = driver.compute_capability(index)
        names.append(f"{driver.device_name(index)} (compute capability {major}.{minor})")
    return Check("GPU", "ok", "; ".join(names))


def _compiler() -> Check:
    from ..build import compiler

    name = "nvcc" if config.compiler() == "nvcc" else "NVRTC"
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
    if found is None:
        return Check("CUTLASS", "missing", "no headers", source.CUTLASS_HELP, needed=True)
    return Check("CUTLASS", "ok", f"{found[1]} ({found[0]})")


def _cupy() -> Check:
    from .. import driver

    found = version_of("cupy-cuda12x", "cupy-cuda13x", "cupy")
    if found is None:
        return Check("CuPy", "missing", "not installed", INSTALL_CUDA, needed=True)
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
    kept = cache.entries()
    size = sum(entry.size_bytes for entry in kept) / 2**20
    return Check("cache", "ok", f"{folder}: {len(kept)} kernels, {size:.1f} MiB")


def _framework(package: str, extra: str) -> Check:
    found = version_of(package)
    if found is None:
        return Check(package, "optional", "not installed", f"pip install 'cupymla[{extra}]' to pass its arrays")
    return Check(package, "ok", found)


def examine() -> list[Check]:
    """Look at everything; a check that cannot even be made is reported as missing, whatever it stumbled on."""
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("Python", _python),
        ("settings", _settings),
        ("GPU", _gpu),
        ("driver", _driver),
        ("compiler", _compiler),
        ("CUTLASS", _cutlass),
        ("CuPy", _cupy),
        ("cache", _cache),
        ("jax", lambda: _framework("jax", "jax")),
        ("torch", lambda: _framework("torch", "torch")),
    ]
    found = []
    for name, check in checks:
        try:
            found.append(check())
        except ImportError as error:
            text = f"a Python package is missing: {error}"
            found.append(Check(name, "missing", text, f"pip install cupymla; for kernels {INSTALL_CUDA}", needed=True))
        except Exception as error:
            text = str(error) if isinstance(error, CupymlaError) else f"{type(error).__name__}: {error}"
            found.append(Check(name, "missing", text, "mend what the message names", needed=True))
    return found


def healthy(checks: list[Check]) -> bool:
    """Whether nothing that is needed is missing. A GPU is not needed."""
    return not any(check.needed and check.state == "missing" for check in checks)
