"""Binding indexer_bwd to its kernels: parameter record, outputs, workspace, launches."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ... import build, driver
from ...launch import Geometry, Launcher
from ...tensor import View
from ..gpu import Launches, Results, check_record
from ..mla import set_strides
from . import plan
from .spec import ARGUMENTS, Problem, Views

_AXES = {
    "q": ("batch", "query", "head"),
    "k": ("batch", "key"),
    "weights": ("batch", "query", "head"),
    **dict.fromkeys(("grad_logits", "indices", "topk_length"), ("batch", "query")),
    "dq": ("batch", "query", "head"),
    "dk": ("batch", "key"),
    "dweights": ("batch", "query", "head"),
}
_INPUTS = tuple(name for name in _AXES if name not in ARGUMENTS.results)

_EVERY_AXIS = ("weights", "topk_length", "dweights")
"""Arrays whose axes all have a field; others end with a contiguous one that has none."""

_BOUNDS = ("totals", "non_finite", "query_bounds", "channel_parts", "largest")
"""Parts of the workspace where sums are integers."""

_DK_TYPES = ("bfloat16", "float16", "float32")


class Parameters(ctypes.Structure):
    """Mirrors `Parameters` in cuda/indexer_bwd/sm90/params.cuh; its size is compared with the kernels' own."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*_AXES, "sums", *_BOUNDS)),
        *((f"{name}_{axis}", ctypes.c_int64) for name, axes in _AXES.items() for axis in axes),
        *((name, ctypes.c_int64) for name in ("q_start", "k_stride", "zeroed_chunks")),
        *((name, ctypes.c_int32) for name in ("batch", "queries", "keys", "heads", "topk")),
        *((name, ctypes.c_int32) for name in ("bf16_weights", "causal", "relu", "dk_type", "adds_log2", "range_keys")),
    )


def filled(problem: Problem, arrays: dict[str, View | None]) -> Parameters:
    """The parameters of a call's launches, without addresses; `arrays` by name, outputs included."""
    options = problem.options
    made = Parameters(
        q_start=options.q_start,
        k_stride=options.k_stride,
        zeroed_chunks=plan.workspace(problem).bytes // 16,
        batch=problem.batch,
        queries=problem.queries,
        keys=problem.keys,
        heads=problem.heads,
        topk=problem.topk,
        bf16_weights=int(problem.weights_dtype == "bfloat16"),
        causal=int(options.causal),
        relu=int(options.relu),
        dk_type=_DK_TYPES.index(problem.dk_dtype),
        adds_log2=plan.adds_log2(problem),
        range_keys=plan.range_keys(problem),
    )
    for name, axes in _AXES.items():
        set_strides(made, name, arrays[name], axes, more=int(name not in _EVERY_AXIS))
    return made


class Binding(Launches):
    """The kernels with everything that one problem and its layouts fix."""

    def __init__(self, views: Views, problem: Problem, results: Sequence[View]) -> None:
        index = problem.device.index
        arrays = {name: getattr(views, name) for name in _AXES}
        arrays |= dict(zip(ARGUMENTS.results, results, strict=True))
        self._record = filled(problem, arrays)
        self._layout = plan.workspace(problem)
        launchers = []
        for launch in plan.launches(problem, driver.arch_of(problem.device)):
            kernel = build.kernel(launch.source, index)
            check_record(launch.source, kernel.facts, Parameters)
            geometry = Geometry((launch.ctas, 1, 1), kernel.facts["threads"], kernel.facts["smem_bytes"])
            launchers.append(Launcher(kernel, geometry, (self._record,)))
        super().__init__(*launchers)
        self.workspace_bytes = self._layout.bytes

    def point(self, views: Views, results: Sequence[int], workspace: int) -> None:
        """Set every address. The views' layouts are those the binding was made for."""
        record, layout = self._record, self._layout
        for name in _INPUTS:
            seen: View | None = getattr(views, name)
            setattr(record, name, None if seen is None else seen.ptr)
        record.dq, record.dk, record.dweights = results
        record.sums = workspace + layout.sums
        for name in _BOUNDS:
            start: int | None = getattr(layout, name)
            setattr(record, name, None if start is None else workspace + start)


def wanted(views: Views, problem: Problem) -> Results:
    """Shapes and dtypes of the results."""
    return problem.results


def workspace_bytes(views: Views, problem: Problem) -> int:
    """How large a workspace a call needs, in bytes. Raises UnsupportedError."""
    plan.launches(problem, driver.arch_of(problem.device))
    return plan.workspace(problem).bytes


def bind(views: Views, problem: Problem, results: Sequence[View], recorded: bool) -> Binding:
    """The kernels for these layouts; see `cupymla.ops.calls.Calls`.

    Raises UnsupportedError, CompileError, DriverError.
    """
    return Binding(views, problem, results)
