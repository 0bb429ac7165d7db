"""Accesses that nothing orders are found in any schedule; the ordered form of the same kernel passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from interpret_kit import element, run
from test_interpret_traps import DONE, FENCE, MULTIPLY, ONES, product

from cupymla_lab.interpret import Trap

# Each thread stores its number in shared memory and reads that of a thread of another warp, or lane.
NEIGHBOUR = f"""mov.u32 %r1, tile; shl.b32 %r2, %r0, 2; add.s32 %r2, %r2, %r1; xor.b32 %r3, %r0, {{bit}};
    shl.b32 %r3, %r3, 2; add.s32 %r3, %r3, %r1; st.shared.u32 [%r2], %r0; {{between}}
    ld.shared.u32 %r4, [%r3]; {{behind}} {element(4)} st.global.u32 [%d10], %r4;"""
# The cluster's CTAs come together.
TOGETHER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"


def raced(body: str, *arrays: Any, what: str = "nothing orders the two", **options: Any) -> None:
    """With and without the check: only it sees the fault."""
    run(body, *arrays, **options)
    with pytest.raises(Trap, match=f"race: .*{what}"):
        run(body, *arrays, races="practice", **options)


def test_a_warp_orders_nothing_without_a_barrier() -> None:
    out = np.zeros(32, np.uint32)
    raced(NEIGHBOUR.format(bit=1, between="", behind=""), out, what="thread 0 reads .* thread 1 wrote")
    raced(NEIGHBOUR.format(bit=1, between="vote.sync.any.pred %p1, 1, -1;", behind=""), out)
    run(NEIGHBOUR.format(bit=1, between="bar.warp.sync -1;", behind=""), out, races="letter")
    assert out.tolist() == [k ^ 1 for k in range(32)]


def test_a_barrier_of_the_cta_orders_warps() -> None:
    out = np.zeros(64, np.uint32)
    raced(NEIGHBOUR.format(bit=32, between="bar.warp.sync -1;", behind=""), out, threads=64)
    run(NEIGHBOUR.format(bit=32, between="bar.sync 0;", behind=""), out, threads=64, races="letter")
    run(NEIGHBOUR.format(bit=32, between="barrier.red.or.pred %p1, 0, 1;", behind=""), out, threads=64, races="letter")


@pytest.mark.parametrize("space", ["shared", "global"])
def test_threads_that_store_together_agree_on_a_place(space: str) -> None:
    out, start = np.zeros(32, np.uint32), {"shared": "mov.u32 %r1, tile;", "global": ""}[space]
    to = {"shared": "%r1", "global": "%d0"}[space]
    run(f"{start} st.{space}.u32 [{to}], 7;", out, races="letter")
    run(f"{start} st.{space}.u32 [{to}], %r0;", out)
    with pytest.raises(Trap, match=r"race: threads store different values at .*, with one instruction"):
        run(f"{start} st.{space}.u32 [{to}], %r0;", out, races="practice")


def test_threads_that_copy_to_one_place_copy_the_same() -> None:
    source = np.zeros(32, np.uint32)
    body = "mov.u32 %r1, tile; {} cp.async.ca.shared.global [%r1], [%d10], 4; cp.async.wait_all;"
    run(body.format("mov.u64 %d10, %d0;"), source, races="letter")
    run(body.format(element(4)), source)
    with pytest.raises(Trap, match=r"race: threads store different values at .*, with one instruction"):
        run(body.format(element(4)), source, races="practice")


def test_a_race_names_both_places_in_cuda() -> None:
    body = NEIGHBOUR.format(bit=1, between="", behind="")
    body = body.replace("st.shared", "\n.loc 1 41 7\nst.shared").replace("ld.shared", "\n.loc 1 42 7\nld.shared")
    with pytest.raises(Trap, match=r"thread 1 wrote at PTX line \d+ \(\?:41\), and nothing .* \(\?:42\)"):
        run(body, np.zeros(32, np.uint32), races="practice")


def test_what_is_still_read_may_not_be_written() -> None:
    out = np.zeros(64, np.uint32)
    again = "st.shared.u32 [%r2], %r4;"
    raced(NEIGHBOUR.format(bit=32, between="bar.sync 0;", behind=again), out, what="writes .* read or was", threads=64)
    run(NEIGHBOUR.format(bit=32, between="bar.sync 0;", behind="bar.sync 0;" + again), out, threads=64, races="letter")


def test_one_lane_arrives_for_its_warp_behind_a_barrier_of_the_warp() -> None:
    """Lane 0 of the first warp says that the buffer is full; it can say so only for itself."""
    out = np.zeros(64, np.uint32)
    body = f"""mov.u32 %r1, tile; add.s32 %r5, %r1, 2048; setp.eq.s32 %p1, %r0, 0; setp.lt.u32 %p3, %r0, 32;
    @%p1 mbarrier.init.shared::cta.b64 [%r5], 1; bar.sync 0; shl.b32 %r2, %r0, 2; add.s32 %r2, %r2, %r1;
    @!%p3 bra READ; st.shared.u32 [%r2], %r0; {{warp}} @%p1 {{arrive}} [%r5]; bra END;
    READ: mbarrier.try_wait.parity{{acquire}}.shared::cta.b64 %p2, [%r5], 0; @!%p2 bra READ;
    ld.shared.u32 %r4, [%r2+-128]; {element(4)} st.global.u32 [%d10], %r4; END:"""
    warp, arrive = "bar.warp.sync -1;", "mbarrier.arrive.shared::cta.b64 _,"
    group: dict[str, Any] = {"threads": 64, "group": 32}
    raced(body.format(warp="", arrive=arrive, acquire=""), out, what="reads .* thread 1 wrote", **group)
    raced(body.format(warp=warp, arrive=arrive.replace("arrive", "arrive.relaxed.cta"), acquire=""), out, **group)
    raced(body.format(warp=warp, arrive=arrive, acquire=".relaxed.cta"), out, **group)
    run(body.format(warp=warp, arrive=arrive, acquire=""), out, races="letter", **group)
    assert out[32:].tolist() == list(range(32))


def test_an_mbarrier_is_used_behind_its_initialisation() -> None:
    body = """mov.u32 %r1, tile; setp.eq.s32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [%r1], 32; {between}
    mbarrier.arrive.shared::cta.b64 _, [%r1];"""
    out = np.zeros(1, np.uint32)
    raced(body.format(between=""), out, what="uses an mbarrier before it knows")
    run(body.format(between="bar.warp.sync -1;"), out, races="letter")


def test_every_thread_makes_an_mbarrier_of_its_own() -> None:
    """With one instruction of two warps: each thread knows of its own mbarrier, and not of its neighbour's."""
    body = """mov.u32 %r1, tile; shl.b32 %r2, %r0, 3; add.s32 %r2, %r2, %r1; mbarrier.init.shared::cta.b64 [%r2], 1;
    {between} xor.b32 %r3, %r0, {bit}; shl.b32 %r3, %r3, 3; add.s32 %r3, %r3, %r1;
    mbarrier.arrive.shared::cta.b64 _, [%r3];"""
    out, group = np.zeros(1, np.uint32), {"threads": 64, "group": 64}
    run(body.format(between="", bit=0), out, races="letter", **group)
    raced(body.format(between="", bit=32), out, what="uses an mbarrier before it knows", **group)
    run(body.format(between="bar.sync 0;", bit=32), out, races="letter", **group)


def test_copies_know_of_mbarriers_behind_a_fence() -> None:
    source = np.arange(4, dtype=np.uint32)
    body = """mov.u32 %r1, tile; add.s32 %r2, %r1, 2048; setp.eq.s32 %p1, %r0, 0; mov.u32 %r5, 16;
    @%p1 mbarrier.init.shared::cta.b64 [%r2], 1; {fence} bar.sync 0; {late}
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d0], %r5, [%r2];
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 16;
    IN: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra IN;"""
    options = {"threads": 64, "readonly": 1}
    raced(body.format(fence="", late=""), source, what=r"no fence\.mbarrier_init", **options)
    raced(body.format(fence="@!%p1 fence.mbarrier_init.release.cluster;", late=""), source, what="no fence", **options)
    run(body.format(fence="@%p1 fence.mbarrier_init.release.cluster;", late=""), source, races="letter", **options)
    run(body.format(fence="", late="fence.proxy.async.shared::cta;"), source, races="letter", **options)


def test_a_wait_is_over_before_the_next_phase_ends() -> None:
    """Two warps wait for a third, which goes on when the first has told it, whatever the second does."""
    body = """mov.u32 %r1, tile; add.s32 %r2, %r1, 8; setp.eq.s32 %p1, %r0, 0; setp.lt.u32 %p2, %r0, 64;
    @%p1 mbarrier.init.shared::cta.b64 [%r1], 32; @%p1 mbarrier.init.shared::cta.b64 [%r2], {count}; bar.sync 0;
    @%p2 bra READ; mbarrier.arrive.shared::cta.b64 _, [%r1];
    FREE: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r2], 0; @!%p3 bra FREE;
    mbarrier.arrive.shared::cta.b64 _, [%r1]; bra END;
    READ: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], 0; @!%p3 bra READ;
    setp.lt.u32 %p4, %r0, {tellers}; {warp} @%p4 mbarrier.arrive.shared::cta.b64 _, [%r2]; END:"""
    out = np.zeros(1, np.uint32)
    options: dict[str, Any] = {"threads": 96, "group": 32}
    run(body.format(count=64, tellers=64, warp=""), out, races="letter", **options)
    with pytest.raises(Trap, match=r"is not ordered before the end of the next phase|deadlock"):
        run(body.format(count=32, tellers=32, warp=""), out, races="practice", **options)
    # Lane 0 speaks for the others of its warp: only behind a barrier of the warp are they there, too.
    alone = body.replace("setp.lt.u32 %p2, %r0, 64;", "setp.lt.u32 %p2, %r0, 32;").replace("96", "64")
    options["threads"] = 64
    raced(alone.format(count=1, tellers=1, warp=""), out, what="is not ordered before the end", **options)
    run(alone.format(count=1, tellers=1, warp="bar.warp.sync -1;"), out, races="letter", **options)


COPIED = f"""mov.u32 %r1, tile; shl.b32 %r2, %r0, 2; add.s32 %r2, %r2, %r1; xor.b32 %r3, %r0, {{bit}};
    shl.b32 %r3, %r3, 2; add.s32 %r3, %r3, %r1; {element(4, 0)} cp.async.ca.shared.global [%r2], [%d10], 4;
    cp.async.commit_group; {{between}} ld.shared.u32 %r4, [%r3]; {element(4, 1)} st.global.u32 [%d10], %r4;"""


def test_copies_are_there_for_those_who_waited_and_those_whom_they_told() -> None:
    source, out = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    wait, options = "cp.async.wait_group 0;", {"readonly": 1, "threads": 64}
    run(COPIED.format(bit=0, between=wait), source, out, races="letter", **options)
    raced(COPIED.format(bit=32, between=wait), source, out, what="reads .* a cp.async of thread 32 wrote", **options)
    run(COPIED.format(bit=32, between=wait + "bar.sync 0;"), source, out, races="letter", **options)
    assert out.tolist() == [k ^ 32 for k in range(64)]
    with pytest.raises(Trap):
        run(COPIED.format(bit=32, between="cp.async.wait_group 1; bar.sync 0;"), source, out, races="letter", **options)
    told = """add.s32 %r5, %r1, 2048; setp.eq.s32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [%r5], 64; bar.sync 0;
    cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r5];
    TOLD: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r5], 0; @!%p2 bra TOLD;"""
    run(COPIED.format(bit=32, between=told), source, out, races="letter", **options)


def test_a_proxy_fence_covers_only_what_it_is_ordered_behind() -> None:
    """A fence of every thread before the others' writes are known, where that of the issuing thread must be behind."""
    out = np.zeros(128, np.float32)
    options = {"threads": 128, "shared": 16384}
    for fence in (FENCE, "bar.sync 0;" + FENCE):
        run(product(ONES.format(fence=fence), MULTIPLY, DONE), out, races="letter", **options)
    early = ONES.replace("{fence}", FENCE).replace("bar.sync 0;", "bar.sync 0; st.shared.u32 [%r1+4], %r3; bar.sync 0;")
    with pytest.raises(Trap, match=r"no fence\.proxy\.async"):
        run(product(early.format(), MULTIPLY, DONE), out, races="practice", **options)
    # The first thread alone fences, before it knows of the others' writes.
    alone = "setp.eq.s32 %p2, %r0, 0; @%p2 " + FENCE
    raced(product(ONES.format(fence=alone), MULTIPLY, DONE), out, what=r"no fence\.proxy\.async", **options)
    run(product(ONES.format(fence="bar.sync 0; " + alone), MULTIPLY, DONE), out, races="letter", **options)


# Each CTA of a pair stores a number in the other one's shared memory and tells it.
TELL = f"""mov.u32 %r1, tile; add.s32 %r2, %r1, 2048; setp.eq.s32 %p1, %r0, 0; mov.u32 %r5, %cluster_ctarank;
    @%p1 mbarrier.init.shared::cta.b64 [%r2], 32; {TOGETHER}
    xor.b32 %r6, %r5, 1; shl.b32 %r3, %r0, 2; add.s32 %r3, %r3, %r1;
    mapa.shared::cluster.u32 %r7, %r3, %r6; mapa.shared::cluster.u32 %r8, %r2, %r6;
    st.shared::cluster.u32 [%r7], %r0; mbarrier.arrive{{release}}.shared::cluster.b64 _, [%r8];
    TOLD: mbarrier.try_wait.parity{{acquire}}.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra TOLD;
    ld.shared.u32 %r4, [%r3]; {{last}} {element(4)} st.global.u32 [%d10], %r4;"""


def test_an_arrival_tells_another_cta_what_its_scope_reaches() -> None:
    out = np.zeros((2, 32), np.uint32)
    apart = "mul.wide.u32 %d11, %r5, 128; add.s64 %d0, %d0, %d11;"
    good = {"release": ".release.cluster", "acquire": ".acquire.cluster", "last": TOGETHER + apart}
    run(TELL.format(**good), out, cluster=2, races="letter")
    assert (out == np.arange(32)).all()
    raced(TELL.format(**good | {"release": ""}), out, cluster=2)
    raced(TELL.format(**good | {"acquire": ""}), out, cluster=2)
    # Each knows by the arrival that the other one needs its memory no more.
    run(TELL.format(**good | {"last": apart}), out, cluster=2, races="letter")


def test_a_cta_stays_while_others_use_its_memory() -> None:
    body = f"""mov.u32 %r1, tile; mov.u32 %r5, %cluster_ctarank; st.shared.u32 [%r1], %r5; {TOGETHER}
    setp.eq.s32 %p1, %r5, 0; @%p1 bra END; mov.u32 %r6, 0; mapa.shared::cluster.u32 %r7, %r1, %r6;
    ld.shared::cluster.u32 %r8, [%r7]; st.global.u32 [%d0], %r8; END: {{last}}"""
    out = np.zeros(1, np.uint32)
    options = {"cluster": 2, "threads": 1}
    run(body.format(last=TOGETHER), out, races="letter", **options)
    with pytest.raises(Trap, match=r"exits, and nothing orders|which has exited"):
        run(body.format(last=""), out, races="practice", **options)


def test_readers_free_a_buffer_of_another_cta_in_practice_but_not_to_the_letter() -> None:
    """An arrival without a scope, as CUTLASS frees buffers: the other CTA then writes what this one has read."""
    body = f"""mov.u32 %r1, tile; add.s32 %r2, %r1, 2048; setp.eq.s32 %p1, %r0, 0; mov.u32 %r5, %cluster_ctarank;
    @%p1 mbarrier.init.shared::cta.b64 [%r2], 32; shl.b32 %r3, %r0, 2; add.s32 %r3, %r3, %r1;
    st.shared.u32 [%r3], %r0; {TOGETHER} ld.shared.u32 %r4, [%r3]; {{read}}
    xor.b32 %r6, %r5, 1; mapa.shared::cluster.u32 %r7, %r3, %r6; mapa.shared::cluster.u32 %r8, %r2, %r6;
    mbarrier.arrive.shared::cluster.b64 _, [%r8];
    FREE: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra FREE;
    st.shared::cluster.u32 [%r7], %r4; {TOGETHER}"""
    out = np.zeros(1, np.uint32)
    run(body.format(read=""), out, cluster=2, races="practice")
    with pytest.raises(Trap, match=r"race: .* writes .* nothing orders the two"):
        run(body.format(read=""), out, cluster=2, races="letter")
    full = body.replace("arrive.shared", "arrive.release.cluster.shared").replace("parity.", "parity.acquire.cluster.")
    run(full.format(read=""), out, cluster=2, races="letter")


COUNTED = """mov.u32 %r1, %ctaid.x; setp.eq.s32 %p1, %r1, 0; @!%p1 bra READ;
    st.global.u32 [%d0], 7; {release} bra END;
    READ: {acquire} setp.eq.u32 %p2, %r2, 0; @%p2 bra READ; {behind}
    ld.global{how}.u32 %r3, [%d0]; st.global.u32 [%d2], %r3;
    END:"""


def counted(release: str, acquire: str, behind: str = "", how: str = "") -> str:
    return COUNTED.format(release=release, acquire=acquire, behind=behind, how=how)


@pytest.mark.parametrize(
    ("release", "acquire", "behind", "ordered"),
    [
        ("atom.acq_rel.gpu.global.add.u32 %r2, [%d1], 1;", "atom.acq_rel.gpu.global.add.u32 %r2, [%d1], 0;", "", True),
        ("st.release.gpu.global.u32 [%d1], 1;", "ld.acquire.gpu.global.u32 %r2, [%d1];", "", True),
        ("fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [%d1], 1;", "ld.relaxed.gpu.global.u32 %r2, [%d1];",
         "fence.acq_rel.gpu;", True),
        ("atom.relaxed.gpu.global.add.u32 %r2, [%d1], 1;", "atom.acq_rel.gpu.global.add.u32 %r2, [%d1], 0;", "", False),
        ("st.release.gpu.global.u32 [%d1], 1;", "ld.relaxed.gpu.global.u32 %r2, [%d1];", "", False),
        ("fence.acq_rel.cta; st.relaxed.gpu.global.u32 [%d1], 1;", "ld.acquire.gpu.global.u32 %r2, [%d1];", "", False),
        ("st.relaxed.gpu.global.u32 [%d1], 1; fence.acq_rel.gpu;", "ld.acquire.gpu.global.u32 %r2, [%d1];", "", False),
    ],
)  # fmt: skip
def test_ctas_hand_global_memory_on_by_release_and_acquire(
    release: str, acquire: str, behind: str, ordered: bool
) -> None:
    data, count, out = np.zeros(1, np.uint32), np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    options = {"threads": 1, "grid": 2}
    body = counted(release, acquire, behind)
    if ordered:
        run(body, data, count, out, races="letter", **options)
        assert out[0] == 7
        count[0] = 0
        with pytest.raises(Trap, match=r"ld\.global\.nc of byte 0 of 'a0', which this launch writes"):
            run(counted(release, acquire, behind, ".nc"), data, count, out, races="practice", **options)
    else:
        with pytest.raises(Trap, match="race: thread 0 reads byte 0 of 'a0' that thread 0 of cluster 0 wrote"):
            run(body, data, count, out, races="practice", **options)


def test_atomic_operations_do_not_race_with_each_other_but_with_others() -> None:
    out = np.zeros(1, np.uint32)
    run("red.global.add.u32 [%d0], 1;", out, threads=64, group=32, grid=2, races="letter")
    assert out[0] == 128
    raced("red.global.add.u32 [%d0], 1; ld.global.u32 %r1, [%d0];", out, threads=64, group=32)
    raced("st.global.u32 [%d0], 1;", out, threads=64, group=32, what="writes byte 0 of 'a0' that thread")
