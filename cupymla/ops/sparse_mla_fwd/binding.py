"""A kernel bound to everything that one problem fixes: parameter record, tensor maps, launch."""

from __future__ import annotations

import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from ... import build, driver
from ...arch import Arch
from ...build import Kernel
from ...build.source import KernelSource
from ...device import Device
from ...errors import CompileError
from ...launch import Geometry, Launcher, active_clusters
from ...tensor import View
from ..gpu import Launches, check_record, tiles
from ..head_tiles import head_tiles
from ..kv_rows import KvRows
from ..log2_scales import lse_scales
from ..mla import lead_strides, record_fields
from ..rows_in_order import list_strides
from . import blackwell_plan, plan
from .order import Order, OrderParameters
from .spec import OPERATOR, Problem, Views

PlanT = TypeVar("PlanT", plan.Plan, blackwell_plan.BlackwellPlan)

_OPTIONAL = (*((name, ctypes.c_void_p) for name in ("indices", "topk_length", "attn_sink")),)
_OUTPUTS = (*((name, ctypes.c_void_p) for name in ("out", "max_logits", "lse")),)
_STRIDES = (
    *((name, ctypes.c_int64) for name in ("indices_batch", "indices_query")),
    *((name, ctypes.c_int64) for name in ("topk_length_batch", "topk_length_query", "attn_sink_head")),
    *((name, ctypes.c_int64) for name in ("out_batch_bytes", "out_query_bytes", "out_head_bytes")),
    *((name, ctypes.c_int64) for name in ("max_logits_batch", "max_logits_query", "max_logits_head")),
    *((name, ctypes.c_int64) for name in ("lse_batch", "lse_query", "lse_head")),
    *((name, ctypes.c_int64) for name in ("q_start", "k_stride")),
)
_SIZES = (*((name, ctypes.c_int32) for name in ("s_q", "s_kv", "h_q", "topk")),)
_UNITS = ("scale_log2", "max_unit", "base_unit", "base_unit_rest", "lse_unit")
_SCALES = tuple((name, ctypes.c_float) for name in _UNITS)


class Parameters(ctypes.Structure):
    """Mirrors `Parameters` in cuda/sparse_mla_fwd/sm90/params.cuh; its size is compared with the kernel's own."""

    _fields_ = (
        ("kv", ctypes.c_void_p),
        *_OPTIONAL,
        *_OUTPUTS,
        *((name, ctypes.c_int64) for name in ("kv_batch_bytes", "kv_token_bytes")),
        *_STRIDES,
        *_SIZES,
        ("head_blocks", ctypes.c_int32),
        *((name, ctypes.c_uint32) for name in ("groups", "group_tokens")),
        ("causal", ctypes.c_int32),
        *_SCALES,
    )


class BlackwellParameters(ctypes.Structure):
    """Mirrors `Parameters` in cuda/sparse_mla_fwd/sm100/params.cuh; its size is compared with the kernel's own."""

    _fields_ = (
        *_OPTIONAL,
        *_OUTPUTS,
        *_STRIDES,
        *((name, ctypes.c_int32) for name in ("token_rows", "batch_rows")),
        *_SIZES,
        *((name, ctypes.c_uint32) for name in ("head_blocks", "items")),
        ("causal", ctypes.c_int32),
        *_SCALES,
    )


def record(source: KernelSource) -> type[Parameters] | type[BlackwellParameters] | type[OrderParameters]:
    """The parameter record of a kernel variant."""
    if source.arch == plan.BLACKWELL:
        return BlackwellParameters
    return OrderParameters if source.entry == plan.ORDER else Parameters


def _geometry(kernel: Kernel, ctas: int, cluster: int) -> Geometry:
    facts = kernel.facts
    clustered = bool(facts.get("clustered"))
    return Geometry((ctas, 1, 1), facts["threads"], facts["smem_bytes"], cluster, clustered=clustered)


def running_plan(
    planned: Callable[[Problem, Arch, int, Collection[int]], PlanT], problem: Problem, device: Device
) -> PlanT:
    """The plan of a GPU whose clusters, where it splits queries, all run at once as the driver has it.

    Args:
        planned: `plan.plan` for a Hopper GPU, `blackwell_plan.blackwell_plan` for a Blackwell GPU.
        problem: what to plan for.
        device: the GPU.
    """
    arch, count = driver.arch_of(device), driver.multiprocessor_count(device.index)
    without: set[int] = set()
    while True:
        chosen = planned(problem, arch, count, without)
        if chosen.parts == 1 or not chosen.tokens:
            return chosen
        kernel = build.kernel(chosen.source, device.index)
        if active_clusters(kernel, _geometry(kernel, chosen.ctas, chosen.cluster)) >= chosen.clusters:
            return chosen
        without.add(chosen.parts)


class Binding(Launches, ABC):
    """The launch of the attention, none where there is no query, and in some of them one ahead."""

    def __init__(
        self,
        problem: Problem,
        source: KernelSource,
        heads: int,
        parameters: Parameters | BlackwellParameters,
        device: Device,
    ) -> None:
        self._problem = problem
        self._heads = heads
        self._parameters = parameters
        self._kernel = build.kernel(source, device.index)
        facts = self._kernel.facts
        check_record(source, facts, type(parameters))
        if facts["heads_per_cta"] != heads:
            raise CompileError(source.path, f"{heads} heads a CTA, the kernel has {facts['heads_per_cta']}")
        self._q_ptr: int | None = None
        super().__init__()

    def _lay_out(self, ctas: int, cluster: int, maps: int) -> None:
        """Add the launch of the attention, whose parameters are that many tensor maps, and the record."""
        geometry = _geometry(self._kernel, ctas, cluster)
        self.launcher = Launcher(self._kernel, geometry, (*(ctypes.c_byte() for _ in range(maps)), self._parameters))
        self._launchers.append(self.launcher)

    def point(self, views: Views, outputs: Sequence[int], workspace: int) -> None:
        """Set every address, the workspace's too. The views' layouts are those the binding was made for."""
        if self.launcher is None:
            return
        parameters = self._parameters
        self._point_selection(views, workspace)
        parameters.attn_sink = None if views.attn_sink is None else views.attn_sink.ptr
        parameters.out, parameters.max_logits, parameters.lse = outputs
        if self._q_ptr != views.q.ptr:
            problem = self._problem
            request = head_tiles(problem, views.q.ptr, problem.q_strides, problem.d_qk, self._heads)
            self.launcher.replace(0, tiles(request, "q", OPERATOR))
            self._q_ptr = views.q.ptr
        self._point_keys(self.launcher, views)

    def _point_selection(self, views: Views, workspace: int) -> None:
        """Set the addresses of indices and topk_length."""
        self._parameters.indices = views.indices.ptr
        self._parameters.topk_length = None if views.topk_length is None else views.topk_length.ptr

    @abstractmethod
    def _point_keys(self, launcher: Launcher, views: Views) -> None:
        """Set the address of kv."""


class HopperBinding(Binding):
    """Of the Hopper kernel: CTAs by themselves, or sharing a query's entries; a launch ahead lists rows in the order of
    tokens where they are to be taken so."""

    def __init__(
        self, problem: Problem, device: Device, outputs: tuple[View, ...], sink_stride: int, may_order: bool
    ) -> None:
        chosen = running_plan(plan.plan, problem, device)
        kv_batch, kv_token = problem.kv_strides
        self._record = Parameters(
            kv_batch_bytes=kv_batch * 2,
            kv_token_bytes=kv_token * 2,
            head_blocks=chosen.head_blocks,
            groups=chosen.assignment.groups,
            group_tokens=chosen.assignment.group_tokens,
            **_common_fields(problem, outputs, sink_stride),
        )
        super().__init__(problem, chosen.source, chosen.heads, self._record, device)
        if chosen.tokens:
            self._lay_out(chosen.ctas, chosen.parts, 1)
        self._order: Order | None = None
        if may_order and chosen.workspace is not None:
            self.workspace_bytes = chosen.workspace.bytes
            self._order = Order(problem, chosen, chosen.workspace, device)
            self._launchers.insert(0, self._order.launcher)
            for name, stride in list_strides(problem).items():
                setattr(self._record, name, stride)

    def _point_selection(self, views: Views, workspace: int) -> None:
        if self._order is None:
            super()._point_selection(views, workspace)
        else:
            self._record.indices, self._record.topk_length = self._order.point(views, workspace)

    def _point_keys(self, launcher: Launcher, views: Views) -> None:
        self._record.kv = views.kv.ptr


class BlackwellBinding(Binding):
    """Of a Blackwell kernel: pairs of CTAs, or CTAs by themselves."""

    def __init__(self, problem: Problem, device: Device, outputs: tuple[View, ...], sink_stride: int) -> None:
        chosen = running_plan(blackwell_plan.blackwell_plan, problem, device)
        self._rows: KvRows = chosen.rows
        self._keys_ptr: int | None = None
        parameters = BlackwellParameters(
            token_rows=chosen.rows.token_rows,
            batch_rows=chosen.rows.batch_rows,
            head_blocks=chosen.head_blocks,
            items=chosen.items,
            **_common_fields(problem, outputs, sink_stride),
        )
        super().__init__(problem, chosen.source, plan.BLACKWELL_CTA_HEADS, parameters, device)
        if chosen.tokens:
            self._lay_out(chosen.ctas, chosen.cluster, 2)

    def _point_keys(self, launcher: Launcher, views: Views) -> None:
        # Without tokens no row is ever asked for, but a map has to have an address.
        ptr = views.kv.ptr if self._problem.s_kv else views.q.ptr
        if self._keys_ptr != ptr:
            launcher.replace(1, tiles(self._rows.tiles(ptr), "kv", OPERATOR))
            self._keys_ptr = ptr


def bind(
    problem: Problem, device: Device, outputs: tuple[View, ...], sink_stride: int, may_order: bool = True
) -> Binding:
    """The binding of a device's kernels; `may_order`: whether it may ask for a workspace, to put rows into the order of
    tokens. Raises UnsupportedError when there is no kernel, CompileError, DriverError."""
    if driver.arch_of(device).name == plan.BLACKWELL:
        return BlackwellBinding(problem, device, outputs, sink_stride)
    return HopperBinding(problem, device, outputs, sink_stride, may_order)


def _common_fields(problem: Problem, outputs: tuple[View, ...], sink_stride: int) -> dict[str, Any]:
    """What the parameter records of all kernels have, by name, but for addresses."""
    options = problem.options
    out_batch, out_query, out_head = lead_strides(outputs[0], problem)
    logits_batch, logits_query, logits_head = lead_strides(outputs[1], problem)
    lse_batch, lse_query, lse_head = lead_strides(outputs[2], problem)
    scale = options.scale(problem.d_qk)
    scales = lse_scales(scale, options.lse_base)
    # Where the scale may be of any sign, a kernel brings scores to units of log2 before it takes their maximum.
    scales_first = scale < plan.SMALLEST_SCALE
    return {
        **record_fields(problem),
        "attn_sink_head": sink_stride,
        "out_batch_bytes": out_batch * 2,
        "out_query_bytes": out_query * 2,
        "out_head_bytes": out_head * 2,
        "max_logits_batch": logits_batch,
        "max_logits_query": logits_query,
        "max_logits_head": logits_head,
        "lse_batch": lse_batch,
        "lse_query": lse_query,
        "lse_head": lse_head,
        "scale_log2": scales.score,
        "max_unit": lse_scales(scale, "e").unit if scales_first else scale,
        "base_unit": scales.unit,
        "base_unit_rest": scales.unit_rest,
        "lse_unit": 1.0 if options.lse_base == "2" else math.log(2.0),
    }
