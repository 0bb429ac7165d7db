"""Calls of one operator in one thread: what is bound once, what never is, and that a call made again is the same.

Arrays are host memory that passes for CuPy's; the launches of the operators' own calls are recorded, not run.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import cupymla
from cupymla import InputError, driver, tensor
from cupymla.launch import Geometry, Launcher
from cupymla.ops import calls
from cupymla.ops.arguments import Arguments, Dtype, Flag, Number, option
from cupymla.ops.calls import Calls
from cupymla.ops.gpu import Results
from cupymla.tensor import View, fast
from cupymla_lab.emulated import DeviceArray, Emulated, emulated, kind_of
from cupymla_lab.subjects import Subject, cheapest


@pytest.fixture
def machine() -> Iterator[Emulated]:
    with emulated("sm_90a", 4) as made:
        yield made


@dataclass
class Arrays:
    x: View
    y: View | float | None = None
    out: View | None = None


@dataclass(frozen=True)
class Options:
    flag: bool = option(False, Flag())
    scale: float | None = option(None, Number(optional=True))
    dtype: Any = option(None, Dtype(("float32", "bfloat16"), optional=True))  # noqa: RUF009 - a field, as all


ARGUMENTS = Arguments("kit", Arrays, Options, results=("out",), numbers=("y",))


class Kit:
    """An operator whose calls note what they were bound for, and with which addresses and numbers they were launched.

    Attributes:
        bound: the arguments of each check of a new call.
        runs: addresses of x and y at each launch.
        pointed: how often addresses were set before each launch.
    """

    def __init__(self) -> None:
        self.bound: list[dict[str, Any]] = []
        self.checked = 0
        self.runs: list[list[int]] = []
        self.streams: list[int] = []
        self.numbers: list[tuple[float, ...]] = []
        self.pointed: list[int] = []
        self.fails: BaseException | None = None
        self.within: Callable[[], object] | None = None
        self.calls = Calls(ARGUMENTS, self._read, self._wanted, self._bind, lambda views, problem: lambda: "cpu")

    def _read(self, **given: Any) -> tuple[Arrays, dict[str, Any]]:
        inputs, options, (out,) = ARGUMENTS.placed(given)
        self.checked += 1
        try:
            ARGUMENTS.chosen(options)
            views = Arrays(*ARGUMENTS.viewed(inputs, (out,)))
        except InputError as refused:
            raise InputError(refused.argument, refused.expected, refused.got, "kit") from None
        if views.x.ptr % 8:
            raise InputError("x", "an address that is a multiple of 8 bytes", views.x.ptr, "kit")
        return views, given

    def _wanted(self, views: Arrays, problem: object) -> Results:
        return ((views.x.shape, "float32"),)

    def _bind(self, views: Arrays, problem: dict[str, Any], results: Sequence[View], recorded: bool) -> Any:
        self.bound.append(problem)
        kit = self

        class Binding:
            launcher, workspace_bytes, times = None, 0, 0
            places: tuple[int, ...] = ()
            numbers: tuple[float, ...] = ()

            def point(self, seen: Arrays, results: Sequence[int], workspace: int) -> None:
                self.times += 1
                self.places = tuple(v.ptr for v in (seen.x, seen.y) if isinstance(v, View))

            def scale(self, *numbers: float) -> None:
                self.numbers = numbers

            def launch(self, stream: int) -> None:
                if kit.within is not None:
                    within, kit.within = kit.within, None
                    within()
                kit.runs.append(list(self.places))
                kit.numbers.append(self.numbers)
                kit.pointed.append(self.times)
                kit.streams.append(stream)
                if kit.fails is not None:
                    raise kit.fails

        return Binding()

    def __call__(self, x: Any, y: Any = None, flag: Any = False, scale: Any = None, **rest: Any) -> Any:
        options = flag, scale, rest.pop("dtype", None)
        return self.calls((x, y), options, (rest.pop("out", None),), **rest)


@pytest.fixture
def kit(machine: Emulated) -> Iterator[Kit]:
    calls.bound.forget()
    # A type is known for CuPy's once an array of it has been seen.
    known = machine.array(np.zeros(1, np.float32))
    tensor.view(known, "x")
    fast.remember(known)
    yield Kit()
    calls.bound.forget()


def floats(machine: Emulated, *shape: int, dtype: Any = np.float32) -> DeviceArray:
    return machine.empty(shape, dtype)


def at(*arrays: DeviceArray) -> list[int]:
    return [array.data.ptr for array in arrays]


def test_a_layout_is_checked_once_and_run_with_each_calls_addresses(machine: Emulated, kit: Kit) -> None:
    first, second, other = (floats(machine, 4, 2) for _ in range(3))
    for _ in range(2):
        kit(first, other), kit(second, other), kit(first, second)
    assert kit.runs == [at(first, other), at(second, other), at(first, second)] * 2
    assert len(kit.bound) == kit.checked == 1


def test_the_first_call_with_a_type_of_arrays_is_bound_for_the_next_ones(machine: Emulated, kit: Kit) -> None:
    fast.frameworks.clear()
    x = floats(machine, 4)
    kit(x), kit(x)
    assert len(kit.bound) == 1 and kit.runs == [at(x)] * 2


def test_addresses_are_set_where_any_is_another_one(machine: Emulated, kit: Kit, monkeypatch: Any) -> None:
    x, y, z, out = (floats(machine, 4, 2) for _ in range(4))
    monkeypatch.setattr(machine._cupy, "ndarray", kind_of(lambda shape, dtype: out))
    kit(x, y), kit(x, y)
    del kit.pointed[:]
    for arguments in ((x, y), (x, y), (x, z), (x, z), (y, z), (x, y), (x, y)):
        kit(*arguments)
    assert np.diff(kit.pointed).tolist() == [0, 1, 0, 1, 1, 0]
    another = floats(machine, 4, 2)
    monkeypatch.setattr(machine._cupy, "ndarray", kind_of(lambda shape, dtype: another))
    kit(x, y), kit(x, y)
    assert np.diff(kit.pointed)[-2:].tolist() == [1, 0]


def test_a_call_within_a_call_takes_nothing_from_it(machine: Emulated, kit: Kit) -> None:
    """A finalizer may make one wherever Python or an allocator runs it; the addresses are the outer call's."""
    x, y, z = (floats(machine, 4, 2) for _ in range(3))
    kit(x, y), kit(x, y)
    for _ in range(2):
        del kit.runs[:]
        kit.within = lambda: kit(z, z)
        kit(x, y)
        assert kit.runs == [at(z, z), at(x, y)]
        kit(x, y)
        assert kit.runs[-1] == at(x, y)


@pytest.mark.parametrize("way", ["short", "long"])
def test_a_call_that_was_interrupted_is_bound_anew(machine: Emulated, kit: Kit, way: str) -> None:
    """Wherever it was: it may have some of the new addresses, and some of the old ones."""
    where = {} if way == "short" else {"stream": 7}
    x, y, z = (floats(machine, 4, 2) for _ in range(3))
    kit(x, y, **where), kit(x, y, **where)
    count = len(kit.bound)
    kit.fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        kit(z, y, **where)
    kit.fails = None
    kit(x, y, **where), kit(x, y, **where)
    assert kit.runs[-2:] == [at(x, y)] * 2 and len(kit.bound) == count + 1


def test_a_call_within_a_call_may_be_interrupted(machine: Emulated, kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a finalizer's, whose exception Python swallows, while the outer one asks for memory: it sets all addresses."""
    x, y, z, out = (floats(machine, 4, 2) for _ in range(4))
    monkeypatch.setattr(machine._cupy, "ndarray", kind_of(lambda shape, dtype: out))
    kit(x, y), kit(x, y)
    (call,) = (made for made in calls.bound.calls.values() if hasattr(made, "maker"))
    maker, point = call.maker, call.binding.point

    def fails(views: Any, results: Any, workspace: int) -> None:
        point(views, results, workspace)
        raise KeyboardInterrupt

    def makes() -> Any:
        call.maker = maker
        with monkeypatch.context() as within, pytest.raises(KeyboardInterrupt):
            within.setattr(call.binding, "point", fails)
            kit(z, z)
        return maker()

    call.maker = makes
    kit(x, y)
    assert kit.runs[-1] == at(x, y)


def test_everything_that_a_check_may_depend_on_is_told_apart(machine: Emulated, kit: Kit) -> None:
    x = floats(machine, 4, 4)
    kit(x), kit(x)
    del kit.bound[:]
    calls.bound.forget()
    transposed = DeviceArray(x.host.T)
    variants: list[tuple[Any, ...]] = [
        *((x,), (floats(machine, 4, 2),), (floats(machine, 4, 4, dtype=np.int32),), (transposed,)),
        *((x, x), (x, transposed), (x, 1.0), (x, 2.0), (x, 0.0), (x, -2.0)),
        *((x, None, True), (x, None, np.False_), (x, None, False, 1), (x, None, False, 1.0)),
    ]
    for _ in range(2):
        for arguments in variants:
            kit(*arguments)
    assert len(kit.bound) == len(variants)


def test_a_number_in_the_place_of_an_array_is_given_to_each_run(machine: Emulated, kit: Kit) -> None:
    """Models have one for each layer. Only of which kind it is may be for a check to decide on."""
    x = floats(machine, 4)
    kit(x, 5.0)
    del kit.bound[:], kit.numbers[:]
    numbers = (2.0, 0.0, -0.0, 3, np.float32(0.1), np.int64(-5), 1, 1.0, np.float64(1), 0)
    for _ in range(2):
        for number in numbers:
            kit(x, number)
    assert [arguments["y"] for arguments in kit.bound] == [0.0, -5, 1]
    assert repr(kit.numbers) == repr([(float(number),) for number in numbers] * 2)
    for number in (float("nan"), float("inf"), 3.5e38, np.float64("nan"), 1e-45):
        count = len(kit.bound)
        kit(x, number), kit(x, number)
        assert len(kit.bound) == count + 2


def test_a_device_that_is_not_current_is_made_so(machine: Emulated, kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    x = floats(machine, 4)
    kit(x), kit(x, stream=5)
    monkeypatch.setattr(driver, "is_current", lambda index: False)
    monkeypatch.setattr(kit.calls, "_returned", lambda *_: "the slow path")
    entered: list[int] = []
    on_device = driver.on_device

    def noted(index: int) -> Any:
        entered.append(index)
        return on_device(index)

    monkeypatch.setattr(driver, "on_device", noted)
    assert kit(x) == "the slow path" and entered == [0]


def test_what_equals_a_checked_option_is_not_taken_for_it(machine: Emulated, kit: Kit) -> None:
    x = floats(machine, 4)
    kit(x, None, True), kit(x, None, True)
    for other in (1, 1.0, "yes"):
        for _ in range(2):
            with pytest.raises(InputError, match="flag"):
                kit(x, None, other)


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
    "value",
    [[1.0], Hostile(False), Hostile(True), object(), np.zeros(2)],
    ids=["list", "without a hash", "equal to all", "object", "array"],
)
def test_options_of_other_kinds_are_checked_each_time(machine: Emulated, kit: Kit, value: object) -> None:
    x = floats(machine, 4)
    kit(x), kit(x)
    for _ in range(2):
        with pytest.raises(InputError, match="scale"):
            kit(x, None, False, value)


@pytest.mark.parametrize("of", ["numpy", "torch", "jax.numpy", "ml_dtypes"])
def test_dtypes_of_every_framework_are_found_again(machine: Emulated, kit: Kit, of: str) -> None:
    """A call takes them as they are: none may cost a plan each time."""
    dtype = getattr(pytest.importorskip(of), "bfloat16" if of == "ml_dtypes" else "float32")
    x, out = floats(machine, 4), floats(machine, 4)
    for rest in ({}, {"out": out}):
        kit(x, dtype=dtype, **rest)
        count = len(kit.bound)
        kit(x, dtype=dtype, **rest), kit(x, dtype=dtype, **rest)
        assert len(kit.bound) == count


def test_addresses_that_only_a_check_can_judge_are_judged(machine: Emulated, kit: Kit) -> None:
    wide = floats(machine, 9)
    for start, good in ((0, True), (4, True), (2, True), (1, False), (2, True), (1, False), (6, True)):
        if good:
            kit(DeviceArray(wide.host[start : start + 2]))
            assert kit.runs[-1] == [wide.data.ptr + 4 * start]
        else:
            with pytest.raises(InputError, match="multiple of 8"):
                kit(DeviceArray(wide.host[start : start + 2]))
    nowhere = DeviceArray(wide.host[:2])
    nowhere.data.ptr = 0
    with pytest.raises(InputError, match="memory"):
        kit(nowhere)


def test_outputs_that_are_given_lie_apart_in_every_call(machine: Emulated, kit: Kit) -> None:
    """Byte ranges that meet send a call to its checks again, which know better."""
    x, out = floats(machine, 8), floats(machine, 8)
    kit(x, out=out), kit(x, out=out)
    count = kit.checked
    kit(x, out=out)
    assert kit.checked == count
    kit(x, out=DeviceArray(x.host))
    assert kit.checked == count + 1


def test_streams_and_outputs_share_what_is_bound(machine: Emulated, kit: Kit) -> None:
    x, out = floats(machine, 8), floats(machine, 8)
    for stream in (5, 6, 5):
        assert kit(x, out=out, stream=stream) is out
    assert kit.streams == [5, 6, 5] and len(kit.bound) == 1


def test_no_array_is_kept_alive(machine: Emulated, kit: Kit) -> None:
    x = DeviceArray(floats(machine, 4).host)
    gone = weakref.ref(x)
    kit(x), kit(x)
    del x
    gc.collect()
    assert calls.bound.calls and gone() is None


def test_threads_do_not_share_bound_calls(machine: Emulated, kit: Kit) -> None:
    x = floats(machine, 4)
    kit(x), kit(x)
    count = len(kit.bound)
    thread = threading.Thread(target=kit, args=(x,))
    thread.start()
    thread.join()
    assert len(kit.bound) == count + 1


def test_what_is_kept_is_bounded(machine: Emulated, kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_LIMIT", 4)
    for extent in range(1, 20):
        kit(floats(machine, extent))
        assert len(calls.bound.calls) <= 4


def test_other_frameworks_are_read_as_views(machine: Emulated, kit: Kit) -> None:
    x = floats(machine, 4)
    assert kit(x.host) == "cpu" and type(x.host) not in fast.frameworks
    with pytest.raises(InputError, match="kit"):
        kit(x, "y" * 3, out="out")


def launches_of(machine: Emulated, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What every launch from now on is given, in place of running it: geometry, tensor maps, parameter bytes."""
    seen: list[Any] = []

    def execute(kernel: Any, geometry: Geometry, parameters: list[bytes], maps: dict[int, Any]) -> None:
        plain = [bytes_ for number, bytes_ in enumerate(parameters) if number not in maps]
        seen.append((kernel.name, geometry, maps, plain))

    monkeypatch.setattr(machine, "execute", execute)
    return seen


NAMES = (
    *("sparse_mla_fwd", "attn_dist", "sparse_mla_bwd", "nvfp4_gemv", "xl_paged_attention"),
    *("indexer_logits", "topk"),
)


@pytest.mark.compile
@pytest.mark.parametrize("name", NAMES)
def test_an_operators_call_made_again_launches_what_one_bound_anew_does(
    name: str, machine: Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sets of arrays in turn and again, each with memory of its own for what the call allocates, and each with the
    other's."""
    subject = Subject(name)
    (case, *_) = cheapest(subject, 2)
    inputs = subject.cases.inputs(case, 0)
    seen = launches_of(machine, monkeypatch)
    call = getattr(cupymla, name)
    made: list[DeviceArray] = []

    def allocate(shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        made.append(machine.empty(shape, dtype))
        return made[-1]

    sets = []
    with monkeypatch.context() as patch:
        patch.setattr(machine._cupy, "ndarray", kind_of(allocate))
        call(**machine.arguments(inputs))
        for _ in range(2):
            del made[:]
            given = machine.arguments(inputs)
            call(**given)
            sets.append((given, list(made)))

    (one, its_memory), (other, others_memory) = sets
    turns = [*sets, sets[1], sets[0], sets[0], (one, others_memory), (other, others_memory), (other, its_memory)]

    def launched() -> list[Any]:
        """What calls on both sets launch, each twice and twice again."""
        del seen[:]
        with monkeypatch.context() as patch:
            for given, fresh in turns:
                memory = iter(fresh)
                patch.setattr(machine._cupy, "ndarray", kind_of(lambda shape, dtype, memory=memory: next(memory)))
                call(**given)
        return list(seen)

    with monkeypatch.context() as patch:
        patch.setattr(call.calls, "read", lambda **_: pytest.fail("checked again"))
        first = launched()
    with monkeypatch.context() as patch:
        patch.setattr(calls._Bound, "keep", lambda self, key, made: made)
        calls.bound.forget()
        assert launched() == first
    count = len(first) // len(turns)
    by_turn = [first[start : start + count] for start in range(0, len(first), count)]
    assert count and len(by_turn) == len(turns)
    assert by_turn[1] == by_turn[2] and by_turn[0] == by_turn[3] == by_turn[4]
    assert len({repr(launches) for launches in (by_turn[0], by_turn[1], by_turn[5], by_turn[7])}) == 4


@pytest.mark.compile
@pytest.mark.parametrize("way", ["short", "long"])
@pytest.mark.parametrize("name", NAMES)
def test_an_operators_call_within_a_call_takes_nothing_from_it(
    name: str, way: str, machine: Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the worst time: addresses of the outer call are set, and nothing of it has been launched."""
    subject = Subject(name)
    (case, *_) = cheapest(subject, 2)
    inputs = subject.cases.inputs(case, 0)
    seen = launches_of(machine, monkeypatch)
    call = getattr(cupymla, name)
    if way == "long":
        monkeypatch.setattr(Calls, "cached", lambda *_: None)
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
