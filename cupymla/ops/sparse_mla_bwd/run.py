"""From checked arguments to a prepared call: the NumPy reference on the CPU, the kernels on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...arch import Gpu
from ...build import KernelSource
from ..mla import CpuOutput
from ..mla_reference import numpy_dtype, stored
from ..operator import CpuCall, Prepared
from . import cuda, plan, reference
from .spec import ARGUMENTS, Problem, Views, read

Result = tuple[Any, ...]


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
    """The kernels that a call on such a GPU compiles. Raises InputError, UnsupportedError."""
    _, problem = read(**arguments)
    chosen = plan.plan(problem, gpu.arch, gpu.multiprocessors)
    return tuple(dict.fromkeys(chosen.source(launch.stage) for launch in chosen.launches()))


def _on_cpu(views: Views, problem: Problem) -> CpuCall[Result]:
    outputs = [(CpuOutput("dq", views.dq, views.q), problem.shared.dtype)]
    outputs.append((CpuOutput("dkv", views.dkv, views.q), problem.dkv_dtype))
    if problem.shared.has_sink:
        outputs.append((CpuOutput("d_sink", views.d_sink, views.q), "float32"))

    def run() -> Result:
        values = reference.sparse_mla_bwd(**ARGUMENTS.by_name(views, problem.shared.options))
        return tuple(
            output.write(stored(value, numpy_dtype(dtype)))
            for (output, dtype), value in zip(outputs, values, strict=True)
        )

    return CpuCall(run)
