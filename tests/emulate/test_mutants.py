"""Mutants as edits of PTX: the list of the survey is of today's kernels, and the host engine catches one of each kind,
and what a schedule model found: a missing wait for `room` in the backward of a pair of CTAs."""

from __future__ import annotations

import re
from collections.abc import Sequence

import mutant_engines
import mutants
import pytest
import survey_mutants
from conftest import HOST
from mutant_subjects import KERNELS
from mutants import Mutant

from cupymla import build
from cupymla.build import KernelSource, compiler
from cupymla.ops import registry
from cupymla.testing import operators

pytestmark = HOST

PTX = """.version 8.8
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 a0)
{
    .reg .pred %p<8>; .reg .b32 %r<8>; .reg .b64 %rd<8>;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], %r2;
    { .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%r1], %r3; @p bra DONE; bra WAIT; DONE: }
    setp.ge.s32 %p1, %r1, %r4;
    @%p1 bra $L__BB0_2;
    @!%p2 st.global.u32 [%rd1], %r1;
    @%p3 bar.sync 0;
$L__BB0_2:
    setp.lt.u32 %p4, %r1, 8;
    selp.b32 %r5, %r1, 0, %p4;
    fence.proxy.async.shared::cta;
    fence.proxy.async.shared::cta;
    ret;
}
"""


def test_what_is_taken_out_and_how() -> None:
    found = mutants.found(PTX, "kernel")
    shown = [(each.kind, each.ordinal, each.replacement, each.unguarded, each.binds) for each in found]
    assert shown == [
        ("expect_tx", 0, "mbarrier.arrive.shared::cta.b64 _, [%r1];", False, ""),
        ("wait", 0, "setp.eq.u32 p, 0, 0;", False, ""),
        ("bound", 0, "", False, "%p1"),
        ("bound", 0, "st.global.u32 [%rd1], %r1;", True, "%p2"),
        ("barrier", 0, "", False, ""),
        ("bound", 0, "setp.eq.u32 %p4, 0, 0;", False, "!%p4"),
        ("fence", 0, "", False, ""),
        ("fence", 1, "", False, ""),
    ]
    assert found[2].text == "setp.ge.s32 %p, %r, %r; @%p bra $L;"


def test_a_mutant_is_the_text_with_one_edit() -> None:
    by_kind = {each.kind: each for each in mutants.found(PTX, "kernel")}
    for kind, before, behind in (
        ("wait", "mbarrier.try_wait.parity.shared::cta.b64 p, [%r1], %r3;", "setp.eq.u32 p, 0, 0;"),
        ("barrier", "@%p3 bar.sync 0;", ""),
    ):
        assert mutants.mutated(PTX, by_kind[kind]) == PTX.replace(before, behind)
    access = next(each for each in mutants.found(PTX, "kernel") if each.unguarded)
    assert mutants.mutated(PTX, access) == PTX.replace("@!%p2 st", "st")


def test_of_many_mutants_each_kind_and_place_has_its_turn() -> None:
    every = mutants.found(PTX, "kernel")
    assert {each.kind for each in mutants.drawn(every, most=5)} == {each.kind for each in every}
    assert [each.line for each in mutants.drawn(every)] == sorted(each.line for each in every)
    copies = [Mutant("wait", "w", n, "here", n, n, n + 1, None, "", "", False) for n in range(20)]
    assert len(mutants.drawn(copies)) == 3


@pytest.mark.compile
@pytest.mark.parametrize("name", ["gemv", "dist-64"])
def test_the_list_is_of_todays_kernels(name: str) -> None:
    entry = survey_mutants.read()[name]
    if entry["compiler"] != str(compiler.toolchain()):
        pytest.skip(f"the list was made by {entry['compiler']}")
    kernel = KERNELS[name]
    every = operators.variants(registry.named(kernel.operator), [kernel.arch])
    source = next(each for each in every if str(each) == entry["kernel"])
    identities = [survey_mutants.identity(each) for each in entry["mutants"]]
    today = mutants.resolved(build.ptx(source), source.entry, identities)
    assert [_files(each.place) for each in today] == [_files(each["place"]) for each in entry["mutants"]]
    assert kernel.is_of(source)
    assert len(today) <= kernel.most


def _files(place: str) -> str:
    """A place without lines, which change with every word of a comment."""
    return re.sub(r":\d+", "", place)


class _Caught:
    """Chooses mutants by their identity, and keeps what is told of each."""

    def __init__(self, wanted: Sequence[tuple[str, str]]) -> None:
        self._wanted = wanted
        self.how: dict[tuple[str, str], list[str]] = {each: [] for each in wanted}

    def choose(
        self, source: KernelSource, executed: Sequence[Mutant], binding: Sequence[Mutant] | None
    ) -> list[Mutant]:
        return [mutant for mutant in executed for kind, place in self._wanted if self._is(mutant, kind, place)]

    def tell(self, mutant: Mutant, how: str) -> None:
        (known,) = [each for each in self._wanted if self._is(mutant, *each)]
        self.how[known].append(how)

    @staticmethod
    def _is(mutant: Mutant, kind: str, place: str) -> bool:
        return mutant.kind == kind and place in mutant.place
