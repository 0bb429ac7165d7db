"""The kernels of `nvfp4_gemv` and its companions: there is none so far, so every plan on a GPU is refused."""

from __future__ import annotations

from typing import NoReturn

from ...errors import UnsupportedError
from ...tensor import Device
from .spec import OPERATOR, Problem


def require_cpu(operator: str, device: Device) -> None:
    """Refuse arrays that only a kernel could read. Raises UnsupportedError."""
    if device.kind != "cpu":
        raise UnsupportedError(
            f"{operator} (it has no CUDA kernel in this version)",
            str(device),
            "arrays on the CPU, by the NumPy reference",
        )


def plan(problem: Problem) -> NoReturn:
    """Choose a kernel for this problem. Raises UnsupportedError."""
    raise UnsupportedError(
        f"{OPERATOR} of {problem.format.name} by {problem.b_dtype} (it has no CUDA kernel in this version)",
        str(problem.device),
        "arrays on the CPU, by the NumPy reference",
    )
