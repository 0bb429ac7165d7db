"""Bindings to the kernels: for each chunk of requests one that scores and one that selects."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

from ... import build, driver
from ...launch import Geometry, Launcher
from ...tensor import View
from ...tensormap import TileMap
from ..gpu import Launches, Results, check_record, tiles
from ..indexer_logits import cuda as dense
from ..indexer_logits.spec import Options as DenseOptions
from ..indexer_logits.spec import Problem as DenseProblem
from ..mla import batched_strides, set_strides
from ..topk import cuda as selection
from . import plan
from .spec import OPERATOR, LogitsViews, Problem, ScoredViews, Views

T = TypeVar("T")

_SWIZZLE_ROWS = 8
_HEADED = ("weights", "q_scale")
_LISTS = ("block_tables", "context_lens")
_BY_REQUEST = ("q", *_HEADED, *_LISTS)
_RESULTS = ("indices", "count", "values", "lse")


class Paged(ctypes.Structure):
    """Mirrors `Paged` in cuda/paged_indexer_topk/sm90/params.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _LISTS),
        *((name, ctypes.c_int64) for name in ("tables_request", "tables_block", "lens_request", "lens_query")),
        *((name, ctypes.c_int32) for name in ("requests", "queries", "columns", "lens_by_query", "page", "blocks")),
    )


class ScoringParameters(ctypes.Structure):
    """Mirrors `ScoringParameters` there; its size is compared with the kernel's own."""

    _fields_ = (
        ("paged", Paged),
        *((name, ctypes.c_void_p) for name in ("cache", *_HEADED, "logits")),
        *((f"{name}_{axis}", ctypes.c_int64) for name in _HEADED for axis in ("request", "query", "head")),
        *((name, ctypes.c_int64) for name in ("logits_request", "logits_query")),
        *((name, ctypes.c_int64) for name in ("block_bytes", "row_bytes", "scales_offset")),
        *((name, ctypes.c_int32) for name in ("heads", "query_tiles", "fill_end", "bf16_weights")),
        *((name, ctypes.c_int32) for name in ("wide_copies", "box_keys")),
        ("floor", ctypes.c_float),
    )


class Parameters(selection.Parameters):
    """Mirrors `SelectionParameters` there; its size is compared with the kernel's own."""

    _fields_ = (
        ("paged", Paged),
        ("lse", ctypes.c_void_p),
        ("lse_batch", ctypes.c_int64),
        ("lse_row", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("lse_base2", "slots")),
    )


def _paged(problem: Problem, views: ScoredViews, requests: int) -> Paged:
    """All but the addresses."""
    tables, lens = views.block_tables.strides, views.context_lens.strides
    return Paged(
        tables_request=tables[0],
        tables_block=tables[1],
        lens_request=lens[0],
        lens_query=lens[1] if problem.lens_by_query else 0,
        requests=requests,
        queries=problem.queries,
        columns=problem.columns,
        lens_by_query=int(problem.lens_by_query),
        page=problem.page,
        blocks=problem.blocks,
    )


def _bytes_before(view: View | None, request: int) -> int:
    return 0 if view is None else request * view.strides[0] * view.itemsize


def _key_tiles(problem: Problem, scored: DenseProblem, cache: View, facts: Mapping[str, int]) -> TileMap | None:
    """Tiles of the keys of blocks: channels, keys of a block, blocks, and an axis of extent 1.

    None for pages that are no power of two, or have fewer keys than the swizzle's pattern has rows; for rows that
    tensor copies do not take; and for strides of 0, which drivers need not take.
    """
    page = problem.page
    if not problem.blocks or problem.row_bytes % 16 or page < _SWIZZLE_ROWS or page & (page - 1):
        return None
    if not problem.row_bytes or (problem.blocks > 1 and not problem.block_bytes):
        return None
    shape, strides = (problem.channels, page, problem.blocks, 1), (problem.row_bytes, problem.block_bytes, 0)
    box = (facts["tile_bytes"] // cache.itemsize, min(page, facts["tile_keys"]), 1, 1)
    return dense.tile_map(scored, cache, shape, strides, box, facts["tile_bytes"])


class Scoring:
    """The launch that scores some requests."""

    def __init__(
        self, views: ScoredViews, problem: Problem, chunk: plan.Chunk, logits: tuple[int, int], fill_end: int
    ) -> None:
        """Lay it out.

        Args:
            views: the arrays.
            problem: of all requests.
            chunk: those of this launch.
            logits: elements from a request's scores to the next one's, and from a query's.
            fill_end: keys up to which -inf is written where nobody sees one; 0 for nowhere.
        """
        index = problem.device.index
        source = plan.scoring(problem, driver.arch_of(problem.device))
        kernel = build.kernel(source, index)
        facts = kernel.facts
        check_record(source, facts, ScoringParameters)
        multiprocessors = driver.multiprocessor_count(index)
        work = plan.work_assignment(problem, chunk.requests, fill_end > 0, facts, multiprocessors)
        self._chunk = chunk
        self._block_bytes = problem.block_bytes
        self._offsets = {name: _bytes_before(getattr(views, name), chunk.first) for name in _BY_REQUEST}
        narrow = problem.dtype == "float8_e4m3fn"
        self.record = record = ScoringParameters(
            paged=_paged(problem, views, chunk.requests),
            logits_request=logits[0],
            logits_query=logits[1],
            block_bytes=problem.block_bytes,
            row_bytes=problem.row_bytes,
            scales_offset=problem.page * problem.channels if narrow else 0,
            heads=problem.heads,
            fill_end=fill_end,
            bf16_weights=int(views.weights.dtype == "bfloat16"),
            floor=0.0 if problem.options.relu else -math.inf,
            **work.fields,
        )
        for name in _HEADED:
            set_strides(record, name, getattr(views, name), ("request", "query", "head"))
        scored = DenseProblem(
            lead=(chunk.requests,),
            queries=problem.queries,
            keys=problem.columns,
            heads=problem.heads,
            channels=problem.channels,
            dtype=problem.dtype,
            masked=True,
            options=DenseOptions(),
            device=problem.device,
        )
        # Tiles of the queries of one product: a pass over the keys has several.
        self._q_tiles = dense.q_tiles(scored, views.q, facts)
        self._k_tiles = _key_tiles(problem, scored, views.k_cache, facts)
        geometry = Geometry((work.ctas, 1, 1), facts["threads"], facts["smem_bytes"], facts["cluster"])
        self.launcher = Launcher(kernel, geometry, (ctypes.c_byte(), ctypes.c_byte(), record))
        self._pointers: tuple[int, int] | None = None

    def point(self, views: ScoredViews, logits: int) -> None:
        """Set every address."""
        record, offsets = self.record, self._offsets
        record.wide_copies = int((views.k_cache.ptr | self._block_bytes) % 16 == 0)
        record.box_keys = self._k_tiles.box[1] if self._k_tiles is not None and record.wide_copies else 0
        pointers = views.q.ptr + offsets["q"], views.k_cache.ptr
        if self._pointers != pointers:
            self._pointers = None
            q_map = tiles(self._q_tiles._replace(ptr=pointers[0]), "q", OPERATOR)
            k_map = q_map  # where there is none, nothing reads it
            if self._k_tiles is not None and record.box_keys:
                k_map = tiles(self._k_tiles._replace(ptr=pointers[1]), "k_cache", OPERATOR)
            self.launcher.replace(0, q_map)
            self.launcher.replace(1, k_map)
            self._pointers = pointers
        for name in _HEADED:
            seen: View | None = getattr(views, name)
            setattr(record, name, None if seen is None else seen.ptr + offsets[name])
        _point_lists(record.paged, views, offsets)
        record.cache = views.k_cache.ptr
        record.logits = logits


def _point_lists(record: Paged, views: ScoredViews, offsets: dict[str, int]) -> None:
    for name in _LISTS:
        setattr(record, name, getattr(views, name).ptr + offsets[name])


class _Selection:
    """The launch that selects from the scores of some requests."""

    def __init__(
        self, views: Views, problem: Problem, chunk: plan.Chunk, results: Sequence[View | None], overlaps: bool
    ) -> None:
        overlaps = overlaps and driver.has_dependent_launch(problem.device.index)
        selected = plan.selected(problem, chunk.requests)
        chosen = selection.running_plan(plan.select, selected, problem.device.index)
        self._offsets = {name: _bytes_before(getattr(views, name), chunk.first) for name in _LISTS}
        self._result_offsets = [_bytes_before(result, chunk.first) for result in results]
        options = problem.options
        self._record = record = Parameters(
            paged=_paged(problem, views, chunk.requests),
            lse_base2=int(options.lse_base == "2"),
            slots=int(options.positions == "slot"),
        )
        stride = plan.row_stride(problem)
        shape, strides = (chunk.requests, problem.queries, problem.columns), (problem.queries * stride, stride, 1)
        scores = View(0, shape, strides, "float32", problem.device, False, "raw", None)
        arrays: dict[str, View | None] = {"scores": scores, "starts": None, "ends": None}
        selection.fill(record, selected, chosen, arrays | dict(zip(_RESULTS[:3], results, strict=False)))
        lse = results[3]
        record.lse_batch, record.lse_row = batched_strides(None if lse is None else lse.strides, 2)
        self.launcher = selection.launcher(chosen, record, problem.device.index, pdl=overlaps)

    def point(self, views: Views, results: Sequence[int | None], scores: int) -> None:
        """Set every address; `results` has one for each name."""
        record = self._record
        record.scores = scores
        _point_lists(record.paged, views, self._offsets)
        for name, address, before in zip(_RESULTS, results, self._result_offsets, strict=True):
            setattr(record, name, None if address is None else address + before)


class LogitsBinding(Launches):
    """`paged_indexer_logits`: a binding; see `cupymla.ops.gpu`. It launches nothing without a score."""

    def __init__(self, views: LogitsViews, problem: Problem, results: Sequence[View], recorded: bool) -> None:
        (logits,) = results
        self._scoring = None
        if problem.requests and problem.room:
            chunk = plan.Chunk(0, problem.requests)
            self._scoring = Scoring(views, problem, chunk, (logits.strides[0], logits.strides[1]), problem.room)
        super().__init__(None if self._scoring is None else self._scoring.launcher)

    def point(self, views: LogitsViews, results: Sequence[int], workspace: int) -> None:
        """Set every address."""
        if self._scoring is not None:
            self._scoring.point(views, *results)


class Binding(Launches):
    """`paged_indexer_topk`: a binding; see `cupymla.ops.gpu`. The kernel that selects is launched as a dependent."""

    def __init__(self, views: Views, problem: Problem, results: Sequence[View], recorded: bool) -> None:
        self._wanted = [result is not None for result in problem.results]
        placed = _placed(self._wanted, results)
        stride = plan.row_stride(problem)
        strides = problem.queries * stride, stride
        self._parts = [
            (
                Scoring(views, problem, chunk, strides, 0) if problem.columns else None,
                _Selection(views, problem, chunk, placed, overlaps=bool(problem.columns) and not recorded),
            )
            for chunk in plan.chunks(problem)
        ]
        super().__init__(*(part.launcher for parts in self._parts for part in parts if part is not None))
        self.workspace_bytes = plan.workspace_limit(problem)

    def point(self, views: Views, results: Sequence[int], workspace: int) -> None:
        """Set every address. The views' layouts are those the binding was made for."""
        placed = _placed(self._wanted, results)
        for scoring, chosen in self._parts:
            if scoring is not None:
                scoring.point(views, workspace)
            chosen.point(views, placed, workspace)


def _placed(wanted: Sequence[bool], results: Sequence[T]) -> list[T | None]:
    """Results by their places among all, None for those that are not wanted."""
    left = iter(results)
    return [next(left) if one else None for one in wanted]


def logits_wanted(views: LogitsViews, problem: Problem) -> Results:
    """Shape and dtype of the result of `paged_indexer_logits`."""
    return (((problem.requests, problem.queries, problem.room), "float32"),)


def wanted(views: Views, problem: Problem) -> Results:
    """Shapes and dtypes of the results of `paged_indexer_topk`."""
    return problem.results


def workspace_bytes(views: Views, problem: Problem) -> int:
    """How large a workspace a call needs, in bytes."""
    return plan.workspace_limit(problem)
