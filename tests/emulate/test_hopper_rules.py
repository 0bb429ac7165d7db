"""Rules of the PTX ISA and of the driver on the host machine, as kernels of a few lines: the right form passes, the
wrong one ends with a message. A breach need not show in a result here; on a GPU it hangs or is wrong."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from conftest import HOST
from hopper_kit import element, program, run, text

from cupymla.build import KernelSource
from cupymla.launch import Geometry, Launcher
from cupymla_lab.emulate import EmulationError, HostError
from cupymla_lab.emulate.host.machine import load
from cupymla_lab.emulate.host.memory import Arrays
from cupymla_lab.emulated import Emulated, Kernel, emulated

pytestmark = [HOST, pytest.mark.compile]

Error = (HostError, EmulationError)
FENCE = "fence.proxy.async.shared::cta;"
TOGETHER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
INIT = """mov.u32 %r1, tile; setp.eq.s32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [%r1], {count};
    bar.sync 0;"""
WAIT = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], {parity}; @!%p2 bra WAIT;"


def numbers(count: int = 32) -> Any:
    return np.zeros(count, np.uint32)


def refused(what: str, body: str, *arrays: Any, **options: Any) -> None:
    """It ends with that message."""
    with pytest.raises(Error, match=what):
        run(body, *(arrays or (numbers(64),)), **options)


# Global memory -------------------------------------------------------------------------------------------------------


def test_reads_and_writes_stay_inside_and_aligned() -> None:
    small, out = np.arange(31, dtype=np.uint32), numbers()
    copy = f"{element(4, 0)} ld.global.u32 %r1, [%d10]; {element(4, 1)} st.global.u32 [%d10], %r1;"
    refused(r"read out of bounds: 4 bytes .* of 'a0' \(124 bytes\)", copy, small, out, readonly=1)
    refused("write to read-only memory", copy, np.arange(32, dtype=np.uint32), out, readonly=2)
    refused("not aligned to 4", "ld.global.u32 %r1, [%d0+2];", out)
    refused("write out of bounds: 4 bytes", "st.u32 [%d0+128], %r0;", out)
    run(copy, np.arange(32, dtype=np.uint32), out, readonly=1)
    assert out.tolist() == list(range(32))


@pytest.mark.parametrize("use", ["ld.global.u32 %r1, [%d0+4];", "red.global.add.u32 [%d0+4], 1;"])
def test_global_memory_is_written_before_it_is_read(use: str) -> None:
    memory, out = Arrays(), numbers()
    memory.add("made", out.ctypes.data, out.nbytes, initialised=False)
    write = f"{element(4)} st.global.u32 [%d10], %r0; bar.warp.sync -1;"
    refused("read of unwritten memory: byte 4 of 'made'", "st.global.u32 [%d0], 1;" + use, out, memory=memory)
    run(write + use, out, memory=memory)
    run(use, out, memory=memory)


def test_variables_of_the_module_are_memory_of_the_kernel() -> None:
    head = text("mov.u64 %d5, table; ld.global.u32 %r1, [%d5+4]; st.global.u32 [%d0], %r1;", 1)
    whole = head.replace(".visible .entry", ".global .align 4 .u32 table[2] = {5, 7};\n.visible .entry")
    out, memory = numbers(1), Arrays()
    memory.add("out", out.ctypes.data, out.nbytes)
    loaded = load(whole, "kernel")
    loaded.launch(Geometry((1, 1, 1), 32, 0), [ctypes.c_uint64(out.ctypes.data)], arrays=memory)
    assert out[0] == 7


def test_a_message_names_thread_and_line() -> None:
    body = "setp.eq.s32 %p1, %r0, 7;\n@%p1 ld.global.u32 %r1, [%d0+400];"
    refused(r"thread 7 of CTA \(0, 0, 0\), PTX line 11: global read out of bounds", body, numbers(4))


def test_registers_that_nothing_has_written_are_not_zero() -> None:
    out = np.zeros((2, 32), np.float32)
    run(f"{element(4)} st.global.f32 [%d10], %f9; st.global.u32 [%d10+128], %r9;", out)
    assert np.isnan(out[0]).all() and (out[1].view(np.int32) == -1).all()


# Shared memory and mbarriers -----------------------------------------------------------------------------------------


def test_shared_memory_is_bounded_and_written_before_it_is_read() -> None:
    out = numbers()
    read = f"mov.u32 %r1, tile; ld.shared.u32 %r2, [%r1]; {element(4)} st.global.u32 [%d10], 1;"
    refused(r"reads shared memory, offset 0 at PTX line \d+, which nothing has written", read, out, races="hardware")
    refused("which nothing has written", "mov.u32 %r1, tile; atom.shared.add.u32 %r2, [%r1], 1;", out, races="hardware")
    run("mov.u32 %r1, tile; ld.shared.u32 %r2, [%r1]; st.global.u32 [%d0], %r2;", out)
    assert out[0] == 0xFFFFFFFF
    run(read, out, races="hardware", checks=())
    refused("is outside", "mov.u32 %r1, tile; st.shared.u32 [%r1+4096], %r0;", out)
    refused("is not aligned to 4", "mov.u32 %r1, tile; st.shared.u32 [%r1+2], %r0;", out)


OTHERS = f"""mov.u32 %r1, tile; mov.u32 %r2, %cluster_ctarank; shl.b32 %r3, %r0, 2; add.s32 %r1, %r1, %r3;
    st.shared.u32 [%r1], %r2; {TOGETHER} xor.b32 %r4, %r2, 1; mapa.shared::cluster.u32 %r5, %r1, %r4;
    {{use}} {TOGETHER}"""


@pytest.mark.parametrize("use", ["ld{}.u32 %r6, [%r5];", "st{}.u32 [%r5], %r0;", "atom{}.add.u32 %r6, [%r5], 1;"])
def test_addresses_of_the_cluster_are_used_as_such(use: str) -> None:
    out = numbers(1)
    run(OTHERS.format(use=use.format(".shared::cluster")), out, cluster=2)
    refused(r"which mapa made, in an access to \.shared::cta", OTHERS.format(use=use.format(".shared")), out, cluster=2)


def test_mapa_names_a_cta_of_the_cluster() -> None:
    refused(
        "mapa to rank 2 of a cluster of 2",
        OTHERS.format(use="").replace("xor.b32 %r4, %r2, 1", "mov.u32 %r4, 2"),
        cluster=2,
    )


def test_a_thread_waits_at_mbarriers_of_its_own_cta() -> None:
    body = f"""{INIT.format(count=1)} {TOGETHER} mov.u32 %r2, %cluster_ctarank; xor.b32 %r2, %r2, 1;
    mapa.shared::cluster.u32 %r5, %r1, %r2; @%p1 {{arrive}} _, [%r5]; {{wait}} {TOGETHER}"""
    arrive, out = "mbarrier.arrive.shared::cluster.b64", numbers(1)
    wait = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [{}], 0; @!%p2 bra WAIT;"
    run(body.format(arrive=arrive, wait=wait.format("%r1")), out, cluster=2)
    for wrong in ({"arrive": arrive, "wait": wait.format("%r5")}, {"arrive": "mbarrier.arrive.shared::cta.b64"}):
        whole = body.format(**{"wait": wait.format("%r1"), **wrong})
        refused(r"which mapa made, in an access to \.shared::cta", whole, out, cluster=2)


@pytest.mark.parametrize(
    "use",
    [
        "@%p1 st.shared.u32 [%r1], %r0;",
        "@%p1 st.shared.u32 [%r1+4], %r0;",
        "@%p1 ld.shared.v4.u32 {%r2, %r3, %r4, %r5}, [%r1];",
        "@%p1 mbarrier.init.shared::cta.b64 [%r1], 1;",
        "@%p1 cp.async.ca.shared.global [%r1], [%d0], 4;",
    ],
)
def test_an_mbarrier_is_no_data_and_is_not_made_anew(use: str) -> None:
    inval, body = "@%p1 mbarrier.inval.shared::cta.b64 [%r1]; bar.sync 0;", INIT.format(count=1)
    wait = "cp.async.wait_all;"
    options: dict[str, Any] = {"races": "hardware", "checks": ()}
    refused("an mbarrier lies at offset 0 of shared memory", body + use + wait, numbers(4), **options)
    run(body + inval + use + wait, numbers(4), **options)
    run(body + "add.s32 %r1, %r1, 16;" + use + wait, numbers(4), **options)


def test_an_mbarrier_counts_bytes_and_arrivals_up_to_a_million() -> None:
    expect = "@%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], {};"
    run(INIT.format(count=1) + expect.format(2**20 - 1), numbers())
    for wrong in (expect.format(2**20), 2 * expect.format(2**19)):
        refused("an mbarrier expects .* where it can count 1048575", INIT.format(count=1) + wrong)
    none = "@%p1 mov.u32 %r2, 0; @%p1 mbarrier.arrive.shared::cta.b64 %d5, [%r1], %r2;"
    refused("0 arrivals on an mbarrier", INIT.format(count=1) + none)
    refused(r"mbarrier\.init with a count of 1048576", INIT.format(count=2**20))


def test_mbarrier_deadlock_and_underflow() -> None:
    arrive = "mbarrier.arrive.shared::cta.b64 _, [%r1];"
    run(INIT.format(count=64) + arrive + WAIT.format(parity=0), numbers(), threads=64)
    with pytest.raises(EmulationError) as stands:
        run(INIT.format(count=65) + arrive + WAIT.format(parity=0), numbers(), threads=64)
    assert stands.value.code == 2 and stands.value.instruction.startswith("mbarrier.try_wait")
    # Bytes that never come keep the phase open while a second arrival is made.
    expect = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 16;"
    refused("more arrivals than it takes", INIT.format(count=1) + expect, threads=64)
    refused("was not initialised", "mov.u32 %r1, tile;" + arrive)


# Barriers ------------------------------------------------------------------------------------------------------------


def test_named_barriers() -> None:
    out = numbers(64)
    write = "mov.u32 %r1, tile; shl.b32 %r2, %r0, 2; add.s32 %r2, %r2, %r1; st.shared.u32 [%r2], %r0;"
    read = f"xor.b32 %r3, %r2, 128; ld.shared.u32 %r4, [%r3]; {element(4)} st.global.u32 [%d10], %r4;"
    for seed in range(3):
        run(write + "barrier.sync.aligned 1, 64;" + read, out, threads=64, seed=seed, races="specified")
        assert out.tolist() == [k ^ 32 for k in range(64)]
    refused("nothing orders the two|which nothing has written", write + read, out, threads=64, races="hardware")
    with pytest.raises(EmulationError) as stands:
        run("barrier.sync.aligned 1, 96;", out, threads=64)
    assert stands.value.code == 3
    refused("there is no named barrier 16", "mov.u32 %r1, 16; barrier.sync %r1, 64;", threads=64)
    refused("no whole warps", "mov.u32 %r1, 40; barrier.sync 1, %r1;", threads=64)
    both = "setp.lt.u32 %p1, %r0, 32; @%p1 bra LOW; {high} bra END; LOW: {low} END:"
    other = both.format(high="barrier.sync 1, 64;", low="barrier.sync 1, 96;")
    refused("threads expect (64|96) and (64|96) participants", other, threads=64)


def test_threads_at_a_named_barrier_reduce_all_or_none() -> None:
    both = "setp.lt.u32 %p1, %r0, 32; @%p1 bra LOW; {high} bra END; LOW: {low} END:"
    reduces, waits = "barrier.red.or.pred %p2, 1, 64, %p1;", "barrier.sync 1, 64;"
    run(both.format(high=waits, low=waits), numbers(), threads=64)
    run(both.format(high=reduces, low=reduces), numbers(), threads=64)
    refused("some threads came to reduce, others to wait", both.format(high=waits, low=reduces), threads=64)


def test_the_barrier_of_a_cluster_is_used_by_turns() -> None:
    arrive, wait = "barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;"
    run(arrive + wait + arrive + wait, numbers(), cluster=2)
    refused("arrive twice without a wait", arrive + arrive, cluster=2)
    refused("wait before an arrive", wait, cluster=2)
    # Threads that have exited are not waited for; those that stand elsewhere are.
    first = "mov.u32 %r1, %cluster_ctarank; setp.eq.s32 %p1, %r1, 0;"
    half = f"{first} @%p1 bra ALONE; bra END; ALONE: {arrive} {wait} END:"
    run(half, numbers(), cluster=2)
    stuck = half.replace("bra END;", INIT.format(count=1) + WAIT.format(parity=0) + "bra END;")
    with pytest.raises(EmulationError) as stands:
        run(stuck, numbers(), cluster=2)
    assert stands.value.code in (2, 4)


# Warps and warpgroups ------------------------------------------------------------------------------------------------


def test_a_mask_names_the_lanes_that_come() -> None:
    run("setp.lt.u32 %p1, %r0, 16; @%p1 bar.warp.sync 0xffff;", numbers())
    refused("membermask 0xffff leaves it out", "bar.warp.sync 0xffff;")
    absent = "setp.lt.u32 %p1, %r0, 16; @!%p1 bra OTHER; vote.sync.any.pred %p2, 1, -1; bra END; OTHER: "
    run(absent + "vote.sync.any.pred %p2, 1, -1; END:", numbers())
    refused("deadlock: .*not all lanes", absent + "bar.warp.sync -1; END:")
    half = "setp.lt.u32 %p1, %r0, 16; @%p1 shfl.sync.idx.b32 %r1, %r0, {}, 31, 0xffff;"
    run(half.format(15), numbers())
    refused("shfl reads lane 16, which does not take part", half.format(16))


def test_elect_takes_any_lane_but_always_the_same() -> None:
    """Code that takes it for the first lane, or for another one each time, is found by some seed."""
    out = np.zeros((2, 64), np.uint32)
    body = f"""elect.sync %r1|%p1, -1; elect.sync %r2|%p2, -1; selp.u32 %r3, 1, 0, %p1; selp.u32 %r4, 1, 0, %p2;
    {element(4)} st.global.u32 [%d10], %r3; st.global.u32 [%d10+256], %r4;"""
    chosen = set()
    for seed in range(8):
        run(body, out, threads=64, seed=seed)
        assert (out[0] == out[1]).all() and out[0].sum() == 2 and (out[0, :32] == out[0, 32:]).all()
        chosen.add(int(out[0].argmax()))
    assert len(chosen) > 2


BOUNDS = ".maxntid 384, 1, 1 .minnctapersm 1"
SPECIALISED = """setp.ge.u32 %p1, %r0, 256; @%p1 bra PRODUCER;
    setmaxnreg.inc.sync.aligned.u32 {consumer}; bra DONE;
    PRODUCER: setmaxnreg.dec.sync.aligned.u32 {producer};
    DONE: {element} st.global.u32 [%d10], %r0;"""


def specialised(producer: int, consumer: int, bounds: str = BOUNDS, seed: int = 0) -> None:
    out = numbers(384)
    body = SPECIALISED.format(producer=producer, consumer=consumer, element=element(4))
    run(body, out, threads=384, bounds=bounds, seed=seed)
    assert out.tolist() == list(range(384))


@pytest.mark.parametrize(("producer", "consumer"), [(24, 240), (40, 232)])
def test_setmaxnreg_assigns_what_the_cta_got_at_launch(producer: int, consumer: int) -> None:
    """384 threads get 168 registers each, so three warpgroups have 504 together: 512 fit the file, but not the pool."""
    for seed in range(3):
        specialised(producer, consumer, seed=seed)


@pytest.mark.parametrize(
    ("producer", "consumer", "bounds", "what"),
    [
        (32, 240, BOUNDS, r"deadlock: setmaxnreg\.inc"),
        (24, 240, f"{BOUNDS} .maxnreg 128", r"deadlock: setmaxnreg\.inc"),
        (176, 232, BOUNDS, r"setmaxnreg\.dec to 176 registers where a warp has 168"),
        (24, 160, BOUNDS, r"setmaxnreg\.inc to 160 registers where a warp has 168"),
        (16, 240, BOUNDS, "multiples of 8 from 24 to 256"),
        (24, 240, "", "without launch bounds"),
    ],
)
def test_registers_that_are_not_there_are_not_dealt_out(producer: int, consumer: int, bounds: str, what: str) -> None:
    with pytest.raises(HostError, match=what):
        specialised(producer, consumer, bounds)


def test_all_warps_of_a_warpgroup_set_their_registers() -> None:
    body = "setp.lt.u32 %p1, %r0, {}; @!%p1 bra END; setmaxnreg.dec.sync.aligned.u32 40; END: bar.sync 0;"
    run(body.format(256), numbers(1), threads=384, bounds=BOUNDS)
    refused(r"deadlock: setmaxnreg\.dec", body.format(224), threads=384, bounds=BOUNDS)


def test_the_warps_of_a_warpgroup_meet_between_two_changes_of_their_registers() -> None:
    body = """setmaxnreg.dec.sync.aligned.u32 120; shr.u32 %r1, %r0, {}; add.s32 %r1, %r1, 1;
    barrier.sync.aligned %r1, {}; setmaxnreg.inc.sync.aligned.u32 168;"""
    options: dict[str, Any] = {"threads": 384, "bounds": BOUNDS, "mode": "lazy", "races": "hardware"}
    run(body.format(7, 128), numbers(1), **options)
    for shift, threads in ((6, 64), (5, 32)):
        what = "changes its registers again, and nothing orders that behind the last change of thread"
        refused(what, body.format(shift, threads), numbers(1), **options)


# Copies and exits ----------------------------------------------------------------------------------------------------


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


def test_a_missing_wait_for_a_copy_is_found() -> None:
    body = f"mov.u32 %r5, 16;{COPY} ld.shared.u32 %r6, [%r2]; cp.async.wait_all;"
    refused("a cp.async of thread", body, np.zeros(128, np.uint32), readonly=1, races="hardware")
    group = f"mov.u32 %r5, 16;{COPY} cp.async.wait_group {{}}; ld.shared.u32 %r6, [%r2]; cp.async.wait_all;"
    run(group.format(0), np.zeros(128, np.uint32), readonly=1, races="hardware")
    refused("a cp.async of thread", group.format(1), np.zeros(128, np.uint32), readonly=1, races="hardware")


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
    for seed in range(3):
        run(SEND.format(bytes=512, told="%r6", wait=SENT), out, cluster=2, seed=seed, races="hardware")
        assert out.tolist() == [[256 + k for k in range(32)], list(range(32))]
    early = SEND.format(bytes=512, told="%r6", wait="")
    refused("nothing orders the two|which nothing has written", early, out, cluster=2, races="hardware")
    with pytest.raises(EmulationError) as stands:
        run(SEND.format(bytes=528, told="%r6", wait=SENT), out, cluster=2)
    assert stands.value.code == 2
    other = SEND.format(bytes=512, told="%r5", wait=SENT)
    refused(r"st\.async to one CTA with an mbarrier of another", other, out, cluster=2)


LOAD = f"""{INIT.format(count=1)} add.s32 %r2, %r1, 16; mov.u32 %r5, 16; {{before}}
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 16;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d0], %r5, [%r1];"""
LOADED = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0; @!%p2 bra WAIT;"
INITIALISED = "@%p1 fence.mbarrier_init.release.cluster;"


def test_a_cta_exits_behind_its_copies() -> None:
    """Its shared memory may be another CTA's by the time they land."""
    source = np.zeros(4, np.uint32)
    load = LOAD.format(before=INITIALISED)
    run(load + LOADED, source, readonly=1)
    refused("ends before this copy of thread 0 was waited for|exits while a copy", load, source, mode="lazy")
    one, copy = "setp.eq.s32 %p1, %r0, 0;", "mov.u32 %r1, tile; @%p1 cp.async.ca.shared.global [%r1], [%d0], 4; {}"
    run(one + copy.format("cp.async.wait_all;"), source)
    for mode in ("eager", "lazy"):
        refused(
            "exits before 1 cp.async to its shared memory were waited for", one + copy.format(""), source, mode=mode
        )
    told = "@%p1 cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r1];"
    arrival = INIT.format(count=1) + "add.s32 %r2, %r1, 16; @%p1 cp.async.ca.shared.global [%r2], [%d0], 4;" + told
    run(arrival + LOADED, source)
    refused("exits while a copy still uses its shared memory", arrival, source, mode="lazy")
    store = f"""mov.u32 %r1, tile; mov.u32 %r5, 16; {one} @%p1 st.shared.v4.u32 [%r1], {{%r0, %r0, %r0, %r0}};
    fence.proxy.async.shared::cta; @%p1 cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1], %r5;
    cp.async.bulk.commit_group; """
    run(store + "cp.async.bulk.wait_group.read 0;", source)
    refused("bulk store of thread 0 was waited for", store, source, mode="lazy")


def test_bulk_copies_are_aligned_inside_and_tell_the_cta_that_they_go_to() -> None:
    source = np.zeros(8, np.uint32)
    load = LOAD.format(before=INITIALISED) + LOADED
    refused("misaligned bulk copy", load.replace("[%d0]", "[%d0+4]"), source)
    refused("global read out of bounds: 16 bytes", load.replace("[%d0]", "[%d0+32]"), source)
    across = f"""{INIT.format(count=1)} {INITIALISED} {TOGETHER} add.s32 %r2, %r1, 16; mov.u32 %r5, 16;
    mov.u32 %r6, %cluster_ctarank; xor.b32 %r6, %r6, 1; mapa.shared::cluster.u32 %r7, %r2, %r6;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 16;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r7], [%d0], %r5, [%r1];
    {LOADED} {TOGETHER}"""
    refused("a bulk copy to one CTA with an mbarrier of another", across, source, cluster=2)


# Clusters, proxies and grids -----------------------------------------------------------------------------------------


def test_a_cta_has_started_before_another_uses_its_memory() -> None:
    body = f"""mov.u32 %r1, tile; mov.u32 %r2, %cluster_ctarank; xor.b32 %r2, %r2, 1; shl.b32 %r3, %r0, 2;
    add.s32 %r1, %r1, %r3; mapa.shared::cluster.u32 %r5, %r1, %r2; {{first}} st.shared::cluster.u32 [%r5], %r0;
    {TOGETHER}"""
    what = r"shared memory of the CTA with rank [01], which need not have started"
    refused(what, body.format(first=""), numbers(1), cluster=2, races="hardware")
    run(body.format(first=TOGETHER), numbers(1), cluster=2, races="specified")
    # To have arrived is enough: nothing has to be published.
    run(body.format(first=TOGETHER.replace("arrive", "arrive.relaxed")), numbers(1), cluster=2, races="specified")


def test_copies_write_behind_a_fence_where_ordinary_code_wrote() -> None:
    source = np.zeros(4, np.uint32)
    writes = f"{INITIALISED} @%p1 st.shared.u32 [%r2], %r0;"
    refused(
        r"asynchronously writes .* no fence\.proxy\.async",
        LOAD.format(before=writes) + LOADED,
        source,
        races="hardware",
    )
    run(LOAD.format(before=writes + FENCE) + LOADED, source, races="specified")


def test_as_specified_copies_write_behind_a_fence_where_ordinary_code_read() -> None:
    """CUTLASS frees buffers that ldmatrix has read without one."""
    source, out = np.zeros(4, np.uint32), numbers()
    again = f"""{{fence}} bar.sync 0; @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 16;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d0], %r5, [%r1];
    AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 1; @!%p2 bra AGAIN;
    {element(4, 1)} st.global.u32 [%d10], %r6;"""
    body = LOAD.format(before=INITIALISED) + LOADED + "ld.shared.u32 %r6, [%r2];" + again
    run(body.format(fence=""), source, out, races="hardware")
    run(body.format(fence=FENCE), source, out, races="specified")
    # The thread that copies knows of its own fence, but that one says nothing of what others read.
    for fence in ("", f"@%p1 {FENCE}"):
        what = r"asynchronously writes .* read or was .* no fence\.proxy\.async"
        refused(what, body.format(fence=fence), source, out, races="specified")


def test_what_is_not_global_memory_is_free_before_the_wait_of_a_dependent_launch() -> None:
    body = "mov.u32 %r1, tile; st.shared.u32 [%r1], %r0; ld.shared.u32 %r2, [%r1]; prefetch.tensormap [%d0];"
    run(body, numbers(1), pdl=True)
    for use in ("ld.global.u32 %r2, [%d0];", "red.global.add.u32 [%d0], %r0;", "prefetch.global.L2 [%d0];",
                "discard.global.L2 [%d0], 128;", "cp.async.bulk.prefetch.L2.global [%d0], 16;"):  # fmt: skip
        refused(r"before its griddepcontrol\.wait", use, numbers(64), pdl=True)
        run("griddepcontrol.wait;" + use, numbers(64), pdl=True)
    some = f"setp.lt.u32 %p1, %r0, 40; @%p1 griddepcontrol.wait; {element(4)} st.global.u32 [%d10], %r0;"
    refused(
        "thread (4|5|6).* of a dependent launch",
        some.replace("griddepcontrol", "griddepcontrol"),
        numbers(64),
        threads=64,
        pdl=True,
    )
    run(some, numbers(64), threads=40, pdl=True)


@pytest.mark.parametrize("load_", ["ld.global", "ld.global.nc"])
def test_what_no_launch_writes_may_be_read_before_the_wait_of_a_dependent_launch(load_: str) -> None:
    """An argument that kernels only read was there before the call; what they may write was perhaps not."""
    copy = f"{load_}.u32 %r2, [%d0]; {{}} {element(4, 1)} st.global.u32 [%d10], %r2;"
    out = numbers()
    run(copy.format("griddepcontrol.wait;"), np.full(1, 7, np.uint32), out, readonly=1, pdl=True)
    assert (out == 7).all()
    refused("before its .*: ld", copy.format("griddepcontrol.wait;"), numbers(1), numbers(), pdl=True)
    refused("before its .*: st", copy.format(""), numbers(1), numbers(), readonly=1, pdl=True)


def test_what_no_launch_writes_may_be_copied_before_the_wait_of_a_dependent_launch() -> None:
    copied = LOAD.format(before=INITIALISED) + LOADED
    run(copied, np.zeros(4, np.uint32), readonly=1, pdl=True)
    refused(r"before its griddepcontrol\.wait", copied, np.zeros(4, np.uint32), pdl=True)
    run("griddepcontrol.wait;" + copied, np.zeros(4, np.uint32), pdl=True)


@pytest.mark.parametrize("load_", ["ld.global", "ld.global.nc"])
@pytest.mark.parametrize("between", [False, True], ids=["next", "one between"])
def test_what_an_overlapping_grid_writes_is_not_read_past_the_order_of_memory(load_: str, between: bool) -> None:
    """A kernel that another dependent one follows lets it in behind its own wait, or both may run beside the first."""
    a, b, memory = numbers(), numbers(), Arrays()
    for name, array in (("a", a), ("b", b)):
        memory.add(name, array.ctypes.data, array.nbytes)

    def launch(body: str, pdl: bool) -> None:
        run(body, a, b, memory=memory, pdl=pdl, races="hardware")

    write = f"{element(4, 0)} st.global.u32 [%d10], %r0;"
    read = f"griddepcontrol.wait; {element(4, 0)} {load_}.u32 %r1, [%d10]; {element(4, 1)} st.global.u32 [%d10], %r1;"
    launch(f"{write} griddepcontrol.launch_dependents;", False)
    if between:
        launch("griddepcontrol.wait; griddepcontrol.launch_dependents;", True)
        launch(read, True)
        launch(f"{write} griddepcontrol.launch_dependents;", False)
        launch("griddepcontrol.launch_dependents; griddepcontrol.wait;", True)
    if load_ == "ld.global":
        launch(read, True)
        return
    with pytest.raises(HostError, match=r"ld\.global\.nc of byte \d+ of 'a', which the launch ahead writes"):
        launch(read, True)
    launch(read, False)


# Launches ------------------------------------------------------------------------------------------------------------


def test_the_driver_refuses_what_a_target_does_not_have() -> None:
    """The tiny kernel has 4096 bytes of static shared memory."""

    def kernel(machine: Emulated) -> Kernel:
        made = Kernel(program("", 0), 0x77, KernelSource("tiny.cu", "kernel"))
        machine._kernels[made.function] = made
        return made

    whole = Geometry((16, 1, 1), 32, 227 * 1024 - 4096, cluster=16)
    with emulated("sm_90a") as machine:
        Launcher(kernel(machine), whole, ())(0)
        with pytest.raises(HostError, match="232449 bytes of shared memory where sm_90a has 232448"):
            Launcher(kernel(machine), replace(whole, smem_bytes=whole.smem_bytes + 1), ())(0)
    nothing_allowed = mock.patch.object(Emulated, "_allow", lambda *given: None)
    for geometry in (replace(whole, cluster=1), replace(whole, smem_bytes=0)):
        with (
            nothing_allowed,
            emulated("sm_90a") as machine,
            pytest.raises(HostError, match="than the kernel was allowed"),
        ):
            Launcher(kernel(machine), geometry, ())(0)
    for geometry in (Geometry((2, 1, 1), 32, 0, cluster=2), Geometry((2, 1, 1), 32, 0, pdl=True)):
        with emulated("sm_80") as machine, pytest.raises(HostError, match="a cluster or a dependent launch on sm_80"):
            Launcher(kernel(machine), geometry, ())(0)
