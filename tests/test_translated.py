"""What stands between an operator's launch and the emulator on a GPU, with a driver that is none."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cupymla import build, driver, tensormap
from cupymla.build import KernelSource
from cupymla.errors import DriverError
from cupymla.launch import Geometry, Launcher
from cupymla.tensor import Device
from cupymla.tensormap import TileMap
from cupymla_lab import translated as module
from cupymla_lab.emulate import EmulationError, Settings
from cupymla_lab.translated import translated

FUNCTION = 0xF00D
SOURCE = KernelSource("attn_dist/sm100/attn_dist.cu", "attn_dist", arch="sm_100f")
REQUEST = TileMap(1 << 20, "bfloat16", (64, 8), (128,), (64, 1))


class FakeEmulated:
    """A translated kernel that notes its launches, and launches through the driver as a real one does."""

    function = FUNCTION
    facts: dict[str, int] = {"threads": 32}  # noqa: RUF012
    parameters = (tensormap.BYTES, 8)

    def __init__(self) -> None:
        self.seen: list[tuple[Geometry, list[tuple[TileMap | None, bytes]], int, Settings]] = []
        self.error: Exception | None = None
        self.closed = 0

    def launch(self, geometry: Geometry, parameters: Any, stream: int, settings: Settings) -> None:
        held = [(p.request, ctypes.string_at(p.address, n)) for p, n in zip(parameters, self.parameters, strict=True)]
        self.seen.append((geometry, held, stream, settings))
        Launcher(self, geometry, [ctypes.c_uint64(1), ctypes.c_uint64(2)])(stream)
        if self.error:
            raise self.error

    def close(self) -> None:
        self.closed += 1
        raise DriverError(715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", "an illegal instruction", "cuMemFree")


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A driver that takes everything; the names of what it was asked for, as it was called."""
    called: list[str] = []

    def function(name: str, *_: object) -> Callable[..., int]:
        def entry(address: int, *rest: Any) -> int:
            called.append(name)
            if name == "cuTensorMapEncodeTiled":
                ctypes.memmove(address, b"m" * tensormap.BYTES, tensormap.BYTES)
            return 0

        return entry

    monkeypatch.setattr(driver, "function", function)
    monkeypatch.setattr(driver, "allow", lambda *_: None)
    monkeypatch.setattr(module, "_loaded", {})
    return called


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeEmulated:
    made = FakeEmulated()
    monkeypatch.setattr(module, "load", lambda source, device: made)
    return made


def launched(stream: int = 0x77) -> None:
    """A launch as an operator's binding makes it: a tensor map and a record, in clusters of one CTA."""
    kernel = build.kernel(SOURCE, 0)
    mapped = tensormap.encoded(REQUEST)
    geometry = Geometry((3, 1, 1), 32, 1024, pdl=True, clustered=True)
    Launcher(kernel, geometry, [mapped, ctypes.c_uint64(99)])(stream)


def test_a_launch_reaches_the_emulator_with_what_it_was_given(real: list[str], fake: FakeEmulated) -> None:
    """Geometry, the bytes of each parameter, the request behind a tensor map, the stream, the settings of the time.

    What the emulator itself launches goes to the driver.
    """
    with translated("sm_100f") as machine:
        assert driver.arch_of(Device("cuda", 0)).name == "sm_100f" and driver.compute_capability(0) == (10, 0)
        for settings in (Settings("lazy"), Settings("random", 3)):
            machine.settings = settings
            launched()
    geometry = Geometry((3, 1, 1), 32, 1024, pdl=True, clustered=True)
    held = [(REQUEST, b"m" * tensormap.BYTES), (None, bytes(ctypes.c_uint64(99)))]
    assert fake.seen == [(geometry, held, 0x77, settings) for settings in (Settings("lazy"), Settings("random", 3))]
    assert real == ["cuTensorMapEncodeTiled", "cuLaunchKernelEx", "cuLaunchKernelEx"]
    assert fake.closed == 1


def test_what_the_emulator_objects_to_comes_out_though_closing_fails(real: list[str], fake: FakeEmulated) -> None:
    fake.error = EmulationError(2, (0, 0))
    with pytest.raises(EmulationError), translated("sm_100f"):
        launched()
    fake.error = None
    with translated("sm_100f"):
        launched()
    assert len(fake.seen) == 2 and fake.closed == 2


def test_maps_that_were_encoded_outside_are_encoded_again(real: list[str], fake: FakeEmulated) -> None:
    """The emulator has to know what is behind each; outside, the cache starts anew."""
    tensormap.encoded(REQUEST)
    with translated("sm_100f"):
        launched()
    assert fake.seen[0][1][0][0] == REQUEST
    tensormap.encoded(REQUEST)
    assert real.count("cuTensorMapEncodeTiled") == 3


def test_everything_is_as_it_was_behind_the_block(real: list[str], fake: FakeEmulated) -> None:
    before = SimpleNamespace(**vars(driver)), build.kernel
    with translated("sm_100f"):
        assert driver.function is not before[0].function
    assert (driver.function, driver.arch_of, build.kernel) == (before[0].function, before[0].arch_of, before[1])
