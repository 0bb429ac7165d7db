"""Energy of calls: what is worked out of a meter's numbers, and the page that shows it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cupymla import driver
from cupymla.bench import machine, timing
from cupymla.bench import run as bench
from cupymla.errors import UnsupportedError
from cupymla_lab import ab, power, profile
from cupymla_lab.power import Measured, Meter, PowerRow, Sample

ROOT = Path(__file__).resolve().parent.parent


class FakeMeter:
    """100 J a second, or what `watts` says; the clock goes down by 10 MHz with every look, and is held after two."""

    def __init__(self, fails_at: int = 10**9) -> None:
        self.looks, self.joules, self.watts = 0, 0.0, 100
        self.last = time.perf_counter()
        self.fails_at = fails_at

    def sample(self) -> Sample:
        self.looks += 1
        if self.looks >= self.fails_at:
            raise UnsupportedError("measuring energy", "a GPU that is lost", "one that is there")
        now = time.perf_counter()
        self.joules += (now - self.last) * self.watts
        self.last = now
        return Sample(now, self.joules, 2000.0 - 10 * self.looks, self.looks > 2)

    def limit_watts(self) -> float:
        return 700.0


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
    meter = FakeMeter()

    def looped(call: Any, seconds: float) -> int:
        asked.append(seconds)
        time.sleep(0.15)
        meter.watts = 500
        return 7

    monkeypatch.setattr(power, "back_to_back", looped)
    taken = power.measure(lambda: None, meter, 4.0)
    assert asked == [power.WARM_SECONDS, 4.0]
    assert taken.calls == 7 and 0.15 <= taken.seconds < 0.28
    assert taken.watts == pytest.approx(500, rel=0.02)
    assert taken.samples[0].clock_mhz == 1990.0
    assert [sample.is_limited for sample in taken.samples[:3]] == [False, False, True]


@pytest.mark.parametrize("fails_at", [1, 5])
def test_a_meter_that_fails_is_no_measurement(monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    def looped(call: Any, seconds: float) -> int:
        time.sleep(0.15)
        return 7

    monkeypatch.setattr(power, "back_to_back", looped)
    with pytest.raises(UnsupportedError, match="a GPU that is lost"):
        power.measure(lambda: None, FakeMeter(fails_at))


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
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetClockInfo")
    with pytest.raises(UnsupportedError, match="without nvmlDeviceGetClockInfo"):
        Meter("0000:01:00.0")


def test_a_driver_without_nvml_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(UnsupportedError, match="libnvidia-ml"):
        Meter("0000:01:00.0")


def test_the_page_shows_the_file() -> None:
    """Renew it with `python -m cupymla_lab power --page docs/power.md --out docs/benchmarks/h200`."""
    page = (ROOT / "docs" / "power.md").read_text()
    folder = ROOT / "docs" / "benchmarks" / "h200"
    assert power.renewed(page, folder) == page
    content = json.loads((folder / "power.json").read_text())
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
    assert power.main(["sparse_mla_fwd", "--page", str(page), "--out", str(tmp_path)]) == 2
    for text in ("no JSON", "{}", json.dumps({**content, "rows": [{"case": "a"}]})):
        (tmp_path / "power.json").write_text(text)
        assert power.main(["--page", str(page), "--out", str(tmp_path)]) == 2
    assert page.read_text().splitlines() == lines
    assert power.main(["--page", str(tmp_path / "none.md"), "--out", str(tmp_path)]) == 2


class FakeCases:
    BENCH = ()

    @staticmethod
    def inputs(case: Any, seed: int, xp: Any) -> dict[str, Any]:
        return {"case": case}

    @staticmethod
    def flops(case: Any) -> int:
        return 10**12


class FakeSubject:
    """Two cases, of 5000 and of 500 us; a prepared call is which variant and which case it is of."""

    cases = FakeCases

    def __init__(self, name: str) -> None:
        self.name, self.call = name, self

    def prepare(self, case: Any) -> Any:
        label, us = APPLIED[-1], {"long": 5000.0, "short": 500.0}[case.name]

        def call() -> tuple[str, float]:
            return label, us

        return call


APPLIED = ["here"]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A GPU that has a name; calls that are measured, in order. A variant's watts are ten times its label's length."""
    calls: list[Any] = []

    @contextlib.contextmanager
    def applied(label: str) -> Iterator[None]:
        APPLIED.append(label)
        yield
        APPLIED.pop()

    def measure(call: Any, meter: Any) -> Measured:
        calls.append(call())
        watts = 10 * len(calls[-1][0])
        return Measured(1, 1.0, tuple(Sample(float(i), i * watts, 1500.0, True) for i in range(4)))

    def variant(folder: Path) -> ab.Variant:
        return ab.Variant(str(folder), lambda: applied(str(folder)))

    cupy = types.ModuleType("cupy")
    cupy.cuda = types.SimpleNamespace(Device=lambda: types.SimpleNamespace(pci_bus_id="0000:01:00.0"))  # type: ignore[attr-defined]
    pool = types.SimpleNamespace(free_all_blocks=lambda: None)
    cupy.get_default_memory_pool = lambda: pool  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(power, "Subject", FakeSubject)
    monkeypatch.setattr(power, "Meter", lambda bus_id: FakeMeter())
    monkeypatch.setattr(power, "measure", measure)
    monkeypatch.setattr(ab, "kernels_of", variant)
    every = [types.SimpleNamespace(name=name) for name in ("long", "short")]
    monkeypatch.setattr(
        bench, "chosen", lambda subject, names: [case for case in every if not names or case.name in names]
    )
    monkeypatch.setattr(timing, "Timer", lambda: types.SimpleNamespace(us=lambda call: call()[1]))
    monkeypatch.setattr(timing, "matmul", lambda: lambda: ("product", 0.0))
    for name, told in (("available", True), ("device_name", "NVIDIA H200")):
        monkeypatch.setattr(driver, name, lambda *_, told=told: told)
    monkeypatch.setattr(machine, "driver_text", lambda: "580.1")
    return calls


def test_long_cases_are_measured_and_written(measured: list[Any], tmp_path: Path) -> None:
    assert power.main(["--out", str(tmp_path), "--commit", "abc"]) == 0
    assert measured == [("product", 0.0), ("here", 5000.0), ("here", 5000.0)]
    content = json.loads((tmp_path / "h200" / "power.json").read_text())
    assert (content["commit"], content["limit_watts"]) == ("abc", 700.0)
    names = [(row["operator"], row["case"]) for row in content["rows"]]
    assert names == [("matmul", profile.CEILING), *((operator, "long") for operator in power.OPERATORS)]


def test_variants_take_turns(measured: list[Any], tmp_path: Path) -> None:
    found = list(power.rows(["sparse_mla_fwd"], ["short"], [Path("/other/cuda")], FakeMeter()))
    assert measured == [("product", 0.0), *[("here", 500.0), ("/other/cuda", 500.0)] * power.TURNS]
    assert [row.case for row in found[1:]] == ["short here", "short /other/cuda"] * power.TURNS
    assert [row.watts for row in found[1:]] == [40.0, 110.0] * power.TURNS


@pytest.mark.parametrize("words", [["sparse_mla_fwd"], ["--case", "long"], ["--baseline", "/other/cuda"]])
def test_a_file_is_of_all_cases(measured: list[Any], tmp_path: Path, words: list[str]) -> None:
    """Others would be lost."""
    assert power.main(["--out", str(tmp_path), *words]) == 2
    assert not measured and not list(tmp_path.iterdir())


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
