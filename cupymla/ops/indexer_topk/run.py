"""indexer_topk's calls: the NumPy reference on the CPU, the kernels on a GPU."""

from __future__ import annotations

from typing import Any

from ...arch import Gpu
from ...build import KernelSource
from ..calls import Calls
from ..indexer_logits import plan as scoring
from ..mla import by_reference
from . import cuda, plan, reference
from .spec import ARGUMENTS, read

CALLS = Calls(
    ARGUMENTS,
    read,
    cuda.wanted,
    cuda.bind,
    by_reference(ARGUMENTS, reference.indexer_topk, cuda.wanted),
    size=cuda.workspace_bytes,
)
"""Those of the public function."""


def sources(gpu: Gpu, **arguments: Any) -> tuple[KernelSource, ...]:
    """The kernels that a call on such a GPU compiles. Raises InputError, UnsupportedError.

    Where the driver has no room for all clusters that the plan asks for, the call may compile another kernel.
    """
    _, problem = read(**arguments)
    # A last chunk of few rows may want another variant.
    selecting = dict.fromkeys(
        plan.select(plan.selected(problem, chunk), gpu.arch, gpu.multiprocessors).source
        for chunk in plan.chunks(problem)
    )
    scores = (scoring.plan(problem.scores, gpu.arch),) if selecting and problem.scores.keys else ()
    return (*scores, *selecting)
