"""Ordinary calls of xl_paged_attention that follow each other in one thread: what is remembered must fit the next call.

The kernel runs in the interpreter; compiles to PTX, needs no GPU.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from xl_kit import take_for_long

from cupymla import driver, launch, tensor
from cupymla.errors import InputError
from cupymla.ops.xl_paged_attention import cuda, plan, spec, xl_paged_attention
from cupymla.ops.xl_paged_attention.cases import inputs, make
from cupymla.ops.xl_paged_attention.reference import xl_paged_attention as reference
from cupymla.testing import compare
from cupymla_lab.emulated import DeviceArray, Emulated, emulated

pytestmark = pytest.mark.compile

SMALL: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_size": 32, "context_lens": (37, 5)}


@pytest.fixture
def machine() -> Iterator[Emulated]:
    with emulated("sm_90a", 2) as made:
        yield made


def require_each_right(machine: Emulated, calls: list[dict[str, Any]]) -> None:
    """Every call, one after the other in one thread, gives what the reference gives."""
    arguments = [machine.arguments(host) for host in calls]
    results = machine.call(lambda: [xl_paged_attention(**each, return_lse=True) for each in arguments])
    for host, (out, lse) in zip(calls, results, strict=True):
        same, exact = reference(**host, return_lse=True, precision="same"), reference(**host, return_lse=True)
        compare.require(
            [
                compare.compare(name, got.get(), near, right)
                for name, got, near, right in zip(("out", "lse"), (out, lse), same, exact, strict=True)
            ]
        )


def test_a_scale_is_that_of_its_own_call(machine: Emulated) -> None:
    """Numbers for k_scale and v_scale may change from call to call."""
    host = inputs(make("dtypes", **SMALL, dtype="float32", kv_dtype="float8_e4m3fn"), seed=1)
    host = {name: value for name, value in host.items() if name not in ("return_lse", "k_scale", "v_scale")}
    scales = ((0.5, 2.0), (0.125, 2.0), (0.5, 0.25))
    require_each_right(machine, [{**host, "k_scale": k, "v_scale": v} for k, v in scales])


def test_scales_in_memory_are_read_where_each_call_has_them(machine: Emulated) -> None:
    host = inputs(make("dtypes", **SMALL, dtype="float32", kv_dtype="float8_e4m3fn"), seed=1)
    host = {name: value for name, value in host.items() if name not in ("return_lse", "k_scale", "v_scale")}
    scales = ((0.5, 2.0), (0.125, 2.0), (0.5, 0.25), (0.125, 0.25))
    require_each_right(
        machine,
        [{**host, "k_scale": np.array([k], np.float32), "v_scale": np.array([v], np.float32)} for k, v in scales],
    )


def test_u_does_not_pass_for_v(machine: Emulated) -> None:
    """pos_bias_u and pos_bias_v have the same shape; a call with one is not a call with the other."""
    host = inputs(make("options", **SMALL, dtype="float32"), seed=2)
    host = {name: value for name, value in host.items() if name not in ("return_lse", "pos_bias_u", "pos_bias_v")}
    rng = np.random.default_rng(3)
    host["pos_emb"] = rng.standard_normal((9, 2, 32), dtype=np.float32)
    offset = rng.standard_normal((2, 32), dtype=np.float32)
    require_each_right(machine, [{**host, name: offset} for name in ("pos_bias_v", "pos_bias_u", "pos_bias_v")])


def test_a_repeated_call_reads_no_layout_and_lays_out_no_launch(
    machine: Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other arrays of the same layouts, other scales: what is remembered serves them all."""
    fields: dict[str, Any] = {
        **SMALL,
        "bias": "fused",
        "extent": 9,
        "offsets": True,
        "dtype": "float32",
        "kv_dtype": "float8_e4m3fn",
        "scales": "number",
    }
    hosts = [inputs(make("dtypes", **fields), seed=seed) for seed in range(3)]
    hosts = [{**host, "k_scale": 0.5 + k} for k, host in enumerate(hosts)]
    done: list[str] = []
    read, laid_out = spec.read, launch.Launcher.__init__

    def counted_read(*args: Any, **kwargs: Any) -> Any:
        done.append("read")
        return read(*args, **kwargs)

    def counted_init(self: launch.Launcher, *args: Any) -> None:
        done.append("laid out")
        laid_out(self, *args)

    monkeypatch.setattr(xl_paged_attention.calls, "read", counted_read)
    monkeypatch.setattr(launch.Launcher, "__init__", counted_init)
    require_each_right(machine, [{n: v for n, v in host.items() if n != "return_lse"} for host in hosts])
    assert sorted(done) == ["laid out", "laid out", "read"]


def test_a_remembered_layout_does_not_excuse_an_address(machine: Emulated) -> None:
    """Alignment and overlap are new questions in every call."""
    host = {**inputs(make("options", **SMALL, dtype="float32"), seed=7)}
    arguments = machine.arguments(host)
    room = np.zeros((2, 3, 2, 32), np.float32)
    whole = machine.array(room, writable=True)

    def part(number: int, shift: int = 0) -> DeviceArray:
        flat = whole.host.reshape(-1)
        rows = np.lib.stride_tricks.as_strided(flat[64 * number + shift :], (2, 2, 32), (768, 128, 4))
        return DeviceArray(rows)

    def calls() -> None:
        xl_paged_attention(**{**arguments, "query": part(0)}, out=part(2))
        xl_paged_attention(**{**arguments, "query": part(1)}, out=part(0))
        wrong = (part(1), part(1), "out"), (part(1), part(0, 1), "out"), (part(0, 3), part(1), "query")
        for query, out, argument in wrong:
            with pytest.raises(InputError) as caught:
                xl_paged_attention(**{**arguments, "query": query}, out=out)
            assert (caught.value.argument, caught.value.operator) == (argument, "xl_paged_attention")

    machine.call(calls)


# Merging ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_heads", "number"), [(8, 12), (8, 13), (8, 36), (8, 37), (9, 36)])
def test_any_number_of_parts_is_put_together(monkeypatch: pytest.MonkeyPatch, num_heads: int, number: int) -> None:
    """Up to 12, or 36 where each of 128 threads has one vector at most, at once; more in groups."""
    monkeypatch.setattr(plan, "ctas", lambda *facts: number)
    monkeypatch.setattr(plan, "_CLUSTER_GAIN", -1e9)
    fields: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": 1,
        "head_size": 64,
        "context_lens": (40 * 32 - 5,),
    }
    with emulated("sm_90a", 132) as wide:
        compare.require(wide.check("xl_paged_attention", make("options", **fields)))
        assert [geometry.grid[0] for geometry in wide.launches] == [number]


@pytest.mark.parametrize(
    ("context_lens", "large_only", "bias"),
    [
        ((700, 0, 333, 65), False, "dense"),
        ((2000, 1900), False, "relative"),
        ((70, 5), True, "dense"),
        ((650, 650, 630), False, "relative"),
        ((650,) * 3, True, "relative"),
    ],
)
def test_parts_may_be_large_and_small(
    monkeypatch: pytest.MonkeyPatch, context_lens: tuple[int, ...], large_only: bool, bias: str
) -> None:
    """As those of long work are. Where sequences are equally long the CTAs past the resident ones have nothing to do;
    where the work cannot be long there are none."""
    monkeypatch.setattr(plan, "_CLUSTER_GAIN", -1e9)
    take_for_long(monkeypatch)
    fields: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 4, "head_size": 64, "bias": bias, "extent": 100}
    shares = 6 * plan._LARGE_PART + 4
    tiles = [-(-length // 32) for length in context_lens]
    assert (4 * sum(tiles) < shares or len(set(tiles)) == 1) == large_only
    with emulated("sm_90a", 3) as small:
        compare.require(small.check("xl_paged_attention", make("options", **fields, context_lens=context_lens)))
        assert [geometry.grid[0] for geometry in small.launches] == [6 if 4 * sum(tiles) < shares else 10]


@pytest.mark.parametrize(
    "context_lens",
    [(70, 5), (0, 0), (70, 0, 5), (5,) * 40, (5,) * 33 + (300,), (33,) * 32 + (0,) * 3],
    ids=["two", "none", "three", "equal", "unequal past the 32nd", "empty past the 32nd"],
)
def test_short_sequences_in_wide_block_tables(monkeypatch: pytest.MonkeyPatch, context_lens: tuple[int, ...]) -> None:
    """The host has to think that there is much to do; the device sees that there is little, or all of one length."""
    monkeypatch.setattr(plan, "_CLUSTER_GAIN", -1e9)
    take_for_long(monkeypatch)
    fields: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 4, "head_size": 64, "bias": "dense"}
    case = make("options", **fields, context_lens=context_lens, max_blocks=70)
    with emulated("sm_90a", 3) as small:
        compare.require(small.check("xl_paged_attention", case))
        assert [geometry.grid[0] for geometry in small.launches] == [10]


# Limits of GPUs and of numbers --------------------------------------------------------------------------------------


def test_tables_that_name_more_keys_than_a_kernel_counts(machine: Emulated) -> None:
    """The kernel rounds a length up to a whole tile in 32 bits; nothing that it gets may be longer than that allows."""
    host = inputs(make("options", **SMALL, dtype="float32", block_size=256), seed=6)
    host["block_tables"] = np.zeros((2, 2**23), np.int32)
    prepared: Any = xl_paged_attention.prepare(**machine.arguments(host))
    assert 2**31 - 64 <= prepared._binding.launcher._parameters[0].capacity <= 2**31 - 1 - 31


@pytest.mark.parametrize("columns", [2, 200])
def test_a_fused_bias_takes_the_memory_that_the_readme_says(machine: Emulated, columns: int) -> None:
    """One fp32 number for each head and distance that there can be, beside the parts of the same call without it."""
    host = inputs(make("options", **SMALL, bias="fused", extent=100), seed=8)
    host["block_tables"] = np.zeros((2, columns), np.int32)
    plain = {name: value for name, value in host.items() if name not in ("pos_emb", "pos_bias_v")}
    calls: list[Any] = [xl_paged_attention.prepare(**machine.arguments(each)) for each in (host, plain)]
    assert calls[0]._binding.workspace_bytes - calls[1]._binding.workspace_bytes == 2 * 2 * min(100, columns * 16) * 4


def test_compute_capability_8_6_gets_a_kernel_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads code for sm_80, whose SMs have 164 KB of shared memory, and has 100 KB itself, 99 of them for a CTA."""
    fields: dict[str, Any] = {**SMALL, "head_size": 192, "dtype": "float16", "bias": "alibi"}
    with emulated("sm_80", 2) as small:
        with monkeypatch.context() as patch:
            patch.setattr(driver, "compute_capability", lambda index: (8, 6))
            compare.require(small.check("xl_paged_attention", make("options", **fields)))
        assert [geometry.smem_bytes <= 99 * 1024 for geometry in small.launches] == [True]


@pytest.mark.parametrize(("dtype", "preferred"), [("bfloat16", 1), ("float32", 0)])
def test_only_kernels_that_keep_tiles_in_shared_memory_take_it_from_l1(
    machine: Emulated, monkeypatch: pytest.MonkeyPatch, dtype: str, preferred: int
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(driver, "prefer_shared_memory", asked.append)
    xl_paged_attention.prepare(**machine.arguments(inputs(make("options", **SMALL, dtype=dtype), seed=8)))
    assert len(asked) == preferred


# Workspaces ---------------------------------------------------------------------------------------------------------


class Streams:
    """The driver's word on streams; what was zeroed and waited for, in order.

    Attributes:
        captures: id of the capture that a stream takes part in.
        ids: of streams that are not the first ones at their address.
    """

    def __init__(self, machine: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captures: dict[int, int] = {}
        self.ids: dict[int, int] = {}
        self.done: list[tuple[str, int]] = []
        self.zeroed: list[int] = []
        self._machine = machine
        monkeypatch.setattr(driver, "capture_id", self.captures.get)
        monkeypatch.setattr(driver, "stream_id", lambda stream: self.ids.get(stream, stream))
        monkeypatch.setattr(driver, "fill_zero", self._fill_zero)
        monkeypatch.setattr(driver, "wait", lambda stream: self.done.append(("wait", stream)))

    def _fill_zero(self, device: int, size_bytes: int, stream: int) -> None:
        self._machine.fill_zero(device, size_bytes, stream)
        self.done.append(("zero", stream))
        self.zeroed.append(device)


@pytest.fixture
def streams(machine: Emulated, monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(machine, monkeypatch)


def plain_call(machine: Emulated) -> dict[str, Any]:
    return machine.arguments(inputs(make("options", **SMALL, dtype="float32"), seed=5))


def test_calls_of_one_capture_share_a_workspace_for_each_stream(machine: Emulated, streams: Streams) -> None:
    """A captured workspace is kept for good, so there must not be one for each call."""
    arguments = plain_call(machine)

    def calls() -> None:
        for capture in (7, 8):
            streams.captures.update({0x50: capture, 0x60: capture})
            for stream in (0x50, 0x60, 0x50, 0x60):
                xl_paged_attention(**arguments, stream=stream)

    machine.call(calls)
    assert streams.done == [("zero", 0x50), ("zero", 0x60)] * 2
    assert len(set(streams.zeroed)) == 4, "graphs may run at the same time, as may a graph's streams"


def test_many_captures_leave_the_workspaces_of_streams_alone(machine: Emulated, streams: Streams) -> None:
    """No capture comes again: what a thread remembers of ended ones is bounded, and costs no stream its workspace."""
    arguments = plain_call(machine)
    captures = 2 * cuda._MOST_WORKSPACES
    remembered_captures = []

    def calls() -> None:
        xl_paged_attention(**arguments, stream=0x60)
        for capture in range(captures):
            streams.captures[0x50] = capture
            xl_paged_attention(**arguments, stream=0x50)
            remembered_captures.append(len(cuda._workspaces.of_captures))
        xl_paged_attention(**arguments, stream=0x60)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda.Binding, "launch", lambda self, stream: None)
        machine.call(calls)
    assert [stream for _, stream in streams.done] == [0x60, *[0x50] * captures]
    assert max(remembered_captures) <= cuda._MOST_WORKSPACES


@pytest.mark.parametrize("captured", [False, True])
def test_a_captured_workspace_outlives_its_thread(
    machine: Emulated, streams: Streams, monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    """The graph may be launched when the thread that captured it is gone, and what it remembered with it."""
    made: list[weakref.ref[cuda.Workspace]] = []

    class Followed(cuda.Workspace):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(weakref.ref(self))

    monkeypatch.setattr(cuda, "Workspace", Followed)
    if captured:
        streams.captures[0x50] = 7
    arguments = plain_call(machine)
    machine.call(lambda: xl_paged_attention(**arguments, stream=0x50))
    gc.collect()
    assert [workspace() is not None for workspace in made] == [captured]


def test_calls_on_the_current_stream_have_its_workspace(
    machine: Emulated, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that comes again is as new to another stream, or to a capture, as the first."""
    arguments = plain_call(machine)
    current = [0x50]
    monkeypatch.setattr(tensor, "current_stream", lambda like: current[0])
    monkeypatch.setattr(tensor.streams, "cupy_stream", lambda index: current[0])
    tensor.view(arguments["query"], "query")
    tensor.fast.remember(arguments["query"])

    def calls() -> None:
        for current[0] in (0x50, 0x60, 0x50):
            xl_paged_attention(**arguments)
        streams.captures[0x50] = 7
        for _ in range(2):
            xl_paged_attention(**arguments)

    with monkeypatch.context() as patch:
        patch.setattr(xl_paged_attention.calls, "_once", lambda *_: pytest.fail("not the fast path"))
        machine.call(calls)
    assert streams.done == [("zero", 0x50), ("zero", 0x60), ("zero", 0x50)]
    assert len(set(streams.zeroed)) == 3


def test_a_new_stream_at_an_old_address_gets_a_workspace_of_its_own(machine: Emulated, streams: Streams) -> None:
    arguments = plain_call(machine)

    def calls() -> None:
        for number in (1, 1, 2, 2):
            streams.ids[0x50] = number
            xl_paged_attention(**arguments, stream=0x50)

    machine.call(calls)
    assert streams.done == [("zero", 0x50)] * 2
    assert len(set(streams.zeroed)) == 2, "the new one is made before the old one is given back"


def test_a_prepared_call_waits_for_its_zeros(machine: Emulated, streams: Streams) -> None:
    """Its first run may be on another stream, which nothing orders behind the one it was prepared on."""
    prepared = xl_paged_attention.prepare(**plain_call(machine), stream=0x50)
    assert streams.done == [("zero", 0x50), ("wait", 0x50)]
    prepared(stream=0x60)
    assert len(streams.done) == 2


def test_a_call_that_is_prepared_in_a_capture_does_not_wait(machine: Emulated, streams: Streams) -> None:
    """Waiting for a stream that is being captured ends the capture."""
    streams.captures[0x50] = 7
    xl_paged_attention.prepare(**plain_call(machine), stream=0x50)
    assert streams.done == [("zero", 0x50)]
