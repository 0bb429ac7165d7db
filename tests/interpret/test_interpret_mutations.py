"""A kernel that lacks one wait, arrival, fence or barrier is found out: by a trap, a deadlock or a wrong result.

`python tests/interpret/test_interpret_mutations.py` takes each synchronising instruction of sparse_mla_fwd away in
turn and prints what was not noticed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import pytest

from cupymla.arch import named
from cupymla.interpret import Trap, program_of
from cupymla.interpret.instructions import bind
from cupymla.interpret.operands import Operands
from cupymla.interpret.program import Program, Step
from cupymla.interpret.threads import Lanes
from cupymla.ops.mla_cases import MlaCase
from cupymla.ops.sparse_mla_fwd import cases, plan, spec
from cupymla.testing import compare
from cupymla.testing.interpreted import Interpreted, interpreted

CASE = next(case for case in cases.CASES if case.name == "h16_d576_k400_q9_kv500_few")
MULTIPROCESSORS = 1

KINDS = {
    "wait for an mbarrier": ("mbarrier.try_wait",),
    "arrival on an mbarrier": ("mbarrier.arrive", "cp.async.mbarrier.arrive"),
    "named barrier": ("barrier.sync", "bar.sync"),
    "wait for wgmma": ("wgmma.wait_group",),
    "fence for wgmma": ("wgmma.fence",),
    "proxy fence": ("fence.proxy.async",),
}


def kind_of(step: Step) -> str | None:
    opcode = ".".join(step.parts)
    return next((kind for kind, starts in KINDS.items() if opcode.startswith(starts)), None)


def sites(program: Program) -> Iterator[tuple[Step, str]]:
    """Every synchronising instruction of a kernel."""
    for step in program.steps:
        kind = kind_of(step)
        if kind is not None:
            yield step, kind


def without(program: Program, step: Step) -> mock._patch[object]:
    """The program in which an instruction does nothing; a poll says that what it polls for has happened."""
    assert program.bound
    if step.parts[0] == "mbarrier" and step.parts[1] == "try_wait":
        put = Operands(program).write(step.operands[0], "pred")

        def true(lanes: Lanes) -> None:
            put(lanes, np.ones(lanes.count, np.bool_))

        return mock.patch.object(step, "run", true)
    return mock.patch.object(step, "run", lambda lanes: None)


def outcome(machine: Interpreted, case: MlaCase) -> str:
    """ "" when a run went well, else how it failed."""
    machine.max_steps = 3_000_000
    machine.races = "practice"
    try:
        compare.require(machine.check("sparse_mla_fwd", case))
    except Trap as trap:
        return trap.what[:200]
    except compare.Mismatch:
        return "a wrong result"
    return ""


def program(case: MlaCase, multiprocessors: int) -> Program:
    """The kernel of a case, bound: a step that is replaced before that is bound over, and left unbound afterwards."""
    _, problem = spec.read(**cases.inputs(case, 0))
    kernel = program_of(plan.plan(problem, named("sm_90a"), multiprocessors).source)
    bind(kernel)
    return kernel


def reached(kernel: Program) -> set[int]:
    """Lines of the synchronising instructions that the case executes at all."""
    lines: set[int] = set()

    def seen(step: Step) -> Callable[[Lanes], object]:
        run = step.run

        def watched(lanes: Lanes) -> object:
            lines.add(step.line)
            return run(lanes)

        return watched

    with contextlib.ExitStack() as stack:
        for step, _ in sites(kernel):
            stack.enter_context(mock.patch.object(step, "run", seen(step)))
        with interpreted(multiprocessors=MULTIPROCESSORS) as machine:
            assert outcome(machine, CASE) == ""
    return lines


def noticed(kernel: Program, step: Step, seeds: int = 2) -> str:
    """How the lack of an instruction shows, "" when it does not."""
    with without(kernel, step):
        for seed in range(seeds):
            with interpreted(multiprocessors=MULTIPROCESSORS, seed=seed) as machine:
                found = outcome(machine, CASE)
            if found:
                return found
    return ""


@pytest.mark.compile
@pytest.mark.parametrize("kind", KINDS)
def test_one_of_each_kind_is_missed(kind: str) -> None:
    kernel = program(CASE, MULTIPROCESSORS)
    steps = [step for step, found in sites(kernel) if found == kind]
    assert any(noticed(kernel, step, seeds=1) for step in steps[:3])


if __name__ == "__main__":
    kernel = program(CASE, MULTIPROCESSORS)
    counts: dict[str, list[int]] = {kind: [0, 0] for kind in KINDS}
    executed = reached(kernel)
    for step, kind in sites(kernel):
        if step.line not in executed:
            continue
        found = noticed(kernel, step)
        counts[kind][0] += bool(found)
        counts[kind][1] += 1
        print(f"{kind:24} line {step.line:6} {found or 'NOT NOTICED':60} {step.text}", flush=True)
    for kind, (caught, total) in counts.items():
        print(f"{kind:24} {caught} of {total}")
    sys.exit(0)
