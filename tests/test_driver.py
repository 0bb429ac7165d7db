"""The driver module: no driver is no error, contexts are the primary ones, and streams are ordered by events."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator

import pytest
from fake_driver import INVALID, FakeDriver, installed, needs_gpu

from cupymla import device, driver
from cupymla.arch import ARCHES
from cupymla.errors import DriverError, UnsupportedError


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    with installed(monkeypatch) as made:
        yield made


def test_import_loads_no_cuda_library_and_no_framework() -> None:
    code = "import sys, cupymla.launch, cupymla.tensormap, cupymla.tensor; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"cupymla.driver", "cupymla.tensor.read"} <= set(loaded)
    assert not {"cuda.bindings", "cupy", "torch", "jax", "jaxlib"} & set(loaded)


def test_absent_driver_library_means_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver as bindings

    def missing(flags: int) -> tuple[int]:
        raise RuntimeError("libcuda.so.1 not found")

    driver._bindings.cache_clear()
    monkeypatch.setattr(bindings, "cuInit", missing)
    assert driver.device_count() == 0
    assert not driver.available()
    with pytest.raises(DriverError, match="no NVIDIA driver library"):
        driver.compute_capability(0)
    driver._bindings.cache_clear()


def test_driver_without_device_means_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver as bindings

    driver._bindings.cache_clear()
    monkeypatch.setattr(bindings, "cuInit", lambda flags: (bindings.CUresult.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,))
    monkeypatch.setattr(bindings, "cuGetErrorName", lambda code: (0, b"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"))
    monkeypatch.setattr(bindings, "cuGetErrorString", lambda code: (0, b"mismatch"))
    assert not driver.available()
    driver._bindings.cache_clear()


def test_check_unpacks_values_and_raises_with_name_and_text(fake: FakeDriver) -> None:
    assert driver.check((0,), "x") is None
    assert driver.check((0, 7), "x") == 7
    assert driver.check((0, 7, 8), "x") == (7, 8)
    with pytest.raises(DriverError) as caught:
        driver.check((INVALID, None), "doing this")
    assert (caught.value.code, caught.value.name, caught.value.doing) == (1, "CUDA_ERROR_INVALID_VALUE", "doing this")
    assert "text of CUDA_ERROR_INVALID_VALUE" in str(caught.value)


def test_error_code_newer_than_the_bindings_still_makes_an_error(fake: FakeDriver) -> None:
    assert driver.error(987654, "x").code == 987654


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100f"),
        ((10, 3), "sm_100f"),
        ((8, 0), "sm_80"),
        ((8, 6), "sm_80"),
        ((8, 9), "sm_89"),
    ],
)
def test_arch_prefers_a_target_that_lists_the_gpu(fake: FakeDriver, capability: tuple[int, int], target: str) -> None:
    fake.attributes = {"COMPUTE_CAPABILITY_MAJOR": capability[0], "COMPUTE_CAPABILITY_MINOR": capability[1]}
    assert driver.arch_of(device.cuda(0)).name == target


@pytest.mark.parametrize(("major", "minor"), [(7, 5), (10, 1), (11, 0), (12, 0), (12, 1)])
def test_arch_of_an_unknown_gpu_names_it_and_the_known_ones(fake: FakeDriver, major: int, minor: int) -> None:
    """And what its owner can do."""
    fake.attributes = {"COMPUTE_CAPABILITY_MAJOR": major, "COMPUTE_CAPABILITY_MINOR": minor}
    with pytest.raises(UnsupportedError) as caught:
        driver.arch_of(device.cuda(0))
    assert caught.value.device == f"Test GPU (compute capability {major}.{minor})"
    for known in ARCHES:
        assert all(f"{major}.{minor}" in caught.value.supported for major, minor in known.only or (known.capability,))
        assert f"({known.name})" in caught.value.supported
    assert "arrays on the CPU" in caught.value.supported
    with pytest.raises(UnsupportedError):
        driver.arch_of(device.CPU)


@pytest.mark.parametrize(
    ("major", "version", "expected"),
    [(9, 12030, True), (10, 13010, True), (9, 12020, False), (8, 13010, False)],
)
def test_dependent_launches_want_hopper_and_a_driver_that_can_capture_them(
    fake: FakeDriver, major: int, version: int, expected: bool
) -> None:
    fake.attributes |= {"COMPUTE_CAPABILITY_MAJOR": major, "COMPUTE_CAPABILITY_MINOR": 0}
    fake.version = version
    assert driver.has_dependent_launch(0) is expected


def test_entry_points_use_the_legacy_default_stream(fake: FakeDriver) -> None:
    """Stream 0 must mean the same to a raw launch as to the frameworks, whatever the process's default is."""
    driver.function("cuCtxGetCurrent")
    assert fake.named("cuGetProcAddress") == [("cuCtxGetCurrent", 12000, 1)]
    with pytest.raises(DriverError, match="looking up cuNothing"):
        driver.function("cuNothing")


def test_on_device_pushes_only_what_is_not_current(fake: FakeDriver) -> None:
    fake.context = 0xC0
    with driver.on_device(0):
        assert fake.named("cuCtxPushCurrent") == []
    with pytest.raises(KeyError), driver.on_device(1):
        assert driver.current_context() == 0xC1
        raise KeyError
    assert driver.current_context() == 0xC0
    assert len(fake.named("cuDevicePrimaryCtxRetain")) == 2


def test_order_records_on_the_first_and_waits_on_the_second(fake: FakeDriver) -> None:
    driver.order(first=5, then=1)
    (event, on), (waiting, waited) = fake.named("cuEventRecord")[0], fake.named("cuStreamWaitEvent")[0]
    assert (on, waiting, waited) == (5, 1, event)
    assert fake.named("cuEventDestroy") == [(event,)]
    assert fake.named("cuEventCreate") == [(2,)], "an event with timing would serialise"


@pytest.mark.parametrize("pair", [(0, 1), (1, 0), (7, 7)])
def test_one_stream_needs_no_order(fake: FakeDriver, pair: tuple[int, int]) -> None:
    driver.order(*pair)
    assert fake.calls == []


def test_a_stream_is_known_by_its_id_and_by_that_of_its_capture(fake: FakeDriver) -> None:
    fake.captured, fake.stream_ids = {9: 77}, {9: 2**40}
    assert [driver.capture_id(stream) for stream in (9, 8, 9)] == [77, None, 77]
    assert [driver.capturing(stream) for stream in (0, 9)] == [False, True]
    assert driver.stream_id(9) == 2**40
    assert fake.calls == [("cuGetProcAddress", name, 12000, 1) for name in ("cuStreamGetCaptureInfo", "cuStreamGetId")]


@pytest.mark.parametrize("name", ["cuStreamGetCaptureInfo", "cuStreamGetId"])
def test_a_stream_that_cannot_be_asked_about_is_an_error(fake: FakeDriver, name: str) -> None:
    arguments = {"cuStreamGetCaptureInfo": 6, "cuStreamGetId": 2}
    fake.answer(name, [ctypes.c_void_p] * arguments[name], lambda *given: int(INVALID))
    with pytest.raises(DriverError, match="stream 0x9"):
        (driver.capture_id if name == "cuStreamGetCaptureInfo" else driver.stream_id)(9)


def test_event_is_given_back_once_and_when_recording_fails(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    event = driver.Event(3)
    event.close()
    event.close()
    assert len(fake.named("cuEventDestroy")) == 1
    monkeypatch.setattr(FakeDriver, "cuEventRecord", lambda self, event, stream: (INVALID,))
    with pytest.raises(DriverError, match="stream 0x3"):
        driver.Event(3)
    assert len(fake.named("cuEventDestroy")) == 2


def test_function_limits_only_grow(fake: FakeDriver) -> None:
    driver.allow(0xF, 48 * 1024, 8)
    assert fake.named("cuFuncSetAttribute") == []
    driver.allow(0xF, 200_000, 16)
    driver.allow(0xF, 100_000, 16)
    assert fake.named("cuFuncSetAttribute") == [
        (0xF, "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", 200_000),
        (0xF, "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1),
    ]


def test_shared_memory_is_preferred_in_full(fake: FakeDriver) -> None:
    driver.prefer_shared_memory(0xF)
    assert fake.named("cuFuncSetAttribute") == [(0xF, "CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT", 100)]


@pytest.mark.gpu
@needs_gpu
def test_real_device_facts_and_context() -> None:
    assert driver.device_name(0)
    assert driver.multiprocessor_count(0) > 0
    assert driver.arch_of(device.cuda(0)).runs_on(driver.compute_capability(0))
    assert driver.version() >= (12, 0)
    with driver.on_device(0):
        assert driver.current_context() == driver.primary_context(0)
        event = driver.Event(0)
        driver.check(driver._bindings().cuCtxSynchronize(), "synchronising")
        assert event.reached()
        event.close()


@pytest.mark.gpu
@needs_gpu
def test_real_error_has_the_driver_s_words() -> None:
    with pytest.raises(DriverError) as caught:
        driver.device_name(driver.device_count())
    assert caught.value.name == "CUDA_ERROR_INVALID_DEVICE"
