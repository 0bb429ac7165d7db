"""Fast attention and low-precision kernels for any array that speaks DLPack.

Importing this package loads neither a framework nor a CUDA library; each operator brings in what it needs when it
is first called.
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"

_ERRORS = ("CupymlaError", "InputError", "UnsupportedError", "CompileError", "DriverError")


def __getattr__(name: str) -> object:
    """Bring in an operator, a companion or an error class when it is first named."""
    # Imports go through import_module: `from . import x` asks this very function for x.
    registry = import_module(f"{__name__}.ops.registry")
    for entry in registry.OPERATORS:
        if name == entry.name or name in entry.companions:
            return getattr(import_module(entry.module), name)
    if name in _ERRORS:
        return getattr(import_module(f"{__name__}.errors"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    registry = import_module(f"{__name__}.ops.registry")
    names = [n for entry in registry.OPERATORS for n in (entry.name, *entry.companions)]
    return sorted([*globals(), *names, *_ERRORS])
