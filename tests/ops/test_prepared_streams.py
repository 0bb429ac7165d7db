"""Calls on streams: what a prepared call's first run is behind, wherever it runs, and what captures leave out."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import fake_cupy
import numpy as np
import pytest
from fake_arrays import Foreign
from fake_driver import FakeDriver, installed

from cupymla import tensor
from cupymla.ops import gpu
from cupymla_lab.emulated import kind_of

HOME, OTHER, LEGACY = 55, 66, 1


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> fake_cupy.FakeCupy:
    made = fake_cupy.install(monkeypatch)
    made.streams.append(HOME)
    return made


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    with installed(monkeypatch) as made:
        # Index 0's context, which the fake hands out as 0xC0, is current: nothing is pushed.
        made.context = 0xC0
        yield made


class Binding:
    """Launches that the driver's list of calls tells of."""

    launcher = None

    def __init__(self, fake: FakeDriver) -> None:
        self._fake = fake

    def launch(self, stream: int) -> None:
        self._fake.calls.append(("launch", stream))


class Memory:
    """Something a launch works in."""


def call(fake: FakeDriver, *, fresh: bool = True, memory: object = None, beside: Any = (), stream: Any = None) -> Any:
    """A call of a CuPy array and what is `beside` it, with an output that is the caller's unless it is `fresh`."""
    array = fake_cupy.ndarray(np.zeros(4, np.float32))
    given = [tensor.view(each, "x") for each in (array, *beside)]
    out = None if fresh else given[0]

    def bind(arrays: gpu.OutputArrays, pointer: int) -> tuple[Binding, object]:
        fake.calls.append(("bind", pointer))
        return Binding(fake), memory

    return gpu.KernelCall(given, stream, lambda own: gpu.OutputArrays(given[0], [((4,), "float32")], (out,), own), bind)


def done(fake: FakeDriver) -> list[tuple[str, int]]:
    """What was bound, launched and waited for, on which streams, in order."""
    return [call[:2] for call in fake.calls if call[0] in ("bind", "launch", "cuStreamSynchronize")]


def waits(fake: FakeDriver) -> list[tuple[int, int]]:
    """Pairs (stream behind which is waited, stream that waits)."""
    recorded = dict(fake.named("cuEventRecord"))
    return [(recorded[event], stream) for stream, event in fake.named("cuStreamWaitEvent")]


@pytest.mark.parametrize("stream", [None, HOME])
def test_memory_of_a_prepared_call_is_free_before_it_runs_anywhere(
    cupy: fake_cupy.FakeCupy, fake: FakeDriver, stream: int | None
) -> None:
    """The pool may have handed out what work ahead on that stream still uses."""
    prepared = call(fake, stream=stream).prepared()
    assert done(fake) == [("bind", HOME), ("cuStreamSynchronize", HOME)]
    prepared(stream=OTHER)
    prepared()
    prepared(stream=OTHER)
    assert done(fake)[2:] == [("launch", OTHER), ("launch", HOME), ("launch", OTHER)]
    assert waits(fake) == [], "runs order nothing"


@pytest.mark.parametrize(
    ("fresh", "memory", "foreign", "waited"),
    [(False, None, False, 0), (True, None, False, 1), (False, Memory(), False, 1), (False, None, True, 1)],
    ids=["all is the caller's", "output", "workspace", "array that names a stream"],
)
def test_a_prepared_call_waits_for_what_a_run_depends_on(
    cupy: fake_cupy.FakeCupy, fake: FakeDriver, fresh: bool, memory: object, foreign: bool, waited: int
) -> None:
    beside = [Foreign(index=0)] if foreign else []
    call(fake, fresh=fresh, memory=memory, beside=beside).prepared()
    assert len(fake.named("cuStreamSynchronize")) == waited


def test_a_call_prepared_in_a_capture_does_not_wait(cupy: fake_cupy.FakeCupy, fake: FakeDriver) -> None:
    """Waiting for a stream that is being captured ends the capture."""
    fake.captured[HOME] = 7
    call(fake, memory=Memory()).prepared()
    assert done(fake) == [("bind", HOME)]


def test_a_call_is_prepared_beside_captures_of_other_streams(cupy: fake_cupy.FakeCupy, fake: FakeDriver) -> None:
    """In their default mode they forbid all threads to allocate; the thread has its own mode back afterwards."""
    modes = []
    make = cupy.ndarray

    def ndarray(shape: tuple[int, ...], dtype: Any) -> Any:
        modes.append(fake.capture_mode)
        return make(shape, dtype)

    cupy.ndarray = ndarray
    call(fake, memory=Memory()).prepared()
    assert modes == [2]
    interesting = ("cuThreadExchangeStreamCaptureMode", "bind", "cuStreamSynchronize")
    steps = [step[:2] for step in fake.calls if step[0] in interesting]
    exchanged = "cuThreadExchangeStreamCaptureMode"
    assert steps == [(exchanged, 2), ("bind", HOME), ("cuStreamSynchronize", HOME), (exchanged, 0)]


def test_a_thread_has_its_capture_mode_back_when_a_call_cannot_be_prepared(
    cupy: fake_cupy.FakeCupy, fake: FakeDriver
) -> None:
    given = [tensor.view(fake_cupy.ndarray(np.zeros(4, np.float32)), "x")]

    def outputs(own: int | None) -> gpu.OutputArrays:
        assert fake.capture_mode == 2
        raise MemoryError

    with pytest.raises(MemoryError):
        gpu.PreparedKernel(given, None, outputs, lambda arrays, pointer: pytest.fail("bound"))
    assert fake.capture_mode == 0


def test_runs_order_arrays_of_other_producers(cupy: fake_cupy.FakeCupy, fake: FakeDriver) -> None:
    prepared = call(fake, beside=[Foreign(index=0)]).prepared()
    del fake.calls[:]
    prepared(stream=OTHER)
    assert waits(fake) == [(LEGACY, OTHER)]
    del fake.calls[:]
    prepared()
    assert waits(fake) == [(LEGACY, HOME)]


def test_a_captured_run_waits_for_nothing_outside_of_its_capture(cupy: fake_cupy.FakeCupy, fake: FakeDriver) -> None:
    """The driver refuses a graph that waits for an event of no graph."""
    prepared = call(fake, beside=[Foreign(index=0)]).prepared()
    del fake.calls[:]
    fake.captured[OTHER] = 7
    prepared(stream=OTHER)
    assert fake.calls == [("launch", OTHER)]


@pytest.mark.parametrize(("capture", "ordered"), [(7, [(77, OTHER)]), (8, []), (None, [])])
def test_streams_of_one_capture_are_ordered(
    cupy: fake_cupy.FakeCupy, fake: FakeDriver, capture: int | None, ordered: list[tuple[int, int]]
) -> None:
    views = [tensor.view(fake_cupy.ndarray(np.zeros(4, np.float32)), "x") for _ in range(2)]
    views[1].framework, views[1].stream = "dlpack", 77
    fake.captured[OTHER] = 7
    if capture is not None:
        fake.captured[77] = capture
    assert tensor.launch_stream(views, OTHER) == OTHER
    assert waits(fake) == ordered


# Calls that are run once


def test_a_call_that_runs_once_does_not_wait(cupy: fake_cupy.FakeCupy, fake: FakeDriver) -> None:
    (out,) = call(fake, memory=Memory(), stream=OTHER)()
    assert done(fake) == [("bind", OTHER), ("launch", OTHER)]
    assert isinstance(out, fake_cupy.ndarray)
    assert cupy.made == [(0, OTHER, (4,), np.dtype(np.float32))]


@pytest.mark.parametrize("captured", [False, True])
def test_memory_that_a_graph_works_in_is_kept(cupy: fake_cupy.FakeCupy, fake: FakeDriver, captured: bool) -> None:
    memory = Memory()
    kept = weakref.ref(memory)
    if captured:
        fake.captured[HOME] = 7
    call(fake, memory=memory)()
    del memory
    gc.collect()
    assert (kept() is not None) == captured


# Calls that were made ready


def made_ready(outputs: int, workspace_bytes: int, launches: list[tuple[list[int], int, bool]]) -> gpu.ReadyKernel:
    """A call made ready that notes the addresses and the stream of its launches, and whether any address moved."""
    like = tensor.view(fake_cupy.ndarray(np.zeros(4, np.float32)), "x")

    def bind(views: tuple[tensor.View, ...]) -> Any:
        assert [view.shape for view in views] == [(4,)] * outputs, "a workspace is no output"
        return lambda pointers, stream, moved: launches.append((list(pointers), stream, moved)), workspace_bytes

    return gpu.ReadyKernel(like, [((4,), "float32")] * outputs, bind)


@pytest.mark.parametrize("workspace_bytes", [0, 100, 2 << 20])
@pytest.mark.parametrize("outputs", [1, 2])
def test_a_workspace_comes_last_and_is_not_returned(
    cupy: fake_cupy.FakeCupy, fake: FakeDriver, outputs: int, workspace_bytes: int
) -> None:
    launches: list[tuple[list[int], int, bool]] = []
    returned = made_ready(outputs, workspace_bytes, launches)()
    arrays = returned if outputs > 1 else (returned,)
    assert type(returned) is (tuple if outputs > 1 else fake_cupy.ndarray)
    ((pointers, stream, moved),) = launches
    assert stream == HOME and moved
    assert [array.data.ptr for array in arrays] == pointers[:outputs]
    assert [array.dtype for array in arrays] == [np.float32] * outputs
    assert len(pointers) == outputs + bool(workspace_bytes)
    # By itself: outputs that live on hold each other's memory, and not the workspace's.
    assert ((0, HOME, (workspace_bytes,), np.dtype("uint8")) in cupy.made) == bool(workspace_bytes)
    assert cupy.allocated == ([(0, HOME, 512 * outputs)] if outputs > 1 else [])


@pytest.mark.parametrize("captured", [False, True])
def test_the_workspace_of_a_captured_call_is_kept(
    cupy: fake_cupy.FakeCupy, fake: FakeDriver, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(gpu.captured, "keep", kept.append)
    if captured:
        fake.captured[HOME] = 7
    launches: list[tuple[list[int], int, bool]] = []
    made_ready(1, 100, launches)()
    made_ready(1, 0, launches)()
    assert [array.data.ptr for array in kept] == ([launches[0][0][1]] if captured else [])


def test_addresses_are_set_again_where_any_has_moved(
    cupy: fake_cupy.FakeCupy, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = (fake_cupy.ndarray(np.zeros(4, np.float32)) for _ in range(2))
    work, other_work = (fake_cupy.ndarray(np.zeros(100, np.uint8)) for _ in range(2))
    next_output, next_work = [here], [work]
    kind = kind_of(lambda shape, dtype: next_work[0] if shape == (100,) else next_output[0])
    monkeypatch.setattr(cupy, "ndarray", kind)
    launches: list[tuple[list[int], int, bool]] = []
    ready = made_ready(1, 100, launches)

    def moved(inputs_moved: bool) -> bool:
        ready(inputs_moved)
        return launches[-1][2]

    assert moved(False)  # the first call
    assert not moved(False)
    assert moved(True)
    assert not moved(False)
    next_output[0] = there
    assert moved(False) and not moved(False)
    next_work[0] = other_work
    assert moved(False) and not moved(False)


def test_addresses_are_set_again_after_a_call_that_failed(cupy: fake_cupy.FakeCupy, fake: FakeDriver) -> None:
    launches: list[bool] = []

    def launch(pointers: Sequence[int], stream: int, moved: bool) -> None:
        launches.append(moved)
        if len(launches) == 3:
            raise RuntimeError

    array = fake_cupy.ndarray(np.zeros(4, np.float32))
    cupy.ndarray = kind_of(lambda shape, dtype: array)
    ready = gpu.ReadyKernel(tensor.view(array, "x"), [((4,), "float32")], lambda views: (launch, 0))
    ready(True)
    ready(False)
    with pytest.raises(RuntimeError):
        ready(False)
    ready(False)
    ready(False)
    assert launches == [True, False, False, True, False]
