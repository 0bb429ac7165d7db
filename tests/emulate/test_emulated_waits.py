"""Waits by parity that could take one phase of an mbarrier for another are found in every mode and schedule."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import HOST
from operator_subjects import PROBLEMS
from races_kit import TOGETHER, Claim, Claims, ordered, passed, raced
from races_kit import refused as refused_as

from cupymla.build.source import cuda_root
from cupymla.ops.attn_dist import plan
from cupymla_lab.emulate import Settings
from cupymla_lab.emulate.host.machine import HostError
from cupymla_lab.emulated import emulated
from cupymla_lab.subjects import Subject

# One worker has them all: what it runs is made once.
pytestmark = [HOST, pytest.mark.compile, pytest.mark.xdist_group("emulated waits")]
CLAIMS = Claims()

TOO_LATE = "is not ordered before the end of the next phase"
TOO_SOON = "is not ordered behind the end of the phase before its own"
PAUSE = "nanosleep.u32 1000000;"


def refused(body: str, what: str = f"({TOO_LATE}|{TOO_SOON})", **options: Any) -> Claim:
    """Unchecked, mode random may let a thread be so late that it waits for ever."""
    return refused_as(body, rf"the wait for an mbarrier .* of thread \d+ .* {what}", **options)


def wait(label: str, barrier: str, parity: int, order: str = "") -> str:
    return f"""{label}: mbarrier.try_wait.parity{order}.shared::cta.b64 %p2, [{barrier}], {parity}; @!%p2 bra {label};
    """


def arrive(barrier: str, order: str = "") -> str:
    return f"mbarrier.arrive{order}.shared::cta.b64 _, [{barrier}];\n    "


def two_warps(first: str, second: str) -> str:
    """Thread 0 does one thing, all of the second warp the other, both with mbarriers %r1 and %r6 of one arrival."""
    return f"""add.s32 %r6, %r1, 8; add.s32 %r7, %r1, 1024; setp.eq.s32 %p3, %r0, 32; setp.ge.u32 %p4, %r0, 32;
    @%p1 mbarrier.init.shared::cta.b64 [%r1], 1; @%p1 mbarrier.init.shared::cta.b64 [%r6], 1; bar.sync 0;
    @%p4 bra SECOND; @!%p1 bra END; {first} bra END; SECOND: {second} END:"""


# How thread 0 ends a phase of the first mbarrier.
EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 16;\n"
COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r7], [%d0], 16, [%r1];\n"
ENDS = {
    "arrival": arrive("%r1"),
    "commit": "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];\n",
    "TMA": EXPECT + COPY,
    "st.async": """mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 4;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r7], %r0, [%r1];""",
}
FREE, READ = wait("FREE", "%r6", 0), wait("READ", "%r1", 0)
TOLD = arrive("%r6")  # what FREE waits for


def handed_over(end: str, between: str, late: str = "", pause: str = "", phases: int = 1) -> str:
    """The second warp waits for a phase, and its first lane says so; then thread 0 ends the next one, or several."""
    more = "".join(end + wait(f"DONE{phase}", "%r1", phase % 2) for phase in range(1, phases + 1))
    return two_warps(end + FREE + pause + more, late + READ + between + "@%p3 " + arrive("%r6"))


TOGETHER_AS_LANES = (
    "bar.warp.sync -1;",
    "shfl.sync.idx.b32 %r8, %r0, 0, 31, -1;",
    "vote.sync.any.pred %p5, 1, -1;",
    "elect.sync _|%p5, -1;",
    "match.any.sync.b32 %r8, %r0, -1;",
)


@CLAIMS.test(end=ENDS)
def test_a_lane_that_speaks_for_others_that_may_not_have_looked_yet(end: str) -> Iterator[Claim]:
    for between in TOGETHER_AS_LANES:
        yield ordered(handed_over(end, between), threads=64)
    # The other lanes are there before thread 0 goes on, or come when both phases are over, or as the seed has it.
    yield passed(handed_over(end, "", pause=PAUSE), "unchecked", ("eager",), threads=64)
    for pause, late in ((PAUSE, ""), ("", f"@!%p3 {PAUSE} "), ("", "")):
        for seed in range(1, 4):
            yield refused(handed_over(end, "", late, pause), seed=seed, threads=64)


@CLAIMS.test()
def test_who_comes_two_phases_late_is_let_through_and_found() -> Iterator[Claim]:
    """Here nothing else tells: the kernel comes to its end."""
    body = handed_over(ENDS["arrival"], "", late=f"@!%p3 {PAUSE} ", phases=2)
    yield raced(body, f"({TOO_LATE}|{TOO_SOON})", threads=64)
    yield refused_as(body, TOO_SOON, modes=("eager",), threads=64)


@CLAIMS.test()
def test_order_of_waits_has_no_scope() -> Iterator[Claim]:
    """Relaxed arrivals and waits, which publish nothing, and arrivals whose scope does not reach the other CTA."""
    order = ".relaxed.cta"
    first = arrive("%r1", order) + wait("FREE", "%r6", 0, order) + arrive("%r1", order)
    second = wait("READ", "%r1", 0, order) + "{between} @%p3 " + arrive("%r6", order)
    yield ordered(two_warps(first, second).format(between="bar.warp.sync -1;"), threads=64)
    yield refused(two_warps(first, second).format(between=""), threads=64)
    body = f"""mbarrier.init.shared::cta.b64 [%r1], 1; {TOGETHER} xor.b32 %r6, %r5, 1;
    mapa.shared::cluster.u32 %r7, %r1, %r6; setp.eq.s32 %p1, %r5, 0; @!%p1 bra OTHER;
    mbarrier.arrive.shared::cluster.b64 _, [%r7]; {wait("FREE", "%r1", 0)} {{pause}}
    mbarrier.arrive.shared::cluster.b64 _, [%r7]; bra END;
    OTHER: {{read}} END: {TOGETHER}"""
    read, free = wait("READ", "%r1", 0), "mbarrier.arrive.shared::cluster.b64 _, [%r7];"
    yield ordered(body.format(read=read + free, pause=""), cluster=2, threads=1)
    yield refused(body.format(read=free + read, pause=""), cluster=2, threads=1)


@CLAIMS.test()
def test_a_phase_ends_behind_the_issue_of_its_copies() -> Iterator[Claim]:
    """Thread 0 arrives for the second phase at once; what it waits for stands before the copy that ends the phase."""
    known, end = wait("KNOWN", "%r1", 0), wait("DONE", "%r1", 1)
    second = READ + "{between} @%p3 " + arrive("%r6")
    counted = "mbarrier.complete_tx.shared::cta.relaxed.cluster.b64 [%r1], 16;\n"
    for copy in (COPY, counted):
        body = two_warps(EXPECT + copy + known + EXPECT + FREE + copy + end, second)
        yield ordered(body.format(between="bar.warp.sync -1;"), threads=64)
        yield refused(body.format(between=""), threads=64)
        yield refused(
            two_warps(EXPECT + copy + known + EXPECT + copy + end + FREE, second).format(between=""), threads=64
        )


@CLAIMS.test()
def test_a_wait_comes_behind_the_end_of_the_phase_before() -> Iterator[Claim]:
    """A wait for the second phase is let through before the first one is over, or waits for the third where both are.
    To know that all who had to arrive have is enough, but not where bytes are under way."""
    second = wait("READ", "%r1", 1)
    yield ordered(two_warps(arrive("%r1") + TOLD + arrive("%r1"), FREE + second), threads=64)
    for pauses in (("", ""), (PAUSE, ""), ("", PAUSE)):
        first = pauses[0] + arrive("%r1") + arrive("%r1")
        yield refused(two_warps(first, pauses[1] + second), threads=64)
    known = wait("KNOWN", "%r1", 0)
    for pause in ("", PAUSE):
        yield refused(two_warps(EXPECT + COPY + TOLD + known + arrive("%r1"), FREE + pause + second), threads=64)
        yield ordered(two_warps(EXPECT + COPY + known + TOLD + arrive("%r1"), FREE + pause + second), threads=64)


@CLAIMS.test()
def test_an_mbarrier_that_is_made_again_begins_again() -> Iterator[Claim]:
    again = "mbarrier.inval.shared::cta.b64 [%r1]; mbarrier.init.shared::cta.b64 [%r1], 1;"
    first = arrive("%r1") + wait("DONE", "%r1", 0) + again + TOLD + arrive("%r1")
    body = two_warps(first, FREE + READ)
    yield ordered(body, threads=64)


SYNC = """    // A lane that has not looked yet would find the next phase begun, once others have read this description.
    __syncwarp();
"""
PLANNER = 8  # its warp


def test_a_planner_whose_lanes_look_for_themselves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One run of any mode finds what hung with few seeds of mode random, and only since threads come late to waits."""
    problem = PROBLEMS["attn_dist-h64"]
    folder = tmp_path / "cuda"
    shutil.copytree(cuda_root(), folder, ignore=shutil.ignore_patterns("third_party"))
    planner = folder / "attn_dist" / "sm100" / "planner.cuh"
    text = planner.read_text()
    assert text.count(SYNC) == 1
    planner.write_text(text.replace(SYNC, ""))
    ours = plan.variant
    monkeypatch.setattr(plan, "variant", lambda *given, **named: replace(ours(*given, **named), root=str(folder)))
    settings = Settings("eager", 1, patience_seconds=20.0, stalls=False, races="hardware")
    with emulated("sm_100f", problem.multiprocessors, settings) as machine, pytest.raises(HostError) as found:
        machine.results(Subject(problem.operator), problem.inputs())
    told = re.search(rf"race: the wait for an mbarrier .* thread (\d+) .* {TOO_LATE}", str(found.value))
    assert told and int(told[1]) // 32 == PLANNER
