"""From checked arguments to a prepared call: the NumPy reference on the CPU, the kernel on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...arch import Gpu
from ...build import KernelSource
from ..mla import CpuOutput
from ..mla_reference import stored
from ..operator import CpuCall, Prepared
from . import cuda, plan, reference
from .spec import ARGUMENTS, Problem, Views, read

Result = Any


def call(views: Views, problem: Problem, stream: object) -> Result:
    """One call. `stream` as the public function takes it; it means nothing on the CPU."""
    if views.q.device.kind == "cpu":
        return _on_cpu(views, problem)()
    return cuda.call(views, problem, stream)


def ready(**arguments: Any) -> Callable[[bool], Result]:
    """A call of CuPy arrays that allocates its output, made ready; see `cupymla.ops.repeat`. Raises InputError."""
    return cuda.ready(*read(**arguments))


def prepare(views: Views, problem: Problem, stream: object) -> Prepared[Result]:
    """A call bound to its arrays, to be run again and again."""
    if views.q.device.kind == "cpu":
        return _on_cpu(views, problem)
    return cuda.prepare(views, problem, stream)


def sources(gpu: Gpu, **arguments: Any) -> tuple[KernelSource, ...]:
    """The kernels that a call on such a GPU compiles. Raises InputError, UnsupportedError."""
    _, problem = read(**arguments)
    return (plan.plan(problem, gpu.arch, gpu.multiprocessors).source,)


def _on_cpu(views: Views, problem: Problem) -> CpuCall[Result]:
    dist = CpuOutput("dist", views.dist, views.q)

    def run() -> Result:
        value = reference.attn_dist(**ARGUMENTS.by_name(views, problem.options))
        return dist.write(stored(value, "float32"))

    return CpuCall(run)
