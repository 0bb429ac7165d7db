"""Fast attention and low-precision kernels for any array that speaks DLPack.

Importing this package loads neither a framework nor a CUDA library; each operator brings in what it needs when it
is first called.
"""

from __future__ import annotations

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Bring in an operator, a companion or an error class when it is first named."""
    import importlib

    from . import errors
    from .ops import registry

    for entry in registry.OPERATORS:
        if name == entry.name or name in entry.companions:
            value = getattr(importlib.import_module(entry.module), name)
            globals()[name] = value
            return value
    if name in ("CupymlaError", "InputError", "UnsupportedError", "CompileError", "DriverError"):
        return getattr(errors, name)
    raise AttributeError(f"module 'cupymla' has no attribute {name!r}")


def __dir__() -> list[str]:
    from .ops import registry

    names = [n for entry in registry.OPERATORS for n in (entry.name, *entry.companions)]
    return sorted([*globals(), *names])
