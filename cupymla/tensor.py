"""The DLPack door: other people's arrays seen as `View`s, without copies, casts or device moves.

First version: NumPy only; the other frameworks follow behind the same functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .errors import InputError


@dataclass(frozen=True, slots=True)
class Device:
    """Where an array lives."""

    kind: Literal["cpu", "cuda"]
    index: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """An array that belongs to somebody else."""

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: Device
    readonly: bool
    framework: str
    owner: object


def view(array: Any, argument: str) -> View:
    """Look at `array` without copying it. Raises InputError when it is no array this package can read."""
    if not isinstance(array, np.ndarray):
        raise InputError(argument, "an array that speaks DLPack", type(array).__name__)
    item = array.dtype.itemsize
    if any(s % item for s in array.strides):
        raise InputError(argument, "strides that are whole elements", str(array.strides))
    return View(
        array.ctypes.data,
        array.shape,
        tuple(s // item for s in array.strides),
        array.dtype.name,
        Device("cpu"),
        not array.flags.writeable,
        "numpy",
        array,
    )


def view_output(array: Any, argument: str) -> View:
    """Like `view`, for an array that is about to be written. Raises InputError when it may not be."""
    seen = view(array, argument)
    if seen.readonly:
        raise InputError(argument, "a writable array", "a read-only array")
    return seen


def to_numpy(seen: View) -> np.ndarray:
    """The array behind a CPU view as a NumPy array over the same memory."""
    assert isinstance(seen.owner, np.ndarray)
    return seen.owner


def from_numpy(array: np.ndarray, like: View) -> Any:
    """A CPU result handed back in the framework of `like`."""
    return array


def empty(like: View, shape: tuple[int, ...], dtype: str) -> Any:
    """An uninitialised array in the framework and on the device of `like`."""
    raise NotImplementedError
