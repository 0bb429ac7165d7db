"""A kernel that lacks one wait, arrival, fence or barrier is found out: by a trap, a deadlock or a wrong result.

    python tests/interpret/test_interpret_mutations.py [OP CASE MULTIPROCESSORS [KERNEL]]

takes each synchronising instruction of an operator's kernels for sm_90a that a case executes away in turn, and narrows
each scope of a cluster to the CTA, and prints what was not noticed. Where there are two kernels, KERNEL says which one
is to run. Without arguments: of sparse_mla_fwd.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from cupymla.errors import InputError
from cupymla.ops import registry
from cupymla.ops.case import Case
from cupymla.testing import compare
from cupymla.testing.operators import Subject
from cupymla_lab import ab
from cupymla_lab.interpret import Program, Trap
from cupymla_lab.interpret.instructions.barriers import HANDLERS
from cupymla_lab.interpret.operands import Operands
from cupymla_lab.interpret.program import Step
from cupymla_lab.interpret.threads import Lanes
from cupymla_lab.interpreted import Interpreted, interpreted
from cupymla_lab.without_gpu import READS_UNWRITTEN

KINDS = {
    "wait for an mbarrier": ("mbarrier.try_wait",),
    "arrival on an mbarrier": ("mbarrier.arrive", "cp.async.mbarrier.arrive"),
    "barrier of a CTA": ("barrier.sync", "bar.sync", "barrier.red", "barrier.arrive"),
    "barrier of a warp": ("bar.warp.sync",),
    "barrier of a cluster": ("barrier.cluster",),
    "wait for cp.async": ("cp.async.wait",),
    "wait for wgmma": ("wgmma.wait_group",),
    "fence for wgmma": ("wgmma.fence",),
    "proxy fence": ("fence.proxy.async",),
    "another fence": ("fence.", "membar."),
}
SCOPE = "scope of a cluster"


class Fixture:
    """An operator's case on so many multiprocessors, and the kernels that it runs, each bound.

    A step that is replaced before its program is bound would be bound over, and left unbound afterwards.
    """

    def __init__(self, operator: str, case: str, multiprocessors: int, kernel: str | None = None) -> None:
        self.subject = Subject(operator)
        entries = (entry for entry in self.subject.entry.kernels if entry.name == kernel)
        self.kernel = None if kernel is None else next(entries)
        self.case: Case = next(made for made in self.subject.cases.CASES if made.name == case)
        self.multiprocessors = multiprocessors
        with self.machine(0) as machine:
            assert self.outcome(machine) == ""
            self.programs: list[Program] = list(machine.programs)

    @contextlib.contextmanager
    def machine(self, seed: int) -> Iterator[Interpreted]:
        wanted = contextlib.nullcontext() if self.kernel is None else ab.chosen(self.subject, self.kernel, self.case)
        with wanted, interpreted(multiprocessors=self.multiprocessors, seed=seed) as made:
            yield made

    def outcome(self, machine: Interpreted) -> str:
        """ "" when a run went well, else how it failed."""
        machine.max_steps = 3_000_000
        machine.races = "practice"
        machine.strict = self.subject.name not in READS_UNWRITTEN
        try:
            compare.require(machine.check(self.subject.name, self.case))
        except Trap as trap:
            return trap.what
        except compare.Mismatch:
            return "a wrong result"
        return ""

    def sites(self) -> Iterator[tuple[Step, str, mock._patch[object]]]:
        """Every mutation: the instruction, its kind, and what puts the mutation in place."""
        for program in self.programs:
            for step in program.steps:
                kind = kind_of(step)
                if kind is not None:
                    yield step, kind, without(program, step)
                if step.parts[0] == "mbarrier" and "cluster" in step.parts:
                    yield step, SCOPE, within_the_cta(program, step)

    def reached(self) -> set[int]:
        """The synchronising instructions that the case executes at all, by their identity."""
        found: set[int] = set()

        def seen(step: Step) -> Callable[[Lanes], object]:
            run = step.run

            def watched(lanes: Lanes) -> object:
                found.add(id(step))
                return run(lanes)

            return watched

        with contextlib.ExitStack() as stack:
            for step in {id(step): step for step, _, _ in self.sites()}.values():
                stack.enter_context(mock.patch.object(step, "run", seen(step)))
            with self.machine(0) as machine:
                assert self.outcome(machine) == ""
        return found

    def noticed(self, mutation: mock._patch[object], seeds: int = 2) -> str:
        """How a mutation shows, "" when it does not."""
        with mutation:
            for seed in range(seeds):
                with self.machine(seed) as machine:
                    found = self.outcome(machine)
                if found:
                    return found
        return ""


def kind_of(step: Step) -> str | None:
    opcode = ".".join(step.parts)
    return next((kind for kind, starts in KINDS.items() if opcode.startswith(starts)), None)


def without(program: Program, step: Step) -> mock._patch[object]:
    """The program in which an instruction does nothing; a poll says that what it polls for has happened."""
    assert program.operands is not None
    if step.parts[0] == "mbarrier" and step.parts[1] == "try_wait":
        put = Operands(program).write(step.operands[0], "pred")

        def true(lanes: Lanes) -> None:
            put(lanes, np.ones(lanes.count, np.bool_))

        return mock.patch.object(step, "run", true)
    return mock.patch.object(step, "run", lambda lanes: None)


def within_the_cta(program: Program, step: Step) -> mock._patch[object]:
    """The program in which an arrival or a wait has the scope of the CTA."""
    narrow = replace(step, parts=tuple("cta" if part == "cluster" else part for part in step.parts))
    return mock.patch.object(step, "run", HANDLERS[step.parts[0]](Operands(program), narrow))


@pytest.fixture(scope="module")
def forward() -> Fixture:
    return Fixture("sparse_mla_fwd", "h16_d576_k400_q9_kv500_few", 1)


@pytest.mark.compile
@pytest.mark.parametrize(
    "kind",
    ["wait for an mbarrier", "arrival on an mbarrier", "barrier of a CTA", "barrier of a warp", "wait for wgmma",
     "fence for wgmma", "proxy fence"],
)  # fmt: skip
def test_one_of_each_kind_is_missed(forward: Fixture, kind: str) -> None:
    mutations = [mutation for _, found, mutation in forward.sites() if found == kind]
    assert any(forward.noticed(mutation, seeds=1) for mutation in mutations[:3])


def chosen(arguments: Sequence[str]) -> tuple[str, str, int, str | None]:
    """What the command is to run: operator, case, multiprocessors, kernel. Ends the process where that cannot be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("operator", metavar="OP", nargs="?", choices=[entry.name for entry in registry.OPERATORS])
    parser.add_argument("case", metavar="CASE", nargs="?")
    parser.add_argument("multiprocessors", metavar="MULTIPROCESSORS", nargs="?", type=int)
    parser.add_argument("kernel", metavar="KERNEL", nargs="?", help="where a target has several")
    options = parser.parse_args(arguments)
    if options.operator is None:
        return "sparse_mla_fwd", "h16_d576_k400_q9_kv500_few", 1, None
    if options.multiprocessors is None or options.multiprocessors < 1:
        parser.error("OP wants a CASE and a number of MULTIPROCESSORS, at least 1")
    subject = Subject(options.operator)
    kernels = list(dict.fromkeys(kernel.name for kernel in subject.entry.kernels))
    if options.kernel not in (None, *kernels):
        parser.error(f"KERNEL: expected one of {', '.join(kernels)}, got {options.kernel!r}")
    try:
        subject.those(subject.cases.CASES, [options.case])
    except InputError as error:
        parser.error(str(error))
    return options.operator, options.case, options.multiprocessors, options.kernel


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sparse_mla"], "invalid choice: 'sparse_mla'"),
        (["sparse_mla_fwd", "h16_d576_k63_q3_kv300"], "wants a CASE and a number of MULTIPROCESSORS"),
        (["sparse_mla_fwd", "h16_d576_k63_q3_kv300", "0"], "wants a CASE and a number of MULTIPROCESSORS"),
        (["sparse_mla_fwd", "nothing_like_it", "1"], "expected a case of cupymla/ops/sparse_mla_fwd/cases.py such as"),
        (["sparse_mla_fwd", "h16_d576_k63_q3_kv300", "1", "joint"], "expected one of sparse_mla_fwd, got 'joint'"),
    ],
)
def test_what_the_command_cannot_run_is_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        chosen(words)
    assert message in capsys.readouterr().err
    assert chosen([])[0] == "sparse_mla_fwd"


def main() -> None:
    fixture = Fixture(*chosen(sys.argv[1:]))
    executed = fixture.reached()
    counts: dict[str, list[int]] = {}
    for step, kind, mutation in fixture.sites():
        if id(step) not in executed:
            continue
        found = fixture.noticed(mutation)
        tally = counts.setdefault(kind, [0, 0])
        tally[0] += bool(found)
        tally[1] += 1
        shown = f"{step.text} ({step.location})"
        print(f"{kind:24} line {step.line:6} {found[:160] or 'NOT NOTICED'} | {shown[:200]}", flush=True)
    for kind, (caught, total) in sorted(counts.items()):
        print(f"{kind:24} {caught} of {total}")


if __name__ == "__main__":
    main()
