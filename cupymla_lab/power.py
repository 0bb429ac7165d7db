"""What a call costs in energy, beside the bf16 matrix product that benchmarks are compared with.

    python -m cupymla_lab power --out docs/benchmarks
    python -m cupymla_lab power OP [--case NAME] [--baseline FOLDER]
    python -m cupymla_lab power --page docs/power.md --out docs/benchmarks/h200

A GPU at its power limit keeps to it by its clock, so there a call takes its energy over these watts. The first command
calls each benchmark case again and again for some seconds and writes <out>/<gpu>/power.json, the second only shows what
it measures, the third renews a page's table. Energy is the driver's own count, of the whole card: another process on
it, or in another part of it, counts as well. `--baseline FOLDER` compares kernels of another `cuda/` folder by it, in
turns.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from cupymla.bench import machine, report, timing
from cupymla.bench import run as bench
from cupymla.cli.terminal import Terminal, exit_with
from cupymla.errors import CupymlaError, InputError, UnsupportedError

from . import ab, profile
from .subjects import Subject

OPERATORS = ("sparse_mla_fwd", "sparse_mla_bwd")
"""Whose cases are measured where none is named: those that work tensor cores hard enough to come to the limit."""

MATRIX_BOUND = frozenset({"sparse_mla_fwd", "sparse_mla_bwd", "sparse_mla_bwd_phase1", "attn_dist"})
"""Whose cases can be measured: their arithmetic takes longer than their memory traffic, so energy is told of it."""

LEAST_US = 1000.0
"""A shorter call is left out where none is named: between such the GPU rests."""

SECONDS = 2.5
WARM_SECONDS = 0.7
_BATCH_SECONDS = 0.02
_SAMPLE_SECONDS = 0.01
_POWER_REASONS = 0x4 | 0x80  # nvmlClocksEventReasonSwPowerCap, nvmlClocksThrottleReasonHwPowerBrakeSlowdown
_SM_CLOCK = 1  # NVML_CLOCK_SM


@dataclass(frozen=True, slots=True)
class PowerRow:
    """One case, called back to back.

    Attributes:
        operator, case: their names; the matrix product's stand first.
        us: of a call, in microseconds; caches are as the call before left them.
        watts: of the whole GPU, its memory included.
        sm_mhz: the median clock.
        limited: the share of samples in which the power limit held the clock.
        joules: of a call.
        picojoules_per_flop: of a call's counted operations.
        of_matmul: the matrix product's energy of an operation over this one's. Where power holds both down, the share
            of its rate that the call comes to.
    """

    operator: str
    case: str
    us: float
    watts: float
    sm_mhz: float
    limited: float
    joules: float
    picojoules_per_flop: float
    of_matmul: float


@dataclass(frozen=True, slots=True)
class Sample:
    """What a meter told at a time: seconds, joules, the clock in MHz, whether power held it."""

    seconds: float
    joules: float
    clock_mhz: float
    is_limited: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """What a loop of calls took: how many there were, seconds, samples meanwhile."""

    calls: int
    seconds: float
    samples: tuple[Sample, ...]

    @property
    def watts(self) -> float:
        """Between the first and the last change of the count, which comes in steps of up to a tenth of a second.

        Raises UnsupportedError where it changed less than twice.
        """
        changes = [now for before, now in pairwise(self.samples) if now.joules != before.joules]
        if len(changes) < 2:
            raise UnsupportedError("measuring energy", f"{len(changes)} changes of the count", "a longer measurement")
        first, last = changes[0], changes[-1]
        return (last.joules - first.joules) / (last.seconds - first.seconds)

    def row(self, operator: str, case: str, flops: int, matmul: PowerRow | None = None) -> PowerRow:
        """As a row of the file; `flops` of a call."""
        seconds = self.seconds / self.calls
        watts = self.watts
        joules = watts * seconds
        per_flop = joules / flops * 1e12
        return PowerRow(
            operator,
            case,
            us=round(seconds * 1e6, 1),
            watts=round(watts, 1),
            sm_mhz=statistics.median(sample.clock_mhz for sample in self.samples),
            limited=round(statistics.mean(sample.is_limited for sample in self.samples), 3),
            joules=round(joules, 4),
            picojoules_per_flop=round(per_flop, 4),
            of_matmul=round(matmul.picojoules_per_flop / per_flop, 4) if matmul else 1.0,
        )


class Meter:
    """A GPU's energy, clock and what holds the clock, as its driver tells them (NVML, of which this needs five calls).

    Raises UnsupportedError where NVML is not there or does not tell all of it.
    """

    def __init__(self, bus_id: str) -> None:
        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise UnsupportedError("measuring energy", str(error), "a driver with NVML") from None
        self._device = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByPciBusId_v2", bus_id.encode(), ctypes.byref(self._device))
        self.sample()

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            code = getattr(self._nvml, name)(*arguments)
        except AttributeError:
            raise UnsupportedError("measuring energy", f"NVML without {name}", "a newer driver") from None
        if code:
            raise UnsupportedError("measuring energy", f"{name} returns {code}", "a GPU and a driver that count it")

    def joules(self) -> float:
        """Since the driver was loaded."""
        millijoules = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._device, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    def clock_mhz(self) -> float:
        """Of the SMs, now."""
        mhz = ctypes.c_uint()
        self._call("nvmlDeviceGetClockInfo", self._device, _SM_CLOCK, ctypes.byref(mhz))
        return float(mhz.value)

    def is_limited(self) -> bool:
        """Whether power holds the clock down now."""
        reasons = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetCurrentClocksThrottleReasons", self._device, ctypes.byref(reasons))
        return bool(reasons.value & _POWER_REASONS)

    def sample(self) -> Sample:
        """All of it, now."""
        return Sample(time.perf_counter(), self.joules(), self.clock_mhz(), self.is_limited())

    def limit_watts(self) -> float:
        """What the GPU may take."""
        milliwatts = ctypes.c_uint()
        self._call("nvmlDeviceGetEnforcedPowerLimit", self._device, ctypes.byref(milliwatts))
        return milliwatts.value / 1e3


def back_to_back(call: Callable[[], object], seconds: float) -> int:
    """Call for so long without a rest between calls, and wait for the last one; returns how many there were."""
    import cupy

    batch, calls, running = 1, 0, deque[Any]()
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for _ in range(batch):
            call()
        calls += batch
        running.append(cupy.cuda.Event())
        running[-1].record()
        if len(running) > 2:
            running.popleft().synchronize()
            each = (time.perf_counter() - begin) / calls
            batch = max(1, int(_BATCH_SECONDS / each))
    cupy.cuda.get_current_stream().synchronize()
    return calls


def measure(call: Callable[[], object], meter: Any, seconds: float = SECONDS) -> Measured:
    """Energy and clock over calls for so many seconds, after some that bring the GPU to the temperature of work."""
    back_to_back(call, WARM_SECONDS)
    samples: list[Sample] = []
    failures: list[CupymlaError] = []
    over = threading.Event()

    def sample() -> None:
        try:
            while not over.wait(_SAMPLE_SECONDS):
                samples.append(meter.sample())
        except CupymlaError as error:
            failures.append(error)

    sampling = threading.Thread(target=sample, daemon=True)
    begin = time.perf_counter()
    sampling.start()
    try:
        calls = back_to_back(call, seconds)
        took = time.perf_counter() - begin
    finally:
        over.set()
        sampling.join()
    for failure in failures:
        raise failure
    return Measured(calls, took, tuple(samples))


TURNS = 2
"""How often each variant of a case is measured where there are several."""


def rows(operators: Sequence[str], cases: Sequence[str], folders: Sequence[Path], meter: Any) -> Iterator[PowerRow]:
    """The matrix product, then each operator's cases; with folders, each case with their kernels too, in turns.

    Raises InputError for a folder or a case that there is not, before anything is measured.
    """
    import cupy

    variants = [ab.here(), *(ab.kernels_of(folder) for folder in folders)]
    chosen = [(subject, case) for subject in map(Subject, operators) for case in bench.chosen(subject, cases)]
    timer = timing.Timer()
    matmul = measure(timing.matmul(), meter).row("matmul", profile.CEILING, 2 * timing.MATMUL_SIZE**3)
    yield matmul
    for subject, case in chosen:
        inputs = subject.cases.inputs(case, 0, cupy)
        calls = []
        for variant in variants:
            with variant.applied():
                calls.append(subject.call.prepare(**inputs))
                calls[-1]()
        if cases or timer.us(calls[0]) >= LEAST_US:
            for _ in range(TURNS if folders else 1):
                for variant, call in zip(variants, calls, strict=True):
                    name = f"{case.name} {variant.label}" if folders else case.name
                    yield measure(call, meter).row(subject.name, name, subject.cases.flops(case), matmul)
        del inputs, calls
        cupy.get_default_memory_pool().free_all_blocks()


COLUMNS = ("operator", "case", "us", "W", "GHz", "held by power", "J", "pJ a flop", "of the matrix product's")


def cells(row: PowerRow) -> tuple[str, ...]:
    """A row as `COLUMNS` have it."""
    return (
        row.operator,
        row.case,
        f"{row.us:.0f}",
        f"{row.watts:.0f}",
        f"{row.sm_mhz / 1e3:.2f}",
        f"{row.limited:.0%}",
        f"{row.joules:.2f}",
        f"{row.picojoules_per_flop:.2f}",
        f"{row.of_matmul:.2f}" if row.limited >= 0.5 else "",  # else time is not energy
    )


def renewed(page: str, folder: Path) -> str:
    """A page with the table of a folder's file in the place of what it has. Raises ValueError where it has none."""
    content = json.loads((folder / "power.json").read_text(encoding="utf-8"))
    limit = f"{content['limit_watts']:.0f} W at most"
    heading = f"{content['gpu']}, {limit}, driver {content['driver']}, {content['date']}."
    rows = [cells(PowerRow(**row)) for row in content["rows"]]
    return report.replaced(page, report.marked_table("power", heading, COLUMNS, rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 2 where nothing can be measured."""
    parser = argparse.ArgumentParser(prog="python -m cupymla_lab power", description=__doc__)
    parser.add_argument("operators", nargs="*", metavar="OP", help="default: " + ", ".join(OPERATORS))
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help="only this case; repeatable")
    parser.add_argument(
        "--baseline", action="append", default=[], type=Path, metavar="FOLDER", help="another cuda/; repeatable"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write FOLDER/<gpu>/power.json")
    parser.add_argument("--commit", metavar="HASH", help="the commit to record (default: ask git)")
    parser.add_argument("--page", type=Path, help="renew this page's table from power.json in FOLDER, no more")
    options = parser.parse_args(arguments)
    try:
        if options.page is None:
            return _measure(options)
        if options.operators or options.case or options.baseline or options.commit:
            raise InputError("--page", "nothing but --out beside it", str(options.page))
        report.renew(options.page, options.out, renewed)
        return 0
    except CupymlaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _measure(options: argparse.Namespace) -> int:
    from cupymla import driver

    operators = options.operators or list(OPERATORS)
    for name in operators:
        if name not in MATRIX_BOUND:
            raise InputError("OP", "one of " + ", ".join(sorted(MATRIX_BOUND)), repr(name))
    if options.case and len(operators) != 1:
        raise InputError("--case", "one operator beside it", ", ".join(operators))
    if options.out is not None and (options.operators or options.case or options.baseline):
        raise InputError("--out", "every case of these kernels: neither OP, --case nor --baseline", str(options.out))
    if not driver.available():
        raise UnsupportedError("measuring energy", "a machine without a CUDA GPU", "one with it")
    import cupy

    meter = Meter(cupy.cuda.Device().pci_bus_id)
    found: list[PowerRow] = []
    for row in rows(operators, options.case, options.baseline, meter):
        found.append(row)
        print("  ".join(cells(row)), flush=True)
    Terminal(False).table("energy", COLUMNS, [cells(row) for row in found])
    if options.out is not None:
        content = {**machine.provenance(options.commit), "limit_watts": meter.limit_watts()}
        report.write(options.out, "power", {**content, "rows": [asdict(row) for row in found]})
    return 0


if __name__ == "__main__":
    exit_with(main)
