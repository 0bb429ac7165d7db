"""From checked arguments to a prepared call: the NumPy reference on the CPU, the kernel on a GPU."""

from __future__ import annotations

from typing import Any

from ... import tensor
from ...arch import Gpu
from ...build import KernelSource
from ..mla import CpuOutput
from ..operator import CpuCall, Prepared
from . import cuda, plan, reference
from .spec import Problem, Views, read

Result = tuple[Any, ...]


def call(views: Views, problem: Problem, stream: object) -> Result:
    """One call. `stream` as the public function takes it; it means nothing on the CPU."""
    if problem.device.kind == "cpu":
        return _on_cpu(views, problem)()
    return cuda.call(views, problem, stream)()


def prepare(views: Views, problem: Problem, stream: object) -> Prepared[Result]:
    """A call bound to its arrays, to be run again and again."""
    if problem.device.kind == "cpu":
        return _on_cpu(views, problem)
    return cuda.call(views, problem, stream).prepared()


def sources(gpu: Gpu, **arguments: Any) -> tuple[KernelSource, ...]:
    """The kernels that a call on such a GPU compiles. Raises InputError, UnsupportedError."""
    _, problem = read(**arguments)
    if not problem.batch * problem.rows:
        return ()
    return (plan.plan(problem, gpu.arch, gpu.multiprocessors).source,)


def _on_cpu(views: Views, problem: Problem) -> CpuCall[Result]:
    outputs = [
        CpuOutput("indices", views.indices, views.scores),
        CpuOutput("count", views.count, views.scores),
        *([CpuOutput("values", views.values, views.scores)] if problem.return_values else []),
    ]

    def run() -> Result:
        limits: dict[str, Any] = {
            name: tensor.to_numpy(view)
            for name, view in (("starts", views.starts), ("ends", views.ends))
            if view is not None
        }
        results = reference.topk(
            tensor.to_numpy(views.scores),
            problem.topk,
            **limits,
            order=problem.order,
            return_values=problem.return_values,
        )
        return tuple(output.write(value) for output, value in zip(outputs, results, strict=True))

    return CpuCall(run)
