"""Which kernel serves the first phase of the backward: none yet."""

from __future__ import annotations

from typing import NoReturn

from ...errors import UnsupportedError
from ...tensor import Device
from ..mla import MlaProblem
from .spec import OPERATOR


def plan(problem: MlaProblem, device: Device) -> NoReturn:
    """Raises UnsupportedError: there is only the NumPy reference, for arrays on the CPU."""
    raise UnsupportedError(
        f"{OPERATOR} with {problem.h_q} heads, d_qk {problem.d_qk}", str(device), "arrays on the CPU"
    )
