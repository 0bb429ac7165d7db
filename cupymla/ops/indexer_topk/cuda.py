"""Binding indexer_topk to its kernels: for each chunk of rows one that scores and one that selects."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TypeVar

from ... import driver
from ...tensor import View
from ..gpu import Launches, Results
from ..indexer_logits import cuda as scoring
from ..indexer_logits.spec import Problem as ScoringProblem
from ..indexer_logits.spec import ScoredViews
from ..indexer_logits.spec import Views as ScoringViews
from ..mla import batched_strides
from ..topk import cuda as selection
from . import plan
from .spec import Problem, Views

T = TypeVar("T")

_SCORED = tuple(field.name for field in fields(ScoredViews))
_BY_ROW = ("q", "weights", "q_scale", "starts", "ends")
_RESULTS = ("indices", "count", "values", "lse")


class Parameters(selection.Parameters):
    """Mirror of `Parameters` in cuda/indexer_topk/sm90/params.cuh; its size is compared with the kernel's own."""

    _fields_ = (
        ("lse", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("lse_batch", "lse_row", "q_start", "k_stride")),
        *((name, ctypes.c_int32) for name in ("causal", "lse_base2", "has_dependent")),
    )


class _Part:
    """A chunk's two launches; `_offsets` are bytes from the beginning of each array and result."""

    def __init__(
        self,
        views: Views,
        problem: Problem,
        results: Sequence[View | None],
        chunk: plan.Chunk,
        *,
        is_first: bool,
        is_last: bool,
        overlaps: bool,
    ) -> None:
        scores, options = problem.scores, problem.options
        device = scores.device
        self._offsets = {name: _offset(getattr(views, name), name, chunk, scores) for name in _SCORED}
        self._views = ScoringViews(
            **{name: _chunk_of(getattr(views, name), name, chunk, scores) for name in _SCORED}  # type: ignore[arg-type]
        )
        q_start = options.q_start + chunk.first_row
        selected = plan.selected(problem, chunk)
        lead, stride = selected.lead, plan.row_stride(problem)
        strides = (*((chunk.rows * stride,) if lead else ()), stride, 1)
        logits = View(0, (*lead, chunk.rows, scores.keys), strides, "float32", device, False, "raw", None)
        own_options = replace(scores.options, q_start=q_start)
        own_scores = replace(scores, lead=lead, queries=chunk.rows, options=own_options)
        self._scoring = scoring.Binding(
            self._views,
            own_scores,
            logits,
            fills=False,
            dependent=overlaps and not is_first,
            has_dependent=overlaps,
        )
        chosen = selection.running_plan(plan.select, selected, device.index)
        self._record = Parameters(
            q_start=q_start,
            k_stride=options.k_stride,
            causal=int(options.causal),
            lse_base2=int(options.lse_base == "2"),
            has_dependent=int(overlaps and not is_last),
        )
        arrays: dict[str, View | None] = {"scores": logits, "starts": views.starts, "ends": views.ends}
        selection.fill(self._record, selected, chosen, arrays | dict(zip(_RESULTS[:3], results, strict=False)))
        lse = results[3]
        self._record.lse_batch, self._record.lse_row = batched_strides(None if lse is None else lse.strides, 2)
        self._result_offsets = [
            None if view is None else _bytes_before(view, chunk, bool(scores.lead)) for view in results
        ]
        scores_first = self._scoring.launcher
        chosen_after = selection.launcher(chosen, self._record, device.index, pdl=overlaps and scores_first is not None)
        self.launchers = scores_first, chosen_after

    def point(self, views: Views, results: Sequence[int | None], workspace: int) -> None:
        """Set every address; `results` has one for each name."""
        for name, offset in self._offsets.items():
            seen: View | None = getattr(self._views, name)
            if seen is not None:
                seen.ptr = getattr(views, name).ptr + offset
        self._scoring.point(self._views, (workspace,), 0)
        record = self._record
        record.scores = workspace
        record.starts, record.ends = (
            None if seen is None else seen.ptr for seen in (self._views.starts, self._views.ends)
        )
        for name, address, before in zip(_RESULTS, results, self._result_offsets, strict=True):
            setattr(record, name, None if address is None or before is None else address + before)


def _bytes_before(view: View, chunk: plan.Chunk, has_batch: bool) -> int:
    """From an array's first element to a chunk's, where the first axes are batch, if there is one, and rows."""
    batch, row = view.strides[:2] if has_batch else (0, view.strides[0])
    return (chunk.first_entry * batch + chunk.first_row * row) * view.itemsize


def _offset(view: View | None, name: str, chunk: plan.Chunk, scores: ScoringProblem) -> int:
    if view is None:
        return 0
    if name in _BY_ROW:
        return _bytes_before(view, chunk, bool(scores.lead))
    return chunk.first_entry * view.strides[0] * view.itemsize if scores.lead else 0


def _chunk_of(view: View | None, name: str, chunk: plan.Chunk, scores: ScoringProblem) -> View | None:
    """A chunk's part of an array, as a view whose address is still to be set."""
    if view is None:
        return None
    shape = list(view.shape)
    if scores.lead:
        shape[0] = chunk.entries
    if name in _BY_ROW:
        shape[1 if scores.lead else 0] = chunk.rows
    return replace(view, shape=tuple(shape), owner=None, capsule=None, stream=None)


class Binding(Launches):
    """The kernels with everything that one problem and its layouts fix; without a query nothing is launched.

    Each but the first is a dependent launch.
    """

    def __init__(self, views: Views, problem: Problem, results: Sequence[View], recorded: bool) -> None:
        overlaps = not recorded and driver.has_dependent_launch(problem.scores.device.index)
        self._wanted = [result is not None for result in problem.results]
        placed = _placed(self._wanted, results)
        parts = list(plan.chunks(problem))
        self._parts = [
            _Part(
                views,
                problem,
                placed,
                chunk,
                is_first=number == 0,
                is_last=number == len(parts) - 1,
                overlaps=overlaps,
            )
            for number, chunk in enumerate(parts)
        ]
        super().__init__(*(launcher for part in self._parts for launcher in part.launchers))
        self.workspace_bytes = plan.workspace_limit(problem)

    def point(self, views: Views, results: Sequence[int], workspace: int) -> None:
        """Set every address. The views' layouts are those the binding was made for."""
        placed = _placed(self._wanted, results)
        for part in self._parts:
            part.point(views, placed, workspace)


def _placed(wanted: Sequence[bool], results: Sequence[T]) -> list[T | None]:
    """Results by their places among all, None for those that are not wanted."""
    left = iter(results)
    return [next(left) if one else None for one in wanted]


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
    return Binding(views, problem, results, recorded)
