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

Result = Any


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
    return () if 0 in problem.shape else (plan.plan(problem, gpu.arch),)


def _on_cpu(views: Views, problem: Problem) -> CpuCall[Result]:
    output = CpuOutput("logits", views.logits, views.q)

    def run() -> Result:
        names = ("q", "k", "weights", "q_scale", "k_scale", "starts", "ends")
        arrays: dict[str, Any] = {
            name: tensor.to_numpy(view) for name in names if (view := getattr(views, name)) is not None
        }
        options = {name: getattr(problem, name) for name in ("causal", "q_start", "k_stride", "relu")}
        return output.write(reference.indexer_logits(**arrays, **options))

    return CpuCall(run)
