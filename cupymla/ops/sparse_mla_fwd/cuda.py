"""Calls of sparse_mla_fwd on a GPU: outputs, bindings that are remembered, launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import driver, tensor
from ...tensor import Allocation, View
from ..gpu import (
    OutputArrays,
    PreparedKernel,
    Ready,
    ReadyKernel,
    ThreadMemo,
    launch_workspace,
    missing_workspace,
    workspace,
)
from . import plan
from .binding import Binding, Parameters, bind, record, running_plan
from .spec import ARGUMENTS, OPERATOR, Problem, Views

__all__ = ["Binding", "Parameters", "bind", "call", "prepare", "record"]

Result = tuple[Any, Any, Any]


_memo: ThreadMemo[Binding] = ThreadMemo()


def _wanted(problem: Problem) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Shapes and dtypes of the outputs."""
    statistics = (problem.head_shape, "float32")
    return (problem.out_shape, problem.dtype), statistics, statistics


def _outputs(views: Views, problem: Problem, stream: int | None, current: bool = False) -> OutputArrays:
    return OutputArrays(views.q, _wanted(problem), (views.out, views.max_logits, views.lse), stream, current)


def _sink_stride(views: Views) -> int:
    return 0 if views.attn_sink is None else views.attn_sink.strides[0]


def _run(binding: Binding, views: Views, outputs: Sequence[int], own: int | None, stream: int) -> None:
    """Launch; `own`: the stream where it is not the current one of q's framework."""
    memory = launch_workspace(views.workspace, binding.workspace_bytes, views.q, own, stream, OPERATOR)
    binding.point(views, outputs, 0 if memory is None else memory.ptr)
    binding.launch(stream)


def _launch(key: object, views: Views, problem: Problem, arrays: OutputArrays, own: int | None, stream: int) -> None:
    binding = _memo.take(key) or bind(problem, views.q.device, arrays.views, _sink_stride(views))
    _run(binding, views, arrays.pointers, own, stream)
    _memo.add(key, binding)


def workspace_bytes(views: Views, problem: Problem) -> int:
    """How large a workspace a call needs, in bytes. Raises UnsupportedError."""
    device = views.q.device
    if driver.arch_of(device).name == plan.BLACKWELL:
        return 0
    with driver.on_device(device.index):
        layout = running_plan(plan.plan, problem, device).workspace
    return 0 if layout is None else layout.bytes


def call(views: Views, problem: Problem, stream: object) -> Result:
    """One call on a GPU: launch and return, without waiting for the result. Raises UnsupportedError, DriverError."""
    given = ARGUMENTS.given(views)
    pointer = tensor.launch_stream(given, stream)
    device = views.q.device
    current = driver.is_current(device.index)
    own = None if stream is None else pointer
    arrays = _outputs(views, problem, own, current)
    key = (problem, device.index, arrays.layouts, _sink_stride(views))
    if current:
        _launch(key, views, problem, arrays, own, pointer)
    else:
        with driver.on_device(device.index):
            _launch(key, views, problem, arrays, own, pointer)
    tensor.hold(given, pointer)
    return arrays.finish()  # type: ignore[no-any-return]


def ready(views: Views, problem: Problem) -> ReadyKernel:
    """A call without outputs, to be run with the addresses that its views have by then; see `cupymla.ops.repeat`."""

    def bound(outputs: tuple[View, ...]) -> Ready:
        binding = bind(problem, views.q.device, outputs, _sink_stride(views))
        given = views.workspace
        size = missing_workspace(given, binding.workspace_bytes, OPERATOR)

        def launch(pointers: Sequence[int], stream: int, moved: bool) -> None:
            if moved:
                memory = pointers[3] if size else 0 if given is None else given.ptr
                binding.point(views, pointers[:3], memory)
            binding.launch(stream)

        return launch, size

    return ReadyKernel(views.q, _wanted(problem), bound)


def prepare(views: Views, problem: Problem, stream: object) -> PreparedKernel[Result]:
    """A prepared call on a GPU, which keeps its workspace. Raises UnsupportedError, DriverError."""

    def pointed(arrays: OutputArrays, pointer: int) -> tuple[Binding, Allocation | None]:
        binding = bind(problem, views.q.device, arrays.views, _sink_stride(views))
        own = None if stream is None else pointer
        memory = workspace(views.workspace, binding.workspace_bytes, views.q, own, OPERATOR)
        binding.point(views, arrays.pointers, 0 if memory is None else memory.ptr)
        return binding, memory if isinstance(memory, Allocation) else None

    return PreparedKernel(ARGUMENTS.given(views), stream, lambda own: _outputs(views, problem, own), pointed)
