"""From checked arguments to a prepared call: the NumPy reference on the CPU, the kernel on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...arch import Gpu
from ...build import KernelSource
from ..mla import CpuOutput
from ..mla_reference import numpy_dtype, stored
from ..operator import CpuCall, Prepared
from . import cuda, plan, reference
from .blackwell_plan import blackwell_plan
from .spec import ARGUMENTS, Problem, Views, read

Result = tuple[Any, Any, Any]


def call(views: Views, problem: Problem, stream: object) -> Result:
    """One call. `stream` as the public function takes it; it means nothing on the CPU."""
    if views.q.device.kind == "cpu":
        return _on_cpu(views, problem)()
    return cuda.call(views, problem, stream)


def ready(**arguments: Any) -> Callable[[bool], Result]:
    """A call of CuPy arrays that allocates its outputs, made ready; see `cupymla.ops.repeat`. Raises InputError."""
    return cuda.ready(*read(**arguments))


def prepare(views: Views, problem: Problem, stream: object) -> Prepared[Result]:
    """A call bound to its arrays, to be run again and again."""
    if views.q.device.kind == "cpu":
        return _on_cpu(views, problem)
    return cuda.prepare(views, problem, stream)


def workspace_bytes(views: Views, problem: Problem) -> int:
    """How large a workspace a call needs, in bytes: none on the CPU."""
    return 0 if views.q.device.kind == "cpu" else cuda.workspace_bytes(views, problem)


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


def _on_cpu(views: Views, problem: Problem) -> CpuCall[Result]:
    out = CpuOutput("out", views.out, views.q)
    max_logits = CpuOutput("max_logits", views.max_logits, views.q)
    lse = CpuOutput("lse", views.lse, views.q)

    def run() -> Result:
        values = reference.sparse_mla_fwd(**ARGUMENTS.by_name(views, problem.options))
        return (
            out.write(stored(values[0], numpy_dtype(problem.dtype))),
            max_logits.write(stored(values[1], "float32")),
            lse.write(stored(values[2], "float32")),
        )

    return CpuCall(run)
