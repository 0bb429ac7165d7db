"""Mutants as edits of PTX: the list of the survey is of today's kernels, and the host engine catches one of each kind,
and what a schedule model found: a missing wait for `room` in the backward of a 2-CTA cluster."""

from __future__ import annotations

import multiprocessing
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
from cupymla.build.source import cuda_root
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
    """Chooses mutants by kind and place, and keeps what is told of each."""

    def __init__(self) -> None:
        self._sought = {(kind, _place(file, text)): (kind, file, text) for kind, file, text, _ in CAUGHT}
        self.how: dict[tuple[str, str, str], list[str]] = {each: [] for each in self._sought.values()}

    def choose(
        self, source: KernelSource, executed: Sequence[Mutant], binding: Sequence[Mutant] | None
    ) -> list[Mutant]:
        """What stands in a loop comes last."""
        last = {self._is(mutant): mutant for mutant in executed}
        return [mutant for sought, mutant in last.items() if sought]

    def tell(self, mutant: Mutant, how: str) -> None:
        """Keep it."""
        sought = self._is(mutant)
        assert sought
        self.how[sought].append(how)

    def _is(self, mutant: Mutant) -> tuple[str, str, str] | None:
        return next(
            (what for (kind, place), what in self._sought.items() if kind == mutant.kind and place in mutant.place),
            None,
        )


FOLDER = cuda_root() / "sparse_mla_bwd" / "sm90"

# Of the backward of a 2-CTA cluster: a kind, a file, a line of it, and how the host engine finds that it is missing.
CAUGHT = (
    # A hand-written model of the pipeline, which is gone, missed it.
    ("wait", "cluster_consumer.cuh", "storage.room.wait(", "race: .* writes shared memory"),
    ("wait", "cluster_consumer.cuh", "storage.full.wait(", "race: .* reads shared memory"),
    ("wait", "cluster_consumer.cuh", "sm90::wgmma_wait<0>()", "register of an unfinished wgmma"),
    ("wait", "cluster_attention.cuh", "wait_for_primary_grid(", "before its griddepcontrol.wait"),
    ("fence", "cluster_consumer.cuh", "fence_async_shared();", "race: .* no fence.proxy.async|asynchronously reads"),
    ("fence", "cluster_consumer.cuh", "sm90::wgmma_fence();", "without a wgmma.fence"),
    ("arrive", "cluster_gradients.cuh", "cluster_arrive_after_reads_at(", "nothing moves any more"),
    (
        "expect_tx",
        "cluster_attention.cuh",
        "storage.entries_in.arrive_and_expect(",
        "race: .* a copy that an mbarrier counts wrote",
    ),
    ("commit", "cluster_gradients.cuh", "sm90::wgmma_commit();", "race: |register of an unfinished wgmma"),
    ("barrier", "cluster_producer.cuh", "__syncwarp();", "race: .* reads shared memory"),
    ("bound", "cluster_producer.cuh", "return entry < stored_entries(storage) ?", "out of bounds"),
)


def _place(file: str, text: str) -> str:
    """Where a line of the sources is, as places name it."""
    lines = (FOLDER / file).read_text().splitlines()
    return f"{file}:{next(number for number, line in enumerate(lines, 1) if text in line)}"


@pytest.mark.compile
@pytest.mark.slow
def test_one_of_each_kind_is_caught() -> None:
    listener = _Caught()
    # In a process of its own: libraries of mutants are kept by their kernel's source.
    answers, mine = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        mutant_engines.emulate(KERNELS["bwd-cluster"], listener, mutant_engines.HOST_RUNS[:1])
        mine.send(listener.how)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    mine.close()
    found = answers.recv()
    process.join()
    for kind, file, text, how in CAUGHT:
        (told,) = found[kind, file, text]
        assert told and re.search(how, told), (kind, file, text, told)
