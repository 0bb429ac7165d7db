"""What bindings to kernels share, without a GPU: prepared calls run where they are asked to, the memo stays bounded."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cupymla import tensor
from cupymla.errors import DriverError, InputError, UnsupportedError
from cupymla.ops import gpu
from cupymla.tensormap import TileMap
from cupymla_lab.emulated import Emulated, emulated

CURRENT = 0


@pytest.mark.parametrize("stride", [0, 1152])
def test_a_driver_that_refuses_broadcast_axes_names_the_argument(stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = DriverError(1, "CUDA_ERROR_INVALID_VALUE", "invalid argument", "encoding a map")

    def refuse(request: TileMap) -> None:
        raise failure

    monkeypatch.setattr(gpu, "encoded", refuse)
    request = TileMap(4096, "bfloat16", (576, 16, 4, 1), (stride, 18432, 1152), (64, 16, 1, 1))
    with pytest.raises((DriverError, InputError)) as caught:
        gpu.tiles(request, "dout", "sparse_mla_bwd")
    if stride:
        assert caught.value is failure
        return
    assert isinstance(caught.value, InputError)
    assert (caught.value.argument, caught.value.operator) == ("dout", "sparse_mla_bwd")
    assert "broadcast" in caught.value.expected
    assert "(0, 18432, 1152)" in caught.value.got


class Workspace:
    """Something a launch needs."""


class Binding:
    """A binding that notes the streams it runs on."""

    launcher = None

    def __init__(self) -> None:
        self.streams: list[int] = []

    def launch(self, stream: int) -> None:
        self.streams.append(stream)


class Kernel:
    """A prepared call of a `Binding`, with all it was asked for on the way."""

    def __init__(self, machine: Emulated, stream: object) -> None:
        self.array = machine.array(np.zeros(4, np.float32), writable=True)
        view = tensor.view_output(self.array, "out")
        self.binding = Binding()
        self.outputs: list[int | None] = []
        self.bound: list[int] = []
        self.workspace: weakref.ref[Workspace] | None = None

        def outputs(own: int | None) -> gpu.OutputArrays:
            self.outputs.append(own)
            return gpu.OutputArrays(view, [((4,), "float32")], (view,), own)

        def bind(arrays: gpu.OutputArrays, pointer: int) -> tuple[Binding, Workspace]:
            self.bound.append(pointer)
            workspace = Workspace()
            self.workspace = weakref.ref(workspace)
            return self.binding, workspace

        self.prepared: gpu.PreparedKernel[Any] = gpu.PreparedKernel([view], stream, outputs, bind)


@pytest.fixture
def machine() -> Iterator[Emulated]:
    with emulated("sm_90a", 1) as made:
        yield made


def test_a_prepared_call_runs_on_the_current_stream(machine: Emulated) -> None:
    kernel = Kernel(machine, None)
    assert (kernel.outputs, kernel.bound, kernel.binding.streams) == ([None], [CURRENT], [])
    kernel.prepared()
    kernel.prepared(stream=0x60)
    kernel.prepared()
    assert kernel.binding.streams == [CURRENT, 0x60, CURRENT]


def test_a_prepared_call_runs_on_the_stream_it_was_given(machine: Emulated) -> None:
    kernel = Kernel(machine, 0x50)
    assert (kernel.outputs, kernel.bound, kernel.binding.streams) == ([0x50], [0x50], [])
    kernel.prepared()
    kernel.prepared(stream=0x60)
    kernel.prepared()
    assert kernel.binding.streams == [0x50, 0x60, 0x50]


def test_a_prepared_call_returns_the_same_arrays_and_keeps_its_workspace(machine: Emulated) -> None:
    kernel = Kernel(machine, None)
    (first,), (second,) = kernel.prepared(), kernel.prepared()
    assert first is second is kernel.array
    gc.collect()
    assert kernel.workspace is not None and kernel.workspace() is not None


def test_outputs_that_cannot_be_written_twice_are_refused_before_anything_is_bound(
    machine: Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(arrays: gpu.OutputArrays) -> None:
        raise UnsupportedError("arrays that are written once", "cuda:0", "a plain call")

    monkeypatch.setattr(gpu.OutputArrays, "require_mutable", refuse)
    bound: list[int] = []
    view = tensor.view_output(machine.array(np.zeros(4, np.float32), writable=True), "out")

    def bind(arrays: gpu.OutputArrays, pointer: int) -> tuple[Binding, None]:
        bound.append(pointer)
        return Binding(), None

    with pytest.raises(UnsupportedError, match="written once"):
        gpu.PreparedKernel([view], None, lambda own: gpu.OutputArrays(view, [((4,), "float32")], (view,), own), bind)
    assert bound == []


def test_the_memo_remembers_and_is_emptied_when_full() -> None:
    memo: gpu.ThreadMemo[str] = gpu.ThreadMemo()
    made = [memo.add(key, str(key)) for key in range(gpu._MEMO_LIMIT)]
    assert len(memo.entries) == gpu._MEMO_LIMIT and memo.entries[3] is made[3]
    memo.add("one more", "x")
    assert memo.entries == {"one more": "x"}


def test_the_memo_is_a_threads_own() -> None:
    memo: gpu.ThreadMemo[str] = gpu.ThreadMemo()
    memo.add("key", "made here")
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(memo.entries.get("key")))
    thread.start()
    thread.join()
    assert seen == [None] and memo.entries["key"] == "made here"
