"""An operator's cases on this machine's GPU, against its references.

    python -m cupymla.testing.gpu check OP ... --out FOLDER     everything: cases, repetition, sanitizers, evidence
    python -m cupymla.testing.gpu cases OP ... [--small]        the cases alone, as the sanitizers run them

Inputs are made by NumPy and copied with their strides, gaps full of NaN. Outputs are filled with NaN and stand between
guard zones before each call, so that what was not written and what was written beside shows.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..ops import registry
from ..ops.case import Case
from . import compare, operators
from .compare import Mismatch, Report
from .evidence import Recorder
from .operators import Subject
from .poison import Guarded

REPEATS = 20

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
        for array in self._beside.values():
            array.fill(np.nan)

    def _read_beside(self) -> dict[str, operators.Array]:
        return {name: array.get() for name, array in self._beside.items()}

    def allocated(self) -> dict[str, operators.Array]:
        """The same call with outputs that the operator allocates."""
        self._poison_beside()
        results = operators.as_tuple(self._subject.call(**self.arguments))
        made = {name: result.get() for name, result in zip(self.outputs, results, strict=True)}
        return {**made, **self._read_beside()}

    def reports(self, got: dict[str, operators.Array]) -> list[Report]:
        """How outputs compare with the references."""
        rows = zip(got.items(), self.same.values(), self.exact.values(), strict=True)
        return [compare.compare(name, value, same, exact) for (name, value), same, exact in rows]


def check_case(operator: str, case: Case, seed: int = 0) -> list[Report]:
    """Run a case with the caller's outputs and with allocated ones; a report for each output of both.

    Raises Mismatch when the call wrote outside its outputs.
    """
    run = Run(Subject(operator), case, seed)
    return [*run.reports(run.launch()), *run.reports(run.allocated())]


def check_same_bits(operator: str, case: Case, repeats: int = REPEATS, seed: int = 0) -> None:
    """Run a case again and again into poisoned outputs. Raises Mismatch unless the bits are equal every time."""
    run = Run(Subject(operator), case, seed)
    first = run.launch()
    for repeat in range(2, repeats + 1):
        for name, value in run.launch().items():
            if value.tobytes() != first[name].tobytes():
                raise Mismatch(f"{operator} {case.name}: run {repeat} of {repeats} gave other bits in {name}")


def repeatable(subject: Subject) -> list[Case]:
    """The cheapest cases of each intent among those that promise equal bits.

    Those are all, but for an operator with a `deterministic` option those that ask for it.
    """
    if "deterministic" not in inspect.signature(subject.call).parameters:
        return subject.small_grid()
    return subject.small_grid(keep=lambda case: getattr(case, "deterministic", False))


@dataclass(frozen=True, slots=True)
class Step:
    """One line of the closing table: what was checked, how it went, how long it took, where its log is."""

    operator: str
    name: str
    passed: bool
    note: str
    seconds: float


def _timed(operator: str, name: str, work: Callable[[], str]) -> Step:
    start = time.monotonic()
    try:
        note, passed = work(), True
    except Exception as error:
        note, passed = f"{type(error).__name__}: {error}", False
    return Step(operator, name, passed, note, time.monotonic() - start)


def run_cases(subject: Subject, cases: Sequence[Case], recorder: Recorder | None = None) -> str:
    """Check cases; returns a line of statistics. Raises Mismatch with all failures."""
    import cupy

    failures, worst = [], 0.0
    for case in cases:
        try:
            reports = check_case(subject.name, case)
            compare.require(reports)
        except Mismatch as mismatch:
            failures.append(f"{case.name}: {mismatch}")
            continue
        worst = max([worst, *(report.error / report.limit for report in reports if report.limit)])
        if recorder:
            recorder.record(subject.name, case, reports)
        cupy.get_default_memory_pool().free_all_blocks()
    if failures:
        raise Mismatch(f"{len(failures)} of {len(cases)} cases failed\n" + "\n".join(failures))
    return f"{len(cases)} cases, worst error {worst:.2f} of its limit"


def _repeat(subject: Subject, found: dict[str, int]) -> str:
    cases = repeatable(subject)
    for case in cases:
        check_same_bits(subject.name, case)
    found.update(cases=len(cases), runs=REPEATS)
    return f"{len(cases)} cases, {REPEATS} runs each, equal bits"


def _sanitize(subject: Subject, tool: str, out: Path, timeout: float, found: dict[str, str]) -> str:
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    log = out / f"{subject.name}.{tool}.log"
    worker = [sys.executable, "-m", "cupymla.testing.gpu", "cases", subject.name, "--small", "--plain-allocations"]
    command = [program, "--tool", tool, "--error-exitcode", "9", *worker]
    with log.open("w") as stream:
        done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, timeout=timeout, check=False)
    summary = [line for line in log.read_text(errors="replace").splitlines() if "SUMMARY" in line]
    text = summary[-1].lstrip("= ") if summary else f"exit status {done.returncode}"
    if done.returncode:
        raise Mismatch(f"{text}, see {log}")
    found[tool] = text
    return f"{text} ({SANITIZERS[tool]})"


def check(subject: Subject, out: Path, sanitizers: Sequence[str], timeout: float) -> list[Step]:
    """Everything for one operator; writes evidence when all cases passed with equal bits and clean sanitizers."""
    recorder = Recorder()
    repeats: dict[str, int] = {}
    summaries: dict[str, str] = {}
    steps = [
        _timed(subject.name, "cases", lambda: run_cases(subject, subject.cases.CASES, recorder)),
        _timed(subject.name, "same bits", lambda: _repeat(subject, repeats)),
    ]
    for tool in sanitizers:
        work = functools.partial(_sanitize, subject, tool, out, timeout, summaries)
        steps.append(_timed(subject.name, tool, work))
    if all(step.passed for step in steps):
        steps.append(_timed(subject.name, "evidence", lambda: _keep(recorder, repeats, summaries)))
    return steps


def _keep(recorder: Recorder, repeats: dict[str, int], sanitizers: dict[str, str]) -> str:
    files = recorder.write(repeats=repeats, sanitizers=sanitizers)
    return ", ".join(map(str, files)) or "nothing to write"


def _show(steps: Sequence[Step], out: Path) -> None:
    details = [f"-- {step.operator} {step.name}\n{step.note}" for step in steps]
    (out / "details.txt").write_text("\n".join(details) + "\n")
    print(f"{'operator':24} {'check':10} {'':6} {'seconds':>8}  note")
    for step in steps:
        note = step.note.splitlines()[0][:120] if step.note else ""
        print(f"{step.operator:24} {step.name:10} {'ok' if step.passed else 'FAILED':6} {step.seconds:8.1f}  {note}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cupymla.testing.gpu", description="Check operators on this GPU.")
    commands = parser.add_subparsers(dest="command", required=True)
    full = commands.add_parser("check", help="cases, repetition, sanitizers, evidence")
    full.add_argument("operators", nargs="*", metavar="OP", help="default: every operator with a kernel for this GPU")
    full.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder for logs (default: gpu-check)")
    full.add_argument("--sanitizers", nargs="*", choices=list(SANITIZERS), default=list(SANITIZERS))
    full.add_argument("--timeout", type=float, default=300.0, help="seconds for one sanitizer run (default: 300)")
    cases = commands.add_parser("cases", help="the cases alone")
    cases.add_argument("operators", nargs="+", metavar="OP")
    cases.add_argument("--small", action="store_true", help="the cheapest cases of each intent")
    cases.add_argument("--plain-allocations", action="store_true", help="one cudaMalloc per array, for memcheck")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 when all passed, 1 when something failed, 2 without a GPU or a kernel for it."""
    from .. import driver

    options = _parser().parse_args(arguments)
    if not driver.available():
        print("this needs a CUDA GPU, and there is none on this machine", file=sys.stderr)
        return 2
    names = options.operators or [entry.name for entry in registry.OPERATORS]
    capability = driver.compute_capability(0)
    subjects = [Subject(name) for name in names if operators.kernel_for(registry.named(name), capability)]
    if not subjects:
        print(f"no kernel for {driver.device_name(0)} among: {', '.join(names)}", file=sys.stderr)
        return 2
    if options.command == "cases":
        return _run_plain(subjects, options.small, options.plain_allocations)
    options.out.mkdir(parents=True, exist_ok=True)
    steps = [step for s in subjects for step in check(s, options.out, options.sanitizers, options.timeout)]
    _show(steps, options.out)
    return 0 if all(step.passed for step in steps) else 1


def _run_plain(subjects: Sequence[Subject], small: bool, plain_allocations: bool) -> int:
    import cupy

    if plain_allocations:
        # A pool hands out parts of large blocks, inside which an overrun goes unseen.
        cupy.cuda.set_allocator(None)
    for subject in subjects:
        print(subject.name, run_cases(subject, subject.small_grid() if small else subject.cases.CASES))
    return 0


if __name__ == "__main__":
    sys.exit(main())
