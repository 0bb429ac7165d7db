"""The demonstration: every operator checked against float64, timed and plotted, in three minutes at most.

On a GPU only the kernels that the shown problems need are compiled, all of them at once, and an operator is shown as
soon as its own are there. Without one the NumPy references are shown, and a kernel is compiled for a GPU elsewhere.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import arch as arches
from ..arch import Gpu
from ..bench.report import in_digits
from ..build import KernelSource
from ..build.precompile import Outcome, check_settings, precompile
from ..errors import CupymlaError
from ..ops import registry
from ..ops.case import Case
from ..testing import operators
from ..testing.compare import Report
from ..testing.operators import Subject
from . import doctor, tables
from .doctor import Check
from .terminal import Terminal

ELSEWHERE = Gpu(arches.named("sm_100f"), (10, 0), 148)
"""The GPU that a machine without one compiles a kernel for: a B200 (NVIDIA Blackwell architecture overview)."""

COMPILED = "attn_dist"
"""The operator of that kernel, whose plan has but one."""

_SHORT = frozenset({"Python", "GPU", "NVRTC", "nvcc", "cache"})
"""Of the doctor's checks, what is told even where nothing that is needed is missing."""

_CPU = "CPU reference"
_ROW = "{:21} {:3} {:28} {:>9} {:>6} {}"


@dataclass(frozen=True, slots=True)
class Shown:
    """One operator's part of the demonstration.

    Attributes:
        operator: its name.
        device: what ran it: a GPU's name, or "CPU reference".
        case: the timed problem.
        checked: the checked problem: the same, or one that float64 on the CPU takes seconds for.
        ms: time of one call in milliseconds: on a GPU the median of many launches, on the CPU a single run.
        reports: how each output compared with float64.
        error: why there is neither time nor comparison; empty where there is.
    """

    operator: str
    device: str
    case: str
    checked: str
    ms: float
    reports: tuple[Report, ...]
    error: str = ""

    @property
    def share(self) -> float:
        """The worst error as a share of its limit."""
        return max((report.error / report.limit for report in self.reports if report.limit), default=0.0)

    @property
    def passed(self) -> bool:
        """Whether it ran, and every output is as accurate as it has to be."""
        return not self.error and not any(report.failure for report in self.reports)

    @property
    def failures(self) -> list[str]:
        """What is wrong, a line each."""
        return [text for text in (self.error, *(report.failure for report in self.reports)) if text]

    def as_dict(self) -> dict[str, Any]:
        """The part as `demo --json` prints it."""
        row = dataclasses.asdict(self)
        return {**row, "worst_share_of_limit": self.share, "passed": self.passed}


@dataclass(frozen=True, slots=True)
class Part:
    """What is to be shown of one operator.

    Attributes:
        subject: the operator.
        inputs: of its small problem, NumPy arrays among them.
        gpu: the GPU that runs it; None for the CPU's reference.
        sources: the kernels that this takes.
    """

    subject: Subject
    inputs: dict[str, Any]
    gpu: Gpu | None
    sources: tuple[KernelSource, ...]

    @property
    def device(self) -> str:
        """What runs it: the GPU's name, or "CPU reference"."""
        from .. import driver

        return _CPU if self.gpu is None else driver.device_name(0)

    @property
    def small(self) -> Case:
        """The checked problem."""
        case: Case = self.subject.cases.DEMO
        return case

    @property
    def timed(self) -> Case:
        """The timed problem."""
        case: Case = self.small if self.gpu is None else self.subject.cases.BENCH[0]
        return case


def part(name: str, gpu: Gpu | None) -> Part:
    """What is to be shown of an operator, by the plans of both of its problems."""
    subject = Subject(name)
    inputs = subject.cases.inputs(subject.cases.DEMO, 0)
    if gpu is None or not operators.kernels_for(subject.entry, gpu.capability):
        return Part(subject, inputs, None, ())
    import cupy

    needed = subject.sources(inputs, gpu)
    # Drawn where it is used: the GPU takes milliseconds for what takes a CPU half a minute.
    needed += subject.sources(subject.cases.inputs(subject.cases.BENCH[0], 0, cupy), gpu)
    cupy.get_default_memory_pool().free_all_blocks()
    return Part(subject, inputs, gpu, tuple(dict.fromkeys(needed)))


def show(chosen: Part) -> Shown:
    """Run, check and time one operator. What goes wrong is part of what is shown."""
    try:
        reports, ms = _check(chosen)
        if chosen.gpu is not None:
            from ..bench import run as bench
            from ..bench import timing

            ms = bench.time_case(chosen.subject, chosen.timed, timing.Timer())[0] / 1e3
    except Exception as error:
        # A driver's, CuPy's or the compile service's: the other operators are shown all the same.
        return not_shown(chosen, f"{type(error).__name__}: {error}")
    return Shown(chosen.subject.name, chosen.device, chosen.timed.name, chosen.small.name, ms, reports)


def not_shown(chosen: Part, error: str) -> Shown:
    """An operator that went wrong."""
    return Shown(chosen.subject.name, chosen.device, chosen.timed.name, chosen.small.name, 0.0, (), error)


def _check(chosen: Part) -> tuple[tuple[Report, ...], float]:
    """Reports of the public call, and the time of that one call in milliseconds."""
    subject, arguments = chosen.subject, chosen.inputs
    if chosen.gpu is not None:
        import cupy

        arguments = operators.arguments_on(cupy, arguments)
    start = time.perf_counter()
    results = subject.named(subject.call(**arguments))
    ms = (time.perf_counter() - start) * 1e3
    if chosen.gpu is not None:
        results = {name: array.get() for name, array in results.items()}
    return tuple(subject.reports(chosen.inputs, results)), ms


def show_all(terminal: Terminal, parts: Sequence[Part]) -> tuple[list[Shown], list[Outcome]]:
    """Show every operator, each as soon as the kernels that it takes are compiled, the others first."""
    shown: dict[str, Shown] = {}
    outcomes: dict[KernelSource, Outcome] = {}

    def show_ready() -> None:
        for each in parts:
            if each.subject.name not in shown and outcomes.keys() >= set(each.sources):
                wrong = [outcomes[source].error for source in each.sources if outcomes[source].error]
                done = shown[each.subject.name] = not_shown(each, wrong[0]) if wrong else show(each)
                show_row(terminal, done)

    terminal.line(_ROW.format("operator", "on", "problem", "one call", "error", "").rstrip())
    wanted = list(dict.fromkeys(source for each in parts for source in each.sources))
    if wanted:
        with terminal.progress("kernels", len(wanted)) as step:

            def compiled(done: Outcome) -> None:
                outcomes[done.source] = done
                step(f"{done.source} {tables.state_of(done)}")
                show_ready()

            precompile(wanted, progress=compiled)
    show_ready()
    return [shown[each.subject.name] for each in parts], [outcomes[source] for source in wanted]


def show_row(terminal: Terminal, done: Shown) -> None:
    """One operator's line, and what is wrong with it."""
    device = "CPU" if done.device == _CPU else "GPU"
    numbers = ("", "") if done.error else (f"{in_digits(done.ms)} ms", f"{done.share:.0%}")
    terminal.line(_ROW.format(done.operator, device, done.case, *numbers, "ok" if done.passed else "WRONG"))
    for text in done.failures:
        terminal.line(f"  {text}")


def show_machine(terminal: Terminal, checks: Sequence[Check]) -> None:
    """What this machine has, in short, and what it lacks."""
    for check in checks:
        if check.name in _SHORT or (check.needed and check.state == "missing"):
            advice = f" - {check.advice}" if check.advice else ""
            terminal.line(f"{check.name + ':':9} {check.found}{advice}")


def gpu_here() -> Gpu | None:
    """GPU 0, as plans see it; None where there is none that any kernel runs on."""
    from .. import device, driver

    if not driver.available() or arches.serving(driver.compute_capability(0)) is None:
        return None
    return Gpu(driver.arch_of(device.cuda(0)), driver.compute_capability(0), driver.multiprocessor_count(0))


def compile_one(terminal: Terminal, parts: Sequence[Part]) -> tuple[list[Outcome], str]:
    """Compile what a GPU elsewhere would run for one of the problems.

    Returns what came of it, and why nothing can be compiled where nothing can.
    """
    from ..build import compiler

    (chosen,) = (each for each in parts if each.subject.name == COMPILED)
    try:
        chain = compiler.toolchain()
    except CupymlaError as error:
        terminal.line(f"no kernel was compiled: {error}")
        return [], str(error)
    outcomes = precompile(chosen.subject.sources(chosen.inputs, ELSEWHERE))
    for done in outcomes:
        row = tables.outcome_row(done)
        told = f"{row.get('registers')} registers, {tables.spill_bytes(row)} bytes of spills" if done.ok else done.error
        terminal.line(f"compiled by {chain}: {done.source}")
        terminal.line(f"  {tables.state_of(done)}, {told}; `python -m cupymla precompile` compiles every kernel")
    return outcomes, ""


def _plot(shown: Sequence[Shown], where: str, out: Path) -> Path | None:
    from ..bench.report import draw_demo

    file = out / "demo.png"
    drawn = [done for done in shown if not done.error]
    if not drawn:
        return None
    names = [f"{done.operator}\n{done.case}" for done in drawn]
    try:
        draw_demo(f"cupymla on {where}", names, [s.ms for s in drawn], [s.share for s in drawn], file)
    except ImportError:
        print("no plot: matplotlib is not installed (pip install 'cupymla[cli]')", file=sys.stderr)
        return None
    return file


def run(terminal: Terminal, out: Path) -> int:
    """The whole demonstration, its plot in the folder `out`; 0 when every check passed and every kernel compiled."""
    from .. import driver

    check_settings()
    checks = doctor.examine()
    show_machine(terminal, checks)
    terminal.line()
    gpu = gpu_here()
    parts = [part(entry.name, gpu) for entry in registry.OPERATORS]
    shown, outcomes = show_all(terminal, parts)
    terminal.line("error: the largest against float64, as a share of what it may be")
    lacking = ""
    if gpu is None:
        terminal.line()
        outcomes, lacking = compile_one(terminal, parts)
    else:
        terminal.line(f"checked by problems that a CPU can compute in float64, such as {shown[0].checked}")
        terminal.line(tables.summary(outcomes))
    file = _plot(shown, "a CPU" if gpu is None else driver.device_name(0), out)
    if file:
        terminal.line(f"plot: {file}")
    terminal.json(
        {
            "checks": [check.as_dict() for check in checks],
            "operators": [done.as_dict() for done in shown],
            "kernels": [tables.outcome_row(outcome) for outcome in outcomes],
            "plot": file,
        }
    )
    return 0 if not lacking and all(done.passed for done in shown) and all(outcome.ok for outcome in outcomes) else 1
