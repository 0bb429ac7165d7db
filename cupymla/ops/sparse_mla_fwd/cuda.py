"""Binding sparse_mla_fwd to its kernel: parameter record, tensor maps, outputs, launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

from ... import build, driver, tensor
from ...device import Device
from ...errors import CompileError
from ...launch import Geometry, Launcher
from ...tensor import View
from ...tensormap import TileMap, encoded
from ..gpu import OutputArrays, PreparedKernel, ReadyKernel, ThreadMemo, check_record
from ..mla import MlaProblem, lead_strides
from . import plan
from .spec import Views

Result = tuple[Any, Any, Any]


class Parameters(ctypes.Structure):
    """Twin of `Parameters` in cuda/sparse_mla_fwd/sm90/params.cuh; its size is compared with the kernel's own."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("kv", "indices", "topk_length", "attn_sink")),
        *((name, ctypes.c_void_p) for name in ("out", "max_logits", "lse")),
        *((name, ctypes.c_int64) for name in ("kv_batch_bytes", "kv_token_bytes")),
        *((name, ctypes.c_int64) for name in ("indices_batch", "indices_query")),
        *((name, ctypes.c_int64) for name in ("topk_length_batch", "topk_length_query", "attn_sink_head")),
        *((name, ctypes.c_int64) for name in ("out_batch_bytes", "out_query_bytes", "out_head_bytes")),
        *((name, ctypes.c_int64) for name in ("max_logits_batch", "max_logits_query", "max_logits_head")),
        *((name, ctypes.c_int64) for name in ("lse_batch", "lse_query", "lse_head")),
        *((name, ctypes.c_int64) for name in ("q_start", "k_stride")),
        *((name, ctypes.c_int32) for name in ("s_q", "s_kv", "h_q", "topk")),
        *((name, ctypes.c_int32) for name in ("head_blocks",)),
        *((name, ctypes.c_uint32) for name in ("groups", "group_tokens")),
        *((name, ctypes.c_int32) for name in ("prefetch_blocks", "causal")),
        *((name, ctypes.c_float) for name in ("scale_log2", "lse_unit")),
    )


class Binding:
    """A loaded kernel with everything that one problem fixes; `point` adds the addresses, `launch` runs it.

    One thread at a time may use it.

    Attributes:
        launcher: the laid-out launch; None when there is no query.
    """

    def __init__(self, problem: MlaProblem, device: Device, outputs: tuple[View, ...], sink_stride: int) -> None:
        chosen = plan.plan(problem, driver.arch_of(device), driver.multiprocessor_count(device.index))
        kernel = build.kernel(chosen.source, device.index)
        facts = kernel.facts
        check_record(chosen.source, facts, Parameters)
        if facts["heads_per_cta"] != chosen.heads:
            raise CompileError(
                chosen.source.path, f"{chosen.heads} heads a CTA, the kernel has {facts['heads_per_cta']}"
            )
        self._problem = problem
        self._heads = chosen.heads
        self._parameters = _parameters(problem, outputs, sink_stride)
        self._parameters.head_blocks = chosen.head_blocks
        self._parameters.groups = chosen.shares.groups
        self._parameters.group_tokens = chosen.shares.group_tokens
        self._parameters.prefetch_blocks = chosen.prefetch_blocks
        self._q_ptr: int | None = None
        self.launcher: Launcher | None = None
        if chosen.tokens:
            geometry = Geometry((chosen.ctas, 1, 1), facts["threads"], facts["smem_bytes"], cluster=chosen.parts)
            self.launcher = Launcher(kernel, geometry, (ctypes.c_byte(), self._parameters))

    def point(self, views: Views, outputs: Sequence[int]) -> None:
        """Set every address. The views' layouts are those the binding was made for."""
        if self.launcher is None:
            return
        parameters = self._parameters
        parameters.kv = views.kv.ptr
        parameters.indices = views.indices.ptr
        parameters.topk_length = None if views.topk_length is None else views.topk_length.ptr
        parameters.attn_sink = None if views.attn_sink is None else views.attn_sink.ptr
        parameters.out, parameters.max_logits, parameters.lse = outputs
        if self._q_ptr != views.q.ptr:
            self.launcher.replace(0, encoded(self._query_tiles(views.q.ptr)))
            self._q_ptr = views.q.ptr

    def _query_tiles(self, ptr: int) -> TileMap:
        """Q in boxes of one CTA's heads x 64 channels of one query, in the layout that wgmma reads."""
        problem = self._problem
        batch, query, head = problem.q_strides
        shape = (problem.d_qk, problem.h_q, problem.s_q, problem.batch or 1)
        # Without a batch axis there is no stride of one, but the map wants a multiple of 16 bytes.
        strides_bytes = (head * 2, query * 2, (problem.d_qk if problem.batch is None else batch) * 2)
        return TileMap(ptr, problem.dtype, shape, strides_bytes, (64, self._heads, 1, 1))

    def launch(self, stream: int) -> None:
        """Run on `stream`, with the device's context current. Raises DriverError."""
        if self.launcher is not None:
            self.launcher(stream)


def _parameters(problem: MlaProblem, outputs: tuple[View, ...], sink_stride: int) -> Parameters:
    kv_batch, kv_token = problem.kv_strides
    indices_batch, indices_query = problem.indices_strides
    length_batch, length_query = problem.topk_length_strides
    out_batch, out_query, out_head = lead_strides(outputs[0], problem)
    logits_batch, logits_query, logits_head = lead_strides(outputs[1], problem)
    lse_batch, lse_query, lse_head = lead_strides(outputs[2], problem)
    return Parameters(
        kv_batch_bytes=kv_batch * 2,
        kv_token_bytes=kv_token * 2,
        indices_batch=indices_batch,
        indices_query=indices_query,
        topk_length_batch=length_batch,
        topk_length_query=length_query,
        attn_sink_head=sink_stride,
        out_batch_bytes=out_batch * 2,
        out_query_bytes=out_query * 2,
        out_head_bytes=out_head * 2,
        max_logits_batch=logits_batch,
        max_logits_query=logits_query,
        max_logits_head=logits_head,
        lse_batch=lse_batch,
        lse_query=lse_query,
        lse_head=lse_head,
        q_start=problem.q_start,
        k_stride=problem.k_stride,
        s_q=problem.s_q,
        s_kv=problem.s_kv,
        h_q=problem.h_q,
        topk=problem.topk,
        causal=int(problem.causal),
        scale_log2=problem.sm_scale * math.log2(math.e),
        lse_unit=1.0 if problem.lse_base == "2" else math.log(2.0),
    )


_memo: ThreadMemo[Binding] = ThreadMemo()


def _wanted(problem: MlaProblem) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Shapes and dtypes of the outputs."""
    statistics = (problem.head_shape, "float32")
    return (problem.out_shape, problem.dtype), statistics, statistics


def _outputs(views: Views, problem: MlaProblem, stream: int | None, current: bool = False) -> OutputArrays:
    return OutputArrays(views.q, _wanted(problem), (views.out, views.max_logits, views.lse), stream, current)


def _given(views: Views) -> list[View]:
    """Every array of the caller's, q first."""
    given = [views.q, views.kv, views.indices]
    for view in (views.topk_length, views.attn_sink, views.out, views.max_logits, views.lse):
        if view is not None:
            given.append(view)
    return given


def _sink_stride(views: Views) -> int:
    return 0 if views.attn_sink is None else views.attn_sink.strides[0]


def _launch(key: object, views: Views, problem: MlaProblem, arrays: OutputArrays, stream: int) -> None:
    binding = _memo.entries.get(key)
    if binding is None:
        binding = _memo.add(key, Binding(problem, views.q.device, arrays.views, _sink_stride(views)))
    binding.point(views, arrays.pointers)
    binding.launch(stream)


def call(views: Views, problem: MlaProblem, stream: object) -> Result:
    """One call on a GPU: launch and return, without waiting for the result. Raises UnsupportedError, DriverError."""
    given = _given(views)
    pointer = tensor.launch_stream(given, stream)
    device = views.q.device
    current = driver.is_current(device.index)
    arrays = _outputs(views, problem, None if stream is None else pointer, current)
    key = (problem, device.index, arrays.layouts, _sink_stride(views))
    if current:
        _launch(key, views, problem, arrays, pointer)
    else:
        with driver.on_device(device.index):
            _launch(key, views, problem, arrays, pointer)
    tensor.hold(given, pointer)
    return arrays.finish()  # type: ignore[no-any-return]


def ready(views: Views, problem: MlaProblem) -> ReadyKernel:
    """A call without outputs, to be run with the addresses that its views have by then; see `cupymla.ops.repeat`."""

    def bind(outputs: tuple[View, ...]) -> Callable[[Sequence[int], int], None]:
        binding = Binding(problem, views.q.device, outputs, _sink_stride(views))

        def launch(pointers: Sequence[int], stream: int) -> None:
            binding.point(views, pointers)
            binding.launch(stream)

        return launch

    return ReadyKernel(views.q, _wanted(problem), bind)


def prepare(views: Views, problem: MlaProblem, stream: object) -> PreparedKernel[Result]:
    """A prepared call on a GPU. Raises UnsupportedError, DriverError."""

    def bind(arrays: OutputArrays, pointer: int) -> tuple[Binding, None]:
        binding = Binding(problem, views.q.device, arrays.views, _sink_stride(views))
        binding.point(views, arrays.pointers)
        return binding, None

    return PreparedKernel(_given(views), stream, lambda own: _outputs(views, problem, own), bind)
