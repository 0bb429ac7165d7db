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
    """The kernels that a call on such a GPU compiles. Raises InputError, UnsupportedError."""
    _, problem = read(**arguments)
    # A last chunk of few rows may want another variant.
    wanted: dict[KernelSource, None] = {}
    for part in plan.parts(problem):
        if problem.scores.keys:
            wanted[scoring.plan(problem.scores, gpu.arch)] = None
        if isinstance(part, plan.Filtered):
            wanted |= dict.fromkeys(plan.variant(gpu.arch, stage=stage) for stage in plan.STAGES[1:])
            wanted |= dict.fromkeys(scoring.plan(problem.scores, gpu.arch, filter) for filter in scoring.FILTERS[1:])
        else:
            wanted[plan.select(plan.selected(problem, part), gpu.arch, gpu.multiprocessors).source] = None
    return tuple(wanted)
