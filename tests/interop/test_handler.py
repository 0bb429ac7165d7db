"""What runs on a GPU, without one: the XLA handler on frames made by hand, runners on a fake driver."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator
from typing import Any

import fake_driver
import numpy as np
import pytest

import cupymla.driver
from cupymla import InputError, UnsupportedError
from cupymla import device as devices
from cupymla.interop import call
from cupymla.interop.call import Call
from cupymla.interop.declaration import Facts
from cupymla.interop.table import declared
from cupymla.ops import calls
from cupymla.ops.calls import Calls

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
    """What the handler has run."""
    seen: list[Any] = []

    def run(key: Any, call: Call, device: Any, addresses: Any, stream: int) -> None:
        seen.append((key, list(addresses), stream))

    monkeypatch.setattr(handler, "run", run)
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
    assert [key[2][0] for key, _, _ in ran] == [(2, 3), (4, 5)]


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

    monkeypatch.setattr(handler, "run", fail)
    assert entered(True, xla.frame(shift().text(), [(16, (2, 3))], [(32, (2, 3))])) == 0xE
    ((got, text),) = xla.errors
    assert got == code and words in text


def test_other_versions_are_refused_in_words(xla: Xla) -> None:
    other = json.dumps({**json.loads(shift().text()), "version": 99})
    assert entered(False, xla.frame(other, [(16, (2, 3))], [(32, (2, 3))])) == 0xE
    assert "another version of cupymla" in xla.errors[0][1]


# Running -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_driver.FakeDriver]:
    calls.bound.forget()
    with fake_driver.installed(monkeypatch) as fake:
        yield fake
    calls.bound.forget()


class Launched:
    """The launches of rel_shift's bindings: addresses and streams; and with what they were bound."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.launches: list[tuple[int, int, int]] = []
        self.recorded: list[bool] = []
        self.within: Callable[[], None] | None = None

    def bind(self, views: Any, problem: Any, results: Any, recorded: bool) -> Any:
        self.recorded.append(recorded)
        launched = self

        class Binding:
            launcher, workspace_bytes, at = None, 0, (0, 0)

            def point(self, views: Any, results: Any, workspace: int) -> None:
                self.at = (views.x.ptr, *results)

            def launch(self, stream: int) -> None:
                within, launched.within = launched.within, None
                if within is not None:
                    within()
                launched.launches.append((*self.at, stream))

        return Binding()


@pytest.fixture
def launched(driver: fake_driver.FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Launched:
    made = Launched(declared("rel_shift").calls())
    monkeypatch.setattr(made.calls, "bind", made.bind)
    return made


def run(addresses: tuple[int, ...], stream: int, device: int = 0) -> None:
    call.run("key", shift(), devices.cuda(device), list(addresses), stream)


def test_what_is_bound_runs_again_where_its_device_is_current(
    driver: fake_driver.FakeDriver, launched: Launched
) -> None:
    def again(*addresses: int) -> bool:
        return call.run_bound("key", 0, list(addresses), 3)

    with cupymla.driver.on_device(0):
        assert not again(0x100, 0x200)
        run((0x100, 0x200), 1)
        assert again(0x100, 0x200) and again(0x300, 0x400) and not again(0x300, 0x404)
        assert [at[:2] for at in launched.launches] == [(0x100, 0x200), (0x100, 0x200), (0x300, 0x400)]
        launched.within = lambda: run((0x500, 0x600), 2) if not again(0x500, 0x600) else None
        assert again(0x700, 0x800) and launched.launches[3:] == [(0x500, 0x600, 2), (0x700, 0x800, 3)]
    assert not again(0x100, 0x200)


def test_a_call_is_bound_once_and_follows_the_addresses(driver: fake_driver.FakeDriver, launched: Launched) -> None:
    """XLA may record what it runs: kernels of a call do not overlap there, and work in no other memory."""
    run((0x100, 0x200), 1)
    run((0x300, 0x400), 2)
    assert launched.recorded == [True]
    assert launched.launches == [(0x100, 0x200, 1), (0x300, 0x400, 2)]


def test_a_call_runs_in_the_context_of_its_device(driver: fake_driver.FakeDriver, launched: Launched) -> None:
    run((0x100, 0x200), 0x77, device=1)
    run((0x300, 0x400), 0x78, device=1)
    assert [stream for *_, stream in launched.launches] == [0x77, 0x78]
    pushed = [name for name, *_ in driver.calls if name.startswith("cuCtxP")]
    assert pushed == ["cuCtxPushCurrent", "cuCtxPopCurrent"] * 2


def test_a_call_within_a_call_takes_nothing_from_it(driver: fake_driver.FakeDriver, launched: Launched) -> None:
    run((0x100, 0x200), 1)
    launched.within = lambda: run((0x500, 0x600), 2)
    run((0x300, 0x400), 3)
    assert launched.launches[1:] == [(0x500, 0x600, 2), (0x300, 0x400, 3)] and len(launched.recorded) == 2


def test_odd_addresses_are_the_public_functions(
    driver: fake_driver.FakeDriver, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is bound checks no address; one that is no multiple of 16 is for the operator to judge."""
    seen: list[Any] = []

    def function(**arguments: Any) -> None:
        seen.append({name: getattr(value, "ptr", value) for name, value in arguments.items()})

    monkeypatch.setattr(type(declared("rel_shift")), "function", lambda self: function)
    run((16, 36), 5)
    assert launched.recorded == [] and seen == [{"x": 16, "out": 36, "stream": 5}]


def test_text_holds_the_whole_call() -> None:
    given = {"q": Facts((2, 4, 576), "bfloat16"), "kv": Facts((5, 576), "bfloat16"), "indices": Facts((2, 3), "int32")}
    given["lse"] = Facts((2, 4), "float32")
    options = {name: p.default for name, p in declared("attn_dist").options.items()}
    made = Call.of(declared("attn_dist"), given, {**options, "sm_scale": float("inf"), "lse_base": "2"})
    assert call.parsed(made.text()) == made
    assert call.parsed(made.text()).is_static


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
