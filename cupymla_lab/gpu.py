"""An operator's cases on this machine's GPU, against its references.

    python -m cupymla_lab gpu check OP ... --out FOLDER     everything: cases, repetition, sanitizers, evidence
    python -m cupymla_lab gpu cases OP ... [--small]        the cases alone, as the sanitizers run them
    python -m cupymla_lab gpu check --emulated sm_100f      kernels for Blackwell, translated, on a Hopper GPU

Inputs are made by NumPy and copied with their strides, gaps full of NaN. Outputs are filled with NaN and stand between
guard zones before each call, so that what was not written and what was written beside shows.

`check` runs cases in processes beside its own: one that faults or hangs fails alone, and references on the CPU, which
take longer than kernels, share its cores.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import inspect
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np

from cupymla import build, driver
from cupymla.bench.processes import Lost, Processes, ended_in_order, status_of
from cupymla.build import KernelSource
from cupymla.cli.terminal import exit_with
from cupymla.ops import registry
from cupymla.ops.case import Case
from cupymla.ops.registry import KernelEntry, OperatorEntry
from cupymla.testing import compare, operators
from cupymla.testing.compare import Mismatch, Report

from . import ab, subjects
from .emulate import EmulationError, Settings
from .guarded import Guarded
from .recorder import Recorder
from .subjects import Subject
from .translated import Translated, translated

T = TypeVar("T")

REPEATS = 20
HOPPER = (9, 0)

# Cases share the GPU with others, which stand still meanwhile: patience says that nothing moves at all.
MODES = (
    Settings("random", 1, patience_seconds=30.0),
    Settings("random", 2, patience_seconds=30.0),
    Settings("lazy", patience_seconds=30.0),
    Settings("eager", patience_seconds=30.0),
)


def modes_text() -> str:
    """`MODES` and their checks in words, for evidence."""
    named = [settings.mode + (f" (seed {settings.seed})" if settings.mode == "random" else "") for settings in MODES]
    checks = sorted({check for settings in MODES for check in settings.checks})
    return f"modes: {', '.join(named)}; checks: {', '.join(checks)}"


# What each tool looks at, and what it cannot see of kernels that move data by TMA and multiply by wgmma.
SANITIZERS = {
    "memcheck": "out-of-bounds and misaligned accesses; tensor-map copies are bounded by their map instead",
    "initcheck": "reads of unwritten global memory by ordinary loads; not what TMA reads",
    "racecheck": "shared-memory hazards of ordinary accesses; not those of TMA copies and wgmma operands",
    "synccheck": "misuse of barriers",
}


class Run:
    """One case set up on the GPU: arguments, guarded outputs and the references' answers."""

    def __init__(self, subject: Subject, case: Case, seed: int = 0) -> None:
        import cupy

        host = subject.cases.inputs(case, seed)
        self._subject = subject
        self.exact = subject.expected(host, "float64")
        self.same = subject.expected(host, "same")
        beside = subject.written_in(host)
        self.outputs = {
            name: Guarded(cupy, like.shape, like.dtype) for name, like in self.same.items() if name not in beside
        }
        self.arguments = operators.arguments_on(cupy, host)
        self._beside = {name: self.arguments[name] for name in beside}
        self._kept = {name: self.arguments[name].copy() for name in beside if name in subject.updates}

    def launch(self) -> dict[str, operators.Array]:
        """Poison the outputs, call, and read them back. Raises Mismatch when a guard zone was written to."""
        for output in self.outputs.values():
            output.poison()
        self._poison_beside()
        self._subject.call(**self.arguments, **{name: output.array for name, output in self.outputs.items()})
        for name, output in self.outputs.items():
            output.check(name)
        return {**{name: output.to_numpy() for name, output in self.outputs.items()}, **self._read_beside()}

    def _poison_beside(self) -> None:
        for name, array in self._beside.items():
            if name in self._kept:
                array[...] = self._kept[name]
            else:
                array.fill(np.nan)

    def _read_beside(self) -> dict[str, operators.Array]:
        return {name: array.get() for name, array in self._beside.items()}

    def allocated(self) -> dict[str, operators.Array]:
        """The same call with outputs that the operator allocates."""
        self._poison_beside()
        made = self._subject.named(self._subject.call(**self.arguments))
        return {**{name: result.get() for name, result in made.items()}, **self._read_beside()}

    def reports(self, got: dict[str, operators.Array]) -> list[Report]:
        """How outputs compare with the references."""
        return self._subject.compared(got, self.same, self.exact)


@contextlib.contextmanager
def launches() -> Iterator[list[str]]:
    """A block that notes the kernel of every launch, by its entry's name.

    What a thread has bound before is launched unnoticed, so that calls are to be made in a new one.
    """
    names: dict[int, str] = {}
    launched: list[str] = []
    load, entry_point = build.kernel, driver.function

    def kernel(source: KernelSource, device: int) -> Any:
        made = load(source, device)
        names[made.function] = source.entry
        return made

    def function(name: str, *argtypes: Any) -> Any:
        found = entry_point(name, *argtypes)
        if name != "cuLaunchKernelEx":
            return found

        def launch(config: Any, chosen: Any, *rest: Any) -> int:
            code: int = found(config, chosen, *rest)
            if not code:
                launched.append(names[chosen.value])
            return code

        return launch

    with mock.patch.object(build, "kernel", kernel), mock.patch.object(driver, "function", function):
        yield launched


def _with_kernel(subject: Subject, kernel: KernelEntry, case: Case, work: Callable[[], T]) -> T:
    """What work on a case gives in a new thread, a kernel being chosen wherever its target has another one as well.

    Raises what work raises, and Mismatch when another one was launched, or none.
    """
    with ab.chosen(subject, kernel, case), launches() as launched, ThreadPoolExecutor(1) as fresh:
        made = fresh.submit(work).result()
    subjects.require_launched(subject, kernel, case, launched)
    return made


def _ways(machine: Translated | None) -> Iterator[None]:
    """Once for each way in which a case is to run: as it is on the GPU, or in each of the emulator's modes."""
    if machine is None:
        yield
        return
    for settings in MODES:
        machine.settings = settings
        yield


def check_case(
    subject: Subject, kernel: KernelEntry, case: Case, seed: int = 0, machine: Translated | None = None
) -> list[Report]:
    """Run a case with the caller's outputs and with allocated ones; a report for each output of both.

    What is translated runs in every mode, with allocated outputs in the last. Raises Mismatch when the call wrote
    outside its outputs, and when another kernel was launched, or none.
    """

    def both() -> list[Report]:
        run = Run(subject, case, seed)
        found = [report for _ in _ways(machine) for report in run.reports(run.launch())]
        return [*found, *run.reports(run.allocated())]

    return _with_kernel(subject, kernel, case, both)


def check_same_bits(
    subject: Subject,
    kernel: KernelEntry,
    case: Case,
    repeats: int = REPEATS,
    seed: int = 0,
    machine: Translated | None = None,
) -> None:
    """Run a case again and again into poisoned outputs, what is translated so often in every mode.

    Raises Mismatch unless the bits are equal every time, and when another kernel was launched, or none.
    """

    def repeated() -> None:
        run = Run(subject, case, seed)
        first: dict[str, bytes] = {}
        for _ in _ways(machine):
            for repeat in range(1, repeats + 1):
                for name, value in run.launch().items():
                    if value.tobytes() != first.setdefault(name, value.tobytes()):
                        raise Mismatch(
                            f"{kernel.name} {case.name}: run {repeat} of {repeats} gave other bits in {name}"
                        )

    _with_kernel(subject, kernel, case, repeated)


def small_grid(subject: Subject, kernel: KernelEntry) -> list[Case]:
    """The cheapest cases of each intent that a kernel can run."""
    served = {case.name for case in subject.cases_of(kernel)}
    return subjects.cheapest(subject, keep=lambda case: case.name in served)


def repeatable(subject: Subject, kernel: KernelEntry) -> list[Case]:
    """The cheapest cases of each intent that a kernel can run, among those that promise equal bits.

    Those are all, but for an operator with a `deterministic` option those that ask for it; none, for a kernel that only
    runs without it.
    """
    if "deterministic" not in inspect.signature(subject.call).parameters:
        return small_grid(subject, kernel)

    def asks(case: Case) -> bool:
        return bool(getattr(case, "options", {}).get("deterministic"))

    served = {case.name for case in subject.cases_of(kernel) if asks(case)}
    return subjects.cheapest(subject, keep=lambda case: case.name in served)


@dataclass(frozen=True, slots=True)
class Step:
    """One line of the closing table: what was checked, how it went, how long it took, where its log is."""

    kernel: str
    name: str
    passed: bool
    note: str
    seconds: float


def _timed(kernel: str, name: str, work: Callable[[], str]) -> Step:
    start = time.monotonic()
    try:
        note, passed = work(), True
    except Exception as error:
        note, passed = f"{type(error).__name__}: {error}", False
    step = Step(kernel, name, passed, note, time.monotonic() - start)
    # At once as well as in the closing table, which a check that is cut off never comes to.
    print(f"-- {_line(step)}", file=sys.stderr, flush=True)
    return step


def _line(step: Step) -> str:
    note = step.note.splitlines()[0][:120] if step.note else ""
    return f"{step.kernel:24} {step.name:10} {'ok' if step.passed else 'FAILED':6} {step.seconds:8.1f}  {note}"


@dataclass(frozen=True, slots=True)
class Job:
    """One case of one kernel: to be compared with the references, or to be repeated.

    Attributes:
        operator, kernel, case: their names; the kernel is one that this machine's GPU runs.
        repeats: how many runs have to give the same bits; 0 compares.
        emulated: the target of a kernel that is translated to run on this machine's GPU.
    """

    operator: str
    kernel: str
    case: str
    repeats: int = 0
    emulated: str = ""


def kernels_here(entry: OperatorEntry, emulated: str = "") -> tuple[KernelEntry, ...]:
    """The kernels of an operator for this machine's GPU, or for another target that it is to be taken for."""
    if emulated:
        return tuple(kernel for kernel in entry.kernels if kernel.arch == emulated)
    return operators.kernels_for(entry, driver.compute_capability(0))


def do(job: Job) -> list[Report]:
    """Do a job on this machine's GPU; returns the reports of a comparison, which may hold failures.

    Raises Mismatch as `check_case` and `check_same_bits` do, and for what the emulator objects to.
    """
    import cupy

    # Ahead of the launch: should a kernel fault or hang, or a sanitizer find something, this names its case.
    print(f"{job.kernel} {job.case}{' repeated' if job.repeats else ''}", file=sys.stderr, flush=True)
    subject = Subject(job.operator)
    (kernel,) = (kernel for kernel in kernels_here(subject.entry, job.emulated) if kernel.name == job.kernel)
    (case,) = (case for case in subject.cases.CASES if case.name == job.case)
    try:
        with translated(job.emulated) if job.emulated else contextlib.nullcontext() as machine:
            if job.repeats:
                check_same_bits(subject, kernel, case, job.repeats, machine=machine)
                return []
            return check_case(subject, kernel, case, machine=machine)
    except EmulationError as error:
        if error.code == 0:
            raise  # its grid may still run: this process is of no more use
        raise Mismatch(f"{kernel.name} {case.name} emulated: {error}") from error
    finally:
        cupy.get_default_memory_pool().free_all_blocks()


@dataclass(frozen=True, slots=True)
class Runner:
    """How jobs are done.

    Attributes:
        result: does one, or raises Mismatch or Lost.
        at_once: how many threads may call it at a time; with more than one, steps of a check run side by side.
        sanitizer: entered for the time of one sanitizer run.
        emulated: the target of kernels that are translated to run on this machine's GPU.
        over: when it is set, nothing more is begun, and sanitizer runs are ended.
    """

    result: Callable[[Job], list[Report]] = do
    at_once: int = 1
    sanitizer: contextlib.AbstractContextManager[object] = field(default_factory=contextlib.nullcontext)
    over: threading.Event = field(default_factory=threading.Event)
    emulated: str = ""

    def results(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, list[Report], str | None]]:
        """Every job with its reports, and with what went wrong, in their order."""

        def one(job: Job) -> tuple[Job, list[Report], str | None]:
            try:
                reports = self.result(job)
                compare.require(reports)
            except (Mismatch, Lost) as error:
                # At once: a check that is cut off never comes to its table.
                if not self.over.is_set():
                    print(f"{job.kernel} {job.case}: {error}", file=sys.stderr, flush=True)
                return job, [], f"{job.case}: {error}"
            return job, reports, None

        if self.at_once == 1:
            yield from map(one, jobs)
            return
        with ThreadPoolExecutor(self.at_once) as threads:
            yield from threads.map(one, jobs)


def _require(failures: Sequence[str | None], jobs: Sequence[Job]) -> None:
    failed = [failure for failure in failures if failure is not None]
    if failed:
        raise Mismatch(f"{len(failed)} of {len(jobs)} cases failed\n" + "\n".join(failed))


def run_cases(
    subject: Subject,
    kernel: KernelEntry,
    cases: Sequence[Case],
    recorder: Recorder | None = None,
    runner: Runner | None = None,
) -> str:
    """Check cases; returns a line of statistics. Raises Mismatch with all failures."""
    how = runner or Runner()
    jobs = [Job(subject.name, kernel.name, case.name, emulated=how.emulated) for case in cases]
    failures, worst = [], 0.0
    for case, (_, reports, failure) in zip(cases, how.results(jobs), strict=True):
        failures.append(failure)
        worst = max([worst, *(report.error / report.limit for report in reports if report.limit)])
        if recorder and failure is None:
            recorder.record(subject.name, kernel, case, reports)
    _require(failures, jobs)
    return f"{len(cases)} cases, worst error {worst:.2f} of its limit"


def _repeat(subject: Subject, kernel: KernelEntry, found: dict[str, int], runner: Runner) -> str:
    cases = repeatable(subject, kernel)
    # What is translated is slow, and runs in each mode.
    repeats, runs = (1, len(MODES)) if runner.emulated else (REPEATS, REPEATS)
    jobs = [Job(subject.name, kernel.name, case.name, repeats, runner.emulated) for case in cases]
    _require([failure for _, _, failure in runner.results(jobs)], jobs)
    found.update(cases=len(cases), runs=runs)
    return f"{len(cases)} cases, {runs} runs each, equal bits"


def _sanitize(
    subject: Subject, kernel: KernelEntry, tool: str, out: Path, timeout: float, found: dict[str, str], runner: Runner
) -> str:
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    log = out / f"{subject.name}.{kernel.name}.{tool}.log"
    worker = [sys.executable, "-m", "cupymla_lab.gpu", "cases", subject.name, "--kernel", kernel.name]
    worker += ["--small", "--plain-allocations"]
    command = [program, "--tool", tool, "--error-exitcode", "9", *worker]
    with runner.sanitizer, log.open("w", encoding="utf-8") as stream:
        status = status_of(command, stream, timeout, runner.over)
    summary = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if "SUMMARY" in line]
    text = summary[-1].lstrip("= ") if summary else f"exit status {status}"
    if status:
        raise Mismatch(f"{text}, see {log}")
    found[tool] = text
    return f"{text} ({SANITIZERS[tool]})"


def check(
    subject: Subject,
    kernel: KernelEntry,
    out: Path,
    sanitizers: Sequence[str],
    timeout: float,
    runner: Runner | None = None,
) -> list[Step]:
    """Everything for one kernel; writes evidence when all its cases passed with equal bits and clean sanitizers."""
    how = runner or Runner()
    recorder = Recorder(ran="emulated", how=modes_text()) if how.emulated else Recorder()
    repeats: dict[str, int] = {}
    summaries: dict[str, str] = {}

    works: list[tuple[str, Callable[[], str]]] = [
        (
            "cases",
            lambda: run_cases(subject, kernel, subjects.cases_run(subject, kernel, bool(how.emulated)), recorder, how),
        ),
        ("same bits", lambda: _repeat(subject, kernel, repeats, how)),
        *(
            (tool, functools.partial(_sanitize, subject, kernel, tool, out, timeout, summaries, how))
            for tool in sanitizers
        ),
    ]
    if how.at_once == 1:
        steps = [_timed(kernel.name, *work) for work in works]
    else:
        # Sanitizers are processes of their own and mostly wait for their own kernels: side by side with all else.
        with ThreadPoolExecutor(len(works)) as side_by_side:
            steps = list(side_by_side.map(lambda work: _timed(kernel.name, *work), works))
    if all(step.passed for step in steps):
        steps.append(_timed(kernel.name, "evidence", lambda: _keep(recorder, repeats, summaries)))
    return steps


def check_all(
    kernels: Sequence[tuple[Subject, KernelEntry]],
    out: Path,
    sanitizers: Sequence[str],
    timeout: float,
    jobs: int,
    limit: float,
    emulated: str = "",
) -> list[Step]:
    """`check` of several kernels, cases of all of them in so many processes; 0 jobs: one by one in this process."""
    if jobs == 0:
        alone = Runner(emulated=emulated)
        return [step for each in kernels for step in check(*each, out, sanitizers, timeout, alone)]
    # Processes end first, so that threads find nothing to wait for when this one is interrupted.
    with (
        ended_in_order(),
        ThreadPoolExecutor(len(kernels)) as side_by_side,
        Processes(do, jobs, limit, (Mismatch,)) as processes,
    ):
        turns = threading.BoundedSemaphore(jobs)
        runner = Runner(processes.result, max(jobs, 2), turns, processes.over, emulated)

        def checked(each: tuple[Subject, KernelEntry]) -> list[Step]:
            return check(*each, out, sanitizers, timeout, runner)

        checks = [side_by_side.submit(checked, each) for each in kernels]
        # Again and again: a signal that interrupts another thread does not wake this one.
        while wait(checks, timeout=0.5).not_done:
            pass
        return [step for each in checks for step in each.result()]


def _keep(recorder: Recorder, repeats: dict[str, int], sanitizers: dict[str, str]) -> str:
    files = recorder.write(repeats=repeats, sanitizers=sanitizers)
    return ", ".join(map(str, files)) or "nothing to write"


def _show(steps: Sequence[Step], out: Path) -> None:
    details = [f"-- {step.kernel} {step.name}\n{step.note}" for step in steps]
    (out / "details.txt").write_text("\n".join(details) + "\n", encoding="utf-8")
    print(f"{'kernel':24} {'check':10} {'':6} {'seconds':>8}  note")
    for step in steps:
        print(_line(step))


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"a time above 0, not {text}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"0 or more, not {text}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cupymla_lab gpu", description="Check operators on this GPU.")
    commands = parser.add_subparsers(dest="command", required=True)
    full = commands.add_parser("check", help="cases, repetition, sanitizers, evidence")
    full.add_argument("operators", nargs="*", metavar="OP", help="default: every operator with a kernel for this GPU")
    full.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder for logs (default: gpu-check)")
    full.add_argument(
        "--sanitizers", nargs="*", choices=list(SANITIZERS), help="default: all; none of what is emulated"
    )
    full.add_argument("--timeout", type=_seconds, default=300.0, help="seconds for one sanitizer run (default: 300)")
    full.add_argument("--limit", type=_seconds, default=300.0, help="seconds for one case (default: 300)")
    full.add_argument(
        "--jobs",
        type=_count,
        default=4,
        help="processes that run cases (default: 4); 0: none beside this one, no limits",
    )
    cases = commands.add_parser("cases", help="the cases alone")
    for command in (full, cases):
        command.add_argument(
            "--emulated", default="", metavar="SM", choices=["sm_100f"],
            help="kernels for this target, translated to run on a Hopper GPU",
        )  # fmt: skip
    cases.add_argument("operators", nargs="+", metavar="OP")
    cases.add_argument("--kernel", metavar="NAME", help="of this kernel alone, where the GPU's target has several")
    cases.add_argument("--small", action="store_true", help="the cheapest cases of each intent")
    cases.add_argument("--case", action="append", metavar="NAME", help="this case; repeatable")
    cases.add_argument("--plain-allocations", action="store_true", help="one cudaMalloc per array, for memcheck")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 when all passed, 1 when something failed, 2 without a GPU or a kernel for it."""
    parser = _parser()
    options = parser.parse_args(arguments)
    known = [entry.name for entry in registry.subjects()]
    if unknown := [name for name in options.operators if name not in known]:
        parser.error(f"no operator {', '.join(unknown)}; there are {', '.join(known)}")
    if not driver.available():
        print("this needs a CUDA GPU, and there is none on this machine", file=sys.stderr)
        return 2
    names = options.operators or known
    if options.emulated and driver.compute_capability(0) != HOPPER:
        print(f"kernels are translated for a Hopper GPU, and this is {driver.device_name(0)}", file=sys.stderr)
        return 2
    subjects = [Subject(name) for name in names]
    kernels = [(subject, kernel) for subject in subjects for kernel in kernels_here(subject.entry, options.emulated)]
    if options.command == "cases" and options.kernel:
        kernels = [(subject, kernel) for subject, kernel in kernels if kernel.name == options.kernel]
    if not kernels:
        print(f"no kernel for {driver.device_name(0)} among: {', '.join(names)}", file=sys.stderr)
        return 2
    if options.command == "cases":
        return _run_plain(kernels, options)
    if options.emulated and options.sanitizers:
        parser.error("--sanitizers: none of what is emulated, which would be the model's affair")
    options.out.mkdir(parents=True, exist_ok=True)
    tools = options.sanitizers
    if tools is None:
        tools = [] if options.emulated else list(SANITIZERS)
    steps = check_all(kernels, options.out, tools, options.timeout, options.jobs, options.limit, options.emulated)
    _show(steps, options.out)
    return 0 if all(step.passed for step in steps) else 1


def _run_plain(kernels: Sequence[tuple[Subject, KernelEntry]], options: argparse.Namespace) -> int:
    import cupy

    if options.plain_allocations:
        # A pool hands out parts of large blocks, inside which an overrun goes unseen.
        cupy.cuda.set_allocator(None)
    for subject, kernel in kernels:
        cases = (
            small_grid(subject, kernel)
            if options.small
            else subjects.cases_run(subject, kernel, bool(options.emulated))
        )
        if options.case:
            cases = subject.those(subject.cases_of(kernel), options.case)
        print(kernel.name, run_cases(subject, kernel, cases, runner=Runner(emulated=options.emulated)))
    return 0


if __name__ == "__main__":
    # Under the module's own name, by which other processes find what is here.
    exit_with(importlib.import_module("cupymla_lab.gpu").main)
