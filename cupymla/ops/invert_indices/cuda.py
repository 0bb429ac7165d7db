"""Binding invert_indices to its kernels: parameter record, outputs, workspace, launches."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ... import build, driver
from ...errors import CompileError
from ...launch import Geometry, Launcher
from ...tensor import View
from ..entry_lists import MOST_RANGE_ROWS
from ..gpu import Launches, Results, check_record
from ..mla import batched_strides, set_strides
from . import plan
from .spec import Problem, Views

_FACTS = {"range_rows": MOST_RANGE_ROWS, "warps": plan.WARPS, "short_list": plan.SHORT_LIST}
"""What a plan goes by, where a kernel says it."""


class Parameters(ctypes.Structure):
    """Mirrors `Parameters` in cuda/invert_indices/sm90/params.cuh; its size is compared with the kernels' own."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("indices", "topk_length", "offsets", "entries")),
        *((name, ctypes.c_void_p) for name in ("scattered", "row_ends")),
        *((f"{name}_{axis}", ctypes.c_int64) for name in ("indices", "topk_length") for axis in ("batch", "query")),
        *((f"{name}_batch", ctypes.c_int64) for name in ("offsets", "entries", "row_ends")),
        *((name, ctypes.c_int32) for name in ("s_q", "s_kv", "topk")),
        *((name, ctypes.c_uint32) for name in ("topk_reciprocal", "chunks", "chunk_queries")),
        *((name, ctypes.c_uint32) for name in ("group_tokens", "has_dependent")),
    )


def filled(views: Views, problem: Problem, results: Sequence[View]) -> Parameters:
    """The parameters of a call's launches, without addresses."""
    made = Parameters(
        s_q=problem.s_q, s_kv=problem.s_kv, topk=problem.topk, topk_reciprocal=(2**32 - 1) // problem.topk
    )
    # An axis of extent 1 may be in front of the entries.
    lead = len(problem.lead) + 1
    made.indices_batch, made.indices_query = batched_strides(views.indices.strides[:lead], 2)
    set_strides(made, "topk_length", views.topk_length, ("batch", "query"))
    made.offsets_batch = made.entries_batch = batched_strides(results[0].strides, 2)[0]
    return made


class Binding(Launches):
    """The kernels with everything that one problem and its layouts fix; they launch nothing without a batch entry."""

    def __init__(self, views: Views, problem: Problem, results: Sequence[View], overlaps: bool) -> None:
        index = problem.device.index
        arch, multiprocessors = driver.arch_of(problem.device), driver.multiprocessor_count(index)
        self._record = filled(views, problem, results)
        steps = plan.launches(problem, arch, multiprocessors)
        overlaps = overlaps and driver.has_dependent_launch(index)
        launchers = []
        for number, step in enumerate(steps):
            kernel = build.kernel(step.source, index)
            facts = kernel.facts
            check_record(step.source, facts, Parameters)
            for name, value in _FACTS.items():
                if facts.get(name, value) != value:
                    raise CompileError(step.source.path, f"{name} of {value}, not {facts[name]}")
            pdl = overlaps and number > 0
            geometry = Geometry(step.grid, facts["threads"], facts["smem_bytes"], facts["cluster"], pdl=pdl)
            launchers.append(Launcher(kernel, geometry, (self._record,)))
        if steps:
            last = steps[-1]
            self._record.chunks, self._record.group_tokens = last.chunks, last.group_tokens
            self._record.chunk_queries = -(-problem.s_q // last.chunks)
            if last.chunks > 1:
                self._record.row_ends_batch = last.chunks * problem.s_kv
            else:
                self._record.row_ends_batch = self._record.offsets_batch
        self._record.has_dependent = int(len(steps) > 1)
        self._scattered_bytes = problem.batch * problem.entries * 4
        super().__init__(*launchers)
        self.workspace_bytes = plan.workspace_limit(problem)

    def point(self, views: Views, results: Sequence[int], workspace: int) -> None:
        """Set every address. The views' layouts are those the binding was made for."""
        record = self._record
        record.indices = views.indices.ptr
        record.topk_length = None if views.topk_length is None else views.topk_length.ptr
        (record.offsets,) = results
        record.entries = results[0] + (record.s_kv + 1) * 4
        record.scattered = workspace if self.workspace_bytes else None
        record.row_ends = workspace + self._scattered_bytes if record.chunks > 1 else results[0] + 4


def wanted(views: Views, problem: Problem) -> Results:
    """Shapes and dtypes of the results."""
    return problem.results


def workspace_bytes(views: Views, problem: Problem) -> int:
    """How large a workspace a call needs, in bytes."""
    return plan.workspace_limit(problem)


def bind(views: Views, problem: Problem, results: Sequence[View], recorded: bool) -> Binding:
    """The kernels for these layouts; see `cupymla.ops.calls.Calls`.

    Raises UnsupportedError, CompileError, DriverError.
    """
    return Binding(views, problem, results, overlaps=not recorded)
