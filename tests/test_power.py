"""Energy of calls: what is worked out of a meter's numbers, and the page that shows it."""

from __future__ import annotations

import ctypes
import json
import time
from pathlib import Path
from typing import Any

import pytest

from cupymla import driver
from cupymla.errors import UnsupportedError
from cupymla.testing import machine, power, timing
from cupymla.testing.power import Measured, Meter, PowerRow, Sample

ROOT = Path(__file__).resolve().parent.parent


class FakeMeter:
    """500 J a second; the clock goes down by 10 MHz with every look at it, and is held after the first two."""

    def __init__(self) -> None:
        self.looks = 0

    def joules(self) -> float:
        return time.perf_counter() * 500

    def clock_mhz(self) -> float:
        self.looks += 1
        return 2000.0 - 10 * self.looks

    def is_limited(self) -> bool:
        return self.looks > 2


def samples(*joules: float) -> tuple[Sample, ...]:
    """A tenth of a second apart, with a clock that goes down, held from the second one on."""
    return tuple(Sample(i / 10, j, 1700.0 - 100 * i, i > 0) for i, j in enumerate(joules))


def test_a_row_is_of_one_call() -> None:
    """100 calls of 2 GFLOP in half a second at 600 W are 3 J and 1500 pJ a FLOP."""
    taken = Measured(100, 0.5, samples(0.0, 60.0, 120.0))
    matmul = PowerRow("matmul", "", 1.0, 1.0, 1.0, 1.0, 1.0, picojoules_per_flop=1200.0, of_matmul=1.0)
    found = taken.row("op", "case", 2_000_000_000, matmul)
    assert found == PowerRow("op", "case", 5000.0, 600.0, 1600.0, 0.667, 3.0, 1500.0, 0.8)
    assert taken.row("matmul", "", 2_000_000_000).of_matmul == 1.0


def test_watts_are_between_changes_of_the_count() -> None:
    """The count stands still until the driver renews it: what was before the first change is not known."""
    taken = Measured(1, 1.0, samples(5.0, 5.0, 100.0, 100.0, 100.0, 220.0, 220.0))
    assert taken.watts == pytest.approx(120 / 0.3)


@pytest.mark.parametrize("joules", [(), (1.0,), (1.0, 1.0), (1.0, 2.0, 2.0)])
def test_too_few_changes_are_no_measurement(joules: tuple[float, ...]) -> None:
    with pytest.raises(UnsupportedError, match="a longer measurement"):
        _ = Measured(1, 1.0, samples(*joules)).watts


def test_energy_is_counted_over_the_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not over those that warm the GPU up, and the clock is sampled meanwhile."""
    asked: list[float] = []

    def looped(call: Any, seconds: float) -> int:
        asked.append(seconds)
        time.sleep(0.15)
        return 7

    monkeypatch.setattr(power, "back_to_back", looped)
    taken = power.measure(lambda: None, FakeMeter(), 4.0)
    assert asked == [power.WARM_SECONDS, 4.0]
    assert taken.calls == 7 and 0.15 <= taken.seconds < 1.0
    assert taken.watts == pytest.approx(500, rel=0.05)
    assert taken.samples[0].clock_mhz == 1990.0
    assert [sample.is_limited for sample in taken.samples[:3]] == [False, False, True]


def test_sampling_ends_with_a_call_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, calls = FakeMeter(), 0

    def looped(call: Any, seconds: float) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("a launch failed")
        return 1

    monkeypatch.setattr(power, "back_to_back", looped)
    with pytest.raises(RuntimeError, match="a launch failed"):
        power.measure(lambda: None, meter)
    looks = meter.looks
    time.sleep(0.1)
    assert meter.looks == looks


class FakeNvml:
    """Energy in mJ, a clock in MHz, a limit in mW; what is asked of another GPU fails."""

    def __init__(self, reasons: int) -> None:
        self.reasons = reasons

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus_id: bytes, device: Any) -> int:
        return 0 if bus_id == b"0000:01:00.0" else 6

    def nvmlDeviceGetTotalEnergyConsumption(self, device: Any, to: Any) -> int:
        return self._tell(to, ctypes.c_ulonglong, 12_345_678)

    def nvmlDeviceGetClockInfo(self, device: Any, which: int, to: Any) -> int:
        return self._tell(to, ctypes.c_uint, {0: 345, 1: 1665}[which])

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: Any, to: Any) -> int:
        return self._tell(to, ctypes.c_ulonglong, self.reasons)

    def nvmlDeviceGetEnforcedPowerLimit(self, device: Any, to: Any) -> int:
        return self._tell(to, ctypes.c_uint, 700_000)

    @staticmethod
    def _tell(to: Any, kind: Any, value: int) -> int:
        ctypes.cast(to, ctypes.POINTER(kind))[0] = value
        return 0


@pytest.mark.parametrize(("reasons", "limited"), [(0, False), (0x4, True), (0x80, True), (0x1 | 0x20, False)])
def test_the_meter_tells_in_joules_and_watts(monkeypatch: pytest.MonkeyPatch, reasons: int, limited: bool) -> None:
    """An idle GPU's clock and a hot one's are not held by power."""
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeNvml(reasons))
    meter = Meter("0000:01:00.0")
    assert (meter.joules(), meter.clock_mhz(), meter.limit_watts()) == (12345.678, 1665.0, 700.0)
    assert meter.is_limited() is limited
    with pytest.raises(UnsupportedError, match="nvmlDeviceGetHandleByPciBusId_v2 returns 6"):
        Meter("0000:02:00.0")


def test_a_driver_without_nvml_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(UnsupportedError, match="libnvidia-ml"):
        Meter("0000:01:00.0")


def test_the_page_shows_the_file() -> None:
    """Renew it with `python -m cupymla.testing.power --page docs/power.md --out docs/benchmarks/h200`."""
    page = (ROOT / "docs" / "power.md").read_text()
    file = ROOT / "docs" / "benchmarks" / "h200" / "power.json"
    assert power.renewed(page, file) == page
    content = json.loads(file.read_text())
    assert content["rows"][0]["operator"] == "matmul"
    assert {row["operator"] for row in content["rows"][1:]} == set(power.OPERATORS)


def test_a_page_is_renewed_in_place(tmp_path: Path) -> None:
    row = {**dict.fromkeys(PowerRow.__slots__, 0.5), "operator": "matmul", "case": "a"}
    content = {"gpu": "NVIDIA H200", "driver": "580.1", "date": "2026-01-02", "commit": "abc", "limit_watts": 700.0}
    (tmp_path / "power.json").write_text(json.dumps({**content, "rows": [row]}))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- power:begin -->\nold\n<!-- power:end -->\nafter\n")
    assert power.main(["--page", str(page), "--out", str(tmp_path)]) == 0
    lines = page.read_text().splitlines()
    assert lines[0] == "before" and lines[-1] == "after" and "old" not in lines
    assert "NVIDIA H200, 700 W at most, driver 580.1, 2026-01-02." in lines
    assert "| matmul | a | 0 | 0 | 0.00 | 50% | 0.50 | 0.50 | 0.50 |" in lines
    assert power.main(["--page", str(page)]) == 2


def test_what_cannot_be_measured_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert power.main(["nvfp4_gemv"]) == 2
    assert "OP" in capsys.readouterr().err
    assert power.main(["--case", "x"]) == 2
    assert "--case" in capsys.readouterr().err


@pytest.mark.skipif(driver.available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert power.main([]) == 2
    assert "without a CUDA GPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_matrix_product_takes_power() -> None:
    import cupy

    meter = Meter(cupy.cuda.Device().pci_bus_id)
    found = power.measure(timing.matmul(), meter, 1.0).row("matmul", "", 2 * timing.MATMUL_SIZE**3)
    assert found.us > 0 and 50 < found.watts <= 1.2 * meter.limit_watts() and found.sm_mhz > 300
    assert machine.provenance("x")["gpu"]
