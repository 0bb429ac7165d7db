"""Binding attn_dist to its kernel: parameter record, tensor map, output, launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

from ... import build, driver, tensor
from ...device import Device
from ...launch import Geometry, Launcher
from ...tensor import View
from ...tensormap import TileMap, encoded
from ..gpu import OutputArrays, PreparedKernel, ReadyKernel, ThreadMemo, check_record
from ..mla import lead_strides
from . import plan
from .spec import Problem, Views

Result = Any


class Parameters(ctypes.Structure):
    """Twin of `Parameters` in cuda/attn_dist/sm90/params.cuh; its size is compared with the kernel's own."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("kv", "indices", "topk_length", "lse", "dist")),
        *((name, ctypes.c_int64) for name in ("kv_batch_bytes", "kv_token_bytes")),
        *((name, ctypes.c_int64) for name in ("indices_batch", "indices_query")),
        *((name, ctypes.c_int64) for name in ("topk_length_batch", "topk_length_query")),
        *((name, ctypes.c_int64) for name in ("lse_batch", "lse_query", "lse_head")),
        *((name, ctypes.c_int64) for name in ("dist_batch", "dist_query")),
        *((name, ctypes.c_int64) for name in ("q_start", "k_stride")),
        *((name, ctypes.c_int32) for name in ("s_q", "s_kv", "h_q", "topk")),
        *((name, ctypes.c_uint32) for name in ("groups", "group_tokens")),
        *((name, ctypes.c_int32) for name in ("slices", "slice_blocks", "causal", "normalize")),
        *((name, ctypes.c_float) for name in ("scale", "unit")),
    )


class Binding:
    """A loaded kernel with everything that one problem fixes; `point` adds the addresses, `launch` runs it.

    One thread at a time may use it.

    Attributes:
        launcher: the laid-out launch; None when there is no query.
    """

    def __init__(self, problem: Problem, device: Device, lse: View, dist: View) -> None:
        chosen = plan.plan(problem, driver.arch_of(device))
        kernel = build.kernel(chosen.source, device.index)
        facts = kernel.facts
        check_record(chosen.source, facts, Parameters)
        self._problem = problem
        self._tile_heads = facts["tile_heads"]
        dealt = plan.deal(problem, chosen.tokens, facts["block_slots"], driver.multiprocessor_count(device.index))
        self._parameters = _parameters(problem, dealt, lse, dist)
        self._q_ptr: int | None = None
        self.launcher: Launcher | None = None
        if chosen.tokens:
            geometry = Geometry((dealt.ctas, 1, 1), facts["threads"], facts["smem_bytes"])
            self.launcher = Launcher(kernel, geometry, (ctypes.c_byte(), self._parameters))

    def point(self, views: Views, dist: int) -> None:
        """Set every address. The views' layouts are those the binding was made for."""
        if self.launcher is None:
            return
        parameters = self._parameters
        parameters.kv = views.kv.ptr
        parameters.indices = views.indices.ptr
        parameters.topk_length = None if views.topk_length is None else views.topk_length.ptr
        parameters.lse = views.lse.ptr
        parameters.dist = dist
        if self._q_ptr != views.q.ptr:
            self.launcher.replace(0, encoded(self._query_tiles(views.q.ptr)))
            self._q_ptr = views.q.ptr

    def _query_tiles(self, ptr: int) -> TileMap:
        """Q in boxes of one consumer's heads x 64 channels of one query, in a swizzled layout."""
        problem = self._problem.shared
        batch, query, head = problem.q_strides
        shape = (problem.d_qk, problem.h_q, problem.s_q, problem.batch or 1)
        # Without a batch axis there is no stride of one, but the map wants a multiple of 16 bytes.
        strides_bytes = (head * 2, query * 2, (problem.d_qk if problem.batch is None else batch) * 2)
        return TileMap(ptr, problem.dtype, shape, strides_bytes, (64, self._tile_heads, 1, 1))

    def launch(self, stream: int) -> None:
        """Run on `stream`, with the device's context current. Raises DriverError."""
        if self.launcher is not None:
            self.launcher(stream)


def _parameters(problem: Problem, dealt: plan.Deal, lse: View, dist: View) -> Parameters:
    shared = problem.shared
    kv_batch, kv_token = shared.kv_strides
    indices_batch, indices_query = shared.indices_strides
    length_batch, length_query = shared.topk_length_strides
    lse_batch, lse_query, lse_head = lead_strides(lse, shared)
    dist_batch, dist_query, _ = lead_strides(dist, shared)
    return Parameters(
        kv_batch_bytes=kv_batch * 2,
        kv_token_bytes=kv_token * 2,
        indices_batch=indices_batch,
        indices_query=indices_query,
        topk_length_batch=length_batch,
        topk_length_query=length_query,
        lse_batch=lse_batch,
        lse_query=lse_query,
        lse_head=lse_head,
        dist_batch=dist_batch,
        dist_query=dist_query,
        q_start=shared.q_start,
        k_stride=shared.k_stride,
        s_q=shared.s_q,
        s_kv=shared.s_kv,
        h_q=shared.h_q,
        topk=shared.topk,
        groups=dealt.groups,
        group_tokens=dealt.group_tokens,
        slices=dealt.slices,
        slice_blocks=dealt.slice_blocks,
        causal=int(shared.causal),
        normalize=int(problem.normalize == "l1"),
        scale=shared.sm_scale * (math.log2(math.e) if shared.lse_base == "2" else 1.0),
        unit=1.0 if shared.lse_base == "2" else math.log2(math.e),
    )


_memo: ThreadMemo[Binding] = ThreadMemo()


def _output(views: Views, problem: Problem, stream: int | None, current: bool = False) -> OutputArrays:
    return OutputArrays(views.q, ((problem.dist_shape, "float32"),), (views.dist,), stream, current)


def _given(views: Views) -> list[View]:
    """Every array of the caller's, q first."""
    given = [views.q, views.kv, views.indices, views.lse]
    for view in (views.topk_length, views.dist):
        if view is not None:
            given.append(view)
    return given


def _launch(key: object, views: Views, problem: Problem, arrays: OutputArrays, stream: int) -> None:
    binding = _memo.entries.get(key)
    if binding is None:
        binding = _memo.add(key, Binding(problem, views.q.device, views.lse, arrays.views[0]))
    binding.point(views, arrays.pointers[0])
    binding.launch(stream)


def call(views: Views, problem: Problem, stream: object) -> Result:
    """One call on a GPU: launch and return, without waiting for the result. Raises UnsupportedError, DriverError."""
    given = _given(views)
    pointer = tensor.launch_stream(given, stream)
    device = views.q.device
    current = driver.is_current(device.index)
    arrays = _output(views, problem, None if stream is None else pointer, current)
    key = (problem, device.index, arrays.layouts, views.lse.strides)
    if current:
        _launch(key, views, problem, arrays, pointer)
    else:
        with driver.on_device(device.index):
            _launch(key, views, problem, arrays, pointer)
    tensor.hold(given, pointer)
    return arrays.finish()[0]


def ready(views: Views, problem: Problem) -> ReadyKernel:
    """A call without outputs, to be run with the addresses that its views have by then; see `cupymla.ops.repeat`."""

    def bind(outputs: tuple[View, ...]) -> Callable[[Sequence[int], int], None]:
        binding = Binding(problem, views.q.device, views.lse, outputs[0])

        def launch(pointers: Sequence[int], stream: int) -> None:
            binding.point(views, pointers[0])
            binding.launch(stream)

        return launch

    return ReadyKernel(views.q, ((problem.dist_shape, "float32"),), bind)


def prepare(views: Views, problem: Problem, stream: object) -> PreparedKernel[Result]:
    """A prepared call on a GPU. Raises UnsupportedError, DriverError."""

    def bind(arrays: OutputArrays, pointer: int) -> tuple[Binding, None]:
        binding = Binding(problem, views.q.device, views.lse, arrays.views[0])
        binding.point(views, arrays.pointers[0])
        return binding, None

    def result(arrays: OutputArrays) -> Result:
        return arrays.finish()[0]

    return PreparedKernel(_given(views), stream, lambda own: _output(views, problem, own), bind, result)
