"""sparse_mla_bwd's calls: the NumPy reference on the CPU, the kernel on a GPU."""

from __future__ import annotations

from typing import Any

from ...arch import Gpu
from ...build import KernelSource
from ..calls import Calls
from ..checks import look_at_lists
from ..mla import by_reference
from . import cuda, plan, reference
from .spec import ARGUMENTS, OPERATOR, VALIDATION, Problem, Views, read


def look(views: Views, problem: Problem, stream: object) -> None:
    """Look at the values of indices, and of lists whether they are theirs. Raises InputError; waits for the stream."""
    VALIDATION.look(views, problem, stream)
    look_at_lists(views.lists, views.indices, views.topk_length, problem.shared.s_kv, stream, OPERATOR)


CALLS = Calls(
    ARGUMENTS,
    read,
    cuda.wanted,
    cuda.bind,
    by_reference(ARGUMENTS, reference.sparse_mla_bwd, cuda.wanted),
    look=look,
    size=cuda.workspace_bytes,
)
"""Those of the public function."""


def sources(gpu: Gpu, **arguments: Any) -> tuple[KernelSource, ...]:
    """The kernels that a call on such a GPU compiles. Raises InputError, UnsupportedError."""
    _, problem = read(**arguments)
    chosen = plan.plan(problem, gpu.arch, gpu.multiprocessors)
    return tuple(dict.fromkeys(chosen.source(launch.stage) for launch in chosen.launches()))
