"""Launching: the driver gets exactly the configuration, attributes and parameters that were asked for."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from fake_driver import FakeDriver, installed, needs_gpu

from cupymla import driver, tensormap
from cupymla.errors import DriverError, InputError
from cupymla.launch import Geometry, LaunchAttribute, LaunchConfig, Launcher, active_clusters

POINTERS = [ctypes.c_void_p] * 4


class Record(ctypes.Structure):
    _fields_ = (("rows", ctypes.c_int32), ("scale", ctypes.c_float), ("out", ctypes.c_void_p))


@dataclass
class FakeKernel:
    function: int = 0xF00D


@dataclass
class Launch:
    config: dict[str, Any]
    attributes: list[tuple[int, list[int]]]
    function: int
    parameters: list[bytes]
    extra: int | None


class FakeLaunches:
    """cuLaunchKernelEx: copies everything it is pointed at, as the driver does, before it returns."""

    def __init__(self, fake: FakeDriver, parameter_bytes: list[int]) -> None:
        self.seen: list[Launch] = []
        self.result = 0
        self._parameter_bytes = parameter_bytes
        fake.answer("cuLaunchKernelEx", POINTERS, self._launch)

    def _launch(self, config: int, function: int, parameters: int, extra: int | None) -> int:
        raw = ctypes.string_at(config, 56)
        words = [int.from_bytes(raw[i : i + 4], "little") for i in range(0, 28, 4)]
        stream, attributes = (int.from_bytes(raw[i : i + 8], "little") for i in (32, 40))
        count = int.from_bytes(raw[48:52], "little")
        decoded = []
        for i in range(count):
            attribute = ctypes.string_at(attributes + 72 * i, 72)
            fields = [int.from_bytes(attribute[j : j + 4], "little") for j in range(0, 20, 4)]
            decoded.append((fields[0], fields[2:5]))
        addresses = (ctypes.c_void_p * len(self._parameter_bytes)).from_address(parameters)
        copied = [ctypes.string_at(a or 0, n) for a, n in zip(addresses, self._parameter_bytes, strict=True)]
        fields_read = {"grid": words[:3], "block": words[3:6], "smem_bytes": words[6], "stream": stream}
        self.seen.append(Launch(fields_read, decoded, function, copied, extra))
        return self.result


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    with installed(monkeypatch) as made:
        yield made


def test_the_driver_says_how_many_clusters_run_at_once(fake: FakeDriver) -> None:
    seen: list[tuple[int, int, int, list[int]]] = []
    code = 0

    def ask(count: int, function: int, config: int) -> int:
        wanted = LaunchConfig.from_address(config)
        attribute = LaunchAttribute.from_address(wanted.attributes)
        seen.append((function, wanted.smem_bytes, attribute.id, list(attribute.value[:3])))
        ctypes.c_int.from_address(count).value = 32
        return code

    fake.answer("cuOccupancyMaxActiveClusters", [ctypes.c_void_p] * 3, ask)
    geometry = Geometry((64, 1, 1), 384, 200_000, cluster=16)
    assert active_clusters(FakeKernel(), geometry) == 32
    assert seen == [(0xF00D, 200_000, 4, [16, 1, 1])]
    allowed = {name for _, name, _ in fake.named("cuFuncSetAttribute")}
    assert "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED" in allowed
    code = 912  # CUDA_ERROR_INVALID_CLUSTER_SIZE
    assert active_clusters(FakeKernel(), geometry) == 0
    code = 1
    with pytest.raises(DriverError, match="how many clusters of 16 CTAs"):
        active_clusters(FakeKernel(), geometry)


def test_layouts_are_those_of_cuda_h() -> None:
    """Offsets as a C compiler lays out cuda.h 12.9 on a 64-bit machine."""
    assert ctypes.sizeof(LaunchConfig) == 56
    assert (LaunchConfig.smem_bytes.offset, LaunchConfig.stream.offset) == (24, 32)
    assert (LaunchConfig.attributes.offset, LaunchConfig.attribute_count.offset) == (40, 48)
    assert ctypes.sizeof(LaunchAttribute) == 72
    assert LaunchAttribute.value.offset == 8


def test_attribute_numbers_are_those_of_the_bindings() -> None:
    from cuda.bindings import driver as bindings

    from cupymla import launch

    names = bindings.CUlaunchAttributeID
    assert names.CU_LAUNCH_ATTRIBUTE_COOPERATIVE.value == launch._COOPERATIVE
    assert names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION.value == launch._CLUSTER_DIMENSION
    expected = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.value
    assert expected == launch._PROGRAMMATIC_STREAM_SERIALIZATION


def test_config_parameters_and_stream_reach_the_driver(fake: FakeDriver) -> None:
    record, number = Record(3, 0.5, 0x1234), ctypes.c_int64(-9)
    launches = FakeLaunches(fake, [ctypes.sizeof(record), 8])
    launcher = Launcher(FakeKernel(), Geometry((6, 2, 3), 384, 1000), [record, number])
    launcher(0x77)
    (seen,) = launches.seen
    assert seen.config == {"grid": [6, 2, 3], "block": [384, 1, 1], "smem_bytes": 1000, "stream": 0x77}
    assert (seen.attributes, seen.function, seen.extra) == ([], 0xF00D, None)
    assert seen.parameters == [bytes(record), bytes(number)]


@pytest.mark.parametrize("stream", [0, 1, 2, 2**63 + 8])
def test_every_stream_address_arrives(fake: FakeDriver, stream: int) -> None:
    launches = FakeLaunches(fake, [])
    Launcher(FakeKernel(), Geometry((1, 1, 1), 1, 0), [])(stream)
    assert launches.seen[0].config["stream"] == stream


def test_attributes(fake: FakeDriver) -> None:
    launches = FakeLaunches(fake, [])
    Launcher(FakeKernel(), Geometry((4, 1, 1), 32, 0, cluster=2, pdl=True, cooperative=True), [])(0)
    assert dict(launches.seen[0].attributes) == {4: [2, 1, 1], 6: [1, 0, 0], 2: [1, 0, 0]}


def test_a_cluster_of_one_is_asked_for_where_it_is_wanted(fake: FakeDriver) -> None:
    launches = FakeLaunches(fake, [])
    for clustered in (False, True):
        Launcher(FakeKernel(), Geometry((4, 1, 1), 32, 0, clustered=clustered), [])(0)
    assert [dict(seen.attributes) for seen in launches.seen] == [{}, {4: [1, 1, 1]}]


def test_changed_fields_are_what_the_next_launch_sees(fake: FakeDriver) -> None:
    record = Record(1, 0.0, None)
    launches = FakeLaunches(fake, [ctypes.sizeof(record)])
    launcher = Launcher(FakeKernel(), Geometry((1, 1, 1), 1, 0), [record])
    launcher(0)
    record.rows = 2
    launcher(0)
    assert [Record.from_buffer_copy(seen.parameters[0]).rows for seen in launches.seen] == [1, 2]


def test_launcher_keeps_its_parameters_alive(fake: FakeDriver) -> None:
    """Only the launcher refers to the record: freed memory would show other bytes."""
    launches = FakeLaunches(fake, [ctypes.sizeof(Record)] * 8)
    launcher = Launcher(FakeKernel(), Geometry((1, 1, 1), 1, 0), [Record(i, 0.0, None) for i in range(8)])
    scribble = [Record(-1, -1.0, None) for _ in range(1000)]
    launcher(0)
    assert [Record.from_buffer_copy(p).rows for p in launches.seen[0].parameters] == list(range(8))
    assert len(scribble) == 1000


def test_tensor_maps_are_passed_by_the_address_of_their_bytes(fake: FakeDriver) -> None:
    encoded = tensormap.EncodedMap()
    ctypes.memset(encoded.address, 0xAB, 128)
    launches = FakeLaunches(fake, [128])
    Launcher(FakeKernel(), Geometry((1, 1, 1), 1, 0), [encoded])(0)
    assert launches.seen[0].parameters == [b"\xab" * 128]


@pytest.mark.parametrize("grid", [(0, 1, 1), (2, 0, 1), (2, 1, 0)])
def test_empty_grid_launches_nothing(fake: FakeDriver, grid: tuple[int, int, int]) -> None:
    launches = FakeLaunches(fake, [])
    Launcher(FakeKernel(), Geometry(grid, 128, 100_000, cluster=2), [])(0)
    assert launches.seen == []


@pytest.mark.parametrize(
    ("geometry", "argument"),
    [
        (Geometry((3, 1, 1), 32, 0, cluster=2), "grid"),
        (Geometry((-1, 1, 1), 32, 0), "grid"),
        (Geometry((2**31, 1, 1), 32, 0), "grid"),
        (Geometry((1, 2**16, 1), 32, 0), "grid"),
        (Geometry((1, 1, 2**16), 32, 0), "grid"),
        (Geometry((1, 1, 1), 0, 0), "block"),
        (Geometry((1, 1, 1), 1025, 0), "block"),
        (Geometry((1, 1, 1), 32, -1), "smem_bytes"),
        (Geometry((32, 1, 1), 32, 0, cluster=32), "cluster"),
        (Geometry((32, 1, 1), 32, 0, cluster=0), "cluster"),
    ],
)
def test_bad_geometry_is_named(fake: FakeDriver, geometry: Geometry, argument: str) -> None:
    with pytest.raises(InputError) as caught:
        Launcher(FakeKernel(), geometry, [])
    assert caught.value.argument == argument


def test_refused_launch_says_what_was_launched(fake: FakeDriver) -> None:
    launches = FakeLaunches(fake, [])
    launches.result = 701
    launcher = Launcher(FakeKernel(), Geometry((5, 1, 1), 32, 0), [])
    with pytest.raises(DriverError, match=r"launching Geometry\(grid=\(5, 1, 1\).*0x11.*OUT_OF_RESOURCES"):
        launcher(0x11)
    launches.result = 0
    launcher(0x11)
    assert len(launches.seen) == 2


def test_large_shared_memory_and_clusters_are_asked_for_before_the_launch(fake: FakeDriver) -> None:
    FakeLaunches(fake, [])
    Launcher(FakeKernel(), Geometry((16, 1, 1), 128, 220_000, cluster=16), [])
    assert {name for _, name, _ in fake.named("cuFuncSetAttribute")} == {
        "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES",
        "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED",
    }


KERNEL = r"""
extern "C" __global__ void fill(int* out, int value) {
    out[blockIdx.x * blockDim.x + threadIdx.x] = value + blockIdx.x;
}
"""


class Pair(ctypes.Structure):
    _fields_ = (("out", ctypes.c_void_p),)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("cluster", [1, 2])
def test_real_launch_and_graph_capture(cluster: int) -> None:
    """A launcher's call is all that a CUDA graph sees: replaying it runs the kernel with the captured values."""
    cupy = pytest.importorskip("cupy")
    if cluster > 1 and driver.compute_capability(0) < (9, 0):
        pytest.skip("clusters need compute capability 9.0")
    kernel = FakeKernel(cupy.RawModule(code=KERNEL).get_function("fill").kernel.ptr)
    out = cupy.zeros(4 * 32, cupy.int32)
    record, value = Pair(out.data.ptr), ctypes.c_int32(5)
    launcher = Launcher(kernel, Geometry((4, 1, 1), 32, 0, cluster=cluster, pdl=cluster > 1), [record, value])
    launcher(cupy.cuda.get_current_stream().ptr)
    expected = cupy.repeat(cupy.arange(4, dtype=cupy.int32), 32)
    assert bool((out == expected + 5).all())
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        value.value = 9
        launcher(stream.ptr)
        graph = stream.end_capture()
        value.value = 100
        graph.launch()
    stream.synchronize()
    assert bool((out == expected + 9).all())
