"""merge_attention's calls: the NumPy reference on the CPU, the kernel on a GPU."""

from __future__ import annotations

import math
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
    by_reference(ARGUMENTS, reference.merge_attention, cuda.wanted),
)
"""Those of the public function."""


def sources(gpu: Gpu, **arguments: Any) -> tuple[KernelSource, ...]:
    """The kernels that a call on such a GPU compiles. Raises InputError, UnsupportedError."""
    _, problem = read(**arguments)
    return (plan.variant(gpu.arch),) if math.prod(problem.results[0][0]) else ()
