"""sparse_mla_decode's calls: the NumPy reference on the CPU, the kernel on a GPU."""

from __future__ import annotations

from typing import Any

from ...arch import Gpu
from ...build import KernelSource
from ..calls import Calls
from ..mla import by_reference
from . import cuda, plan, reference
from .spec import ARGUMENTS, look, read

CALLS = Calls(
    ARGUMENTS,
    read,
    cuda.wanted,
    cuda.bind,
    by_reference(ARGUMENTS, reference.sparse_mla_decode, cuda.wanted),
    look=look,
    size=cuda.workspace_bytes,
)
"""Those of the public function."""


def sources(gpu: Gpu, **arguments: Any) -> tuple[KernelSource, ...]:
    """The kernels that a call on such a GPU compiles. Raises InputError, UnsupportedError.

    Where the driver has no room for clusters that the plan asks for, the call compiles another kernel.
    """
    _, problem = read(**arguments)
    if not problem.rows:
        return ()
    chosen = plan.plan(problem, gpu.arch, gpu.multiprocessors)
    return tuple(source for source in (chosen.source, chosen.merge) if source is not None)
