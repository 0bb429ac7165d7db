"""A caller's memory for a call to work in. Where there is none, `calls.BoundCall` makes some."""

from __future__ import annotations

from typing import Any

from .. import tensor
from ..errors import InputError
from ..tensor import View
from . import mla

ALIGNMENT = 16
"""Of a caller's workspace, in bytes."""


def read(array: Any, like: View) -> View | None:
    """A caller's workspace, seen; None where there is none.

    Raises InputError for what is not uint8 in one axis, on the device of `like`, at an aligned address.
    """
    if array is None:
        return None
    seen = tensor.view_output(array, "workspace")
    if len(seen.shape) != 1:
        raise InputError("workspace", "one axis", f"shape {list(seen.shape)}")
    mla.check_array(seen, "workspace", seen.shape, "uint8", like, "lists")
    if seen.ptr % ALIGNMENT and seen.shape[0]:
        raise InputError("workspace", f"an address that is a multiple of {ALIGNMENT} bytes", hex(seen.ptr))
    return seen


def require(workspace: View, size_bytes: int, operator: str) -> None:
    """Raise InputError for a caller's workspace that is too small."""
    if workspace.shape[0] < size_bytes:
        raise InputError("workspace", f"at least {size_bytes} bytes", workspace.shape[0], operator)
