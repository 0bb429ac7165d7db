"""Binding sparse_mla_bwd to its kernels: parameter record, tensor maps, outputs, workspace, launches."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

from ... import build, driver
from ...device import Device
from ...errors import CompileError
from ...launch import Geometry, Launcher
from ...launch import Parameter as LaunchParameter
from ...tensor import View
from ...tensormap import element_bytes, encoded
from ..entry_lists import MOST_RANGE_ROWS
from ..gpu import Launches, Results, check_record, tiles
from ..head_tiles import BOX_CHANNELS, head_tiles
from ..log2_scales import log2_scales
from ..mla import MaskOptions, MlaProblem, lead_strides, record_fields
from ..rows_in_order import list_strides
from . import plan
from .launches import ATTENDING, Launch, Stage
from .paths.cluster import ROPE_COLUMNS
from .sizes import group_word_bytes
from .spec import OPERATOR, Problem, Views


class Parameters(ctypes.Structure):
    """Mirrors `Parameters` in cuda/sparse_mla_bwd/params.cuh; its size is compared with the kernels' own."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("kv", "out", "lse", "indices", "topk_length", "attn_sink")),
        *((name, ctypes.c_void_p) for name in ("attn_dist", "dq", "dkv", "d_sink")),
        *((name, ctypes.c_void_p) for name in ("sums", "sink_terms", "partials", "row_ends", "entry_list")),
        *(
            (name, ctypes.c_void_p)
            for name in ("rows", "row_topk_entries", "row_counts", "listed_dist", "non_finite_rows")
        ),
        *((name, ctypes.c_int64) for name in ("kv_batch_bytes", "kv_token_bytes")),
        *((name, ctypes.c_int64) for name in ("out_batch_bytes", "out_query_bytes", "out_head_bytes")),
        *((name, ctypes.c_int64) for name in ("lse_batch", "lse_query", "lse_head")),
        *((name, ctypes.c_int64) for name in ("indices_batch", "indices_query")),
        *((name, ctypes.c_int64) for name in ("topk_length_batch", "topk_length_query", "attn_sink_head")),
        *((name, ctypes.c_int64) for name in ("attn_dist_batch", "attn_dist_query")),
        *((name, ctypes.c_int64) for name in ("dq_batch_bytes", "dq_query_bytes", "dq_head_bytes")),
        *((name, ctypes.c_int64) for name in ("dkv_batch_bytes", "dkv_token_bytes", "d_sink_head")),
        *((name, ctypes.c_int64) for name in ("sums_batch", "sums_token")),
        *((name, ctypes.c_int64) for name in ("q_start", "k_stride", "kv_rows")),
        *((name, ctypes.c_int32) for name in ("s_q", "s_kv", "h_q", "topk")),
        *((name, ctypes.c_uint32) for name in ("query_begin", "query_end")),
        *((name, ctypes.c_int32) for name in ("head_blocks", "batch_rows", "token_rows", "causal", "has_dependent")),
        *((name, ctypes.c_float) for name in ("sm_scale", "scale_log2", "unit", "unit_rest")),
        *((name, ctypes.c_float) for name in ("lse_to_log2", "sink_to_lse")),
        *((name, ctypes.c_void_p) for name in ("p_ds", "lists")),
        ("lists_batch", ctypes.c_int64),
    )


class SinkLseParameters(ctypes.Structure):
    """Mirrors `SinkLseParameters` in cuda/sparse_mla_bwd/sink_lse.cuh."""

    _fields_ = (
        ("common", Parameters),
        *((name, ctypes.c_void_p) for name in ("dout", "sink_lse")),
        *((name, ctypes.c_int64) for name in ("dout_batch_bytes", "dout_query_bytes", "dout_head_bytes")),
        ("is_fp16", ctypes.c_int32),
    )


class ListParameters(ctypes.Structure):
    """Mirrors `ListParameters` in cuda/sparse_mla_bwd/entry_lists.cuh."""

    _fields_ = (("common", Parameters), ("chunk_queries", ctypes.c_uint32))


def sink_lse_parameters(views: Views, shared: MlaProblem[MaskOptions]) -> SinkLseParameters:
    """What the stage `sink_lse` has beside the others, without addresses."""
    record = SinkLseParameters(is_fp16=shared.dtype == "float16")
    record.dout_batch_bytes, record.dout_query_bytes, record.dout_head_bytes = _bytes(views.dout, shared)
    return record


def parameters(chosen: plan.Plan, views: Views, outputs: Sequence[View]) -> Parameters:
    """The record without addresses.

    Args:
        chosen: the plan.
        views: the arguments; only their strides matter.
        outputs: dq, dkv, and d_sink where there is one.
    """
    problem, shared = chosen.problem, chosen.problem.shared
    options, scale = shared.options, shared.options.scale(shared.d_qk)
    scales = log2_scales(scale, options.lse_base)
    record = Parameters(
        **record_fields(shared),
        kv_rows=chosen.kv_rows,
        head_blocks=chosen.head_blocks,
        sm_scale=scale,
        scale_log2=scales.score,
        unit=scales.unit,
        unit_rest=scales.unit_rest,
        lse_to_log2=1.0 if options.lse_base == "2" else math.log2(math.e),
        sink_to_lse=math.log2(math.e) if options.lse_base == "2" else 1.0,
    )
    if chosen.kv_map is not None:
        record.batch_rows, record.token_rows = chosen.kv_map.batch_rows, chosen.kv_map.token_rows
    record.kv_batch_bytes, record.kv_token_bytes = (stride * 2 for stride in shared.kv_strides)
    record.out_batch_bytes, record.out_query_bytes, record.out_head_bytes = _bytes(views.out, shared)
    record.lse_batch, record.lse_query, record.lse_head = lead_strides(views.lse, shared)
    record.attn_sink_head = 0 if views.attn_sink is None else views.attn_sink.strides[0]
    if views.attn_dist is not None:
        record.attn_dist_batch, record.attn_dist_query = (0, *views.attn_dist.strides)[-3:-1]
    if views.lists is not None and problem.has_lists:
        record.lists_batch = (0, *views.lists.strides)[-2]
    record.dq_batch_bytes, record.dq_query_bytes, record.dq_head_bytes = _bytes(outputs[0], shared)
    dkv_batch, dkv_token = _row_strides(outputs[1], shared)
    if chosen.workspace.sums is None:
        record.sums_batch, record.sums_token = dkv_batch, dkv_token
    else:
        size = element_bytes(problem.dkv_dtype)
        record.dkv_batch_bytes, record.dkv_token_bytes = dkv_batch * size, dkv_token * size
        record.sums_batch, record.sums_token = shared.s_kv * shared.d_qk, shared.d_qk
    record.d_sink_head = outputs[2].strides[0] if shared.has_sink else 0
    return record


def _bytes(view: View, shared: MlaProblem[MaskOptions]) -> tuple[int, int, int]:
    """Strides of a 16-bit array of shape [[batch,] s_q, h_q, ...] in bytes."""
    batch, query, head = lead_strides(view, shared)
    return batch * 2, query * 2, head * 2


def _row_strides(view: View, shared: MlaProblem[MaskOptions]) -> tuple[int, int]:
    """Strides (batch, token) of an array of kv's shape, with or without its axis of extent 1."""
    if shared.batch is None:
        return 0, view.strides[0]
    return view.strides[0], view.strides[1]


def point(record: Parameters, chosen: plan.Plan, views: Views, outputs: Sequence[int], workspace: int) -> None:
    """Set every address in a record; `outputs` as for `parameters`, `workspace` that of the workspace."""
    record.kv = views.kv.ptr
    record.out = views.out.ptr
    record.lse = views.lse.ptr
    record.indices = views.indices.ptr
    record.topk_length = None if views.topk_length is None else views.topk_length.ptr
    record.attn_sink = None if views.attn_sink is None else views.attn_sink.ptr
    record.attn_dist = None if views.attn_dist is None else views.attn_dist.ptr
    record.lists = views.lists.ptr if views.lists is not None and chosen.problem.has_lists else None
    record.dq = outputs[0]
    layout = chosen.workspace
    if layout.sums is None:
        record.sums = outputs[1]
    else:
        record.sums, record.dkv = workspace + layout.sums, outputs[1]
    if layout.sink_terms is not None:
        record.sink_terms, record.d_sink = workspace + layout.sink_terms, outputs[2]
    for name in (
        *("partials", "row_ends", "entry_list", "rows", "row_topk_entries", "row_counts", "listed_dist"),
        *("non_finite_rows", "p_ds"),
    ):
        start: int | None = getattr(layout, name)
        setattr(record, name, None if start is None else workspace + start)
    if layout.group_words is not None:
        record.row_ends = workspace + layout.group_words


def _list_bytes(chosen: plan.Plan) -> dict[str, int]:
    """What one chunk has of each list, in bytes, where those of several are made at once."""
    topk = chosen.problem.shared.topk
    if chosen.queries == 1:
        return {"row_ends": chosen.kv_rows * 4, "entry_list": chosen.chunk * topk * 4}
    entries = chosen.chunk * chosen.queries * topk
    return {
        "rows": entries * 4,
        "row_topk_entries": entries * chosen.queries * 2,
        "row_counts": chosen.chunk * 4,
        "row_ends": chosen.chunk * group_word_bytes(chosen.problem),
    }


def make_sink_a_key(attending: Parameters, sink_lse: int, shared: MlaProblem[MaskOptions]) -> None:
    """Let the record of an attention have the lse with the sink, which is at `sink_lse`, and no sink."""
    attending.lse, attending.attn_sink, attending.sink_terms = sink_lse, None, None
    attending.lse_batch, attending.lse_query, attending.lse_head = shared.s_q * shared.h_q, shared.h_q, 1


def put_in_order(listed: Parameters, record: Parameters, chosen: plan.Plan, begin: int) -> None:
    """Make `listed` the record of an attention that takes what `sort` has listed from query `begin` on in the place of
    indices, and leaves the distribution for `scatter`."""
    ctypes.pointer(listed)[0] = record
    shared = chosen.problem.shared

    def from_query_0(start: int | None, query_bytes: int) -> int | None:
        # As if the queries before it had lists too: where the list of query 0 would be.
        return None if start is None else (start - begin * query_bytes) % 2**64

    listed.indices = from_query_0(record.rows, shared.topk * 4)
    listed.topk_length = from_query_0(record.row_counts, 4)
    for name, stride in list_strides(shared).items():
        setattr(listed, name, stride)
    listed.attn_dist = from_query_0(record.listed_dist, shared.topk * 4)
    listed.attn_dist_batch, listed.attn_dist_query = listed.indices_batch, listed.indices_query


class Binding(Launches):
    """Loaded kernels with everything that one problem fixes; `point` adds the addresses, `launch` runs them.

    One thread at a time may use it. Its kernels overlap where they may: each but the first is a dependent launch, which
    waits in the kernel for the one before (docs/streams_and_graphs.md). The first is an ordinary one, and the last lets
    nothing in early, so that the call is to other people's kernels what a call of one kernel is.

    Attributes:
        plan: how the problem is computed.
        launcher: the laid-out launch of the attention stage, or its first half; None when there is no query.
        workspace_bytes: how large a workspace it needs.
    """

    def __init__(
        self, problem: Problem, device: Device, views: Views, outputs: Sequence[View], overlaps: bool = True
    ) -> None:
        """Bind arrays of these layouts; `overlaps`: whether kernels may overlap. Raises CompileError, DriverError."""
        arch, multiprocessors = driver.arch_of(device), driver.multiprocessor_count(device.index)
        self.plan = plan.plan(problem, arch, multiprocessors)
        self.workspace_bytes = self.plan.workspace.bytes
        self._parameters = parameters(self.plan, views, outputs)
        counts_sink = problem.counts_sink
        self._sink = sink_lse_parameters(views, problem.shared) if counts_sink else None
        self._listing = ListParameters(chunk_queries=self.plan.chunk)
        self._attending = Parameters() if self.plan.in_order or counts_sink else self._parameters
        self._pointers: tuple[int, int, int] | None = None
        self._lists: list[tuple[str, int, int]] = []  # of the first chunk: names, addresses, bytes of a chunk
        self._overlaps = overlaps and driver.has_dependent_launch(device.index)
        self._laid_out: dict[tuple[Stage, tuple[int, int, int], bool], Launcher] = {}
        self._steps = [(self._launcher(step, device), step) for step in self.plan.launches()]
        attends = [launcher for launcher, step in self._steps if step.stage in ATTENDING]
        super().__init__(*attends[:1])

    def _launcher(self, step: Launch, device: Device) -> Launcher:
        """The launcher of a step; steps that differ in their queries alone share one."""
        dependent = step.dependent and self._overlaps
        key = step.stage, step.grid, dependent
        known = self._laid_out.get(key)
        if known is not None:
            return known
        source = self.plan.source(step.stage)
        kernel = build.kernel(source, device.index)
        facts = kernel.facts
        record = self._record_of(step.stage)
        check_record(source, facts, type(record))
        if step.stage == "list" and facts["range_rows"] != MOST_RANGE_ROWS:
            raise CompileError(source.path, f"ranges of {MOST_RANGE_ROWS} rows, not {facts['range_rows']}")
        if step.stage in ATTENDING and facts["block_heads"] != self.plan.block_heads:
            raise CompileError(source.path, f"{self.plan.block_heads} heads a head block, not {facts['block_heads']}")
        geometry = Geometry(step.grid, facts["threads"], facts["smem_bytes"], facts["cluster"], pdl=dependent)
        count = self.plan.maps if step.stage in ATTENDING else 0
        maps = tuple(ctypes.c_byte() for _ in range(count))
        given: tuple[LaunchParameter, ...] = (*maps, record)
        made = self._laid_out[key] = Launcher(kernel, geometry, given)
        return made

    def _record_of(self, stage: Stage) -> Parameters | SinkLseParameters | ListParameters:
        """What kernels of a stage are given, filled in or not."""
        if stage == "list":
            return self._listing
        if stage == "sink_lse" and self._sink is not None:
            return self._sink
        return self._attending if stage in ATTENDING else self._parameters

    def point(self, views: Views, outputs: Sequence[int], workspace: int) -> None:
        """Set every address. The views' layouts are those the binding was made for."""
        point(self._parameters, self.plan, views, outputs, workspace)
        record = self._parameters
        if self._sink is not None:
            self._sink.dout, self._sink.sink_lse = views.dout.ptr, workspace + (self.plan.workspace.sink_lse or 0)
        sizes = _list_bytes(self.plan) if self.plan.lists > 1 else {}
        starts = {name: getattr(record, name) for name in sizes}
        self._lists = [(name, start, sizes[name]) for name, start in starts.items() if start is not None]
        pointers = (views.q.ptr, views.dout.ptr, views.kv.ptr)
        if self.launcher is None or self._pointers == pointers:
            return
        self._pointers = None  # until every map is another one
        shared, heads, queries = self.plan.problem.shared, self.plan.box_heads, self.plan.queries
        wanted = [("q", views.q, shared.d_qk, BOX_CHANNELS), ("dout", views.dout, shared.d_v, BOX_CHANNELS)]
        if self.plan.attends_in_clusters:
            wanted.append(("q", views.q, shared.d_qk, ROPE_COLUMNS))
        maps = []
        for name, view, channels, box_channels in wanted:
            strides = lead_strides(view, shared)
            request = head_tiles(shared, view.ptr, strides, channels, heads, queries, box_channels)
            maps.append(tiles(request, name, OPERATOR))
        if self.plan.kv_map is not None:
            # Without a token no entry is valid, so nothing is read, but a map wants an address.
            maps.append(encoded(self.plan.kv_map.tiles(views.kv.ptr if shared.s_kv else views.q.ptr)))
        for (stage, *_), launcher in self._laid_out.items():
            if stage in ATTENDING:
                for number, made in enumerate(maps):
                    launcher.replace(number, made)
        self._pointers = pointers

    def launch(self, stream: int) -> None:
        """Run on `stream`, with the device's context current. Raises DriverError."""
        for launcher, step in self._steps:
            if self.plan.lists > 1:
                self._take_list(step.list)
            record = self._record(step)
            record.query_begin, record.query_end, record.has_dependent = (
                step.query_begin,
                step.query_end,
                step.has_dependent,
            )
            launcher(stream)

    def _record(self, step: Launch) -> Parameters:
        """What a step's kernel is given, or what it has in common with others'."""
        sink, record = self._sink, self._parameters
        own = self._record_of(step.stage)
        if not isinstance(own, Parameters):
            own.common = record
            common: Parameters = own.common
            return common
        if step.stage not in ATTENDING or self._attending is record:
            return record
        if self.plan.in_order:
            put_in_order(self._attending, record, self.plan, step.query_begin)
        else:
            ctypes.pointer(self._attending)[0] = record
        if sink is not None:
            make_sink_a_key(self._attending, sink.sink_lse, self.plan.problem.shared)
        return self._attending

    def _take_list(self, number: int) -> None:
        """Point the record to what that chunk has of the lists; to all of them for number 0."""
        for name, start, size in self._lists:
            setattr(self._parameters, name, start + number * size)


def wanted(views: Views, problem: Problem) -> Results:
    """Shapes and dtypes of the results."""
    both = (views.q.shape, problem.shared.dtype), (problem.dkv_shape, problem.dkv_dtype)
    return (*both, ((problem.shared.h_q,), "float32")) if problem.shared.has_sink else both


def workspace_bytes(views: Views, problem: Problem) -> int:
    """How large a workspace a call needs, in bytes. Raises UnsupportedError."""
    device = views.q.device
    return plan.plan(problem, driver.arch_of(device), driver.multiprocessor_count(device.index)).workspace.bytes


def bind(views: Views, problem: Problem, results: Sequence[View], recorded: bool) -> Binding:
    """The kernels for these layouts; see `cupymla.ops.calls.Calls`.

    Raises UnsupportedError, CompileError, DriverError.
    """
    return Binding(problem, views.q.device, views, results, overlaps=not recorded)
