"""What calls of sparse_mla_fwd want of a GPU: results, a workspace, a binding."""

from __future__ import annotations

from collections.abc import Sequence

from ... import driver
from ...tensor import View
from ..gpu import Results
from . import binding, plan
from .binding import Binding, Parameters, record, running_plan
from .spec import Problem, Views

__all__ = ["Binding", "Parameters", "bind", "record", "wanted", "workspace_bytes"]


def wanted(views: Views, problem: Problem) -> Results:
    """Shapes and dtypes of the results."""
    statistics = (problem.head_shape, "float32")
    return (problem.out_shape, problem.dtype), statistics, statistics


def workspace_bytes(views: Views, problem: Problem) -> int:
    """How large a workspace a call needs, in bytes. Raises UnsupportedError."""
    device = views.q.device
    if driver.arch_of(device).name == plan.BLACKWELL:
        return 0
    with driver.on_device(device.index):
        layout = running_plan(plan.plan, problem, device).workspace
    return 0 if layout is None else layout.bytes


def bind(views: Views, problem: Problem, results: Sequence[View], recorded: bool) -> Binding:
    """The kernel for these layouts; see `cupymla.ops.calls.Calls`.

    Calls that are recorded take rows in the order of tokens only in a workspace that they are given. Raises
    UnsupportedError, CompileError, DriverError.
    """
    sink_stride = 0 if views.attn_sink is None else views.attn_sink.strides[0]
    may_order = not recorded or views.workspace is not None
    return binding.bind(problem, views.q.device, tuple(results), sink_stride, may_order)
