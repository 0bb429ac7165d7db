"""What binds a kernel: hardware counters of an operator's benchmark cases, read by Nsight Compute.

    python -m cupymla_lab profile [OP ...] [--case NAME] --out docs/benchmarks
    python -m cupymla_lab profile --page docs/counters.md --out docs/benchmarks/h200

The first writes <out>/<gpu>/<op>.profile.json and prints a table, the second renews a page's tables. Caches are flushed
before a kernel and clocks left alone, as in the benchmark; a kernel runs once for each few counters, so times are those
of kernels, not of calls. Needs `ncu`, from the CUDA toolkit or of its own, and a driver that lets this user read
counters.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cupymla.bench import machine, report, timing
from cupymla.bench import run as bench
from cupymla.cli.terminal import Terminal, exit_with
from cupymla.errors import CupymlaError, InputError, UnsupportedError
from cupymla.ops import registry

from .subjects import Subject

PERCENT = ".avg.pct_of_peak_sustained_elapsed"

METRICS: Mapping[str, str] = {
    "us": "gpu__time_duration.sum",
    "cycles": "sm__cycles_elapsed.max",
    "tensor_percent": "sm__pipe_tensor_cycles_active" + PERCENT,
    "shared_percent": "l1tex__data_pipe_lsu_wavefronts_mem_shared" + PERCENT,
    "issue_percent": "smsp__issue_active" + PERCENT,
    "exponentials_percent": "sm__inst_executed_pipe_xu" + PERCENT,
    "integers_percent": "sm__inst_executed_pipe_alu" + PERCENT,
    "fma_percent": "sm__inst_executed_pipe_fma" + PERCENT,
    "uniform_percent": "sm__inst_executed_pipe_uniform" + PERCENT,
    "l2_percent": "lts__throughput" + PERCENT,
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
    "link_percent": "lts__ltcfabric2ltc_cycles_active" + PERCENT,
    "l2_sectors": "lts__t_sectors.sum",
    "l2_reduction_sectors": "lts__t_sectors_op_red.sum",
    "l2_to_sm_bytes": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "dram_percent": "dram__throughput" + PERCENT,
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "warps": "sm__warps_active.avg.per_cycle_active",
}
"""Counters by the name that they have in the file; names of Nsight Compute on compute capability 9.0."""

STALLS = (
    *("barrier", "branch_resolve", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard"),
    *("math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "selected"),
    *("short_scoreboard", "sleeping", "tex_throttle", "wait"),
)
"""What a warp that issues nothing waits for."""

_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
_SCALES = {"us": 1e-3}  # from nanoseconds


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a call.

    Attributes:
        kernel: its name.
        grid: CTAs.
        counters: by the names of `METRICS`; those that this Nsight Compute knows.
        stalls: warps that wait, in the average over all cycles in which an instruction is issued, by the reason.
    """

    kernel: str
    grid: int
    counters: dict[str, float]
    stalls: dict[str, float]

    @property
    def ghz(self) -> float:
        """The clock while it ran."""
        return self.counters["cycles"] / self.counters["us"] / 1e3


@dataclass(frozen=True, slots=True)
class Profiled:
    """A case's launches, in their order."""

    case: str
    launches: list[Launch]


# In the process that is profiled --------------------------------------------------------------------------------------


CEILING = "cublas_bf16_8192"
"""The matrix product's place among the cases."""

MOST_LAUNCHES = 10
"""Of a call that are profiled, the first ones: those behind them come again for other queries."""


def run_cases(operator: str, cases: Sequence[str], note: Path) -> None:
    """Run each case twice, the second time for the profiler, and note how many kernels that saw of it."""
    import cupy

    from cupymla import launch

    subject = Subject(operator)
    launched = 0
    original = launch.Launcher.__call__

    def counting(launcher: launch.Launcher, stream: int) -> None:
        nonlocal launched
        original(launcher, stream)
        launched += 1
        if launched == MOST_LAUNCHES:
            cupy.cuda.runtime.profilerStop()

    setattr(launch.Launcher, "__call__", counting)  # noqa: B010
    counts = []
    for case in bench.chosen(subject, cases):
        inputs = subject.cases.inputs(case, 0, cupy)
        prepared = subject.call.prepare(**inputs)
        prepared()
        cupy.cuda.runtime.deviceSynchronize()
        launched = 0
        cupy.cuda.runtime.profilerStart()
        prepared()
        cupy.cuda.runtime.deviceSynchronize()
        cupy.cuda.runtime.profilerStop()
        counts.append((case.name, min(launched, MOST_LAUNCHES)))
        note.write_text(json.dumps(counts), encoding="utf-8")
        del inputs, prepared
        cupy.get_default_memory_pool().free_all_blocks()
    product = timing.matmul()
    product()
    cupy.cuda.runtime.deviceSynchronize()
    cupy.cuda.runtime.profilerStart()
    product()
    cupy.cuda.runtime.deviceSynchronize()
    cupy.cuda.runtime.profilerStop()


# Outside of it --------------------------------------------------------------------------------------------------------


def known(ncu: str, chip: str) -> frozenset[str]:
    """Counters that an Nsight Compute knows, without their suffixes."""
    run = subprocess.run(
        [ncu, "--query-metrics", "--chip", chip], capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    return frozenset(line.split()[0] for line in run.stdout.splitlines() if line.split() and "__" in line.split()[0])


def wanted(names: frozenset[str]) -> list[str]:
    """The counters to ask for. All of them where it is not known what there is."""
    every = [*METRICS.values(), *(_STALL.format(reason) for reason in STALLS)]
    return [metric for metric in every if not names or metric.partition(".")[0] in names]


def read(text: str, counts: Iterable[tuple[str, int]]) -> list[Profiled]:
    """What Nsight Compute printed as CSV in its raw form, distributed over the cases.

    What is left behind them are the kernels of the matrix product that benchmarks are compared with, `CEILING`. Raises
    ValueError where there are fewer launches.
    """
    lines = text.splitlines()
    start = next((place for place, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError("Nsight Compute printed no table")
    rows = [row for row in csv.DictReader(lines[start:]) if (row["ID"] or "").isdigit()]
    launches = [_launch(row) for row in rows]
    found, place = [], 0
    for case, count in counts:
        found.append(Profiled(case, launches[place : place + count]))
        place += count
    if place > len(launches):
        raise ValueError(f"{place} launches and {len(launches)} profiles")
    return [*found, Profiled(CEILING, launches[place:])]


def _launch(row: Mapping[str, str]) -> Launch:
    def number(column: str) -> float | None:
        try:
            return float(row[column].replace(",", ""))
        except (KeyError, ValueError):
            return None

    counters = {name: number(metric) for name, metric in METRICS.items()}
    stalls = {reason: number(_STALL.format(reason)) for reason in STALLS}
    grid = 1
    for extent in row.get("Grid Size", "1").strip("()").split(","):
        grid *= int(extent)
    return Launch(
        row["Kernel Name"].partition("(")[0],
        grid,
        {name: round(value * _SCALES.get(name, 1), 3) for name, value in counters.items() if value is not None},
        {reason: round(value, 3) for reason, value in stalls.items() if value is not None},
    )


def profiled(operator: str, cases: Sequence[str], ncu: str, seconds: float = 300) -> list[Profiled]:
    """Profile an operator's benchmark cases, all where none is named.

    Raises UnsupportedError where Nsight Compute may not read counters or does not get through in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "launches.json"
        metrics = wanted(known(ncu, "gh100"))
        options = ["--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw"]
        options += ["--print-units", "base", "--metrics", ",".join(metrics)]
        inner = [sys.executable, "-m", "cupymla_lab.profile", operator, "--note", str(note)]
        inner += [word for name in cases for word in ("--case", name)]
        try:
            run = subprocess.run(
                [ncu, *options, *inner],
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                check=False,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            raise UnsupportedError(f"profiling {operator}", f"{seconds:.0f} s", "fewer cases") from None
        if run.returncode or not note.exists():
            last = " ".join((run.stdout + run.stderr).split()[-60:])
            raise UnsupportedError(f"profiling {operator}", f"this machine ({last})", "a user who may read counters")
        return read(run.stdout, json.loads(note.read_text(encoding="utf-8")))


COLUMNS = (
    *("case", "kernel", "us", "GHz", "tensor cores %", "shared memory %", "issue %", "L2 %", "found in L2 %"),
    *("L2's link %", "L2 to SMs TB/s", "reductions TB/s", "DRAM %", "most waited for"),
)


SUFFIX = ".profile.json"

PAGE_SHARE = 0.05
"""Of a case's time that a launch takes at least to have a row on a page."""


def table(found: Iterable[Profiled], least_share: float = 0.02) -> list[tuple[str, ...]]:
    """Rows of `COLUMNS`, but for launches that take less than that share of their case's time."""
    rows = []
    for case in found:
        total = sum(launch.counters["us"] for launch in case.launches)
        rows += [
            (case.case, *_cells(launch)) for launch in case.launches if launch.counters["us"] >= least_share * total
        ]
    return rows


def markdown(file: Path) -> str:
    """A file of profiles as a table, with what it is of, between the markers that a page keeps it in."""
    content = json.loads(file.read_text(encoding="utf-8"))
    found = [Profiled(row["case"], [Launch(**launch) for launch in row["launches"]]) for row in content["rows"]]
    operator = file.name.removesuffix(SUFFIX)
    heading = f"{content['gpu']}, driver {content['driver']}, {content['date']}."
    return report.marked_table(operator, heading, COLUMNS, table(found, PAGE_SHARE))


def renewed(page: str, folder: Path) -> str:
    """A page with the tables of a folder's files in the place of those it has. Raises ValueError for one it lacks."""
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        page = report.replaced(page, markdown(file))
    return page


def _cells(launch: Launch) -> tuple[str, ...]:
    counters, us = launch.counters, launch.counters["us"]

    def percent(name: str) -> str:
        return f"{counters[name]:.0f}" if name in counters else ""

    def rate(name: str, unit_bytes: int) -> str:
        return f"{counters[name] * unit_bytes / us / 1e6:.2f}" if name in counters else ""

    waits = sorted(launch.stalls.items(), key=lambda pair: -pair[1])[:3]
    return (
        launch.kernel,
        f"{us:.1f}",
        f"{launch.ghz:.2f}",
        *(percent(f"{name}_percent") for name in ("tensor", "shared", "issue", "l2", "l2_hit", "link")),
        rate("l2_to_sm_bytes", 1),
        rate("l2_reduction_sectors", 32),
        percent("dram_percent"),
        ", ".join(f"{reason} {value:.1f}" for reason, value in waits),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m cupymla_lab profile", description=__doc__)
    parser.add_argument("operators", nargs="*", metavar="OP", help="default: every operator")
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help="only this case; repeatable")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write FOLDER/<gpu>/<op>.profile.json")
    parser.add_argument("--commit", metavar="HASH", help="the commit to record (default: ask git)")
    parser.add_argument("--seconds", type=float, default=300, help="how long an operator may take (default: 300)")
    parser.add_argument(
        "--page", type=Path, help="renew this page's tables from the files in FOLDER, and do nothing else"
    )
    parser.add_argument("--note", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.note is not None:
        run_cases(options.operators[0], options.case, options.note)
        return 0
    try:
        if options.page is None:
            return _profile(options)
        report.renew(options.page, options.out, renewed)
        return 0
    except CupymlaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _profile(options: argparse.Namespace) -> int:
    ncu = shutil.which("ncu")
    if ncu is None:
        raise UnsupportedError("profiling", "a machine without ncu", "Nsight Compute on the PATH")
    names = {entry.name for entry in registry.subjects()}
    for name in options.operators:
        if name not in names:
            raise InputError("OP", "one of " + ", ".join(sorted(names)), repr(name))
    terminal = Terminal(False)
    for name in options.operators or [entry.name for entry in registry.subjects() if Subject(entry.name).cases.BENCH]:
        found = profiled(name, options.case, ncu, options.seconds)
        terminal.table(name, COLUMNS, table(found))
        if options.out is not None and not options.case:
            content: dict[str, Any] = {**machine.provenance(options.commit), "rows": [asdict(each) for each in found]}
            report.write(options.out, f"{name}.profile", content)
    return 0


if __name__ == "__main__":
    exit_with(main)
