"""Operators' small cases on a CPU: their kernels, recompiled, on the host machine (docs/emulation.md).

    python -m cupymla_lab without-gpu OP ... [--arch SM] [--kernel NAME] [--most-flops N]
    python -m cupymla_lab without-gpu OP --case NAME ... [--arch SM]        these cases alone; writes nothing
    python -m cupymla_lab without-gpu OP --sources FOLDER [--case NAME ...] kernels of another cuda/; writes nothing
    python -m cupymla_lab without-gpu OP --set plan.LIMIT=8 [...]           another value of a constant; the same
    python -m cupymla_lab without-gpu OP --list                             the names of all small cases

When all of a kernel's cases that are small enough pass, `tests/evidence/<op>.<kernel>.<arch>.cpu.json` says so.
That makes a kernel "emulated", never "verified".
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from cupymla import evidence
from cupymla.bench import machine
from cupymla.build import compiler
from cupymla.cli.terminal import exit_with
from cupymla.errors import InputError
from cupymla.evidence import WithoutGpu
from cupymla.ops import registry
from cupymla.ops.case import Case
from cupymla.ops.registry import KernelEntry
from cupymla.testing import compare
from cupymla.testing.compare import Report

from . import ab, recorder, subjects
from .emulate import MODES, Settings
from .emulate.settings import Mode
from .emulated import Emulated, emulated, strict_settings
from .ptx.approximation import ULPS
from .subjects import Subject

MULTIPROCESSORS = (1, 132, 3)
# nvfp4_gemv puts a CTA of up to 512 threads on every SM, however little there is to do, and a CPU's time goes by CTAs:
# few cases get many of them. The numbers are 13, so that each meets all six pairs of operands that cases go through.
MANY_MULTIPROCESSORS = {
    "nvfp4_gemv": (1, 17, 3, 5, 2, 9, 4, 132, 7, 24, 12, 6, 11),
    "xl_attention_cluster": (8, 132, 24),  # its clusters want eight
}
MOST_FLOPS = 4e8
TURNS = 3  # of a case that is asked for by name: one number of multiprocessors is one plan, one mode one order
# These kernels read shared memory past what they filled and drop what they read: it is NaN here, so it would show.
READS_UNWRITTEN = frozenset({"nvfp4_gemv"})


def multiprocessors(operator: str, kernel: str | None = None) -> tuple[int, ...]:
    """How many SMs machines for an operator have, in turn; or for one of its kernels alone."""
    of_kernel = MANY_MULTIPROCESSORS.get(kernel or "")
    return of_kernel or MANY_MULTIPROCESSORS.get(operator, MULTIPROCESSORS)


@contextmanager
def machine_for(operator: str, arch: str, turn: int, kernel: str | None = None) -> Iterator[Emulated]:
    """A block in which operators run on a CPU as on a GPU of that target.

    Args:
        operator: which one will run.
        arch: the target.
        turn: chooses the number of multiprocessors, the order of threads and the mode.
        kernel: the one that alone will run, where the target has another one as well.
    """
    counts = multiprocessors(operator, kernel)
    with emulated(arch, counts[turn % len(counts)], settings_for(operator, arch, turn)) as made:
        yield made


def mode_of(turn: int) -> Mode:
    """The mode of a turn: they come by turns, and meet three numbers of multiprocessors in all ways."""
    return MODES[(turn + turn // len(MODES)) % len(MODES)]


def settings_for(operator: str, arch: str, turn: int) -> Settings:
    """How the launches of a turn run."""
    # What a grid may do in wall-clock time says nothing on a machine with other work.
    plain = replace(strict_settings(arch), patience_seconds=60.0, approximation="scattered")
    checks = tuple(check for check in plain.checks if check != "written" or operator not in READS_UNWRITTEN)
    return replace(plain, mode=mode_of(turn), seed=turn, checks=checks)


def small_cases(subject: Subject, most_flops: float = MOST_FLOPS, kernel: KernelEntry | None = None) -> list[Case]:
    """The cases that a CPU can run, of all or of those that a kernel can run."""
    every = subject.cases.CASES if kernel is None else subject.cases_of(kernel)
    return [case for case in every if subject.cases.flops(case) <= most_flops]


def run_cases(
    subject: Subject, kernel: KernelEntry, cases: Sequence[Case], turns: int = 1, sources: Path | None = None
) -> list[Sequence[Report]] | None:
    """Run a kernel's cases, saying of each how it went; None when one failed.

    The kernel is chosen wherever its target has another one as well, and no other may run.

    Args:
        subject: the operator.
        kernel: the one to choose.
        cases: what to run.
        turns: how often a case runs, each time on another number of multiprocessors, in another mode and order.
        sources: the `cuda/` folder that kernels are compiled from, by default this package's.
    """
    arch = kernel.arch
    counts = multiprocessors(subject.name, kernel.name)
    variant = ab.here() if sources is None else ab.kernels_of(sources, "--sources")
    reports: list[Sequence[Report]] = []
    failed = 0
    for number, case in enumerate(cases):
        for turn in range(turns):
            start = time.monotonic()
            whole = turns * number + turn
            how = f"{counts[whole % len(counts)]} SM {mode_of(whole)}"
            what = f"{kernel.name} {arch} {case.name} {how}"
            try:
                with (
                    ab.chosen(subject, kernel, case),
                    machine_for(subject.name, arch, whole, kernel.name) as made,
                    variant.applied(),
                ):
                    found = made.check(subject.name, case)
                    subjects.require_launched(subject, kernel, case, made.launched)
                compare.require(found)
                reports.append(found)
            except Exception as error:
                failed += 1
                print(f"{what}: {type(error).__name__}: {error}", flush=True)
            else:
                ran = ", ".join(dict.fromkeys(made.launched)) or "nothing launched"
                print(f"{what}: ok, {time.monotonic() - start:.1f} s ({ran})", flush=True)
    return None if failed else reports


def run_kernel(subject: Subject, kernel: KernelEntry, most_flops: float) -> WithoutGpu | None:
    """Run a kernel's small cases; None when one failed."""
    chosen = small_cases(subject, most_flops, kernel)
    reports = run_cases(subject, kernel, chosen, len(MODES))
    digest = evidence.current_hash(subject.entry, kernel)
    if reports is None or digest is None:
        return None
    counts = ", ".join(map(str, multiprocessors(subject.name, kernel.name)))
    varied = f"modes: {', '.join(MODES)}; multiprocessors in turn: {counts}"
    return WithoutGpu(
        operator=subject.name,
        kernel=kernel.name,
        arch=kernel.arch,
        content_hash=digest,
        ran="emulated",
        how=f"{varied}; races looked for; ex2.approx off by up to {ULPS} ulp",
        toolkit=str(compiler.toolchain()),
        cases=len(chosen),
        of=len(subject.cases_of(kernel)),
        worst_errors=recorder.worst(reports),
        date=machine.today(),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 when all cases passed, 1 when one failed."""
    parser = argparse.ArgumentParser(prog="python -m cupymla_lab without-gpu", description=__doc__.splitlines()[0])
    parser.add_argument("operators", nargs="+", metavar="OP", choices=[entry.name for entry in registry.subjects()])
    parser.add_argument("--arch", action="append", metavar="SM", help="a target; repeatable (default: all)")
    parser.add_argument("--kernel", metavar="NAME", help="this kernel alone, where a target has several")
    parser.add_argument("--case", action="append", metavar="NAME", help="only this case; repeatable; writes nothing")
    parser.add_argument(
        "--sources", type=Path, metavar="FOLDER", help="kernels of another cuda/ folder; writes nothing"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="MODULE.NAME=VALUE",
        help="another value of a constant of the operator's package, as ab takes it; repeatable; writes nothing",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the names of the cases, each with what it protects")
    parser.add_argument(
        "--most-flops", type=float, default=MOST_FLOPS, metavar="N",
        help=f"larger cases are left out (default: {MOST_FLOPS:.0e})",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except InputError as error:
        parser.error(str(error))


def _run(options: argparse.Namespace) -> int:
    complete = True
    for name in options.operators:
        subject = Subject(name)
        kernels = [k for k in subject.entry.kernels if options.arch is None or k.arch in options.arch]
        if not kernels:
            raise InputError("--arch", "one of " + ", ".join(subject.entry.targets), ", ".join(options.arch), name)
        if options.kernel:
            known = dict.fromkeys(kernel.name for kernel in kernels)
            if options.kernel not in known:
                raise InputError("--kernel", "one of " + ", ".join(known), repr(options.kernel), name)
            kernels = [kernel for kernel in kernels if kernel.name == options.kernel]
        if options.list:
            for case in small_cases(subject, options.most_flops):
                print(f"{case.name}  ({case.intent})")
            continue
        if options.case or options.sources or options.set:
            every = small_cases(subject, options.most_flops)
            cases = subject.those(subject.cases.CASES, options.case) if options.case else every
            unserved = [case.name for case in cases if not any(case in subject.cases_of(k) for k in kernels)]
            if options.case and unserved:
                raise InputError("--case", f"cases of {options.kernel}", ", ".join(unserved), name)
            turns = TURNS if options.case else 1
            with ab.constants(subject, options.set):
                for kernel in kernels:
                    served = [case for case in cases if case in subject.cases_of(kernel)]
                    complete &= run_cases(subject, kernel, served, turns, options.sources) is not None
            continue
        for kernel in kernels:
            found = run_kernel(subject, kernel, options.most_flops)
            complete &= found is not None
            print(recorder.write_without_gpu(found) if found else f"{name} {kernel.arch}: not all cases passed")
    return 0 if complete else 1


if __name__ == "__main__":
    exit_with(main)
