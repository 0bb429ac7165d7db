"""invert_indices' calls: the NumPy reference on the CPU, the kernels on a GPU."""

from __future__ import annotations

from typing import Any

from ...arch import Gpu
from ...build import KernelSource
from ..calls import Calls
from ..mla import by_reference
from . import cuda, plan, reference
from .spec import ARGUMENTS, read

CALLS = Calls(
    ARGUMENTS,
    read,
    cuda.wanted,
    cuda.bind,
    by_reference(ARGUMENTS, reference.invert_indices, cuda.wanted),
    size=cuda.workspace_bytes,
)
"""Those of the public function."""


def sources(gpu: Gpu, **arguments: Any) -> tuple[KernelSource, ...]:
    """The kernels that a call on such a GPU compiles. Raises InputError, UnsupportedError."""
    _, problem = read(**arguments)
    return tuple(launch.source for launch in plan.launches(problem, gpu.arch, gpu.multiprocessors))
