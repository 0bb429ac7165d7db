"""Other ways to an operator's result on this machine, timed beside it: what a user would call without it.

A rival gets the case's arrays in the form it asks for, made before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ...ops.case import Case
from . import attention, gemv

Call = Callable[[], object]

_RIVALS: dict[str, Callable[[Any, dict[str, Any]], Iterator[tuple[str, Call]]]] = {
    "nvfp4_gemv": gemv.calls,
    "xl_paged_attention": attention.calls,
}


def of(operator: str, case: Case, inputs: dict[str, Any]) -> Iterator[tuple[str, Call]]:
    """Name and call of each rival that can run a case.

    Args:
        operator: the operator's name.
        case: the case.
        inputs: its arguments, CuPy arrays.
    """
    if operator in _RIVALS:
        yield from _RIVALS[operator](case, inputs)
