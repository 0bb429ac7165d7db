"""Binding attn_dist to its kernel: tensor maps, output, launch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from ... import build, driver, tensor
from ...device import Device
from ...launch import Geometry, Launcher
from ...tensor import View
from ...tensormap import encoded
from ..gpu import OutputArrays, PreparedKernel, Ready, ReadyKernel, ThreadMemo, check_record, tiles
from ..head_tiles import head_tiles
from ..kv_rows import KvRows, kv_rows
from . import plan, records
from .records import record
from .spec import ARGUMENTS, OPERATOR, Problem, Views

Result = Any

__all__ = ["Binding", "call", "prepare", "record"]


class Binding:
    """A loaded kernel with everything that one problem fixes; `point` adds the addresses, `launch` runs it.

    One thread at a time may use it.

    Attributes:
        launcher: the laid-out launch; None when there is no query.
    """

    def __init__(self, problem: Problem, device: Device, lse: View, dist: View) -> None:
        multiprocessors = driver.multiprocessor_count(device.index)
        chosen = plan.plan(problem, driver.arch_of(device), multiprocessors)
        kernel = build.kernel(chosen.source, device.index)
        facts = kernel.facts
        check_record(chosen.source, facts, record(chosen.source))
        self._problem = problem
        self._tile_heads, self._tile_queries = facts["tile_heads"], facts.get("tile_queries", 1)
        dealt = plan.deal(
            chosen.source,
            facts,
            multiprocessors,
            s_q=problem.s_q,
            topk=problem.topk,
            batch=1 if problem.batch is None else problem.batch,
            normalized=problem.options.normalize is not None,
        )
        # Blackwell's kernel reads KV through a map, Hopper's by address.
        self._rows: KvRows | None = None
        self._parameters: records.Hopper | records.Blackwell
        if record(chosen.source) is records.Hopper:
            self._parameters = records.hopper(problem, dealt, lse, dist)
        else:
            self._rows = kv_rows(problem, OPERATOR)
            self._parameters = records.blackwell(problem, self._rows, chosen.tokens, dealt, lse, dist)
        self._pointers: tuple[int, int] | None = None
        self.launcher: Launcher | None = None
        if chosen.tokens:
            shape = (dealt.ctas, 1, 1), facts["threads"], facts["smem_bytes"], facts["cluster"]
            geometry = Geometry(*shape, clustered=bool(facts.get("clustered")))
            maps = [ctypes.c_byte() for _ in range(1 if self._rows is None else 2)]
            self.launcher = Launcher(kernel, geometry, (*maps, self._parameters))

    def point(self, views: Views, dist: int) -> None:
        """Set every address. The views' layouts are those the binding was made for."""
        if self.launcher is None:
            return
        parameters = self._parameters
        if isinstance(parameters, records.Hopper):
            parameters.kv = views.kv.ptr
        parameters.indices = views.indices.ptr
        parameters.topk_length = None if views.topk_length is None else views.topk_length.ptr
        parameters.lse = views.lse.ptr
        parameters.dist = dist
        # Without tokens no row is ever asked for, but a map has to have an address.
        pointers = views.q.ptr, views.kv.ptr if self._problem.s_kv else views.q.ptr
        if self._pointers != pointers:
            problem = self._problem
            tile = self._tile_heads, self._tile_queries
            request = head_tiles(problem, pointers[0], problem.q_strides, problem.d_qk, *tile)
            self.launcher.replace(0, tiles(request, "q", OPERATOR))
            if self._rows is not None:
                self.launcher.replace(1, encoded(self._rows.tiles(pointers[1])))
            self._pointers = pointers

    def launch(self, stream: int) -> None:
        """Run on `stream`, with the device's context current. Raises DriverError."""
        if self.launcher is not None:
            self.launcher(stream)


_memo: ThreadMemo[Binding] = ThreadMemo()


def _output(views: Views, problem: Problem, stream: int | None, current: bool = False) -> OutputArrays:
    return OutputArrays(views.q, ((problem.slot_shape, "float32"),), (views.dist,), stream, current)


def _launch(key: object, views: Views, problem: Problem, arrays: OutputArrays, stream: int) -> None:
    binding = _memo.take(key) or Binding(problem, views.q.device, views.lse, arrays.views[0])
    binding.point(views, arrays.pointers[0])
    binding.launch(stream)
    _memo.add(key, binding)


def call(views: Views, problem: Problem, stream: object) -> Result:
    """One call on a GPU: launch and return, without waiting for the result. Raises UnsupportedError, DriverError."""
    given = ARGUMENTS.given(views)
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

    def bind(outputs: tuple[View, ...]) -> Ready:
        binding = Binding(problem, views.q.device, views.lse, outputs[0])

        def launch(pointers: Sequence[int], stream: int, moved: bool) -> None:
            if moved:
                binding.point(views, pointers[0])
            binding.launch(stream)

        return launch, 0

    return ReadyKernel(views.q, ((problem.slot_shape, "float32"),), bind)


def prepare(views: Views, problem: Problem, stream: object) -> PreparedKernel[Result]:
    """A prepared call on a GPU. Raises UnsupportedError, DriverError."""

    def bind(arrays: OutputArrays, pointer: int) -> tuple[Binding, None]:
        binding = Binding(problem, views.q.device, views.lse, arrays.views[0])
        binding.point(views, arrays.pointers[0])
        return binding, None

    def result(arrays: OutputArrays) -> Result:
        return arrays.finish()[0]

    return PreparedKernel(ARGUMENTS.given(views), stream, lambda own: _output(views, problem, own), bind, result)
