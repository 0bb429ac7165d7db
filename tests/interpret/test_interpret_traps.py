"""What no kernel may do ends the run and says where; the right form of the same kernel passes."""

from __future__ import annotations

import numpy as np
import pytest
from interpret_kit import element, run

from cupymla_lab.interpret import Trap, Unknown


def test_reads_and_writes_stay_inside_and_aligned() -> None:
    small, out = np.arange(31, dtype=np.uint32), np.zeros(32, np.uint32)
    copy = f"{element(4, 0)} ld.global.u32 %r1, [%d10]; {element(4, 1)} st.global.u32 [%d10], %r1;"
    with pytest.raises(Trap, match=r"read out of bounds: 4 bytes .* of 'a0' \(124 bytes\)"):
        run(copy, small, out, readonly=1)
    with pytest.raises(Trap, match="write to read-only memory"):
        run(copy, np.arange(32, dtype=np.uint32), out, readonly=2)
    with pytest.raises(Trap, match="misaligned global access"):
        run("ld.global.u32 %r1, [%d0+2];", out)
    run(copy, np.arange(32, dtype=np.uint32), out, readonly=1)
    assert out.tolist() == list(range(32))


def test_a_trap_names_thread_and_line() -> None:
    with pytest.raises(Trap) as trap:
        run("setp.eq.s32 %p1, %r0, 7;\n@%p1 ld.global.u32 %r1, [%d0+400];", np.zeros(4, np.uint32))
    assert "threads 0 to 31" in trap.value.where
    assert trap.value.instruction.startswith("@%p1 ld.global.u32")
    assert trap.value.line == 11


def test_shared_memory_is_bounded_and_written_before_it_is_read() -> None:
    out = np.zeros(32, np.uint32)
    with pytest.raises(Trap, match="unwritten shared memory"):
        run("mov.u32 %r1, tile; ld.shared.u32 %r2, [%r1];", out)
    run("mov.u32 %r1, tile; ld.shared.u32 %r2, [%r1]; st.global.u32 [%d0], %r2;", out, strict=False)
    assert out[0] == 0xFFFFFFFF
    with pytest.raises(Trap, match="shared write out of bounds"):
        run("mov.u32 %r1, tile; st.shared.u32 [%r1+4096], %r0;", out)
    with pytest.raises(Trap, match="misaligned shared"):
        run("mov.u32 %r1, tile; st.shared.u32 [%r1+2], %r0;", out)


def test_unknown_instructions_are_named_with_their_line() -> None:
    with pytest.raises(Unknown, match=r"instruction tex is not known.*line 10") as trap:
        run("tex.1d.v4.f32.s32 {%f1, %f2, %f3, %f4}, [a0, {%r0}];", np.zeros(4, np.uint32))
    assert trap.value.line == 10
    with pytest.raises(Unknown, match="a format of cvt"):
        run("cvt.rna.tf32.f32 %r1, %f1;", np.zeros(4, np.uint32))


INIT = """mov.u32 %r1, tile; setp.eq.s32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [%r1], {count};
    bar.sync 0;"""
WAIT = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], {parity}; @!%p2 bra WAIT;"


def test_a_deadlock_names_the_places_where_threads_wait() -> None:
    lines = "\n.loc 1 42 7, function_name $L__info_string0, inlined_at 1 20 3\n"
    with pytest.raises(Trap, match=r"deadlock: CTA 0 .*64 at PTX line \d+ .* \(\?:42, from \?:20\)"):
        run(INIT.format(count=1) + lines + WAIT.format(parity=0), np.zeros(64, np.uint32), threads=64)


def test_mbarrier_deadlock_and_underflow() -> None:
    arrive = "mbarrier.arrive.shared::cta.b64 _, [%r1];"
    out = np.zeros(64, np.uint32)
    run(INIT.format(count=64) + arrive + WAIT.format(parity=0), out, threads=64)
    with pytest.raises(Trap, match=r"deadlock: CTA 0 .*64 at PTX line"):
        run(INIT.format(count=65) + arrive + WAIT.format(parity=0), out, threads=64)
    with pytest.raises(Trap, match="mbarrier underflow"):
        # Bytes that never come keep the phase open while a second arrival is made.
        expect = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 16;"
        run(INIT.format(count=1) + expect, out, threads=64)
    with pytest.raises(Trap, match="no mbarrier has been initialised"):
        run("mov.u32 %r1, tile;" + arrive, out, threads=64)


def test_named_barriers() -> None:
    out = np.zeros(64, np.uint32)
    write = "mov.u32 %r1, tile; shl.b32 %r2, %r0, 2; add.s32 %r2, %r2, %r1; st.shared.u32 [%r2], %r0;"
    read = f"xor.b32 %r3, %r2, 128; ld.shared.u32 %r4, [%r3]; {element(4)} st.global.u32 [%d10], %r4;"
    for seed in range(4):
        run(write + "barrier.sync.aligned 1, 64;" + read, out, threads=64, group=32, seed=seed)
        assert out.tolist() == [k ^ 32 for k in range(64)]
    with pytest.raises(Trap, match="unwritten shared memory"):
        run(write + read, out, threads=64, group=32)
    with pytest.raises(Trap, match="overrun"):
        run("bar.arrive 1, 32;", out, threads=64)
    with pytest.raises(Trap, match="deadlock"):
        run("barrier.sync.aligned 1, 96;", out, threads=64)


SPECIALISED = """setp.ge.u32 %p1, %r0, 256; @%p1 bra PRODUCER;
    setmaxnreg.inc.sync.aligned.u32 {consumer}; bra DONE;
    PRODUCER: setmaxnreg.dec.sync.aligned.u32 {producer};
    DONE: {element} st.global.u32 [%d10], %r0;"""


BOUNDS = ".maxntid 384, 1, 1 .minnctapersm 1"


def specialised(producer: int, consumer: int, bounds: str = BOUNDS, seed: int = 0) -> None:
    out = np.zeros(384, np.uint32)
    body = SPECIALISED.format(producer=producer, consumer=consumer, element=element(4))
    run(body, out, threads=384, bounds=bounds, seed=seed)
    assert out.tolist() == list(range(384))


def test_setmaxnreg_deals_out_what_the_cta_got_at_launch() -> None:
    """384 threads get 168 registers each, so three warpgroups have 504 together: 512 fit the file, but not the pool."""
    for seed in range(3):
        specialised(24, 240, seed=seed)
        specialised(40, 232, seed=seed)
    with pytest.raises(Trap, match=r"deadlock: CTA 0 .*setmaxnreg\.inc"):
        specialised(32, 240)
    with pytest.raises(Trap, match=r"deadlock: .*setmaxnreg\.inc"):
        specialised(24, 240, f"{BOUNDS} .maxnreg 128")
    with pytest.raises(Trap, match=r"setmaxnreg\.dec to 176 registers where a warp has 168"):
        specialised(176, 232)
    with pytest.raises(Trap, match=r"setmaxnreg\.inc to 160 registers where a warp has 168"):
        specialised(24, 160)
    with pytest.raises(Trap, match="multiples of 8 from 24 to 256"):
        specialised(16, 240)
    with pytest.raises(Trap, match="without launch bounds"):
        specialised(24, 240, "")


COPY = f"""mov.u32 %r1, tile; shl.b32 %r2, %r0, 4; add.s32 %r2, %r2, %r1; {element(16, 0)}
    cp.async.cg.shared.global [%r2], [%d10], 16, %r5; cp.async.commit_group;"""


@pytest.mark.parametrize("size", [0, 4, 16])
def test_copies_fill_up_with_zeros(size: int) -> None:
    source, out = np.arange(1, 129, dtype=np.uint32), np.zeros((32, 4), np.uint32)
    body = f"mov.u32 %r5, {size};{COPY} cp.async.wait_group 0; ld.shared.v4.u32 {{%r6, %r7, %r8, %r9}}, [%r2];"
    run(body + f"{element(16, 1)} st.global.v4.u32 [%d10], {{%r6, %r7, %r8, %r9}};", source, out, readonly=1)
    expected = source.reshape(32, 4).copy()
    expected[:, size // 4 :] = 0
    assert out.tolist() == expected.tolist()


# Each CTA of a pair sends 512 bytes to the other one, behind an mbarrier at 2048 of its shared memory.
SEND = """mov.u32 %r1, tile; add.s32 %r2, %r1, 2048; setp.eq.s32 %p1, %r0, 0; mov.u32 %r5, %cluster_ctarank;
    @%p1 mbarrier.init.shared::cta.b64 [%r2], 1; @%p1 fence.mbarrier_init.release.cluster;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {bytes};
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    xor.b32 %r6, %r5, 1; shl.b32 %r3, %r0, 4; add.s32 %r3, %r3, %r1; mapa.shared::cluster.u32 %r7, %r3, %r6;
    mapa.shared::cluster.u32 %r8, %r2, {told}; shl.b32 %r9, %r5, 8; add.s32 %r9, %r9, %r0; cvt.rn.f32.u32 %f1, %r9;
    st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%r7], {{%f1, %f1, %f1, %f1}}, [%r8];
    mov.f32 %f1, 0f00000000;
    {wait} ld.shared.v4.f32 {{%f1, %f2, %f3, %f4}}, [%r3]; cvt.rzi.u32.f32 %r10, %f4;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    mul.wide.u32 %d10, %r5, 128; add.s64 %d10, %d10, %d0; mul.wide.u32 %d11, %r0, 4; add.s64 %d10, %d10, %d11;
    st.global.u32 [%d10], %r10;"""
SENT = "SENT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra SENT;"


def test_asynchronous_stores_land_late_and_tell_the_mbarrier_where_they_land() -> None:
    out = np.zeros((2, 32), np.uint32)
    expected = [[256 + k for k in range(32)], list(range(32))]
    early = 0
    for seed in range(8):
        out[...] = 0
        run(SEND.format(bytes=512, told="%r6", wait=SENT), out, cluster=2, seed=seed)
        assert out.tolist() == expected
        try:
            run(SEND.format(bytes=512, told="%r6", wait=""), out, cluster=2, seed=seed)
        except Trap as trap:
            early += "an unfinished copy still writes" in str(trap) or "unwritten shared memory" in str(trap)
    assert early >= 4
    with pytest.raises(Trap, match="deadlock"):
        run(SEND.format(bytes=528, told="%r6", wait=SENT), out, cluster=2)
    with pytest.raises(Trap, match=r"st\.async to one CTA with an mbarrier of another"):
        run(SEND.format(bytes=512, told="%r5", wait=SENT), out, cluster=2)


def test_a_missing_wait_for_a_copy_is_found() -> None:
    """A read of what a copy still writes is a trap, whenever the copy would have finished."""
    source = np.arange(128, dtype=np.uint32)
    body = f"mov.u32 %r5, 16;{COPY} ld.shared.u32 %r6, [%r2];"
    found = 0
    for seed in range(8):
        try:
            run(body, source, readonly=1, seed=seed)
        except Trap as trap:
            assert "an unfinished copy still writes" in str(trap)
            found += 1
    # One copy in four is finished at once, to find buffers that are filled too early.
    assert found >= 4


# One warpgroup multiplies 64x16 by 16x64, all ones, at 1024 and 3072 of 8 KiB of shared memory.
ONES = """mov.u32 %r1, tile; shl.b32 %r2, %r0, 6; add.s32 %r2, %r2, %r1; mov.u32 %r3, 0x3c003c00; mov.u32 %r4, 0;
FILL: st.shared.u32 [%r2], %r3; st.shared.u32 [%r2+8192], %r3; add.s32 %r2, %r2, 4; add.s32 %r4, %r4, 1;
    setp.lt.u32 %p1, %r4, 16; @%p1 bra FILL;
    {fence} bar.sync 0; shr.u32 %r5, %r1, 4; cvt.u64.u32 %d5, %r5; or.b64 %d5, %d5, 0x4000004000010000;
    add.s64 %d6, %d5, 512; mov.f32 %f0, 0f3F800000;"""
REGISTERS = ", ".join(f"%f{k}" for k in range(1, 33))
MULTIPLY = f"""wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {{{REGISTERS}}}, %d5, %d6, 0, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;"""
FENCE, DONE = "fence.proxy.async.shared::cta;", "wgmma.wait_group.sync.aligned 0;"


def product(*parts: str) -> str:
    return "\n".join(parts) + f"{element(4)} st.global.f32 [%d10], %f1;"


def test_products_of_a_warpgroup_wait_for_each_other() -> None:
    out = np.zeros(128, np.float32)
    run(product(ONES.format(fence=FENCE), MULTIPLY, DONE), out, threads=128, shared=16384)
    assert (out == 16).all()
    with pytest.raises(Trap, match=r"no fence\.proxy\.async"):
        run(product(ONES.format(fence=""), MULTIPLY, DONE), out, threads=128, shared=16384)
    with pytest.raises(Trap, match=r"before wgmma\.wait_group"):
        run(product(ONES.format(fence=FENCE), MULTIPLY), out, threads=128, shared=16384)
    with pytest.raises(Trap, match="that an unfinished wgmma reads"):
        early = "st.shared.u32 [%r1], %r0;"
        run(product(ONES.format(fence=FENCE), MULTIPLY, early, DONE), out, threads=128, shared=16384)
    with pytest.raises(Trap, match=r"without a wgmma\.fence"):
        late = MULTIPLY.replace("wgmma.fence.sync.aligned;", "")
        run(product(ONES.format(fence=FENCE), late, DONE), out, threads=128, shared=16384)


def test_an_endless_loop_of_polls_is_a_deadlock_and_so_is_half_a_cluster() -> None:
    out = np.zeros(32, np.uint32)
    arrive, wait = "barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;"
    run(arrive + wait, out, cluster=2)
    first = "mov.u32 %r1, %cluster_ctarank; setp.eq.s32 %p1, %r1, 0;"
    half = f"{first} @%p1 bra ALONE; bra END; ALONE: {arrive} {wait} END:"
    run(half, out, cluster=2)
    with pytest.raises(Trap, match="deadlock"):
        run(half.replace("bra END;", INIT.format(count=1) + WAIT.format(parity=0) + "bra END;"), out, cluster=2)


BULK = """setp.eq.s32 %p1, %r0, 0; mov.u32 %r1, tile; mov.u32 %r5, 16; add.s32 %r2, %r1, 2048;
    @%p1 mbarrier.init.shared::cta.b64 [%r2], 1; bar.sync 0;"""
USES_OF_GLOBAL_MEMORY = {
    "load": "ld.global.u32 %r2, [%d0];",
    "load past the cache": "ld.global.nc.u32 %r2, [%d0];",
    "generic load": "ld.u32 %r2, [%d0];",
    "store": f"{element(4)} st.global.u32 [%d10], %r0;",
    "reduction": "red.global.add.u32 [%d0], %r0;",
    "vector of a reduction": "red.global.add.v2.f32 [%d0], {%f0, %f1};",
    "atomic operation": "atom.global.add.u32 %r2, [%d0], %r0;",
    "cp.async": "mov.u32 %r1, tile; shl.b32 %r2, %r0, 2; add.s32 %r1, %r1, %r2; "
    "cp.async.ca.shared.global [%r1], [%d0], 4; cp.async.wait_all;",
    "bulk copy in": BULK + "@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[%r1], [%d0], %r5, [%r2]; @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 16; "
    "IN: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra IN;",
    "bulk copy out": BULK + "st.shared.v4.u32 [%r1], {%r0, %r0, %r0, %r0}; fence.proxy.async.shared::cta; "
    "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1], %r5; cp.async.bulk.commit_group; "
    "cp.async.bulk.wait_group.read 0;",
    "prefetch": "prefetch.global.L2 [%d0];",
    "bulk prefetch": "mov.u32 %r5, 16; cp.async.bulk.prefetch.L2.global [%d0], %r5;",
    "discard": "discard.global.L2 [%d0], 128;",
}


@pytest.mark.parametrize("use", USES_OF_GLOBAL_MEMORY)
def test_a_dependent_launch_waits_before_it_uses_global_memory(use: str) -> None:
    body, wait = USES_OF_GLOBAL_MEMORY[use], "griddepcontrol.wait;"
    with pytest.raises(
        Trap, match=r"thread 0 of a dependent launch uses global memory before its griddepcontrol\.wait"
    ) as trap:
        run(f"griddepcontrol.launch_dependents; {body} {wait}", np.zeros(64, np.uint32), pdl=True)
    assert "CTA 0" in trap.value.where and trap.value.line and trap.value.instruction.split()[-1]
    run(f"{wait} {body}", np.zeros(64, np.uint32), pdl=True)
    run(body, np.zeros(64, np.uint32))


def test_each_thread_of_a_dependent_launch_waits_for_itself() -> None:
    body = f"setp.lt.u32 %p1, %r0, 40; @%p1 griddepcontrol.wait; {element(4)} st.global.u32 [%d10], %r0;"
    with pytest.raises(Trap, match="thread 40 of a dependent launch"):
        run(body, np.zeros(64, np.uint32), threads=64, pdl=True)
    run(body, np.zeros(64, np.uint32), threads=40, pdl=True)


def test_what_is_not_global_memory_is_free_before_the_wait() -> None:
    """Parameters, shared memory and tensor maps that are parameters."""
    body = "mov.u32 %r1, tile; st.shared.u32 [%r1], %r0; ld.shared.u32 %r2, [%r1]; prefetch.tensormap [%d0];"
    run(body + "mov.u32 %r3, tile; cvta.shared.u64 %d5, %d6;", np.zeros(1, np.uint32), pdl=True)
