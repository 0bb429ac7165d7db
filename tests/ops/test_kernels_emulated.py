"""Every kernel for sm_80 to sm_90a without a GPU: operators' own plans and bindings, run on the host machine, keep the
accuracy criterion. Blackwell's have tests of their own, with fewer queries.

The cheapest case of each intent runs always, and the next one where a kernel of it is new: on one of the targets that
share the kernel's source, for one number of multiprocessors out of several and in one mode, so that all targets, plans
that group, that do not and that split, and all modes, have their turn. `--interpret-all` runs every small case on every
target for three of them.
Compiles, needs no GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from variants_kit import shown_by

from cupymla import arch as arches
from cupymla.arch import Gpu
from cupymla.ops import registry
from cupymla.ops.case import Case
from cupymla.ops.registry import KernelEntry
from cupymla.testing import compare
from cupymla_lab.emulated import emulated
from cupymla_lab.subjects import Subject, cheapest
from cupymla_lab.without_gpu import machine_for, mode_of, multiprocessors, small_cases

CHEAP_FLOPS = 4e7
TURNS = 3  # numbers of multiprocessors for a case


def subjects() -> Iterator[tuple[Subject, list[str], set[str]]]:
    """Each operator with the targets that have kernels of one source, and the names of those kernels."""
    for entry in registry.OPERATORS:
        targets: dict[str, list[KernelEntry]] = {}
        for kernel in entry.kernels:
            if arches.named(kernel.arch).capability < (10, 0):
                targets.setdefault(kernel.first or kernel.arch, []).append(kernel)
        for kernels in targets.values():
            archs = list(dict.fromkeys(kernel.arch for kernel in kernels))
            yield Subject(entry.name), archs, {name for kernel in kernels for name in kernel.names}


def always(subject: Subject, archs: list[str], names: set[str]) -> dict[str, int]:
    """The names of the cases that run without being asked for, each with its turn: the cheapest of each intent, and
    the next one where it shows a definition of a kernel that none before it does."""
    chosen: dict[str, int] = {}
    intents, seen = set[str](), set[tuple[object, ...]]()
    counts = multiprocessors(subject.name)
    cheap = cheapest(subject, 2, keep=lambda case: subject.cases.flops(case) <= CHEAP_FLOPS)
    for turn, case in enumerate(cheap):
        arch = arches.named(archs[turn % len(archs)])
        gpu = Gpu(arch, arch.capability, counts[turn % len(counts)])
        wanted = subject.sources(subject.cases.inputs(case, 0), gpu)
        if wanted and names.isdisjoint(source.entry for source in wanted):
            continue  # a kernel of another source
        shown = set().union(*(shown_by(source, 1) for source in wanted))
        if case.intent not in intents or not seen.issuperset(shown):
            chosen[case.name] = turn
            intents.add(case.intent)
            seen |= shown
    return chosen


def parameters() -> list[object]:
    found: dict[str, tuple[str, str, Case, int]] = {}
    asked: set[str] = set()
    for subject, archs, names in subjects():
        chosen = always(subject, archs, names)
        counts = multiprocessors(subject.name)
        for number, case in enumerate(small_cases(subject)):
            first = chosen.get(case.name, number)
            for turn, arch in itertools.product(range(first, first + TURNS), archs):
                name = f"{subject.name}-{arch}-{case.name}-{counts[turn % len(counts)]}-{mode_of(turn)}"
                runs = case.name in chosen and turn == first and arch == archs[first % len(archs)]
                if runs or name not in asked:
                    found[name] = (subject.name, arch, case, turn)
                if runs:
                    asked.add(name)
    marks = {name: [] if name in asked else [pytest.mark.interpret_all] for name in found}
    return [pytest.param(*given, id=name, marks=marks[name]) for name, given in found.items()]


@pytest.mark.compile
@pytest.mark.parametrize(("operator", "arch", "case", "turn"), parameters())
def test_kernel_meets_the_accuracy_criterion(operator: str, arch: str, case: Case, turn: int) -> None:
    with machine_for(operator, arch, turn) as machine:
        compare.require(machine.check(operator, case))


@pytest.mark.compile
def test_plans_of_all_kinds_are_run() -> None:
    """The numbers of multiprocessors above make sparse_mla_fwd share queries, not share them, and split them."""
    case = {c.name: c for c in Subject("sparse_mla_fwd").cases.CASES}["h24_d576_k500_q3_kv600_lengths"]
    clusters = set()
    for count in (1, 132):
        with emulated("sm_90a", count) as machine:
            compare.require(machine.check("sparse_mla_fwd", case))
            clusters |= {geometry.cluster for geometry in machine.launches}
    assert min(clusters) == 1 < max(clusters)
