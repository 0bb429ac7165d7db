"""sparse_mla_fwd's calls: the NumPy reference on the CPU, the kernel on a GPU."""

from __future__ import annotations

from typing import Any

from ...arch import Gpu
from ...build import KernelSource
from ..calls import Calls
from ..mla import by_reference
from . import cuda, plan, reference
from .blackwell_plan import blackwell_plan
from .spec import ARGUMENTS, VALIDATION, read

CALLS = Calls(
    ARGUMENTS,
    read,
    cuda.wanted,
    cuda.bind,
    by_reference(ARGUMENTS, reference.sparse_mla_fwd, cuda.wanted),
    look=VALIDATION.look,
    size=cuda.workspace_bytes,
)
"""Those of the public function."""


def sources(gpu: Gpu, **arguments: Any) -> tuple[KernelSource, ...]:
    """The kernels that a call on such a GPU compiles. Raises InputError, UnsupportedError.

    Where the driver has no room for clusters that the plan asks for, the call compiles another kernel.
    """
    _, problem = read(**arguments)
    if gpu.arch.name == plan.BLACKWELL:
        return (blackwell_plan(problem, gpu.arch, gpu.multiprocessors).source,)
    chosen = plan.plan(problem, gpu.arch, gpu.multiprocessors)
    order = () if chosen.workspace is None else (plan.variant(gpu.arch, stage="order"),)
    return (chosen.source, *order)
