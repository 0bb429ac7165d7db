"""Binding merge_attention to its kernel: parameter record, outputs, launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

from ... import build, driver
from ...launch import Geometry, Launcher
from ...tensor import View
from ..gpu import Launches, Results, check_record
from . import plan
from .spec import CHANNELS, DTYPES, MAX_LEAD, Problem, Views

_CTAS_PER_SM = 16
"""Twice as many as run at a time: a grid-stride loop with more would only start and end them."""

_P, _I64, _I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_AXES = 3
"""Two that may lie between parts and heads, and the heads."""


class Parameters(ctypes.Structure):
    """Mirrors `Parameters` in cuda/merge_attention/sm80/params.cuh; its size is compared with the kernel's own."""

    _fields_ = (
        *((name, _P) for name in ("outs", "lses", "attn_sink", "out", "lse")),
        *((f"{name}_strides", _I64 * _AXES) for name in ("outs", "lses", "out", "lse")),
        *((name, _I64) for name in ("outs_part", "lses_part", "attn_sink_head", "rows")),
        *((name, _I32) for name in ("inner", "heads", "parts", "d_v", "type", "base2")),
    )


def _axes(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of rows and heads, the axes that are missing in front."""
    return (0,) * (_AXES - len(strides)) + strides


def fill(made: Parameters, problem: Problem, views: Views, out: View, lse: View) -> None:
    """Write the parameters of a launch, but for addresses."""
    made.parts, made.heads, made.d_v = problem.parts, problem.heads, problem.d_v
    made.type, made.base2 = DTYPES.index(problem.dtype), int(problem.options.lse_base == "2")
    _, inner = (1,) * (MAX_LEAD - len(problem.lead)) + problem.lead
    made.inner, made.rows = inner, math.prod(problem.lead)
    made.outs_part, made.lses_part = views.outs.strides[0], views.lses.strides[0]
    made.outs_strides, made.lses_strides = _axes(views.outs.strides[1:-1]), _axes(views.lses.strides[1:])
    made.out_strides, made.lse_strides = _axes(out.strides[:-1]), _axes(lse.strides)
    made.attn_sink_head = 0 if views.attn_sink is None else views.attn_sink.strides[0]


class Binding(Launches):
    """The kernel with everything that one problem and its layouts fix; it launches nothing without an element."""

    def __init__(self, views: Views, problem: Problem, results: Sequence[View]) -> None:
        out, lse = results
        launcher = None
        threads = math.prod(problem.results[0][0]) // CHANNELS
        self._record = Parameters()
        if threads:
            index = problem.device.index
            source = plan.variant(driver.arch_of(problem.device))
            kernel = build.kernel(source, index)
            check_record(source, kernel.facts, Parameters)
            fill(self._record, problem, views, out, lse)
            size = kernel.facts["threads"]
            ctas = min(-(-threads // size), _CTAS_PER_SM * driver.multiprocessor_count(index))
            launcher = Launcher(kernel, Geometry((ctas, 1, 1), size, kernel.facts["smem_bytes"]), (self._record,))
        super().__init__(launcher)

    def point(self, views: Views, results: Sequence[int], workspace: int) -> None:
        """Set every address. The views' layouts are those the binding was made for."""
        record = self._record
        record.outs, record.lses = views.outs.ptr, views.lses.ptr
        record.attn_sink = None if views.attn_sink is None else views.attn_sink.ptr
        record.out, record.lse = results


def wanted(views: Views, problem: Problem) -> Results:
    """Shapes and dtypes of the results."""
    return problem.results


def bind(views: Views, problem: Problem, results: Sequence[View], recorded: bool) -> Binding:
    """The kernel for these layouts; see `cupymla.ops.calls.Calls`.

    Raises UnsupportedError, CompileError, DriverError.
    """
    return Binding(views, problem, results)
