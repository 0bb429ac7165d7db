"""The calls of both functions: the NumPy references on the CPU, the kernels on a GPU."""

from __future__ import annotations

from typing import Any

from ...arch import Gpu
from ...build import KernelSource
from ..calls import Calls
from ..mla import by_reference
from . import cuda, plan, reference
from .spec import ARGUMENTS, LOGITS, look_at_tables, read, read_logits

PAGED_INDEXER_LOGITS = Calls(
    LOGITS,
    read_logits,
    cuda.logits_wanted,
    cuda.LogitsBinding,
    by_reference(LOGITS, reference.paged_indexer_logits, cuda.logits_wanted),
    look=look_at_tables,
)
PAGED_INDEXER_TOPK = Calls(
    ARGUMENTS,
    read,
    cuda.wanted,
    cuda.Binding,
    by_reference(ARGUMENTS, reference.paged_indexer_topk, cuda.wanted),
    look=look_at_tables,
    size=cuda.workspace_bytes,
)


def sources(gpu: Gpu, **arguments: Any) -> tuple[KernelSource, ...]:
    """The kernels that a call of `paged_indexer_topk` on such a GPU compiles. Raises InputError, UnsupportedError.

    Where the driver has no room for all clusters that the plan asks for, the call may compile another kernel.
    """
    _, problem = read(**arguments)
    # A last chunk of few rows may want another variant.
    selecting = dict.fromkeys(
        plan.select(plan.selected(problem, chunk.requests), gpu.arch, gpu.multiprocessors).source
        for chunk in plan.chunks(problem)
    )
    scores = (plan.scoring(problem, gpu.arch),) if selecting and problem.columns else ()
    return (*scores, *selecting)
