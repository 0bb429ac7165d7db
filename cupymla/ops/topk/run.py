"""topk's calls: the NumPy reference on the CPU, the kernel on a GPU."""

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
    by_reference(ARGUMENTS, reference.topk, cuda.wanted),
)
"""Those of the public function."""


def sources(gpu: Gpu, **arguments: Any) -> tuple[KernelSource, ...]:
    """The kernels that a call on such a GPU compiles. Raises InputError, UnsupportedError.

    Where the driver has no room for all clusters that the plan asks for, the call may compile another kernel.
    """
    _, problem = read(**arguments)
    if not problem.batch * problem.rows:
        return ()
    return (plan.plan(problem, gpu.arch, gpu.multiprocessors).source,)
