"""Binding topk to its kernel: parameter record, outputs, launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence

from ... import build, driver
from ...arch import Arch
from ...launch import Geometry, Launcher, active_clusters
from ...tensor import View
from ..gpu import Launches, Results, check_record
from ..mla import batched_strides
from . import plan
from .spec import Problem, Views

_ARRAYS = ("scores", "starts", "ends", "indices", "count", "values")


class Parameters(ctypes.Structure):
    """Mirrors `Parameters` in cuda/topk/sm80/params.cuh; its size is compared with the kernel's own."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _ARRAYS),
        *((f"{name}_{axis}", ctypes.c_int64) for name in _ARRAYS for axis in ("batch", "row")),
        *((name, ctypes.c_int32) for name in ("rows", "columns", "topk", "by_score")),
        *((name, ctypes.c_int32) for name in ("capacity", "streamed", "bitmap_words", "sorted")),
    )


def fill(made: Parameters, problem: Problem, chosen: plan.Plan, arrays: dict[str, View | None]) -> None:
    """Write the parameters of a launch; `arrays` by name, outputs included."""
    made.rows, made.columns, made.topk = problem.rows, problem.columns, problem.topk
    made.by_score = int(problem.options.order == "score")
    made.capacity, made.streamed = chosen.capacity, int(chosen.streamed)
    made.bitmap_words, made.sorted = chosen.bitmap_words, chosen.sorted
    for name, seen in arrays.items():
        setattr(made, name, None if seen is None else seen.ptr)
        batch, row, *_ = batched_strides(
            None if seen is None else seen.strides, 2 if name in ("starts", "ends", "count") else 3
        )
        setattr(made, f"{name}_batch", batch)
        setattr(made, f"{name}_row", row)


def running_plan(
    planned: Callable[[Problem, Arch, int, Collection[int]], plan.Plan], problem: Problem, device: int
) -> plan.Plan:
    """The plan of a GPU whose clusters, where a row has one, all run at once as the driver has it.

    Args:
        planned: `topk.plan.plan`, or that of an operator that selects from its scores.
        problem: what to plan for.
        device: the GPU's number.
    """
    arch, count = driver.arch_of(problem.device), driver.multiprocessor_count(device)
    without: set[int] = set()
    while True:
        chosen = planned(problem, arch, count, without)
        if chosen.cluster == 1:
            return chosen
        kernel = build.kernel(chosen.source, device)
        if active_clusters(kernel, _geometry(kernel, chosen)) * chosen.cluster >= chosen.ctas:
            return chosen
        without.add(chosen.cluster)


def _geometry(kernel: build.Kernel, chosen: plan.Plan, pdl: bool = False) -> Geometry:
    smem_bytes = kernel.facts["smem_bytes"] + chosen.array_bytes
    return Geometry((chosen.ctas, 1, 1), chosen.threads, smem_bytes, chosen.cluster, pdl=pdl)


def launcher(chosen: plan.Plan, record: Parameters, device: int, pdl: bool = False) -> Launcher:
    """A planned launch of a kernel that has that record; also of the operators that select from their scores.

    Raises CompileError, UnsupportedError, DriverError.
    """
    kernel = build.kernel(chosen.source, device)
    check_record(chosen.source, kernel.facts, type(record))
    return Launcher(kernel, _geometry(kernel, chosen, pdl), (record,))


class Binding(Launches):
    """The kernel with everything that one problem and its layouts fix; it launches nothing without a row."""

    def __init__(self, views: Views, problem: Problem, results: Sequence[View]) -> None:
        launch = None
        if problem.batch * problem.rows:
            index = problem.device.index
            chosen = running_plan(plan.plan, problem, index)
            made = (*results, None)
            arrays = {"scores": views.scores, "starts": views.starts, "ends": views.ends}
            arrays |= {"indices": made[0], "count": made[1], "values": made[2]}
            self._record = Parameters()
            fill(self._record, problem, chosen, arrays)
            launch = launcher(chosen, self._record, index)
        super().__init__(launch)

    def point(self, views: Views, results: Sequence[int], workspace: int) -> None:
        """Set every address. The views' layouts are those the binding was made for."""
        if self.launcher is None:
            return
        record = self._record
        record.scores = views.scores.ptr
        record.starts = None if views.starts is None else views.starts.ptr
        record.ends = None if views.ends is None else views.ends.ptr
        record.indices, record.count, *values = results
        record.values = values[0] if values else None


def wanted(views: Views, problem: Problem) -> Results:
    """Shapes and dtypes of the results."""
    return problem.results


def bind(views: Views, problem: Problem, results: Sequence[View], recorded: bool) -> Binding:
    """The kernel for these layouts; see `cupymla.ops.calls.Calls`.

    Raises UnsupportedError, CompileError, DriverError.
    """
    return Binding(views, problem, results)
