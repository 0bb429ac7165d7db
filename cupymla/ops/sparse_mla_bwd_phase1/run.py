"""From checked arguments to a prepared call: the NumPy reference on the CPU, the kernel on a GPU."""

from __future__ import annotations

from typing import Any

from ...arch import Gpu
from ...build import KernelSource
from ..mla import CpuOutput
from ..mla_reference import stored
from ..operator import CpuCall, Prepared
from . import cuda, plan, reference
from .spec import ARGUMENTS, Problem, Views, read

Result = tuple[Any, Any]


def call(views: Views, problem: Problem, stream: object) -> Result:
    """One call. `stream` as the public function takes it; it means nothing on the CPU."""
    if views.q.device.kind == "cpu":
        return _on_cpu(views, problem)()
    return cuda.call(views, problem, stream)


def prepare(views: Views, problem: Problem, stream: object) -> Prepared[Result]:
    """A call bound to its arrays, to be run again and again."""
    if views.q.device.kind == "cpu":
        return _on_cpu(views, problem)
    return cuda.prepare(views, problem, stream)


def sources(gpu: Gpu, **arguments: Any) -> tuple[KernelSource, ...]:
    """The kernels that a call on such a GPU compiles. Raises InputError, UnsupportedError."""
    _, problem = read(**arguments)
    chosen = plan.plan(problem, gpu.arch, gpu.multiprocessors)
    return (chosen.source,) if chosen.tokens else ()


def _on_cpu(views: Views, problem: Problem) -> CpuCall[Result]:
    p = CpuOutput("p", views.p, views.q)
    delta = CpuOutput("delta", views.delta, views.q)

    def run() -> Result:
        values = reference.sparse_mla_bwd_phase1(**ARGUMENTS.by_name(views, problem.options))
        return p.write(stored(values[0], "float32")), delta.write(stored(values[1], "float32"))

    return CpuCall(run)
