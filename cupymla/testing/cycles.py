"""Where an operator's time would go on a Hopper GPU: recorded in the interpreter, replayed against a clock.

    python -m cupymla.testing.cycles OP --case NAME [--against FOLDER] [--set NAME=VALUE] [--rate NAME=VALUE]

An estimate: docs/cycles.md says what it takes for granted. Cases are those of `BENCH` and `CASES`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from .. import arch as arches
from .. import build
from ..cli.terminal import Terminal, exit_with
from ..errors import CupymlaError, InputError, UnsupportedError
from ..interpret import Program
from ..interpret.cycles import Rates, Recorder, Replayed, Trace, replay, report
from ..interpret.cycles.costs import of_machine_code
from ..interpret.cycles.rates import FROM_MEMORY
from ..interpret.cycles.trace import SECTOR, Run
from ..interpret.traps import Trap
from ..ops import registry
from ..ops.case import Case
from . import against, machine_code
from .against import Variant
from .interpreted import interpreted
from .operators import Subject
from .without_gpu import READS_UNWRITTEN

QUERIES = 2
MULTIPROCESSORS = 2
# Of operators whose cases have no queries to leave out: an H200, of whose CTAs some are run.
ALL_MULTIPROCESSORS = 132
BLOCK = 64  # slots of a KV block of the kernels for sm_90a
PLACES = 12
GHZ = 1.755  # at which the rates were counted


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch of a recorded call.

    Attributes:
        kernel: its entry.
        trace: what its warps did.
        machine_code: whether instructions were counted in machine code, not in PTX.
    """

    kernel: str
    trace: Trace
    machine_code: bool


def record(
    subject: Subject,
    case: Case,
    variant: Variant,
    arch: str = "sm_90a",
    multiprocessors: int = MULTIPROCESSORS,
    ctas: int | None = None,
    ptx_costs: bool = False,
    in_l2: Sequence[str] = (),
) -> list[Launch]:
    """Run a case in the interpreter and write down what each launch's warps do.

    Args:
        subject: the operator.
        case: its problem.
        variant: of the kernels or of the plan.
        arch: the target.
        multiprocessors: that plans are made for.
        ctas: the first so many of each launch are run, in whole clusters; None for all.
        ptx_costs: whether instructions are counted in PTX also where there is a disassembler.
        in_l2: arguments that are in L2 from the start, as other CTAs ask for them too.

    Raises Trap, UnsupportedError for a case that the target has no kernel for, and InputError for one that launches
    nothing, that does not come to an end without the CTAs left out, or that has no such argument to be in L2.
    """
    recorders: list[Recorder] = []
    counted: dict[int, dict[int, Run]] = {}

    def watch(program: Program) -> Recorder:
        if id(program) not in counted and not ptx_costs:
            with machine.real_cupy():
                text = machine_code.by_ptx_line(build.cubin(machine.source(program)))
            counted[id(program)] = of_machine_code(text or "")
        recorders.append(Recorder(program, counted.get(id(program)) or None))
        return recorders[-1]

    with interpreted(arch, multiprocessors) as machine, variant.applied():
        machine.watch = watch
        machine.ctas = ctas
        machine.strict = subject.name not in READS_UNWRITTEN
        try:
            machine.results(subject, subject.cases.inputs(case, 0))
        except Trap as trap:
            if ctas is None:
                raise
            raise InputError(
                "--ctas", "as many CTAs as the launches need from each other", f"{ctas}: {trap}", subject.name
            ) from trap
        launched = list(machine.launched)
        places = {name: machine.places(name) for name in in_l2}
        by_code = [bool(counted.get(id(recorder.program))) for recorder in recorders]
    if not launched:
        raise InputError("--case", "a case that launches a kernel", case.name, subject.name)
    for name, found in places.items():
        if not found:
            raise InputError("--in-l2", "an array among the case's arguments", repr(name), subject.name)
    sectors = tuple((first // SECTOR, -(-behind // SECTOR)) for found in places.values() for first, behind in found)
    for recorder in recorders:
        recorder.trace.in_l2 = sectors
    return [Launch(name, rec.trace, code) for name, rec, code in zip(launched, recorders, by_code, strict=True)]


def replayed(launches: Sequence[Launch], rates: Rates, resident: int = 1) -> list[tuple[Launch, Replayed]]:
    """Each launch with what the clock says of it, so many CTAs to a multiprocessor."""
    return [(launch, replay(launch.trace, rates, resident)) for launch in launches]


def longest(found: Sequence[tuple[Launch, Replayed]]) -> tuple[Launch, Replayed]:
    """The launch whose last CTA ends last."""
    return max(found, key=lambda pair: pair[1].cycles)


def microseconds(cycles: float) -> float:
    """Cycles at the clock that the rates were counted with."""
    return cycles / (1000 * GHZ)


def sharing(ctas: int, resident: int) -> str:
    """How many CTAs were recorded and how they share multiprocessors, in words."""
    each = "each with a multiprocessor to itself" if resident == 1 else f"{resident} to a multiprocessor"
    return "1 CTA with a multiprocessor to itself" if ctas == 1 else f"{ctas} CTAs, {each}"


def shortened(case: Case, queries: int) -> Case:
    """A case with fewer queries, where it has a number of them."""
    s_q = getattr(case, "s_q", None)
    return case if s_q is None or s_q <= queries else replace(case, s_q=queries)  # type: ignore[call-arg]


def halved(case: Case) -> Case | None:
    """The same case with half of the slots; None where it has no slots, or too few for two blocks."""
    topk = getattr(case, "topk", 0)
    return replace(case, topk=topk // 2) if topk >= 4 * BLOCK else None  # type: ignore[call-arg]


def rates_from(settings: Sequence[str], base: Rates | None = None) -> Rates:
    """The default rates, or others, with some of them set, as NAME=VALUE. Raises InputError for what is none."""
    known = [field.name for field in fields(Rates)]
    chosen: dict[str, float] = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        divides = name.endswith("_bytes") or name in ("tensor_columns", "warp_products")
        if name not in known or not (0 <= value < math.inf) or (divides and value == 0):
            raise InputError("--rate", "NAME=NUMBER, not negative, with a name of " + ", ".join(known), repr(setting))
        chosen[name] = value
    return replace(base or Rates(), **chosen)


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
    parser.add_argument(
        "--multiprocessors",
        type=int,
        help=f"that plans are made for (default: {MULTIPROCESSORS}; {ALL_MULTIPROCESSORS} for cases without queries)",
    )
    parser.add_argument(
        "--ctas",
        type=int,
        metavar="N",
        help="only the first CTAs of each launch (default: all; for cases without queries those of a multiprocessor)",
    )
    parser.add_argument("--resident", type=int, default=1, metavar="N", help="CTAs to a multiprocessor (default: 1)")
    parser.add_argument("--ptx-costs", action="store_true", help="count instructions in PTX, not in machine code")
    parser.add_argument("--arch", default="sm_90a", metavar="SM", help="a target up to sm_90a")
    parser.add_argument("--against", action="append", default=[], metavar="FOLDER", help="another cuda/; repeatable")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="as bench takes it; repeatable"
    )
    parser.add_argument("--rate", action="append", default=[], metavar="NAME=VALUE", help="of Rates; repeatable")
    parser.add_argument("--from-memory", action="store_true", help="what is asked for first comes from device memory")
    parser.add_argument(
        "--in-l2", action="append", default=[], metavar="NAME", help="an argument that other CTAs read too; repeatable"
    )
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except (InputError, UnsupportedError) as error:
        parser.error(str(error))
    except CupymlaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    subject, terminal = Subject(options.operator), Terminal(False)
    rates = rates_from(options.rate, FROM_MEMORY if options.from_memory else None)
    if arches.named(options.arch).capability > (9, 0):
        raise InputError(
            "--arch", "a target that the interpreter runs, such as sm_90a", repr(options.arch), subject.name
        )
    for name in ("queries", "multiprocessors", "ctas", "resident"):
        if (given := getattr(options, name)) is not None and given < 1:
            raise InputError(f"--{name}", "at least 1", str(given), subject.name)
    every = (*subject.cases.CASES, *subject.cases.BENCH)
    case = shortened(subject.those(every, [options.case])[0], options.queries)
    few = hasattr(case, "s_q")
    multiprocessors = options.multiprocessors or (MULTIPROCESSORS if few else ALL_MULTIPROCESSORS)
    ctas = options.ctas or (None if few else options.resident)

    def found_of(case: Case, variant: Variant) -> list[tuple[Launch, Replayed]]:
        launches = record(subject, case, variant, options.arch, multiprocessors, ctas, options.ptx_costs, options.in_l2)
        return replayed(launches, rates, options.resident)

    variants = against.variants(subject, [Path(folder) for folder in options.against], options.set)
    rows: list[tuple[str, ...]] = []
    first, recorded, counted = 0.0, 0, "PTX"
    for number, variant in enumerate(variants):
        found = found_of(case, variant)
        (launch, taken), block = longest(found), ""
        whole = report.last_end(taken)
        if (less := halved(case)) is not None:
            half = report.last_end(longest(found_of(less, variant))[1])
            blocks = (getattr(case, "topk", 0) - getattr(less, "topk", 0)) / BLOCK
            block = f"{(whole - half) / blocks:.0f}"
        if number == 0:
            first, recorded = taken.cycles, len(launch.trace.clusters)
            counted = "machine code" if launch.machine_code else "PTX"
            for one in found:
                _details(terminal, *one)
        last, time = f"{taken.cycles:.0f}", f"{microseconds(taken.cycles):.2f}"
        rows.append((variant.label, launch.kernel, f"{whole:.0f}", last, time, block, f"{taken.cycles / first:.3f}"))
    where = "comes from device memory when it is asked for first" if options.from_memory else "is in L2"
    shared = sharing(recorded, options.resident)
    terminal.line(f"Instructions counted in {counted}; what is read {where}; {shared}.")
    columns = (
        *("variant", "longest launch", "first CTA", "last CTA", f"us at {GHZ} GHz"),
        *(f"each {BLOCK} slots", "of the first"),
    )
    terminal.table(f"{case.name}: cycles, estimated", columns, rows)
    return 0


if __name__ == "__main__":
    exit_with(main)
