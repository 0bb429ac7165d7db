"""Binding indexer_loss to its kernel: parameter record, outputs, launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

from ... import build, driver
from ...launch import Geometry, Launcher
from ...tensor import View
from ..gpu import Launches, Results, check_record
from ..mla import set_strides
from . import plan
from .spec import Problem, Views

_AXES = {
    "q": ("batch", "query", "head"),
    "k": ("batch", "key"),
    "weights": ("batch", "query", "head"),
    **dict.fromkeys(("indices", "target", "topk_length", "lse", "loss", "grad_logits"), ("batch", "query")),
}
_ROWS = ("topk_length", "lse", "loss")


class Parameters(ctypes.Structure):
    """Mirrors `Parameters` in cuda/indexer_loss/sm90/params.cuh; its size is compared with the kernel's own."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _AXES),
        *((f"{name}_{axis}", ctypes.c_int64) for name, axes in _AXES.items() for axis in axes),
        *((name, ctypes.c_int64) for name in ("q_start", "k_stride")),
        *((name, ctypes.c_int32) for name in ("queries", "keys", "heads", "topk", "bf16_weights", "causal")),
        ("floor", ctypes.c_float),
    )


def filled(problem: Problem, arrays: dict[str, View | None]) -> Parameters:
    """The parameters of a launch; `arrays` by name, outputs included."""
    weights = arrays["weights"]
    made = Parameters(
        q_start=problem.options.q_start,
        k_stride=problem.options.k_stride,
        queries=problem.queries,
        keys=problem.keys,
        heads=problem.heads,
        topk=problem.topk,
        bf16_weights=int(weights is not None and weights.dtype == "bfloat16"),
        causal=int(problem.options.causal),
        floor=0.0 if problem.options.relu else -math.inf,
    )
    for name, axes in _AXES.items():
        seen = arrays[name]
        setattr(made, name, None if seen is None else seen.ptr)
        # Rows of q, k and lists end with a contiguous axis, which has no field.
        set_strides(made, name, seen, axes, more=int(name not in (*_ROWS, "weights")))
    return made


class Binding(Launches):
    """The kernel with everything that one problem and its layouts fix; it launches nothing without a query."""

    def __init__(self, views: Views, problem: Problem, results: Sequence[View]) -> None:
        launcher = None
        if 0 not in problem.row:
            index = problem.device.index
            source = plan.plan(problem, driver.arch_of(problem.device))
            kernel = build.kernel(source, index)
            facts = kernel.facts
            check_record(source, facts, Parameters)
            arrays = {name: getattr(views, name) for name in _AXES}
            arrays["loss"], arrays["grad_logits"] = results
            self._record = filled(problem, arrays)
            geometry = Geometry((problem.batch * problem.queries, 1, 1), facts["threads"], facts["smem_bytes"])
            launcher = Launcher(kernel, geometry, (self._record,))
        super().__init__(launcher)

    def point(self, views: Views, results: Sequence[int], workspace: int) -> None:
        """Set every address. The views' layouts are those the binding was made for."""
        if self.launcher is None:
            return
        for name in tuple(_AXES)[:-2]:
            seen: View | None = getattr(views, name)
            setattr(self._record, name, None if seen is None else seen.ptr)
        self._record.loss, self._record.grad_logits = results


def wanted(views: Views, problem: Problem) -> Results:
    """Shapes and dtypes of the results."""
    return ((problem.row, "float32"), ((*problem.row, problem.topk), "float32"))


def bind(views: Views, problem: Problem, results: Sequence[View], recorded: bool) -> Binding:
    """The kernel for these layouts; see `cupymla.ops.calls.Calls`.

    Raises UnsupportedError, CompileError, DriverError.
    """
    return Binding(views, problem, results)
