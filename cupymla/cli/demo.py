"""The demonstration: every operator on a problem sized for this machine, checked against float64 and timed."""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bench.report import in_digits
from ..build.precompile import Outcome, precompile
from ..errors import CupymlaError
from ..ops import registry
from ..ops.case import Case
from ..testing import compare, operators
from ..testing.compare import Report
from ..testing.operators import Subject
from . import doctor, tables
from .terminal import Terminal

ARCHES = ("sm_90a", "sm_100f")

# A reference in float64 takes seconds for this much on two cores, and each problem is computed three times.
CPU_FLOPS = 3e10
CPU_BYTES = 70e6


@dataclass(frozen=True, slots=True)
class Shown:
    """One operator's part of the demonstration.

    Attributes:
        operator: its name.
        device: what ran it: a GPU's name, or "CPU reference".
        case: the timed problem.
        checked: the checked problem: the same, or fewer of its queries where float64 on the CPU would take minutes.
        ms: time of one call in milliseconds: on a GPU the median of many launches, on the CPU a single run.
        reports: how each output compared with float64.
    """

    operator: str
    device: str
    case: str
    checked: str
    ms: float
    reports: tuple[Report, ...]

    @property
    def share(self) -> float:
        """The worst error as a share of its limit."""
        return max((report.error / report.limit for report in self.reports if report.limit), default=0.0)

    @property
    def passed(self) -> bool:
        """Whether every output kept the comparison law."""
        return not any(report.failure for report in self.reports)

    def as_dict(self) -> dict[str, Any]:
        """The part as `demo --json` prints it."""
        row = dataclasses.asdict(self)
        return {**row, "worst_share_of_limit": self.share, "passed": self.passed}


def sized(subject: Subject) -> Case:
    """The first benchmark case that the CPU can check in seconds, or the first of all with fewer queries."""
    flops, size = subject.cases.flops, subject.cases.bytes_moved

    def fits(case: Case) -> bool:
        return bool(flops(case) <= CPU_FLOPS and size(case) <= CPU_BYTES)

    cases: Sequence[Case] = subject.cases.BENCH
    fitting = [case for case in cases if fits(case)]
    if fitting:
        return max(fitting, key=size)
    case: Any = cases[0]
    while not fits(case) and getattr(case, "s_q", 1) > 1:
        fewer = case.s_q // 2
        case = dataclasses.replace(case, s_q=fewer, name=re.sub(r"q\d+", f"q{fewer}", case.name, count=1))
    return case if fits(case) else min(cases, key=size)


def _check(subject: Subject, case: Case, on_gpu: bool) -> tuple[tuple[Report, ...], float]:
    """Reports of the public call, and the time of that one call in milliseconds."""
    host = subject.cases.inputs(case, 0)
    arguments = host
    if on_gpu:
        import cupy

        arguments = operators.arguments_on(cupy, host)
    start = time.perf_counter()
    results = operators.as_tuple(subject.call(**arguments))
    ms = (time.perf_counter() - start) * 1e3
    got = [result.get() if on_gpu else result for result in results]
    same, exact = subject.reference(host, "same"), subject.reference(host, "float64")
    names = subject.outputs[: len(got)]
    rows = zip(names, got, same, exact, strict=True)
    return tuple(compare.compare(name, value, like, true) for name, value, like, true in rows), ms


def show_operator(name: str, gpu: str | None) -> Shown:
    """Run, check and time one operator, on the GPU when it has a kernel for it."""
    subject = Subject(name)
    small = sized(subject)
    on_gpu = gpu is not None and _has_kernel(subject)
    reports, ms = _check(subject, small, on_gpu)
    if gpu is None or not on_gpu:
        return Shown(name, "CPU reference", small.name, small.name, ms, reports)
    from ..bench import run as bench
    from ..bench import timing

    case = subject.cases.BENCH[0]
    us, _ = bench.time_case(subject, case, timing.Timer(), beside=False)
    return Shown(name, gpu, case.name, small.name, us / 1e3, reports)


def _has_kernel(subject: Subject) -> bool:
    from .. import driver

    return bool(operators.kernels_for(subject.entry, driver.compute_capability(0)))


def _no_compiler() -> str | None:
    """Why nothing can be compiled here, which each of hundreds of kernels would say; None where there is a compiler."""
    from ..build import compiler

    try:
        compiler.toolchain()
    except CupymlaError as error:
        return str(error)
    return None


def _compile_all(terminal: Terminal) -> list[Outcome]:
    """Every variant of every kernel that GPUs of the architectures with exact targets run."""
    sources = []
    for entry in registry.OPERATORS:
        sources += operators.variants(entry, operators.targets_on(entry, ARCHES))
    with terminal.progress("kernels", len(sources)) as step:
        return precompile(sources, progress=lambda done: step(f"{done.source} {tables.state_of(done)}"))


def _plot(shown: Sequence[Shown], where: str, out: Path) -> Path | None:
    from ..bench.report import draw_demo

    file = out / "demo.png"
    names = [f"{part.operator}\n{part.case}" for part in shown]
    try:
        draw_demo(f"cupymla on {where}", names, [s.ms for s in shown], [s.share for s in shown], file)
    except ImportError:
        print("no plot: matplotlib is not installed (pip install 'cupymla[cli]')", file=sys.stderr)
        return None
    return file


def run(terminal: Terminal, out: Path) -> int:
    """The whole demonstration, its plot in the folder `out`; 0 when every check passed and every kernel compiled."""
    from .. import driver

    checks = doctor.examine()
    tables.show_checks(terminal, checks)
    gpu = driver.device_name(0) if driver.available() else None
    shown = []
    with terminal.progress("operators", len(registry.OPERATORS), begins=True) as step:
        for entry in registry.OPERATORS:
            step(entry.name)
            shown.append(show_operator(entry.name, gpu))
    rows = [
        (s.operator, s.device, s.case, in_digits(s.ms), s.checked, f"{s.share:.0%}", "ok" if s.passed else "WRONG")
        for s in shown
    ]
    columns = ("operator", "ran on", "problem", "ms", "checked against float64", "error / limit", "result")
    terminal.table("Operators", columns, rows)
    for part in shown:
        for report in part.reports:
            if report.failure:
                terminal.line(f"{part.operator}: {report.failure}")
    outcomes, lacking = [], None if gpu else _no_compiler()
    if lacking:
        terminal.line(f"no kernel was compiled: {lacking}")
    elif not gpu:
        outcomes = _compile_all(terminal)
    tables.show_outcomes(terminal, outcomes)
    file = _plot(shown, gpu or "a CPU", out)
    if file:
        terminal.line(f"plot: {file}")
    terminal.json(
        {
            "checks": [check.as_dict() for check in checks],
            "operators": [part.as_dict() for part in shown],
            "kernels": [tables.outcome_row(outcome) for outcome in outcomes],
            "plot": file,
        }
    )
    return 0 if not lacking and all(part.passed for part in shown) and all(outcome.ok for outcome in outcomes) else 1
