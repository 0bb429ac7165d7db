"""Ordinary calls whose layouts came before: what is remembered, what never is, and that a call made again is the same.

Arrays are host memory that passes for CuPy's; the launches of the operators' own calls are recorded, not run.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest

import cupymla
from cupymla import InputError, driver, tensor
from cupymla.launch import Geometry, Launcher
from cupymla.ops import repeat
from cupymla.tensor import View
from cupymla.testing import operators
from cupymla_lab.emulated import DeviceArray, Emulated, emulated, kind_of
from cupymla_lab.subjects import cheapest


@pytest.fixture
def machine() -> Iterator[Emulated]:
    with emulated("sm_90a", 4) as made:
        yield made


class Calls:
    """An operator whose calls note what they were made ready for and where their arrays were."""

    def __init__(self) -> None:
        self.ready: list[dict[str, Any]] = []
        self.runs: list[list[int]] = []
        self.numbers: list[tuple[float, ...]] = []
        self.moved: list[bool] = []
        self.fails = False
        self.repeats = repeat.Repeats(("x", "y"), ("flag", "scale"), self._ready)

    def _ready(self, **arguments: Any) -> Callable[[bool], Any]:
        if arguments["flag"] not in (True, False):
            raise InputError("flag", "True or False", arguments["flag"])
        self.ready.append(arguments)
        views = [value for value in arguments.values() if isinstance(value, View)]

        def run(moved: bool, *numbers: float) -> int:
            self.numbers.append(numbers)
            self.runs.append([view.ptr for view in views])
            self.moved.append(moved)
            if self.fails:
                raise ZeroDivisionError
            return len(self.runs)

        return run

    def __call__(self, x: Any, y: Any = None, flag: Any = False, scale: Any = None) -> Any:
        return self.repeats((x, y), (flag, scale))


@pytest.fixture
def calls(machine: Emulated) -> Calls:
    # A type is known for CuPy's once an array of it has been seen.
    tensor.view(machine.array(np.zeros(1, np.float32)), "x")
    return Calls()


def floats(machine: Emulated, *shape: int, dtype: Any = np.float32) -> DeviceArray:
    return machine.empty(shape, dtype)


def test_a_layout_is_checked_once_and_run_with_each_calls_addresses(machine: Emulated, calls: Calls) -> None:
    first, second, other = (floats(machine, 4, 2) for _ in range(3))
    assert [calls(first, other), calls(second, other), calls(first, second)] == [1, 2, 3]
    assert len(calls.ready) == 1
    at = {name: array.data.ptr for name, array in (("first", first), ("second", second), ("other", other))}
    assert calls.runs == [[at["first"], at["other"]], [at["second"], at["other"]], [at["first"], at["second"]]]


def test_a_call_is_told_whether_its_arrays_have_moved(machine: Emulated, calls: Calls) -> None:
    x, y, z = (floats(machine, 4, 2) for _ in range(3))
    for arguments in ((x, y), (x, y), (x, z), (x, z), (y, z), (x, y), (x, y)):
        calls(*arguments)
    assert calls.moved == [True, False, True, False, True, True, False]
    # What was called with another layout in between makes no difference; a call that failed is forgotten.
    calls(x)
    calls(x, y)
    assert calls.moved[-2:] == [True, False]
    calls.fails = True
    with pytest.raises(ZeroDivisionError):
        calls(x, y)
    calls.fails = False
    calls(x, y)
    calls(x, y)
    assert calls.moved[-3:] == [False, True, False]
    assert calls.runs[-1] == [x.data.ptr, y.data.ptr]


def test_a_call_within_a_call_goes_through_the_door(machine: Emulated, calls: Calls) -> None:
    """A finalizer may make one wherever Python or an allocator runs it; the addresses are the outer call's."""
    x, y, z = (floats(machine, 4, 2) for _ in range(3))
    calls(x, y)
    (found,) = calls.repeats.entries.values()
    run, inner = found.run, []
    assert run is not None

    def interrupted(moved: bool) -> Any:
        inner.append(calls(z, z))
        return run(moved)

    found.run = interrupted
    calls(x, y)
    assert inner == [None] and calls.runs[-1] == [x.data.ptr, y.data.ptr]
    calls(x, y)
    assert calls.runs[-1] == [x.data.ptr, y.data.ptr] and len(calls.ready) == 1


def test_a_call_that_was_interrupted_is_made_ready_anew(machine: Emulated, calls: Calls) -> None:
    """Wherever it was: its views may have some of the new addresses, and some of the old ones."""
    x, y, z = (floats(machine, 4, 2) for _ in range(3))
    calls(x, y)
    (found,) = calls.repeats.entries.values()

    views = found.views

    class Halting:
        """The views, of which the second cannot be reached."""

        def __iter__(self) -> Iterator[View]:
            yield views[0]
            raise KeyboardInterrupt

    found.views = Halting()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        calls(z, y)
    assert views[0].ptr == z.data.ptr and calls.repeats.entries == {}
    assert calls(x, y) and calls.runs[-1] == [x.data.ptr, y.data.ptr] and len(calls.ready) == 2


def test_everything_that_a_check_may_depend_on_is_told_apart(machine: Emulated, calls: Calls) -> None:
    x = floats(machine, 4, 4)
    transposed = DeviceArray(x.host.T)
    variants: list[tuple[Any, ...]] = [
        *((x,), (floats(machine, 4, 2),), (floats(machine, 4, 4, dtype=np.int32),), (transposed,)),
        *((x, x), (x, transposed), (x, 1.0), (x, 2.0)),
        *((x, None, True), (x, None, np.False_), (x, None, False, 1), (x, None, False, 1.0), (x, None, False, "1")),
    ]
    for _ in range(2):
        for arguments in variants:
            calls(*arguments)
    assert len(calls.ready) == len(variants)
    assert len(calls.runs) == 2 * len(variants)


def test_a_number_in_the_place_of_an_array_is_given_to_each_run(machine: Emulated, calls: Calls) -> None:
    """Models have one for each layer. Only whether it is 1 may be for a check to decide on."""
    x = floats(machine, 4)
    numbers = (2.0, -0.0, 3, np.float32(0.1), np.int64(-5), 1, 1.0, np.float64(1))
    for _ in range(2):
        for number in numbers:
            assert calls(x, number)
    assert [arguments["y"] for arguments in calls.ready] == [2.0, 1]
    assert repr(calls.numbers) == repr([(float(number),) for number in numbers] * 2)
    for number in (float("nan"), float("inf"), -float("inf"), 3.5e38, 10**400, np.float64("nan"), True):
        assert calls(x, number) is None


def test_another_device_is_another_layout_and_must_be_current(
    machine: Emulated, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, elsewhere = floats(machine, 4), floats(machine, 4)
    elsewhere.data.device_id = 1
    calls(x, x)
    calls(x, elsewhere)
    assert [arguments["y"].device.index for arguments in calls.ready] == [0, 1]
    monkeypatch.setattr(driver, "is_current", lambda index: index == 1)
    assert calls(x, x) is None
    assert calls(elsewhere) == 3


def test_what_equals_a_checked_option_is_not_taken_for_it(machine: Emulated, calls: Calls) -> None:
    x = floats(machine, 4)
    assert calls(x, None, True) == 1
    with pytest.raises(InputError, match="flag"):
        calls(x, None, 2)
    assert calls(x, None, True, 1.0) == 2
    for scale in (1, True, np.float32(1)):
        calls(x, None, True, scale)
    assert [arguments["scale"] for arguments in calls.ready] == [None, 1.0, 1, True, np.float32(1)]


class Hostile:
    """An option that refuses to be hashed, and one that equals everything."""

    def __init__(self, hashes: bool) -> None:
        self.hashes = hashes

    def __hash__(self) -> int:
        if not self.hashes:
            raise ZeroDivisionError
        return hash(None)

    def __eq__(self, other: object) -> bool:
        return True


@pytest.mark.parametrize(
    "option",
    [[1.0], Hostile(False), Hostile(True), object(), np.zeros(())],
    ids=["list", "without a hash", "equal to all", "object", "array"],
)
def test_options_of_other_kinds_go_through_the_door(machine: Emulated, calls: Calls, option: object) -> None:
    x = floats(machine, 4)
    assert calls(x, None, False, None) == 1
    assert calls(x, None, False, option) is None
    assert len(calls.ready) == 1


def test_addresses_that_only_the_door_can_judge_go_through_it(machine: Emulated, calls: Calls) -> None:
    wide = floats(machine, 9)
    assert calls(DeviceArray(wide.host[:4])) == 1
    assert calls(DeviceArray(wide.host[1:5])) is None
    assert calls(DeviceArray(wide.host[4:8])) == 2
    nowhere = DeviceArray(wide.host[:4])
    nowhere.data.ptr = 0
    assert calls(nowhere) is None


def test_arrays_of_other_frameworks_go_through_the_door(machine: Emulated, calls: Calls) -> None:
    x = floats(machine, 4)
    for arguments in ((x.host,), (x, x.host), (x, "y"), (x, object()), (None,), (1.0,)):
        assert calls(*arguments) is None
    strange = floats(machine, 4)
    strange.dtype = np.dtype("datetime64[s]")
    assert calls(strange) is None
    assert calls.ready == []


def test_a_refused_call_is_refused_again(machine: Emulated, calls: Calls) -> None:
    x = floats(machine, 4)
    for _ in range(2):
        with pytest.raises(InputError, match="flag"):
            calls(x, None, "yes")
    assert calls.runs == [] and calls.repeats.entries == {}


def test_no_array_is_kept_alive(machine: Emulated, calls: Calls) -> None:
    x = DeviceArray(floats(machine, 4).host)
    gone = weakref.ref(x)
    calls(x)
    del x
    gc.collect()
    assert len(calls.repeats.entries) == 1 and gone() is None


def test_threads_do_not_share_calls(machine: Emulated, calls: Calls) -> None:
    x = floats(machine, 4)
    calls(x)
    thread = threading.Thread(target=calls, args=(x,))
    thread.start()
    thread.join()
    assert len(calls.ready) == 2 and calls.ready[0]["x"] is not calls.ready[1]["x"]


def launches_of(machine: Emulated, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What every launch from now on is given, in place of running it: geometry, tensor maps, parameter bytes."""
    seen: list[Any] = []

    def execute(kernel: Any, geometry: Geometry, parameters: list[bytes], maps: dict[int, Any]) -> None:
        plain = [bytes_ for number, bytes_ in enumerate(parameters) if number not in maps]
        seen.append((kernel.name, geometry, maps, plain))

    monkeypatch.setattr(machine, "execute", execute)
    return seen


NAMES = ("sparse_mla_fwd", "attn_dist", "sparse_mla_bwd", "nvfp4_gemv", "xl_paged_attention")


@pytest.mark.compile
@pytest.mark.parametrize("name", NAMES)
def test_an_operators_call_made_again_launches_what_a_call_through_the_door_does(
    name: str, machine: Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sets of arrays in turn and again, each with memory of its own for what the call allocates, and each with the
    other's."""
    subject = operators.Subject(name)
    (case, *_) = cheapest(subject, 2)
    inputs = subject.cases.inputs(case, 0)
    seen = launches_of(machine, monkeypatch)
    call, spec = getattr(cupymla, name), import_module(f"cupymla.ops.{name}.spec")
    made: list[DeviceArray] = []

    def allocate(shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        made.append(machine.empty(shape, dtype))
        return made[-1]

    sets = []
    with monkeypatch.context() as patch:
        patch.setattr(machine._cupy, "ndarray", kind_of(allocate))
        for _ in range(2):
            del made[:]
            given = machine.arguments(inputs)
            call(**given)
            sets.append((given, list(made)))

    (one, its_memory), (other, others_memory) = sets
    turns = [*sets, sets[1], sets[0], sets[0], (one, others_memory), (other, others_memory), (other, its_memory)]

    def launched(**replacements: Callable[..., Any]) -> list[Any]:
        """What calls on both sets launch, each twice and twice again, while these stand in for parts of the way."""
        del seen[:]
        with monkeypatch.context() as patch:
            for part, replacement in replacements.items():
                if part not in ("read", "checked"):
                    patch.setattr(repeat.Repeats, part, replacement)
                elif hasattr(spec, part):
                    patch.setattr(spec, part, replacement)
            for given, fresh in turns:
                memory = iter(fresh)
                patch.setattr(machine._cupy, "ndarray", kind_of(lambda shape, dtype, memory=memory: next(memory)))
                call(**given)
        return list(seen)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("checked again")

    first = launched()
    # The door's two names; some operators go through one, some through the other.
    assert launched(_checked=refuse, read=refuse, checked=refuse) == first
    assert launched(__call__=lambda *_: None) == first
    count = len(first) // len(turns)
    by_turn = [first[start : start + count] for start in range(0, len(first), count)]
    assert count and len(by_turn) == len(turns)
    assert by_turn[1] == by_turn[2] and by_turn[0] == by_turn[3] == by_turn[4]
    assert len({repr(launches) for launches in (by_turn[0], by_turn[1], by_turn[5], by_turn[7])}) == 4


@pytest.mark.compile
@pytest.mark.parametrize("way", ["remembered", "through the door"])
@pytest.mark.parametrize("name", NAMES)
def test_a_call_within_a_call_takes_nothing_from_it(
    name: str, way: str, machine: Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the worst time: addresses of the outer call are set, and nothing of it has been launched."""
    subject = operators.Subject(name)
    (case, *_) = cheapest(subject, 2)
    inputs = subject.cases.inputs(case, 0)
    seen = launches_of(machine, monkeypatch)
    call = getattr(cupymla, name)
    if way == "through the door":
        monkeypatch.setattr(repeat.Repeats, "__call__", lambda *_: None)
    made: list[DeviceArray] = []

    def allocate(shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        made.append(machine.empty(shape, dtype))
        return made[-1]

    def from_now_on(allocator: Callable[..., DeviceArray]) -> None:
        monkeypatch.setattr(machine._cupy, "ndarray", kind_of(allocator))

    def calls() -> None:
        from_now_on(allocate)
        sets = []
        for _ in range(2):
            given = machine.arguments(inputs)
            call(**given)  # and has what it allocates once
            del made[:]
            call(**given)
            sets.append((given, list(made)))

        def launched(given: dict[str, Any], *memory: DeviceArray) -> list[Any]:
            """What a call launches whose memory, and that of a call within it, are these arrays."""
            del seen[:]
            places = iter(memory)
            from_now_on(lambda shape, dtype: next(places))
            call(**given)
            return list(seen)

        alone = [launched(given, *memory) for given, memory in sets]
        assert alone[0] and alone[0] != alone[1]
        (outer, outers_memory), (inner, inners_memory) = sets
        launch, waiting = Launcher.__call__, [inner]

        def interrupted(launcher: Launcher, stream: int) -> None:
            if waiting:
                call(**waiting.pop())
            launch(launcher, stream)

        monkeypatch.setattr(Launcher, "__call__", interrupted)
        assert launched(outer, *outers_memory, *inners_memory) == [*alone[1], *alone[0]]
        # And neither is in the other's way from then on.
        assert [launched(given, *memory) for given, memory in sets] == alone

    # In a thread of its own, which has no bindings of other machines.
    machine.call(calls)
