"""Accesses to shared and Tensor Memory that nothing orders are found in every mode; ordered kernels pass."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import gemm
import numpy as np
import pytest
from conftest import HOST
from device import blank
from device import run as run_operation
from isa_oracle import Array
from ptx_kernels import mma
from races_kit import FENCE, TOGETHER, Claim, Claims, ordered, raced, refused

from cupymla.errors import InputError
from cupymla_lab.emulate import MODES, Settings
from cupymla_lab.emulate.host.machine import HostError
from cupymla_lab.emulate.settings import Mode
from cupymla_lab.ptx.races import Races

# One worker has them all: what it runs is made once.
pytestmark = [HOST, pytest.mark.compile, pytest.mark.xdist_group("emulated races")]
CLAIMS = Claims()

# Each thread stores its number in shared memory and reads that of a thread of another warp, or lane.
NEIGHBOUR = """shl.b32 %r2, %r0, 2; add.s32 %r2, %r2, %r1; xor.b32 %r3, %r0, {bit};
    shl.b32 %r3, %r3, 2; add.s32 %r3, %r3, %r1; st.shared.u32 [%r2], %r0; {between}
    ld.shared.u32 %r4, [%r3]; {behind} st.global.u32 [%d11], %r4;"""


@CLAIMS.test()
def test_a_warp_orders_nothing_without_a_barrier() -> Iterator[Claim]:
    voted = "vote.sync.any.pred %p2, 1, -1;"
    told = r"thread \d+ reads shared memory, offset \d+, that thread \d+ wrote at PTX"
    yield refused(NEIGHBOUR.format(bit=1, between=voted, behind=""), told, modes=("eager",))
    yield raced(NEIGHBOUR.format(bit=1, between=voted, behind=""))
    body = NEIGHBOUR.format(bit=1, between="bar.warp.sync -1;", behind="")
    yield ordered(body, gives=lambda found: found[:32].tolist() == [k ^ 1 for k in range(32)])


@CLAIMS.test()
def test_a_barrier_of_the_cta_orders_warps() -> Iterator[Claim]:
    for between in ("bar.sync 0;", "barrier.sync 3, 64;", "barrier.red.or.pred %p2, 0, 1;"):
        yield ordered(NEIGHBOUR.format(bit=32, between=between, behind=""), threads=64)
    both = "setp.lt.u32 %p3, %r0, 32; @%p3 barrier.arrive 1, 64; @!%p3 barrier.sync 1, 64;"
    # Who only arrives learns nothing of the second warp's numbers.
    yield raced(NEIGHBOUR.format(bit=32, between=both, behind=""), "thread .* that thread", threads=64)


@CLAIMS.test()
def test_what_is_still_read_may_not_be_written() -> Iterator[Claim]:
    again = "st.shared.u32 [%r2], %r4;"
    yield raced(NEIGHBOUR.format(bit=32, between="bar.sync 0;", behind=again), threads=64)
    yield ordered(NEIGHBOUR.format(bit=32, between="bar.sync 0;", behind="bar.sync 0;" + again), threads=64)


@CLAIMS.test()
def test_atomic_operations_do_not_race_with_each_other_but_with_others() -> Iterator[Claim]:
    zero = "@%p1 st.shared.u32 [%r1], 0; bar.sync 0; red.shared.add.u32 [%r1], 1; "
    yield raced(zero + "ld.shared.u32 %r2, [%r1];", threads=64)
    body = zero + "bar.sync 0; ld.shared.u32 %r2, [%r1]; st.global.u32 [%d11], %r2;"
    yield ordered(body, gives=lambda found: bool((found[:64] == 64).all()), threads=64)


# Lane 0 of the first warp says that the buffer is full; it can say so only for itself.
FULL = """add.s32 %r6, %r1, 2048; setp.lt.u32 %p3, %r0, 32; @%p1 mbarrier.init.shared::cta.b64 [%r6], 1; bar.sync 0;
    shl.b32 %r2, %r0, 2; add.s32 %r2, %r2, %r1;
    @!%p3 bra READ; st.shared.u32 [%r2], %r0; {warp} @%p1 mbarrier.arrive{release}.shared::cta.b64 _, [%r6]; bra END;
    READ: mbarrier.try_wait.parity{acquire}.shared::cta.b64 %p2, [%r6], 0; @!%p2 bra READ;
    ld.shared.u32 %r4, [%r2+-128]; st.global.u32 [%d11], %r4; END:"""


@CLAIMS.test()
def test_one_lane_arrives_for_its_warp_behind_a_barrier_of_the_warp() -> Iterator[Claim]:
    warp = "bar.warp.sync -1;"
    body = FULL.format(warp=warp, release="", acquire="")
    yield ordered(body, gives=lambda found: found[32:64].tolist() == list(range(32)), threads=64)
    for release, acquire in ((".relaxed.cta", ""), ("", ".relaxed.cta")):
        body = FULL.format(warp=warp, release=release, acquire=acquire)
        yield refused(body, "nothing orders", modes=("eager",), threads=64)
    # Not run unchecked: the other lanes may truly be late.
    yield refused(FULL.format(warp="", release="", acquire=""), threads=64)


@CLAIMS.test()
def test_an_mbarrier_is_used_behind_its_initialisation() -> Iterator[Claim]:
    body = """@%p1 mbarrier.init.shared::cta.b64 [%r1], 32; {between} mbarrier.arrive.shared::cta.b64 _, [%r1];"""
    shuffled = "elect.sync _|%p2, -1;"
    yield raced(body.format(between=shuffled), "uses an mbarrier before it knows")
    yield ordered(body.format(between="bar.warp.sync -1;"))


# Copies ------------------------------------------------------------------------------------------------------------

# Thread 0 has 256 bytes loaded; a thread of another warp waits for them and tells the rest by a barrier.
LOADED = """add.s32 %r6, %r1, 2048; setp.eq.u32 %p4, 0, 0; setp.eq.s32 %p3, %r0, 32;
    shl.b32 %r2, %r0, 2; add.s32 %r2, %r2, %r1;
    @%p1 mbarrier.init.shared::cta.b64 [%r6], 1; @%p1 fence.mbarrier_init.release.cluster; bar.sync 0;
    @!%p1 bra WAIT; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r6], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d0], 256, [%r6];
    WAIT: @!{who} bra REST; mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r6], 0; @!%p2 bra WAIT; REST:
    {between} ld.shared.u32 %r4, [%r2]; st.global.u32 [%d11], %r4; {behind}"""


def counted(found: Array) -> bool:
    return bool((found[:64] == np.arange(64)).all())


@CLAIMS.test()
def test_what_tma_loads_is_known_to_who_waited_and_whom_they_told() -> Iterator[Claim]:
    everyone = LOADED.format(who="%p4", between="", behind="")
    yield ordered(everyone, gives=counted, threads=64)
    yield ordered(LOADED.format(who="%p3", between="bar.sync 0;", behind=""), gives=counted, threads=64)
    yield refused(LOADED.format(who="%p3", between="", behind=""), threads=64)
    # Loading over what others still read.
    again = """@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r6], 256; @%p1
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d0], 256, [%r6];
    AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r6], 1; @!%p2 bra AGAIN;"""
    yield raced(
        LOADED.format(who="%p3", between="bar.sync 0;", behind=again), "writes .* read or was still", threads=64
    )
    # Once they have read it: a copy uses the asynchronous proxy, so as specified a fence lies behind their reads.
    told = LOADED.format(who="%p3", between="bar.sync 0;", behind="bar.sync 0;" + again)
    yield ordered(told, "hardware", threads=64)
    yield refused(told, r"asynchronously writes .* read or was .* no fence\.proxy\.async", "specified", threads=64)
    yield ordered(LOADED.format(who="%p3", between="bar.sync 0;", behind=FENCE + "bar.sync 0;" + again), threads=64)


# Every thread writes a number, thread 0 has the TMA store them, then thread 32 overwrites the first.
STORED = """shl.b32 %r2, %r0, 2; add.s32 %r2, %r2, %r1; setp.eq.s32 %p3, %r0, 32; st.shared.u32 [%r2], %r0;
    {before} @!%p1 bra REST; {issuer} cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 256;
    cp.async.bulk.commit_group; {wait} REST: {after} @%p3 st.shared.u32 [%r1], 7; @%p1 cp.async.bulk.wait_group 0;"""


@CLAIMS.test()
def test_what_tma_stores_is_fenced_before_and_read_before_it_is_overwritten() -> Iterator[Claim]:
    good = {"before": FENCE + "bar.sync 0;", "issuer": "", "wait": "cp.async.bulk.wait_group.read 0;"}
    good["after"] = "bar.sync 0;"
    yield ordered(STORED.format(**good), gives=counted, threads=64)
    fenced = STORED.format(**good | {"before": "bar.sync 0;", "issuer": FENCE})
    yield ordered(fenced, gives=lambda found: bool((found[1:64] > 0).all()), threads=64)
    yield raced(STORED.format(**good | {"before": "bar.sync 0;"}), r"no fence\.proxy\.async", threads=64)
    # The issuer fences before it knows of the others' writes.
    yield raced(STORED.format(**good | {"before": f"@%p1 {FENCE} bar.sync 0;"}), r"no fence\.proxy\.async", threads=64)
    yield raced(STORED.format(**good | {"wait": ""}), "writes .* a bulk store of thread 0 read or was", threads=64)
    yield raced(STORED.format(**good | {"after": ""}), "writes .* a bulk store of thread 0 read or was", threads=64)


@CLAIMS.test()
def test_copies_by_threads_are_there_for_those_who_waited_and_those_whom_they_told() -> Iterator[Claim]:
    body = """shl.b32 %r2, %r0, 2; add.s32 %r2, %r2, %r1; xor.b32 %r3, %r0, 32; shl.b32 %r3, %r3, 2;
    add.s32 %r3, %r3, %r1; cp.async.ca.shared.global [%r2], [%d10], 4; cp.async.commit_group; {between}
    ld.shared.u32 %r4, [%r3]; st.global.u32 [%d11], %r4;"""
    yield ordered(body.format(between="cp.async.wait_group 0; bar.sync 0;"), threads=64)
    for between in ("cp.async.wait_group 0;", "cp.async.wait_group 1; bar.sync 0;"):
        yield refused(body.format(between=between), threads=64)


# Clusters ------------------------------------------------------------------------------------------------------------

# Each CTA of a pair stores numbers in the other one's shared memory and tells it.
TELL = f"""add.s32 %r2, %r1, 2048; @%p1 mbarrier.init.shared::cta.b64 [%r2], 32;
    @%p1 fence.mbarrier_init.release.cluster; {TOGETHER}
    xor.b32 %r6, %r5, 1; shl.b32 %r3, %r0, 2; add.s32 %r3, %r3, %r1;
    mapa.shared::cluster.u32 %r7, %r3, %r6; mapa.shared::cluster.u32 %r8, %r2, %r6; {{store}}
    TOLD: mbarrier.try_wait.parity{{acquire}}.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra TOLD;
    ld.shared.u32 %r4, [%r3]; {{last}} st.global.u32 [%d11], %r4;"""
PLAIN = "st.shared::cluster.u32 [%r7], %r0; mbarrier.arrive{release}.shared::cluster.b64 _, [%r8];"
ASYNC = """mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 4;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r7], %r0, [%r8];"""


@CLAIMS.test()
def test_an_arrival_tells_another_cta_what_its_scope_reaches() -> Iterator[Claim]:
    good, acquire = PLAIN.format(release=".release.cluster"), ".acquire.cluster"
    yield ordered(TELL.format(store=good, acquire=acquire, last=TOGETHER), cluster=2)
    yield raced(TELL.format(store=PLAIN.format(release=""), acquire=acquire, last=TOGETHER), cluster=2)
    yield raced(TELL.format(store=good, acquire="", last=TOGETHER), cluster=2)
    # Each knows by the arrival that the other one needs its memory no more.
    yield ordered(TELL.format(store=good, acquire=acquire, last=""), cluster=2)


@CLAIMS.test()
def test_what_st_async_brings_is_there_for_ordinary_waits_on_hardware() -> Iterator[Claim]:
    yield ordered(TELL.format(store=ASYNC, acquire=".acquire.cluster", last=TOGETHER), cluster=2)
    yield ordered(TELL.format(store=ASYNC, acquire="", last=TOGETHER), "hardware", cluster=2)
    body = TELL.format(store=ASYNC, acquire="", last=TOGETHER)
    yield refused(body, " reads .* a copy that an mbarrier counts", "specified", ("eager",), cluster=2)


@CLAIMS.test()
def test_a_cta_stays_while_others_use_its_memory() -> Iterator[Claim]:
    body = f"""st.shared.u32 [%r1], %r5; {TOGETHER} setp.eq.s32 %p1, %r5, 0; @%p1 bra END; mov.u32 %r6, 0;
    mapa.shared::cluster.u32 %r7, %r1, %r6; ld.shared::cluster.u32 %r8, [%r7]; st.global.u32 [%d0], %r8;
    END: {{last}}"""
    yield ordered(body.format(last=TOGETHER), cluster=2, threads=1)
    yield raced(body.format(last=""), "exits, and nothing orders|which has exited", cluster=2, threads=1)


@CLAIMS.test()
def test_a_relaxed_barrier_of_the_cluster_hands_on_what_lies_behind_a_fence() -> Iterator[Claim]:
    body = """add.s32 %r2, %r1, 2048; @%p1 mbarrier.init.shared::cta.b64 [%r2], 1; {fence}
    barrier.cluster.arrive.relaxed; barrier.cluster.wait; xor.b32 %r6, %r5, 1; mapa.shared::cluster.u32 %r8, %r2, %r6;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8]; barrier.cluster.arrive; barrier.cluster.wait;"""
    yield ordered(body.format(fence="fence.mbarrier_init.release.cluster;"), cluster=2, threads=1)
    yield raced(body.format(fence=""), "uses an mbarrier before it knows", cluster=2, threads=1)


# The Tensor Core -----------------------------------------------------------------------------------------------------

# One product of 128x64x16 bf16 by a CTA, of 256x64x16 by a pair, of zeros: what thread 0 does behind it, and before.
INSTRUCTION = {1: 1 << 4 | 1 << 7 | 1 << 10 | 64 // 8 << 17 | 128 // 16 << 24}
INSTRUCTION[2] = INSTRUCTION[1] & ~(31 << 24) | 256 // 16 << 24
DESCRIPTOR = 1 << 46 | (1024 >> 4) << 32 | 1 << 16 | 2 << 61


def multiplied(operation: str, races: Races, mode: Mode, group: int = 1, seed: int = 1) -> None:
    smem, tmem = blank(group)
    arguments = [DESCRIPTOR, DESCRIPTOR + (16384 >> 4), INSTRUCTION[group] << 32, 0, 0]
    settings = Settings(mode, seed, checks=(), races=races)
    run_operation(operation, smem * 0, tmem, arguments, group, settings=settings, among=products(group))


AGAIN = "st.shared.b32 [%smem+16384], %r0;"


@functools.cache
def products(group: int) -> tuple[str, str, str, str]:
    """A product by itself, with B overwritten behind it, behind a commit as well, and behind a wait for that."""
    commit = f"""add.u32 %at, %smem, 65528; mbarrier.init.shared::cta.b64 [%at], 1; fence.mbarrier_init.release.cluster;
    tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster.b64 [%at];"""
    wait = "LOOP: mbarrier.try_wait.parity.shared::cta.b64 %p, [%at], 0; @!%p bra LOOP;"
    plain = mma("f16", group)
    return plain, plain + AGAIN, plain + commit + AGAIN, plain + commit + wait + AGAIN


@pytest.mark.parametrize("group", [1, 2])
def test_a_product_reads_until_somebody_waited_for_a_commit_behind_it(group: int) -> None:
    plain, at_once, committed, waited = products(group)
    for mode in MODES:
        multiplied(plain, "specified", mode, group)
        multiplied(at_once, "unchecked", mode, group)
        for early in (at_once, committed):
            told = r"race: .* writes .* a tensor operation of thread 0.* read or was still"
            with pytest.raises(HostError, match=told):
                multiplied(early, "hardware", mode, group)
        multiplied(waited, "specified", mode, group)


# What the GEMM of gemm.cu loses by each of its instructions, where that is an order of accesses to shared memory.
LOST = (
    ("cp.async.bulk.wait_group.read", "writes .* a bulk store of thread 64 read or was still"),
    ("fence.proxy.async", r"asynchronously reads .* no fence\.proxy\.async"),
)


@functools.cache
def runner() -> gemm.Runner:
    return gemm.Runner("host")


@pytest.mark.parametrize(("instruction", "what"), LOST)
@pytest.mark.parametrize("mode", MODES)
def test_a_gemm_without_its_waits_and_fences(instruction: str, what: str, mode: Mode) -> None:
    site = next(site for site in runner().kernel.sites if site.text.startswith(instruction))
    assert runner().run(Settings(mode, 1, races="specified")) == 0
    with pytest.raises(HostError, match=rf"race: .*{what}"):
        runner().run(Settings(mode, 1, checks=(), removed=site.number, races="hardware"))


# Its waits for an mbarrier, in the order of the text: of the products for a free accumulator and for a full stage, of
# the epilogue for a full accumulator. Without the last two others wait for a phase that may be over before they look.
MISSED = "the wait for an mbarrier"
WAITS = (
    (1, "writes Tensor Memory, column .* read or was still reading"),
    (2, f"(a (copy that an mbarrier counts|tensor operation of thread 32)|{MISSED})"),
    (3, f"((reads|writes) Tensor Memory, column|{MISSED})"),
)


@pytest.mark.parametrize(("number", "what"), WAITS)
@pytest.mark.parametrize("mode", MODES)
def test_a_gemm_without_one_of_its_waits(number: int, what: str, mode: Mode) -> None:
    waits = [site for site in runner().kernel.sites if site.text.startswith("mbarrier.try_wait")]
    with pytest.raises(HostError, match=rf"race: .*{what}"):
        runner().run(Settings(mode, 1, checks=(), removed=waits[number].number, races="hardware"))


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="races"):
        Settings(races="maybe")  # type: ignore[arg-type]
    # The other model takes ten seconds to compile, and would be refused before it runs.
    monkeypatch.setattr(runner().kernel._host, "_model", "ptx")
    with pytest.raises(InputError, match="model as PTX"):
        runner().run(Settings(races="specified"))
