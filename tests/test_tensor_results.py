"""Arrays, outwards: results come back as the caller's own kind, in the order of the right streams."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from fake_arrays import CUDA0, CUDA1, Foreign, Interface, view_at
from fake_driver import FakeDriver, installed

from cupymla import dlpack, tensor
from cupymla.errors import InputError
from cupymla.tensor import make, streams
from cupymla.tensor.make import Handover
from cupymla.tensor.types import NUMPY_DTYPES


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    with installed(monkeypatch) as made:
        yield made


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> fake_cupy.FakeCupy:
    return fake_cupy.install(monkeypatch)


# Results


FRAMEWORKS = ["numpy", "torch", "jax"]


def array_in(framework: str) -> Any:
    module = pytest.importorskip(framework if framework != "jax" else "jax.numpy")
    return module.zeros((2, 3))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "bool"])
def test_results_come_back_in_the_caller_s_framework(framework: str, dtype: str) -> None:
    like = tensor.view(array_in(framework), "q")
    allocation = tensor.allocate(like, (2, 5), dtype)
    assert (allocation.view.shape, allocation.view.dtype, allocation.view.readonly) == ((2, 5), dtype, False)
    values = np.arange(10).reshape(2, 5).astype(NUMPY_DTYPES[dtype])
    tensor.to_numpy(allocation.view)[...] = values
    result = allocation.finish()
    assert type(result) is type(like.owner)
    seen = tensor.view(result, "result")
    assert seen.dtype == dtype
    np.testing.assert_array_equal(tensor.to_numpy(seen), values)


@pytest.mark.parametrize(("framework", "dtype"), [("numpy", "uint8"), ("torch", "float4_e2m1fn_x2"), ("jax", "uint8")])
def test_packed_fp4_results(framework: str, dtype: str) -> None:
    like = tensor.view(array_in(framework), "q")
    allocation = tensor.allocate(like, (4,), "float4_e2m1fn_x2")
    tensor.to_numpy(allocation.view)[...] = [1, 2, 3, 255]
    seen = tensor.view(allocation.finish(), "result")
    assert seen.dtype == dtype
    np.testing.assert_array_equal(tensor.to_numpy(seen), [1, 2, 3, 255])


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)[::-1, ::-1],
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.zeros((0, 3), ml_dtypes.float8_e5m2),
        np.array(2.5, np.float32),
        np.float32(2.5),
    ],
    ids=["negative strides", "transposed", "empty", "scalar array", "scalar"],
)
def test_any_numpy_result_is_handed_back(framework: str, array: Any) -> None:
    like = tensor.view(array_in(framework), "q")
    seen = tensor.view(tensor.from_numpy(array, like), "result")
    assert seen.framework == framework
    np.testing.assert_array_equal(tensor.to_numpy(seen), array)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_bytes_are_handed_back_as_what_they_hold(framework: str) -> None:
    array = np.array([0x38, 0x40, 0xB8], np.uint8)
    seen = tensor.view(tensor.from_numpy(array, tensor.view(array_in(framework), "q"), "float8_e4m3fn"), "result")
    assert seen.dtype == "float8_e4m3fn"
    np.testing.assert_array_equal(tensor.to_numpy(seen).astype(np.float32), [1, 2, -1])


def test_torch_result_shares_numpy_memory() -> None:
    array = np.zeros((2, 3), ml_dtypes.bfloat16)
    result = tensor.from_numpy(array, tensor.view(array_in("torch"), "q"))
    result[1, 2] = 3
    assert array[1, 2] == 3


def test_unknown_framework_gets_its_own_arrays_through_its_namespace() -> None:
    class Space:
        @staticmethod
        def from_dlpack(producer: Any) -> tuple[str, np.ndarray]:
            return "theirs", np.from_dlpack(producer)

    class Theirs(Foreign):
        def __array_namespace__(self) -> type[Space]:
            return Space

    like = tensor.view(Theirs(dlpack.CPU, 0), "q")
    name, array = tensor.from_numpy(np.arange(6.0).reshape(2, 3).T, like)
    assert name == "theirs"
    np.testing.assert_array_equal(array, np.arange(6.0).reshape(2, 3).T)
    plain = tensor.from_numpy(np.ones(2), tensor.view(Foreign(dlpack.CPU, 0), "q"))
    assert isinstance(plain, np.ndarray)


def test_cuda_views_are_not_numpy() -> None:
    with pytest.raises(ValueError, match="cuda:0"):
        tensor.to_numpy(view_at(1000, (4,), (1,)))
    with pytest.raises(ValueError, match="cuda:0"):
        tensor.from_numpy(np.zeros(1), view_at(1000, (4,), (1,)))


@pytest.mark.parametrize(
    ("dtype", "carrier"), [("bfloat16", "bfloat16"), ("float8_e4m3fn", "uint8"), ("float4_e2m1fn_x2", "uint8")]
)
def test_cupy_results_come_from_its_pool_on_the_array_s_device(
    cupy: fake_cupy.FakeCupy, dtype: str, carrier: str
) -> None:
    like = tensor.view(fake_cupy.ndarray(np.zeros(3), device=1), "q")
    cupy.streams.append(55)
    allocation = tensor.allocate(like, (2, 5), dtype)
    array = allocation.finish()
    assert cupy.made == [(1, 55, (2, 5), NUMPY_DTYPES[carrier])]
    assert (allocation.view.ptr, allocation.view.dtype, allocation.view.device) == (array.data.ptr, dtype, CUDA1)
    assert cupy.devices == [0]


@pytest.mark.parametrize(("asked", "pool"), [(99, 99), (1, 0), (0, 0)])
def test_cupy_memory_comes_from_the_pool_of_the_stream_that_writes_it(
    cupy: fake_cupy.FakeCupy, asked: int, pool: int
) -> None:
    like = tensor.view(fake_cupy.ndarray(np.zeros(3)), "q")
    cupy.streams.append(55)
    tensor.allocate(like, (2,), "float32", stream=asked)
    assert cupy.made[0][:2] == (0, pool)
    assert cupy.streams == [0, 55]


WANTED: list[tuple[tuple[int, ...], str]] = [((3, 5), "bfloat16"), ((7,), "float32"), ((600,), "uint8")]


def test_small_cupy_arrays_of_a_call_share_an_allocation(cupy: fake_cupy.FakeCupy) -> None:
    cupy.devices.append(1)
    cupy.streams.append(55)
    arrays, pointers = tensor.cupy_arrays(WANTED)
    assert cupy.allocated == [(1, 55, 512 + 512 + 1024)] and cupy.made == []
    assert [(array.shape, array.dtype) for array in arrays] == [(shape, NUMPY_DTYPES[dtype]) for shape, dtype in WANTED]
    # Each where it is said to lie, whatever was made behind it.
    assert [array.data.ptr for array in arrays] == pointers == [array.host.ctypes.data for array in arrays]
    assert [pointer % 512 for pointer in pointers] == [0, 0, 0]
    assert {array.data.device_id for array in arrays} == {1}
    for number, array in enumerate(arrays):
        array.host[...] = number
    for number, array in enumerate(arrays):
        assert (array.host == number).all(), "arrays overlap"


@pytest.mark.parametrize(("spare", "together"), [(0, True), (-1, False)])
def test_large_cupy_arrays_have_an_allocation_each(
    cupy: fake_cupy.FakeCupy, spare: int, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make, "TOGETHER_BYTES", 512 + 512 + 1024 + spare)
    arrays, pointers = tensor.cupy_arrays(WANTED)
    assert len(cupy.allocated) == together
    assert [shape for _, _, shape, _ in cupy.made] == ([] if together else [shape for shape, _ in WANTED])
    assert [array.data.ptr for array in arrays] == pointers
    assert [array.shape for array in arrays] == [shape for shape, _ in WANTED]


def test_what_is_shared_is_a_megabyte_at_most(cupy: fake_cupy.FakeCupy) -> None:
    half = ((1 << 19,), "uint8")
    tensor.cupy_arrays([half, half])
    tensor.cupy_arrays([half, half, ((1,), "float32")])
    assert cupy.allocated == [(0, 0, 1 << 20)] and len(cupy.made) == 3


@pytest.mark.parametrize("wanted", [WANTED[:1], [((0, 4), "float32"), ((0,), "bfloat16")]], ids=["one", "empty"])
def test_there_is_nothing_to_share(cupy: fake_cupy.FakeCupy, wanted: list[tuple[tuple[int, ...], str]]) -> None:
    arrays, pointers = tensor.cupy_arrays(wanted)
    assert cupy.allocated == [] and len(cupy.made) == len(wanted)
    assert [array.data.ptr for array in arrays] == pointers


def test_an_empty_cupy_array_beside_others_takes_no_memory(cupy: fake_cupy.FakeCupy) -> None:
    arrays, pointers = tensor.cupy_arrays([((0, 4), "float32"), ((), "float32"), ((2, 0), "float8_e4m3fn")])
    assert cupy.allocated == [(0, 0, 512)]
    assert [array.shape for array in arrays] == [(0, 4), (), (2, 0)]
    assert arrays[2].dtype == np.uint8
    assert [pointer - pointers[0] for pointer in pointers] == [0, 0, 512]
    arrays[1].host[...] = 3
    assert arrays[1].host == 3


# Streams


class CudaStream:
    def __init__(self, protocol: Any) -> None:
        self.protocol = protocol

    def __cuda_stream__(self) -> Any:
        return self.protocol


class WithAttributes:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


@pytest.mark.parametrize(
    ("stream", "address"),
    [
        (0, 0),
        (2**64 - 1, 2**64 - 1),
        (None, 0),
        (CudaStream((0, 0x55)), 0x55),
        (WithAttributes(__cuda_stream__=(0, 0x56)), 0x56),
        (WithAttributes(ptr=0x57), 0x57),
        (WithAttributes(cuda_stream=0x58), 0x58),
    ],
)
def test_stream_addresses(stream: Any, address: int) -> None:
    assert tensor.stream_pointer(stream) == address


@pytest.mark.parametrize(
    "stream",
    [
        -1,
        2**64,
        True,
        1.0,
        "0",
        pytest.param(10**5000, id="huge"),
        object(),
        CudaStream((1, 5)),
        CudaStream(5),
        CudaStream((0, -5)),
        WithAttributes(ptr=None),
    ],
)
def test_what_is_no_stream_is_refused(stream: Any) -> None:
    with pytest.raises(InputError) as caught:
        tensor.stream_pointer(stream)
    assert caught.value.argument == "stream"


def test_current_streams(cupy: fake_cupy.FakeCupy, fake: FakeDriver) -> None:
    cupy.streams.append(55)
    assert tensor.current_stream(tensor.view(fake_cupy.ndarray(np.zeros(3)), "q")) == 55
    assert tensor.current_stream(tensor.view(np.zeros(3), "q")) == 0
    assert tensor.current_stream(tensor.view(Foreign(), "q")) == 1
    assert tensor.current_stream(tensor.view(Interface(stream=2), "q")) == 2
    assert tensor.current_stream(tensor.view(Interface(stream=None), "q")) == 1


def waits(fake: FakeDriver) -> set[tuple[int, int]]:
    """Pairs (stream behind which is waited, stream that waits)."""
    recorded = dict(fake.named("cuEventRecord"))
    return {(recorded[event], stream) for stream, event in fake.named("cuStreamWaitEvent")}


def test_one_framework_launches_on_its_current_stream(cupy: fake_cupy.FakeCupy, fake: FakeDriver) -> None:
    cupy.streams.append(55)
    views = [tensor.view(fake_cupy.ndarray(np.zeros(3)), "q") for _ in range(3)]
    assert tensor.launch_stream(views) == 55
    assert tensor.launch_stream(views, WithAttributes(ptr=66)) == 66
    assert fake.calls == [], "no event, no context: the caller vouches for the stream that it names"


def test_unknown_producers_launch_where_they_are_ready(fake: FakeDriver) -> None:
    assert tensor.launch_stream([tensor.view(Foreign(), "q"), tensor.view(Foreign(), "kv")]) == 1
    assert fake.calls == []


def test_arrays_ready_elsewhere_are_waited_for(cupy: fake_cupy.FakeCupy, fake: FakeDriver) -> None:
    cupy.streams.append(55)
    mine = tensor.view(fake_cupy.ndarray(np.zeros(3), device=1), "q")
    theirs, interface = tensor.view(Foreign(), "kv"), tensor.view(Interface(stream=77), "sink")
    assert tensor.launch_stream([mine, theirs, interface]) == 55
    assert waits(fake) == {(1, 55), (77, 55)}
    assert fake.named("cuCtxPushCurrent") == [(0xC1,)], "stream 1 is that of the arrays' device"
    fake.calls.clear()
    assert tensor.launch_stream([theirs, mine]) == 1
    assert waits(fake) == {(55, 1)}
    fake.calls.clear()
    assert tensor.launch_stream([theirs, mine], 88) == 88
    assert waits(fake) == {(1, 88)}


def test_cpu_calls_need_no_driver() -> None:
    views = [tensor.view(np.zeros(3), "q")]
    assert tensor.launch_stream(views) == 0
    with pytest.raises(InputError):
        tensor.launch_stream(views, "not a stream")


def test_inputs_without_stream_order_are_held_until_the_kernel_is_done(
    cupy: fake_cupy.FakeCupy, fake: FakeDriver
) -> None:
    array = Foreign()
    before = sys.getrefcount(array)
    fake.pending = {0x9001}
    tensor.hold([tensor.view(array, "kv")], 88)
    assert fake.named("cuEventRecord") == [(0x9001, 88)]
    ordered = [tensor.view(fake_cupy.ndarray(np.zeros(3)), "q")]
    tensor.hold(ordered, 88)
    assert sys.getrefcount(array) > before
    fake.pending.clear()
    fake.captured = {88: 1}
    tensor.hold(ordered, 88)
    assert sys.getrefcount(array) > before, "events must not be asked about while a stream is being captured"
    fake.captured.clear()
    tensor.hold(ordered, 88)
    assert sys.getrefcount(array) == before
    assert fake.named("cuEventDestroy") == [(0x9001,)]


def test_another_framework_s_stream_waits_before_it_reuses_an_input(
    cupy: fake_cupy.FakeCupy, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = tensor.view(fake_cupy.ndarray(np.zeros(3)), "q")
    theirs = tensor.view(fake_cupy.ndarray(np.zeros(3)), "kv")
    theirs.framework = "torch"
    monkeypatch.setattr(streams, "current_stream", lambda seen: 77 if seen is theirs else 88)
    tensor.hold([ours, theirs], 88)
    assert fake.named("cuEventRecord") == [(0x9001, 88)]
    assert fake.named("cuStreamWaitEvent") == [(77, 0x9001)]


def test_cupy_and_torch_arrays_are_not_held(cupy: fake_cupy.FakeCupy, fake: FakeDriver) -> None:
    tensor.hold([tensor.view(fake_cupy.ndarray(np.zeros(3)), "q")], 88)
    assert fake.calls == []


class ConsumingSpace:
    """A framework that imports by DLPack on its own stream 99."""

    taken: Any = None

    @classmethod
    def from_dlpack(cls, producer: Any) -> str:
        cls.taken = dlpack.read_capsule(producer.__dlpack__(stream=99, max_version=(1, 0)))
        return "theirs"


def test_results_for_unknown_frameworks_are_ordered_behind_the_kernel(
    cupy: fake_cupy.FakeCupy, fake: FakeDriver
) -> None:
    class Theirs(Foreign):
        def __array_namespace__(self) -> type[ConsumingSpace]:
            return ConsumingSpace

    fake.attributes = {"COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0}
    allocation = tensor.allocate(tensor.view(Theirs(), "q"), (4, 2), "bfloat16", stream=88)
    assert cupy.made == [(1, 88, (4, 2), NUMPY_DTYPES["bfloat16"])]
    assert fake.calls == [], "nothing to wait for before the launch"
    assert allocation.finish() == "theirs"
    assert waits(fake) == {(88, 99)}
    seen = ConsumingSpace.taken
    assert (seen.ptr, seen.kind, seen.index, seen.dtype) == (allocation.view.ptr, dlpack.CUDA, 1, "bfloat16")


@pytest.mark.parametrize(("asked", "ordered"), [(None, {(88, 1)}), (1, {(88, 1)}), (2, {(88, 2)}), (-1, set())])
def test_handover_orders_the_stream_that_the_consumer_names(
    fake: FakeDriver, asked: int | None, ordered: set[tuple[int, int]]
) -> None:
    handover = Handover(0x1000, (4,), "float32", CUDA0, None, 88)
    handover.__dlpack__(stream=asked)
    assert waits(fake) == ordered


def test_handover_refuses_copies_and_other_devices() -> None:
    handover = Handover(0x1000, (4,), "float32", CUDA0, None, 88)
    with pytest.raises(BufferError):
        handover.__dlpack__(copy=True)
    with pytest.raises(BufferError):
        handover.__dlpack__(dl_device=(1, 0))
