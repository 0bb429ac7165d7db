"""Binding topk to its kernel: parameter record, outputs, launch."""

from __future__ import annotations

import ctypes
from typing import Any

from ... import build, driver
from ...launch import Geometry, Launcher
from ...tensor import View
from ..gpu import KernelCall, Launches, OutputArrays, check_record
from ..indexer_door import batched_strides
from . import plan
from .spec import Problem, Views

_ARRAYS = ("scores", "starts", "ends", "indices", "count", "values")


class Parameters(ctypes.Structure):
    """Twin of `Parameters` in cuda/topk/sm80/params.cuh; its size is compared with the kernel's own."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _ARRAYS),
        *((f"{name}_{axis}", ctypes.c_int64) for name in _ARRAYS for axis in ("batch", "row")),
        *((name, ctypes.c_int32) for name in ("rows", "columns", "topk", "by_score")),
        *((name, ctypes.c_int32) for name in ("capacity", "streamed", "bitmap_words", "sorted")),
    )


def record(problem: Problem, chosen: plan.Plan, arrays: dict[str, View | None]) -> Parameters:
    """The parameters of a launch; `arrays` by name, outputs included."""
    made = Parameters(
        rows=problem.rows,
        columns=problem.columns,
        topk=problem.topk,
        by_score=int(problem.order == "score"),
        capacity=chosen.capacity,
        streamed=int(chosen.streamed),
        bitmap_words=chosen.bitmap_words,
        sorted=chosen.sorted,
    )
    for name, seen in arrays.items():
        setattr(made, name, None if seen is None else seen.ptr)
        batch, row, *_ = batched_strides(seen, 2 if name in ("starts", "ends", "count") else 3)
        setattr(made, f"{name}_batch", batch)
        setattr(made, f"{name}_row", row)
    return made


def _launcher(views: Views, problem: Problem, outputs: OutputArrays) -> Launcher | None:
    if not problem.batch * problem.rows:
        return None
    index = problem.device.index
    chosen = plan.plan(problem, driver.arch_of(problem.device), driver.multiprocessor_count(index))
    kernel = build.kernel(chosen.source, index)
    check_record(chosen.source, kernel.facts, Parameters)
    made = (*outputs.views, None)
    arrays = {"scores": views.scores, "starts": views.starts, "ends": views.ends}
    arrays |= {"indices": made[0], "count": made[1], "values": made[2]}
    smem_bytes = kernel.facts["smem_bytes"] + chosen.array_bytes
    geometry = Geometry((chosen.ctas, 1, 1), chosen.threads, smem_bytes, chosen.cluster)
    return Launcher(kernel, geometry, (record(problem, chosen, arrays),))


def call(views: Views, problem: Problem, stream: object) -> KernelCall[tuple[Any, ...]]:
    """A call on a GPU. Running it raises UnsupportedError, DriverError."""
    given = (views.indices, views.count, views.values)[: len(problem.results)]

    def outputs(own: int | None) -> OutputArrays:
        return OutputArrays(views.scores, problem.results, given, own)

    def bind(arrays: OutputArrays, stream: int) -> tuple[Launches, None]:
        return Launches(_launcher(views, problem, arrays)), None

    return KernelCall(views.given, stream, outputs, bind)
