"""Where an operator's time would go on a Hopper GPU: recorded in the interpreter, replayed against a clock.

    python -m cupymla.testing.cycles OP --case NAME [--against FOLDER] [--set NAME=VALUE] [--rate NAME=VALUE]

An estimate: docs/cycles.md says what it takes for granted. Cases are those of `BENCH` and `CASES`.
"""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from .. import build
from ..cli.terminal import Terminal, exit_with
from ..errors import InputError, UnsupportedError
from ..interpret import Program
from ..interpret.cycles import Rates, Recorder, Replayed, Trace, replay, report
from ..interpret.cycles.costs import of_machine_code
from ..ops import registry
from ..ops.case import Case
from . import against, machine_code
from .against import Variant
from .interpreted import interpreted
from .operators import Subject
from .without_gpu import READS_UNWRITTEN, is_interpreted

QUERIES = 2
MULTIPROCESSORS = 2
BLOCK = 64  # slots of a KV block of the kernels for sm_90a
PLACES = 12


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch of a recorded call: the kernel's entry and what its warps did."""

    kernel: str
    trace: Trace


def record(
    subject: Subject,
    case: Case,
    variant: Variant,
    arch: str = "sm_90a",
    multiprocessors: int = MULTIPROCESSORS,
    ctas: int | None = None,
) -> list[Launch]:
    """Run a case in the interpreter and write down what each launch's warps do.

    Args:
        subject: the operator.
        case: its problem.
        variant: of the kernels or of the plan.
        arch: the target.
        multiprocessors: that plans are made for.
        ctas: the first so many of each launch are run; None for all.

    Raises Trap, UnsupportedError for a case that the target has no kernel for, and InputError for one that launches
    nothing.
    """
    recorders: list[Recorder] = []

    def watch(program: Program) -> Recorder:
        with machine.real_cupy():
            text = machine_code.by_ptx_line(build.cubin(machine.source(program)))
        recorders.append(Recorder(program, None if text is None else of_machine_code(text)))
        return recorders[-1]

    with interpreted(arch, multiprocessors) as machine, variant.applied():
        machine.watch = watch
        machine.ctas = ctas
        machine.strict = subject.name not in READS_UNWRITTEN
        machine.results(subject, subject.cases.inputs(case, 0))
        launched = list(machine.launched)
    if not launched:
        raise InputError("--case", "a case that launches a kernel", case.name, subject.name)
    return [Launch(name, recorder.trace) for name, recorder in zip(launched, recorders, strict=True)]


def replayed(launches: Sequence[Launch], rates: Rates, resident: int = 1) -> list[tuple[Launch, Replayed]]:
    """Each launch with what the clock says of it, so many CTAs to a multiprocessor."""
    return [(launch, replay(launch.trace, rates, resident)) for launch in launches]


def longest(found: Sequence[tuple[Launch, Replayed]]) -> tuple[str, float]:
    """The kernel whose launch's first CTA takes longest, and how many cycles it takes."""
    cycles, kernel = max((report.last_end(taken), launch.kernel) for launch, taken in found)
    return kernel, cycles


def shortened(case: Case, queries: int) -> Case:
    """A case with fewer queries, where it has a number of them."""
    s_q = getattr(case, "s_q", None)
    return case if s_q is None or s_q <= queries else replace(case, s_q=queries)  # type: ignore[call-arg]


def halved(case: Case) -> Case | None:
    """The same case with half of the slots; None where it has no slots, or too few for two blocks."""
    topk = getattr(case, "topk", 0)
    return replace(case, topk=topk // 2) if topk >= 4 * BLOCK else None  # type: ignore[call-arg]


def named(subject: Subject, name: str) -> Case:
    """A case by its name. Raises InputError for an unknown one."""
    known: dict[str, Case] = {case.name: case for case in (*subject.cases.CASES, *subject.cases.BENCH)}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3) or sorted(known)[:3]
        raise InputError("--case", "a case such as " + ", ".join(near), repr(name), subject.name)
    return known[name]


def rates_from(settings: Sequence[str]) -> Rates:
    """The default rates with some of them set, as NAME=VALUE. Raises InputError for what is none."""
    known = [field.name for field in fields(Rates)]
    chosen: dict[str, float] = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        divides = name.endswith("_bytes") or name == "tensor_columns"
        if name not in known or not (0 <= value < math.inf) or (divides and value == 0):
            raise InputError("--rate", "NAME=NUMBER, not negative, with a name of " + ", ".join(known), repr(setting))
        chosen[name] = value
    return replace(Rates(), **chosen)


def _details(terminal: Terminal, launch: Launch, taken: Replayed) -> None:
    shares = report.busy(taken)
    at_work = [(name, f"{100 * share:.0f}%") for name, share in shares.items() if share >= 0.005]
    terminal.table(f"{launch.kernel}: what was at work", ("what", "of the time"), at_work)
    for warp in report.leaders(taken):
        first = warp.recorded.warp
        kinds = ", ".join(f"{s.what} {s.cycles:.0f}" for s in report.shares(launch.trace, warp, False)[:8])
        rows = [(f"{s.cycles:.0f}", s.what, s.place) for s in report.shares(launch.trace, warp, True)[:PLACES]]
        terminal.table(f"warps {first} to {first + 3}, cycles: {kinds}", ("cycles", "what", "where"), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m cupymla.testing.cycles", description=__doc__.splitlines()[0])
    parser.add_argument("operator", metavar="OP", choices=[entry.name for entry in registry.OPERATORS])
    parser.add_argument("--case", required=True, metavar="NAME", help="of BENCH or CASES")
    parser.add_argument("--queries", type=int, default=QUERIES, help=f"at most so many (default: {QUERIES})")
    parser.add_argument("--multiprocessors", type=int, default=MULTIPROCESSORS, help="that plans are made for")
    parser.add_argument("--arch", default="sm_90a", metavar="SM", help="a target up to sm_90a")
    parser.add_argument("--against", action="append", default=[], metavar="FOLDER", help="another cuda/; repeatable")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="as bench takes it; repeatable"
    )
    parser.add_argument("--rate", action="append", default=[], metavar="NAME=VALUE", help="of Rates; repeatable")
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except (InputError, UnsupportedError) as error:
        parser.error(str(error))


def _run(options: argparse.Namespace) -> int:
    subject, rates, terminal = Subject(options.operator), rates_from(options.rate), Terminal(False)
    if not is_interpreted(options.arch):
        raise InputError(
            "--arch", "a target that the interpreter runs, such as sm_90a", repr(options.arch), subject.name
        )
    for name in ("queries", "multiprocessors"):
        if (given := getattr(options, name)) < 1:
            raise InputError(f"--{name}", "at least 1", str(given), subject.name)
    case = shortened(named(subject, options.case), options.queries)
    variants = against.variants(subject, [Path(folder) for folder in options.against], options.set)
    rows: list[tuple[str, ...]] = []
    first = 0.0
    for number, variant in enumerate(variants):
        found = replayed(record(subject, case, variant, options.arch, options.multiprocessors), rates)
        (kernel, whole), block = longest(found), ""
        if (less := halved(case)) is not None:
            _, half = longest(replayed(record(subject, less, variant, options.arch, options.multiprocessors), rates))
            blocks = (getattr(case, "topk", 0) - getattr(less, "topk", 0)) / BLOCK
            block = f"{(whole - half) / blocks:.0f}"
        if number == 0:
            first = whole
            for launch, taken in found:
                _details(terminal, launch, taken)
        rows.append((variant.label, kernel, f"{whole:.0f}", block, f"{whole / first:.3f}"))
    title = f"{case.name}: cycles, estimated"
    terminal.table(title, ("variant", "longest launch", "first CTA", f"each {BLOCK} slots", "of the first"), rows)
    return 0


if __name__ == "__main__":
    exit_with(main)
