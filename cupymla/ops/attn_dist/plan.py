"""Which kernel serves an attention distribution: none yet."""

from __future__ import annotations

from typing import NoReturn

from ...errors import UnsupportedError
from ...tensor import Device
from .spec import OPERATOR, Problem


def plan(problem: Problem, device: Device) -> NoReturn:
    """Raises UnsupportedError: there is only the NumPy reference, for arrays on the CPU."""
    wanted = f"{OPERATOR} with {problem.shared.h_q} heads, d_qk {problem.shared.d_qk}"
    raise UnsupportedError(wanted, str(device), "arrays on the CPU")
