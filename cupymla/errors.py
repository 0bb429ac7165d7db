"""The errors a caller can meet, each saying what was asked, what was expected and what came.

Every exception derives from `CupymlaError`, and each also derives from the built-in that a caller unaware of
this package would catch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_SHOWN = 80
"""Characters of a value that an error shows."""


def shown(value: object, text: Callable[[Any], str] = repr) -> str:
    """A caller's value for an error: its text in at most 80 characters, or its type's name when it has none.

    A text can fail: Python refuses to print integers of more than 4300 digits, and `__repr__` is the caller's code.
    """
    try:
        whole = text(value)
    except Exception:
        return type(value).__name__
    return whole if len(whole) <= _SHOWN else whole[: _SHOWN - 3] + "..."


def kind(value: object) -> str:
    """What a caller gave in a place where it does not belong: an array by its shape, all else by its value."""
    try:
        shape = getattr(value, "shape", None)
    except Exception:  # of a property, which is the caller's code
        shape = None
    return shown(value) if shape is None else f"an array of shape {shown(shape, lambda extents: str([*extents]))}"


class CupymlaError(Exception):
    """Base of every error this package raises on purpose. All of them can be pickled and copied."""

    def __reduce__(self) -> tuple[Any, ...]:
        # `args` is the message, which is not what __init__ takes, so a copy is made without __init__.
        return _remade, (type(self), self.args), self.__dict__


def _remade(kind: type[CupymlaError], args: tuple[Any, ...]) -> CupymlaError:
    return kind.__new__(kind, *args)


class InputError(CupymlaError, ValueError):
    """An argument cannot be used as given. Raised before anything is launched or written.

    Attributes:
        argument: the parameter's name as the public function spells it.
        expected: what the operator accepts there.
        got: what was passed, in words. A value that is no str is shown by its str().
        operator: the operator's name, or None when the argument belongs to no operator.
    """

    def __init__(self, argument: str, expected: str, got: object, operator: str | None = None) -> None:
        self.argument = argument
        self.expected = expected
        self.got = got if isinstance(got, str) else shown(got, str)
        self.operator = operator
        where = f"{operator}: " if operator else ""
        super().__init__(f"{where}argument '{argument}': expected {expected}, got {self.got}")


class UnsupportedError(CupymlaError, NotImplementedError):
    """The input is meaningful but no kernel here serves it on this device.

    Attributes:
        wanted: the operator and option that was asked for.
        device: GPU name and compute capability, or "cpu".
        supported: what would work instead.
    """

    def __init__(self, wanted: str, device: str, supported: str) -> None:
        self.wanted = wanted
        self.device = device
        self.supported = supported
        super().__init__(f"{wanted} is not supported on {device}; supported: {supported}")


class CompileError(CupymlaError, RuntimeError):
    """A kernel source did not compile, or compiled into something its build options forbid.

    Attributes:
        source: path of the translation unit.
        log: the compiler's own log, with file and line of the real sources.
    """

    def __init__(self, source: str, what: str, log: str = "") -> None:
        self.source = source
        self.log = log
        super().__init__(f"{source}: {what}" + (f"\n{log}" if log else ""))


class DriverError(CupymlaError, RuntimeError):
    """The CUDA driver refused a call.

    Attributes:
        code: the CUresult as an int.
        name: its CUDA name, such as "CUDA_ERROR_INVALID_VALUE".
        doing: what was being done, in words.
    """

    def __init__(self, code: int, name: str, text: str, doing: str) -> None:
        self.code = code
        self.name = name
        self.doing = doing
        super().__init__(f"{doing}: {name} ({code}): {text}")
