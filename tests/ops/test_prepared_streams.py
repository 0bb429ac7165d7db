"""Calls on streams: what a prepared call's first run is behind, wherever it runs, and what captures leave out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import fake_cupy
import numpy as np
import pytest
from fake_arrays import Foreign
from fake_driver import FakeDriver, installed

from cupymla import driver, tensor
from cupymla.errors import UnsupportedError
from cupymla.ops import calls
from cupymla.ops.arguments import Arguments, NoOptions
from cupymla.ops.calls import Calls
from cupymla.ops.gpu import Launches
from cupymla.tensor import View, fast
from cupymla_lab.emulated import kind_of

HOME, OTHER, LEGACY = 55, 66, 1


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> fake_cupy.FakeCupy:
    made = fake_cupy.install(monkeypatch)
    made.streams.append(HOME)
    return made


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    calls.bound.forget()
    with installed(monkeypatch) as made:
        # Index 0's context, which the fake hands out as 0xC0, is current: nothing is pushed.
        made.context = 0xC0
        yield made
    calls.bound.forget()


@dataclass
class Arrays:
    x: View
    beside: View | None = None
    out: View | None = None
    second: View | None = None


ARGUMENTS = Arguments("kit", Arrays, NoOptions, results=("out", "second"))


class Kit:
    """An operator whose launches the driver's list of calls tells of; `launches` has their addresses and streams."""

    def __init__(self, fake: FakeDriver, workspace_bytes: int = 0, results: int = 1) -> None:
        kit = self
        self.launches: list[tuple[list[int], int, int]] = []
        self.pointed: list[bool] = []
        self.fails = False

        class Binding(Launches):
            places: tuple[list[int], int] = ([], 0)

            def __init__(self) -> None:
                super().__init__()
                self.workspace_bytes = workspace_bytes
                self.moved = False
                fake.calls.append(("bind", 0))

            def point(self, views: Arrays, results: Sequence[int], workspace: int) -> None:
                self.places, self.moved = ([views.x.ptr, *results], workspace), True

            def launch(self, stream: int) -> None:
                fake.calls.append(("launch", stream))
                kit.launches.append((*self.places, stream))
                kit.pointed.append(self.moved)
                self.moved = False
                if kit.fails:
                    raise RuntimeError

        def read(**given: Any) -> tuple[Arrays, None]:
            inputs, _, outputs = ARGUMENTS.placed(given)
            return Arrays(*ARGUMENTS.viewed(inputs, outputs)), None

        self.calls = Calls(
            ARGUMENTS,
            read,
            lambda views, problem: [((4,), "float32")] * results,
            lambda views, problem, places, recorded: Binding(),
            lambda views, problem: pytest.fail("no CPU"),
        )


def array() -> Any:
    return fake_cupy.ndarray(np.zeros(4, np.float32))


def prepared(kit: Kit, *, fresh: bool = True, beside: Any = None, stream: Any = None) -> Any:
    """A prepared call of a CuPy array and what is `beside` it, with an output that is the caller's unless `fresh`."""
    out = {} if fresh else {"out": array()}
    return kit.calls.prepare(x=array(), beside=beside, stream=stream, **out)


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
    call = prepared(Kit(fake), stream=stream)
    assert done(fake) == [("bind", 0), ("cuStreamSynchronize", HOME)]
    call(stream=OTHER)
    call()
    call(stream=OTHER)
    assert done(fake)[2:] == [("launch", OTHER), ("launch", HOME), ("launch", OTHER)]
    assert waits(fake) == [], "runs order nothing"


def test_a_prepared_call_runs_on_the_stream_it_was_given(cupy: fake_cupy.FakeCupy, fake: FakeDriver) -> None:
    call = prepared(Kit(fake), stream=0x50)
    del fake.calls[:]
    call()
    call(stream=0x60)
    call()
    assert done(fake) == [("launch", 0x50), ("launch", 0x60), ("launch", 0x50)]


@pytest.mark.parametrize(
    ("fresh", "memory", "foreign", "waited"),
    [(False, 0, False, 0), (True, 0, False, 1), (False, 64, False, 1), (False, 0, True, 1)],
    ids=["all is the caller's", "output", "workspace", "array that names a stream"],
)
def test_a_prepared_call_waits_for_what_a_run_depends_on(
    cupy: fake_cupy.FakeCupy, fake: FakeDriver, fresh: bool, memory: int, foreign: bool, waited: int
) -> None:
    prepared(Kit(fake, memory), fresh=fresh, beside=Foreign(index=0) if foreign else None)
    assert len(fake.named("cuStreamSynchronize")) == waited


def test_a_call_prepared_in_a_capture_does_not_wait(cupy: fake_cupy.FakeCupy, fake: FakeDriver) -> None:
    """Waiting for a stream that is being captured ends the capture."""
    fake.captured[HOME] = 7
    prepared(Kit(fake, 64))
    assert done(fake) == [("bind", 0)]


def test_a_call_is_prepared_beside_captures_of_other_streams(cupy: fake_cupy.FakeCupy, fake: FakeDriver) -> None:
    """In their default mode they forbid all threads to allocate; the thread has its own mode back afterwards."""
    modes = []
    make = cupy.ndarray

    def ndarray(shape: tuple[int, ...], dtype: Any) -> Any:
        modes.append(fake.capture_mode)
        return make(shape, dtype)

    cupy.ndarray = ndarray
    prepared(Kit(fake, 64))
    assert set(modes) == {2}
    interesting = ("cuThreadExchangeStreamCaptureMode", "bind", "cuStreamSynchronize")
    steps = [step[:2] for step in fake.calls if step[0] in interesting]
    exchanged = "cuThreadExchangeStreamCaptureMode"
    assert steps == [(exchanged, 2), ("bind", 0), ("cuStreamSynchronize", HOME), (exchanged, 0)]


def test_a_thread_has_its_capture_mode_back_when_a_call_cannot_be_prepared(
    cupy: fake_cupy.FakeCupy, fake: FakeDriver
) -> None:
    def ndarray(shape: tuple[int, ...], dtype: Any) -> Any:
        assert fake.capture_mode == 2
        raise MemoryError

    cupy.ndarray = ndarray
    with pytest.raises(MemoryError):
        prepared(Kit(fake))
    assert fake.capture_mode == 0


def test_a_prepared_call_returns_the_same_arrays_and_its_workspace_is_its_own(
    cupy: fake_cupy.FakeCupy, fake: FakeDriver
) -> None:
    kit = Kit(fake, 64)
    call = prepared(kit)
    first, second = call(), call()
    assert first is second
    assert kit.launches[0] == kit.launches[1] and kit.launches[0][1] == call._keep.ptr


def test_outputs_that_cannot_be_written_twice_are_refused(
    cupy: fake_cupy.FakeCupy, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor.Allocation, "repeatable", False)
    with pytest.raises(UnsupportedError, match="a prepared call that allocates cupy arrays"):
        prepared(Kit(fake))


def test_runs_order_arrays_of_other_producers(cupy: fake_cupy.FakeCupy, fake: FakeDriver) -> None:
    call = prepared(Kit(fake), beside=Foreign(index=0))
    del fake.calls[:]
    call(stream=OTHER)
    assert waits(fake) == [(LEGACY, OTHER)]
    del fake.calls[:]
    call()
    assert waits(fake) == [(LEGACY, HOME)]


def test_a_captured_run_waits_for_nothing_outside_of_its_capture(cupy: fake_cupy.FakeCupy, fake: FakeDriver) -> None:
    """The driver refuses a graph that waits for an event of no graph."""
    call = prepared(Kit(fake), beside=Foreign(index=0))
    del fake.calls[:]
    fake.captured[OTHER] = 7
    call(stream=OTHER)
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


def once(kit: Kit, **where: Any) -> Any:
    return kit.calls((array(), None), (), (None, None), **where)


def test_a_call_that_runs_once_does_not_wait(cupy: fake_cupy.FakeCupy, fake: FakeDriver) -> None:
    kit = Kit(fake, 64)
    out = once(kit, stream=OTHER)
    assert done(fake) == [("bind", 0), ("launch", OTHER)]
    assert isinstance(out, fake_cupy.ndarray)
    assert cupy.made == [(0, OTHER, (4,), np.dtype(np.float32)), (0, OTHER, (64,), np.dtype(np.uint8))]


@pytest.mark.parametrize("way", [{}, {"stream": HOME}], ids=["short", "long"])
@pytest.mark.parametrize("captured", [False, True])
def test_memory_that_a_graph_works_in_is_kept(
    cupy: fake_cupy.FakeCupy, fake: FakeDriver, captured: bool, way: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(calls, "captured", kept)
    tensor.view(array(), "x")
    fast.remember(array())
    driver.primary_context(0)
    if captured:
        fake.captured[HOME] = 7
    kit = Kit(fake, 100)
    once(kit, **way)
    once(Kit(fake), **way)
    places = [memory.ptr if hasattr(memory, "ptr") else memory[0].data.ptr for memory in kept]
    assert places == ([kit.launches[0][1]] if captured else [])


# The fast path


@pytest.fixture
def known(cupy: fake_cupy.FakeCupy, fake: FakeDriver) -> None:
    """As after a first call."""
    tensor.view(array(), "x")
    fast.remember(array())
    driver.primary_context(0)


@pytest.mark.parametrize("workspace_bytes", [0, 100, 2 << 20])
@pytest.mark.parametrize("results", [1, 2])
def test_a_workspace_comes_last_and_is_not_returned(
    cupy: fake_cupy.FakeCupy, fake: FakeDriver, known: None, workspace_bytes: int, results: int
) -> None:
    kit = Kit(fake, workspace_bytes, results)
    returned = once(kit)
    arrays = returned if results > 1 else (returned,)
    assert type(returned) is (tuple if results > 1 else fake_cupy.ndarray)
    (((_, *pointers), workspace, stream),) = kit.launches
    assert stream == HOME
    assert [one.data.ptr for one in arrays] == pointers
    assert [one.dtype for one in arrays] == [np.float32] * results
    assert bool(workspace) == bool(workspace_bytes)
    # By itself: outputs that live on hold each other's memory, and not the workspace's.
    assert ((0, HOME, (workspace_bytes,), np.dtype("uint8")) in cupy.made) == bool(workspace_bytes)
    assert cupy.allocated == ([(0, HOME, 512 * results)] if results > 1 else [])


def test_addresses_are_set_again_where_any_has_moved(
    cupy: fake_cupy.FakeCupy, fake: FakeDriver, known: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = array(), array()
    work, other_work = (fake_cupy.ndarray(np.zeros(100, np.uint8)) for _ in range(2))
    next_output, next_work = [here], [work]
    kind = kind_of(lambda shape, dtype: next_work[0] if shape == (100,) else next_output[0])
    monkeypatch.setattr(cupy, "ndarray", kind)
    kit, inputs = Kit(fake, 100), [array(), array()]

    def moved(number: int) -> bool:
        kit.calls((inputs[number], None), (), (None, None))
        return kit.pointed[-1]

    assert moved(0)  # the first call
    assert not moved(0)
    assert moved(1) and not moved(1)
    next_output[0] = there
    assert moved(1) and not moved(1)
    next_work[0] = other_work
    assert moved(1) and not moved(1)


def test_a_call_that_failed_is_bound_anew(cupy: fake_cupy.FakeCupy, fake: FakeDriver, known: None) -> None:
    kit, x, out = Kit(fake), array(), array()
    cupy.ndarray = kind_of(lambda shape, dtype: out)

    def call() -> None:
        kit.calls((x, None), (), (None, None))

    call()
    call()
    kit.fails = True
    with pytest.raises(RuntimeError):
        call()
    kit.fails = False
    call()
    call()
    assert kit.pointed == [True, False, False, True, False]
    assert len([step for step in fake.calls if step[0] == "bind"]) == 2
