"""What runs on a GPU, without one: the XLA handler on frames made by hand, runners on a fake driver."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator
from typing import Any

import fake_driver
import numpy as np
import pytest

import cupymla
from cupymla import InputError, UnsupportedError
from cupymla import device as devices
from cupymla.interop import bindings, call
from cupymla.interop.call import Call, Runner, Runners
from cupymla.interop.declaration import Facts
from cupymla.interop.table import declared

pytest.importorskip("jax")

from cupymla.interop.jax import handler

POINTER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
STREAM, ORDINAL = 0x5000, 1


class Xla:
    """XLA's side: its table of functions, and frames."""

    def __init__(self) -> None:
        self.errors: list[tuple[int, str]] = []
        self._functions = [POINTER(lambda request: 0) for _ in range(18)]
        self._functions[0] = POINTER(self._error_create)
        self._functions[4] = POINTER(self._stream_get)
        self._functions[17] = POINTER(self._ordinal_get)
        self.table = (ctypes.c_uint64 * 24)()
        self.table[0] = ctypes.sizeof(self.table)
        for place, function in enumerate(self._functions):
            self.table[6 + place] = ctypes.cast(function, ctypes.c_void_p).value or 0
        self._kept: list[Any] = []

    def _error_create(self, request: int) -> int:
        made = handler._ErrorCreate.from_address(request)
        self.errors.append((made.code, made.message.decode()))
        return 0xE

    def _stream_get(self, request: int) -> int:
        handler._StreamGet.from_address(request).stream = STREAM
        return 0

    def _ordinal_get(self, request: int) -> int:
        handler._OrdinalGet.from_address(request).ordinal = ORDINAL
        return 0

    def _array(self, values: list[int]) -> int:
        made = (ctypes.c_uint64 * max(len(values), 1))(*values)
        self._kept.append(made)
        return ctypes.addressof(made)

    def _buffer(self, address: int, shape: tuple[int, ...]) -> int:
        return self._array([48, 0, 11, address, len(shape), self._array(list(shape))])

    def frame(self, text: str, arrays: list[Any], results: list[Any], stage: int = 3, extension: int = 0) -> int:
        """A call frame; arrays and results are (address, shape)."""
        raw = ctypes.create_string_buffer(text.encode(), len(text))
        self._kept.append(raw)
        span = self._array([ctypes.addressof(raw), len(text)])
        lists = []
        for buffers in (arrays, results):
            items = self._array([self._buffer(*buffer) for buffer in buffers])
            lists += [40, 0, len(buffers), 0, items]
        attributes = [48, 0, 1, 0, 0, self._array([span])]
        return self._array([176, extension, ctypes.addressof(self.table), 0xC, stage, *lists, *attributes, 0])


def entered(on_gpu: bool, frame: int) -> int | None:
    made = handler.Handler(on_gpu)
    error: int | None = POINTER(made.address)(frame)
    return error


@pytest.fixture
def xla() -> Iterator[Xla]:
    """XLA's own table stays where it is for good; ours come and go, perhaps at one address."""
    handler._api.cache_clear()
    yield Xla()
    handler._api.cache_clear()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What reaches the runners."""
    seen: list[Any] = []

    def run(key: Any, make: Callable[[], Runner], addresses: Any, stream: int) -> None:
        seen.append((key, list(addresses), stream))

    monkeypatch.setattr(handler._runners, "run", run)
    return seen


def shift(shape: tuple[Any, ...] = (2, 3)) -> Call:
    return Call.of(declared("rel_shift"), {"x": Facts(shape, "float32")}, {})


@pytest.mark.parametrize(
    ("on_gpu", "replayable", "traits"),
    [(False, True, 0), (True, False, 0), (True, True, handler.COMMAND_BUFFER_COMPATIBLE)],
)
def test_metadata_is_answered(xla: Xla, ran: list[Any], on_gpu: bool, replayable: bool, traits: int) -> None:
    """XLA asks for version and traits before anything else; nothing runs."""
    metadata = handler._Metadata()
    extension = handler._Extension(32, 1, None, ctypes.addressof(metadata))
    made = handler.Handler(on_gpu, replayable)
    assert POINTER(made.address)(xla.frame("", [], [], 0, ctypes.addressof(extension))) is None
    assert (metadata.version.major, metadata.version.minor) == handler.API_VERSION
    assert metadata.traits == traits and ran == []


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_only_the_execution_runs(xla: Xla, ran: list[Any], stage: int) -> None:
    assert entered(True, xla.frame(shift().text(), [(16, (2, 3))], [(32, (2, 3))], stage)) is None
    assert ran == [] and xla.errors == []


@pytest.mark.parametrize("on_gpu", [False, True])
def test_addresses_stream_and_device_arrive(xla: Xla, ran: list[Any], on_gpu: bool) -> None:
    text = shift().text()
    assert entered(on_gpu, xla.frame(text, [(16, (2, 3))], [(32, (2, 3))])) is None
    ((key, addresses, stream),) = ran
    assert key == (text.encode(), ORDINAL if on_gpu else -1)
    assert addresses == [16, 32] and stream == (STREAM if on_gpu else 0)


def test_a_version_without_devices_is_told_so(xla: Xla, ran: list[Any]) -> None:
    """The answer to XLA needs one function only; without an answer XLA takes unwritten results for good ones."""
    xla.table[0] = 8 * (6 + 17)
    assert entered(True, xla.frame(shift().text(), [(16, (2, 3))], [(32, (2, 3))])) == 0xE
    ((code, text),) = xla.errors
    assert code == handler._UNIMPLEMENTED and "jax 0.10" in text and ran == []


def test_open_shapes_are_read_from_the_buffers(xla: Xla, ran: list[Any]) -> None:
    """Two runs of one program with other extents are two calls."""
    text = json.dumps({**json.loads(shift().text()), "arrays": [["x", "float32", None]]})
    for shape in ((2, 3), (4, 5)):
        entered(True, xla.frame(text, [(16, shape)], [(32, shape)]))
    assert [key[2].arrays[0][1].shape for key, _, _ in ran] == [(2, 3), (4, 5)]


@pytest.mark.parametrize(
    ("failure", "code", "words"),
    [
        (InputError("q", "this", "that", "op"), 3, "cupymla: op: argument 'q': expected this, got that"),
        (UnsupportedError("op", "cuda:0", "more"), 12, "cupymla: op is not supported on cuda:0; supported: more"),
        (KeyError("lost"), 13, "in fail\n"),
        (KeyboardInterrupt(), 13, "KeyboardInterrupt"),
    ],
)
def test_exceptions_become_statuses(
    xla: Xla, monkeypatch: pytest.MonkeyPatch, failure: BaseException, code: int, words: str
) -> None:
    """Nothing may propagate into XLA's stack."""

    def fail(*_: Any) -> None:
        raise failure

    monkeypatch.setattr(handler._runners, "run", fail)
    assert entered(True, xla.frame(shift().text(), [(16, (2, 3))], [(32, (2, 3))])) == 0xE
    ((got, text),) = xla.errors
    assert got == code and words in text


def test_other_versions_are_refused_in_words(xla: Xla) -> None:
    other = json.dumps({**json.loads(shift().text()), "version": 99})
    assert entered(False, xla.frame(other, [(16, (2, 3))], [(32, (2, 3))])) == 0xE
    assert "another version of cupymla" in xla.errors[0][1]


# Runners -------------------------------------------------------------------------------------------------------------


class Recorded:
    """Stands for a public function and for its binding."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.bound: list[Any] = []

    def __call__(self, **arguments: Any) -> None:
        self.calls.append({name: getattr(value, "ptr", value) for name, value in arguments.items()})

    def bind(self, arguments: Any, options: Any, overlaps: bool) -> Callable[[int], None]:
        self.bound.append((dict(options), overlaps))
        return lambda stream: self.calls.append((stream, {name: view.ptr for name, view in arguments.items()}))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_driver.FakeDriver]:
    with fake_driver.installed(monkeypatch) as fake:
        yield fake


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    made = Recorded()
    monkeypatch.setattr(type(declared("rel_shift")), "function", lambda self: made)
    monkeypatch.setattr(cupymla, "rel_shift", made, raising=False)
    return made


def test_without_a_binding_the_public_function_is_called(driver: fake_driver.FakeDriver, recorded: Recorded) -> None:
    """On the stream that the framework names, in the context of the device that it names."""
    runner = Runner.of(shift(), devices.cuda(1))
    runner((16, 32), 0x77)
    runner((48, 64), 0x78)
    assert recorded.calls == [{"x": 16, "out": 32, "stream": 0x77}, {"x": 48, "out": 64, "stream": 0x78}]
    assert [name for name, *_ in driver.calls if name.startswith("cuCtxP")] == [
        "cuCtxPushCurrent",
        "cuCtxPopCurrent",
    ] * 2


def test_binding_is_made_once_and_follows_the_addresses(
    driver: fake_driver.FakeDriver, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA may record what it runs: kernels of a call do not overlap there."""
    monkeypatch.setattr(bindings, "BINDINGS", {"rel_shift": recorded.bind})
    runner = Runner.of(shift(), devices.cuda(0))
    runner((16, 32), 1)
    runner((48, 64), 2)
    assert recorded.bound == [({}, False)]
    assert recorded.calls == [(1, {"x": 16, "out": 32}), (2, {"x": 48, "out": 64})]


def test_an_operator_with_a_kernel_passes_its_door_once(
    driver: fake_driver.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What serves an operator that is only declared: its own call, behind a door that was passed when it was bound."""
    from cupymla.ops.attn_dist import cuda, spec

    doors, calls = [], []
    read = spec.read

    def counted(**arguments: Any) -> Any:
        doors.append(arguments)
        return read(**arguments)

    def recorded_call(views: Any, problem: Any, stream: int) -> None:
        calls.append((views.q.ptr, views.dist.ptr, problem.topk, stream))

    monkeypatch.setattr(bindings, "BINDINGS", {})
    monkeypatch.setattr(spec, "read", counted)
    monkeypatch.setattr(cuda, "call", recorded_call)
    arrays = {"q": Facts((2, 4, 576), "bfloat16"), "kv": Facts((5, 576), "bfloat16"), "indices": Facts((2, 3), "int32")}
    arrays["lse"] = Facts((2, 4), "float32")
    options = {name: p.default for name, p in declared("attn_dist").options.items()}
    runner = Runner.of(Call.of(declared("attn_dist"), arrays, options), devices.cuda(0))
    runner([n << 20 for n in range(1, 6)], 7)
    runner([n << 21 for n in range(1, 6)], 8)
    assert len(doors) == 1
    assert calls == [(1 << 20, 5 << 20, 3, 7), (1 << 21, 5 << 21, 3, 8)]


def test_odd_addresses_go_through_the_door(
    driver: fake_driver.FakeDriver, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A binding checks no address; one that is no multiple of 16 is for the operator to judge."""
    monkeypatch.setattr(bindings, "BINDINGS", {"rel_shift": recorded.bind})
    Runner.of(shift(), devices.cuda(0))((16, 36), 5)
    assert recorded.bound == [] and recorded.calls == [{"x": 16, "out": 36, "stream": 5}]


def test_runners_are_not_shared_while_they_run() -> None:
    made = []

    class Nested:
        def __init__(self, depth: int) -> None:
            self.depth = depth
            made.append(self)

        def __call__(self, addresses: Any, stream: int) -> None:
            if addresses:
                runners.run("key", lambda: Nested(1), (), 0)  # type: ignore[arg-type, return-value]

    runners = Runners()
    runners.run("key", lambda: Nested(0), (1,), 0)  # type: ignore[arg-type, return-value]
    assert len(made) == 2
    runners.run("key", lambda: Nested(2), (1,), 0)  # type: ignore[arg-type, return-value]
    assert len(made) == 2


def test_text_holds_the_whole_call() -> None:
    given = {"q": Facts((2, 4, 576), "bfloat16"), "kv": Facts((5, 576), "bfloat16"), "indices": Facts((2, 3), "int32")}
    given["lse"] = Facts((2, 4), "float32")
    options = {name: p.default for name, p in declared("attn_dist").options.items()}
    made = Call.of(declared("attn_dist"), given, {**options, "sm_scale": float("inf"), "lse_base": "2"})
    assert call.parsed(made.text()) == made
    assert made.is_static and not call.lacks_shapes(made.text())


def test_options_become_plain_or_are_refused() -> None:
    import ml_dtypes

    assert call.plain("f", "x", np.float32(0.5)) == 0.5
    for flag in (True, np.True_):
        assert call.plain("f", "x", flag) is True
    for whole in (2, np.int64(2), np.array(2)):
        assert call.plain("f", "x", whole) == 2 and type(call.plain("f", "x", whole)) is int
    assert call.plain("f", "x", np.dtype(ml_dtypes.bfloat16)) == "bfloat16"
    assert call.plain("f", "x", np.float16) == "float16"
    with pytest.raises(InputError, match="f: argument 'x': expected a plain value"):
        call.plain("f", "x", object())
