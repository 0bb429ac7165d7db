"""Binding sparse_mla_decode to its kernel: parameter record, tensor map of q, launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

from ... import build, driver
from ...build.source import KernelSource
from ...errors import CompileError
from ...launch import Geometry, Launcher, active_clusters
from ...tensor import View
from ..gpu import Launches, Results, check_record, tiles
from ..head_tiles import head_tiles
from ..log2_scales import lse_scales
from ..mla_cache.cuda import page_reciprocal
from ..sparse_mla_fwd import binding as forward
from . import plan
from .spec import OPERATOR, Cache, Problem, Views


class Source(ctypes.Structure):
    """Mirrors `Source` in cuda/sparse_mla_decode/sm90/params.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("cache", "indices", "lengths")),
        *((name, ctypes.c_int64) for name in ("block_bytes", "indices_batch", "indices_query")),
        *((name, ctypes.c_int64) for name in ("lengths_batch", "lengths_query")),
        ("topk", ctypes.c_int32),
        *((name, ctypes.c_uint32) for name in ("slots", "page", "page_reciprocal")),
    )


class Parameters(forward.Parameters):
    """Mirror of `Parameters` in cuda/sparse_mla_decode/sm90/params.cuh; its size is compared with the kernel's own."""

    _fields_ = (
        ("sources", Source * 2),
        ("share_outputs", ctypes.c_void_p),
        ("share_statistics", ctypes.c_void_p),
        ("share_heads", ctypes.c_int64),
    )


def _fill(made: Source, cache: Cache, indices: View, lengths: View | None) -> None:
    """Write what a source has but for addresses."""
    made.block_bytes, made.topk, made.slots, made.page = cache.block_bytes, cache.topk, cache.num_slots, cache.page
    made.page_reciprocal = page_reciprocal(cache.page)
    made.indices_batch, made.indices_query, _ = indices.strides
    if lengths is not None:
        made.lengths_batch, made.lengths_query = (*lengths.strides, 0)[:2]


def _ptr(view: View | None) -> int | None:
    return None if view is None else view.ptr


class Binding(Launches):
    """The kernels with everything that one problem and its layouts fix; they launch nothing without a row."""

    def __init__(self, views: Views, problem: Problem, results: Sequence[View], recorded: bool) -> None:
        launchers = []
        self._problem = problem
        self._q_ptr: int | None = None
        if problem.rows:
            chosen = _running_plan(problem)
            kernel = build.kernel(chosen.source, problem.device.index)
            check_record(chosen.source, kernel.facts, Parameters)
            self._heads = chosen.division.heads
            if kernel.facts["heads_per_cta"] != self._heads:
                found = kernel.facts["heads_per_cta"]
                raise CompileError(chosen.source.path, f"{self._heads} heads a CTA, the kernel has {found}")
            if chosen.rows.group_tokens > kernel.facts["most_rows"]:
                found = kernel.facts["most_rows"]
                raise CompileError(chosen.source.path, f"{chosen.rows.group_tokens} rows a CTA, the kernel has {found}")
            self._record = self._filled(views, problem, chosen, results)
            self._tiled = Launcher(kernel, _geometry(kernel, chosen), (ctypes.c_byte(), self._record))
            launchers.append(self._tiled)
            self.workspace_bytes = chosen.workspace_bytes
            self._statistics_at = problem.rows * problem.h_q * chosen.division.shares * plan.SHARE_CHANNELS * 4
            if chosen.merge is not None:
                launchers.append(self._merging(chosen, chosen.merge, overlaps=not recorded))
        super().__init__(*launchers)

    def _merging(self, chosen: plan.Plan, source: KernelSource, *, overlaps: bool) -> Launcher:
        problem, index = self._problem, self._problem.device.index
        kernel = build.kernel(source, index)
        check_record(source, kernel.facts, Parameters)
        geometry = Geometry(
            (problem.rows * problem.h_q, 1, 1),
            kernel.facts["threads"],
            kernel.facts["smem_bytes"],
            pdl=overlaps and driver.has_dependent_launch(index),
        )
        return Launcher(kernel, geometry, (self._record, ctypes.c_uint32(chosen.division.shares)))

    @staticmethod
    def _filled(views: Views, problem: Problem, chosen: plan.Plan, results: Sequence[View]) -> Parameters:
        out, lse = results
        scales = lse_scales(problem.scale, problem.options.lse_base)
        made = Parameters(
            s_q=problem.s_q,
            h_q=problem.h_q,
            k_stride=1,
            head_blocks=chosen.head_blocks,
            groups=chosen.rows.groups,
            group_tokens=chosen.rows.group_tokens,
            scale_log2=scales.score,
            max_unit=1.0,
            base_unit=scales.unit,
            base_unit_rest=scales.unit_rest,
            lse_unit=1.0 if problem.options.lse_base == "2" else math.log(2.0),
            share_heads=problem.rows * problem.h_q,
        )
        if views.attn_sink is not None:
            (made.attn_sink_head,) = views.attn_sink.strides
        made.out_batch_bytes, made.out_query_bytes, made.out_head_bytes, _ = out.strides_bytes
        # max_logits has the place of lse: see params.cuh.
        for name in ("lse", "max_logits"):
            for axis, stride in zip(("batch", "query", "head"), lse.strides, strict=True):
                setattr(made, f"{name}_{axis}", stride)
        _fill(made.sources[0], problem.caches[0], views.indices, views.topk_length)
        if views.extra_indices is not None:
            _fill(made.sources[1], problem.caches[1], views.extra_indices, views.extra_topk_length)
        return made

    def point(self, views: Views, results: Sequence[int], workspace: int) -> None:
        """Set every address. The views' layouts are those the binding was made for."""
        if self.launcher is None:
            return
        record, problem = self._record, self._problem
        record.out, record.lse = results
        record.max_logits = record.lse
        record.attn_sink = _ptr(views.attn_sink)
        first, second = record.sources
        first.cache, first.indices, first.lengths = views.k_cache.ptr, views.indices.ptr, _ptr(views.topk_length)
        second.cache, second.indices = _ptr(views.extra_k_cache), _ptr(views.extra_indices)
        second.lengths = _ptr(views.extra_topk_length)
        if self.workspace_bytes:
            record.share_outputs, record.share_statistics = workspace, workspace + self._statistics_at
        if self._q_ptr != views.q.ptr:
            batch, query, head, _ = views.q.strides
            request = head_tiles(problem, views.q.ptr, (batch, query, head), problem.d_qk, self._heads)
            self._tiled.replace(0, tiles(request, "q", OPERATOR))
            self._q_ptr = views.q.ptr


def _geometry(kernel: build.Kernel, chosen: plan.Plan) -> Geometry:
    # A CTA that is alone still reads its own shared memory as a cluster's.
    facts = kernel.facts
    division = chosen.division
    grid = chosen.ctas, division.shares, 1
    return Geometry(grid, facts["threads"], facts["smem_bytes"], division.cluster, clustered=True)


def _running_plan(problem: Problem) -> plan.Plan:
    """The plan whose clusters run as the driver has it; with `splits` given, the only one."""
    device = problem.device
    arch, count = driver.arch_of(device), driver.multiprocessor_count(device.index)
    chosen = plan.plan(problem, arch, count)
    if chosen.division.cluster == 1 or problem.options.splits is not None:
        return chosen
    kernel = build.kernel(chosen.source, device.index)
    if active_clusters(kernel, _geometry(kernel, chosen)) > 0:
        return chosen
    return plan.plan(problem, arch, count, pairs=False)


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
