"""Binding sparse_mla_bwd_phase1 to its kernel: parameter record, tensor maps, outputs, launches."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ... import build, driver
from ...device import Device
from ...errors import CompileError
from ...launch import Geometry, Launcher
from ...tensor import View
from ...tensormap import encoded
from ..gpu import Launches, Results, check_record, tiles
from ..head_tiles import head_tiles
from ..mla import lead_strides, record_fields
from . import plan
from .spec import OPERATOR, Problem, Views


class Parameters(ctypes.Structure):
    """Mirrors `Parameters` in cuda/sparse_mla_bwd_phase1/sm100/params.cuh; sizes are compared with the kernel's own."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "dout", "indices", "topk_length", "p", "delta")),
        *((name, ctypes.c_int64) for name in ("out_batch_bytes", "out_query_bytes", "out_head_bytes")),
        *((name, ctypes.c_int64) for name in ("dout_batch_bytes", "dout_query_bytes", "dout_head_bytes")),
        *((name, ctypes.c_int64) for name in ("indices_batch", "indices_query")),
        *((name, ctypes.c_int64) for name in ("topk_length_batch", "topk_length_query")),
        *((name, ctypes.c_int64) for name in ("p_batch", "p_query", "p_head")),
        *((name, ctypes.c_int64) for name in ("delta_batch", "delta_query", "delta_head")),
        *((name, ctypes.c_int64) for name in ("q_start", "k_stride")),
        *((name, ctypes.c_int32) for name in ("s_q", "s_kv", "h_q", "topk")),
        *((name, ctypes.c_int32) for name in ("batch_rows", "token_rows")),
        *((name, ctypes.c_uint32) for name in ("groups", "group_tokens", "head_block_clusters")),
        *((name, ctypes.c_int32) for name in ("causal",)),
    )


def parameters(chosen: plan.Plan, problem: Problem, views: Views, outputs: Sequence[View]) -> Parameters:
    """The record without addresses.

    Args:
        chosen: the plan.
        problem: the problem.
        views: the arguments; only their strides matter.
        outputs: p and delta.
    """
    record = Parameters(
        **record_fields(problem),
        batch_rows=chosen.rows.batch_rows,
        token_rows=chosen.rows.token_rows,
        groups=chosen.assignment.groups,
        group_tokens=chosen.assignment.group_tokens,
        head_block_clusters=chosen.assignment.ctas,
    )
    out, dout = (tuple(2 * stride for stride in lead_strides(view, problem)) for view in (views.out, views.dout))
    record.out_batch_bytes, record.out_query_bytes, record.out_head_bytes = out
    record.dout_batch_bytes, record.dout_query_bytes, record.dout_head_bytes = dout
    record.p_batch, record.p_query, record.p_head = lead_strides(outputs[0], problem)
    record.delta_batch, record.delta_query, record.delta_head = lead_strides(outputs[1], problem)
    return record


class Binding(Launches):
    """A loaded kernel with everything that one problem fixes; `point` adds the addresses, `launch` runs it.

    One thread at a time may use it.

    Attributes:
        plan: how the problem is computed.
    """

    def __init__(self, problem: Problem, device: Device, views: Views, outputs: Sequence[View]) -> None:
        arch, multiprocessors = driver.arch_of(device), driver.multiprocessor_count(device.index)
        self.plan = plan.plan(problem, arch, multiprocessors)
        self._problem = problem
        self._parameters = parameters(self.plan, problem, views, outputs)
        self._pointers: tuple[int, int] | None = None
        launcher = None
        if self.plan.tokens:
            source = self.plan.source
            kernel = build.kernel(source, device.index)
            facts = kernel.facts
            check_record(source, facts, Parameters)
            if (facts["cta_heads"], facts["cluster"]) != (plan.CTA_HEADS, plan.PAIR_CTAS):
                raise CompileError(source.path, f"{plan.PAIR_CTAS} CTAs of {plan.CTA_HEADS} heads for a query")
            if self.plan.assignment.group_tokens > facts["cluster_queries"]:
                raise CompileError(source.path, f"pairs that take {self.plan.assignment.group_tokens} queries")
            geometry = Geometry((self.plan.ctas, 1, 1), facts["threads"], facts["smem_bytes"], cluster=facts["cluster"])
            launcher = Launcher(kernel, geometry, (ctypes.c_byte(), ctypes.c_byte(), self._parameters))
        super().__init__(launcher)

    def point(self, views: Views, outputs: Sequence[int], workspace: int) -> None:
        """Set every address. The views' layouts are those the binding was made for."""
        if self.launcher is None:
            return
        record = self._parameters
        record.out = views.out.ptr
        record.dout = views.dout.ptr
        record.indices = views.indices.ptr
        record.topk_length = None if views.topk_length is None else views.topk_length.ptr
        record.p, record.delta = outputs
        pointers = views.q.ptr, views.kv.ptr
        if self._pointers != pointers:
            problem = self._problem
            request = head_tiles(problem, views.q.ptr, problem.q_strides, problem.d_qk, plan.CTA_HEADS)
            self.launcher.replace(0, tiles(request, "q", OPERATOR))
            # Without a token no entry is valid, so nothing is read, but a map wants an address.
            kv = views.kv.ptr if self._problem.s_kv else views.q.ptr
            self.launcher.replace(1, encoded(self.plan.rows.tiles(kv)))
            self._pointers = pointers


def wanted(views: Views, problem: Problem) -> Results:
    """Shapes and dtypes of the results."""
    return ((*problem.head_shape, problem.topk), "float32"), (problem.head_shape, "float32")


def bind(views: Views, problem: Problem, results: Sequence[View], recorded: bool) -> Binding:
    """The kernel for these layouts; see `cupymla.ops.calls.Calls`.

    Raises UnsupportedError, CompileError, DriverError.
    """
    return Binding(problem, views.q.device, views, results)
