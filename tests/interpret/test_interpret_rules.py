"""Rules of the PTX ISA and of the driver. A breach need not show in a result here; on a GPU it hangs or is wrong."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from interpret_kit import element, run, text
from test_interpret_races import TOGETHER
from test_interpret_traps import BOUNDS, DONE, FENCE, INIT, MULTIPLY, ONES, product

from cupymla.build import KernelSource
from cupymla.launch import Geometry, Launcher
from cupymla_lab.interpret import GlobalMemory, Trap, Unknown, interpret, parse
from cupymla_lab.interpret.instructions.wgmma import decode, element_addresses
from cupymla_lab.interpreted import Interpreted, Kernel, interpreted

# Shared memory and mbarriers ---------------------------------------------------------------------------------------

OTHERS = f"""mov.u32 %r1, tile; mov.u32 %r2, %cluster_ctarank; shl.b32 %r3, %r0, 2; add.s32 %r1, %r1, %r3;
    st.shared.u32 [%r1], %r2; {TOGETHER} xor.b32 %r4, %r2, {{to}}; mapa.shared::cluster.u32 %r5, %r1, %r4;
    {{use}} {TOGETHER}"""


@pytest.mark.parametrize("to", [0, 1], ids=["own", "other"])
def test_addresses_of_the_cluster_are_used_as_such(to: int) -> None:
    """Also those that mapa gives for the CTA itself lie in another window than its own."""
    out = np.zeros(1, np.uint32)
    for use in ("ld{}.u32 %r6, [%r5];", "st{}.u32 [%r5], %r0;", "atom{}.add.u32 %r6, [%r5], 1;"):
        run(OTHERS.format(to=to, use=use.format(".shared::cluster")), out, cluster=2)
        with pytest.raises(Trap, match=r"which mapa made, in an access to \.shared::cta"):
            run(OTHERS.format(to=to, use=use.format(".shared")), out, cluster=2)


def test_a_thread_waits_at_mbarriers_of_its_own_cta() -> None:
    body = f"""{INIT.format(count=1)} {TOGETHER} mov.u32 %r2, %cluster_ctarank; xor.b32 %r2, %r2, 1;
    mapa.shared::cluster.u32 %r5, %r1, %r2; @%p1 {{arrive}} _, [%r5]; {{wait}} {TOGETHER}"""
    arrive, out = "mbarrier.arrive.shared::cluster.b64", np.zeros(1, np.uint32)
    wait = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [{}], 0; @!%p2 bra WAIT;"
    run(body.format(arrive=arrive, wait=wait.format("%r1")), out, cluster=2)
    for wrong in ({"arrive": arrive, "wait": wait.format("%r5")}, {"arrive": "mbarrier.arrive.shared::cta.b64"}):
        with pytest.raises(Trap, match=r"which mapa made, for an mbarrier in \.shared::cta"):
            run(body.format(**{"wait": wait.format("%r1"), **wrong}), out, cluster=2)


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
    wait, out = "cp.async.wait_all;", np.zeros(4, np.uint32)
    with pytest.raises(Trap, match=r"an mbarrier lies at offset [04] of shared memory"):
        run(body + use + wait, out, strict=False)
    run(body + inval + use + wait, out, strict=False)
    run(body + "add.s32 %r1, %r1, 16;" + use + wait, out, strict=False)


def test_an_mbarrier_counts_bytes_and_arrivals_up_to_a_million() -> None:
    expect, out = "@%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], {};", np.zeros(1, np.uint32)
    run(INIT.format(count=1) + expect.format(2**20 - 1), out)
    for wrong in (expect.format(2**20), 2 * expect.format(2**19)):
        with pytest.raises(Trap, match=r"an mbarrier expects .* where it can count 1048575"):
            run(INIT.format(count=1) + wrong, out)
    with pytest.raises(Trap, match="0 arrivals on an mbarrier"):
        run(INIT.format(count=1) + "@%p1 mov.u32 %r2, 0; mbarrier.arrive.shared::cta.b64 %d5, [%r1], %r2;", out)
    with pytest.raises(Trap, match=r"mbarrier\.init with a count of 1048576"):
        run(INIT.format(count=2**20), out)


def test_threads_at_a_named_barrier_reduce_all_or_none() -> None:
    out = np.zeros(1, np.uint32)
    both = "setp.lt.u32 %p1, %r0, 32; @%p1 bra LOW; {high} bra END; LOW: {low} END:"
    reduces, waits = "barrier.red.or.pred %p2, 1, 64, %p1;", "barrier.sync 1, 64;"
    run(both.format(high=waits, low=waits), out, threads=64)
    run(both.format(high=reduces, low=reduces), out, threads=64)
    with pytest.raises(Trap, match="some threads came to reduce, others to wait"):
        run(both.format(high=waits, low=reduces), out, threads=64)
    with pytest.raises(Trap, match="named barrier of 0 threads"):
        run("mov.u32 %r1, 0; barrier.sync 1, %r1;", out)


# Warpgroups --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, what",
    [
        ("add.s64 %d6, %d6, 8;", "in a later row of the swizzle's 1024 bytes"),
        ("or.b64 %d6, %d6, 0x0010000000000000;", "has bits that mean nothing"),
        ("sub.s64 %d6, %d6, 0x0000002000000000;", "not multiples of 1024"),
    ],
)
def test_descriptors_begin_where_the_swizzle_does(change: str, what: str) -> None:
    """64 to 1024 bytes behind is 32 to 64 in units of 16; up to 128 bytes, columns of a row, are allowed."""
    out = np.zeros(128, np.float32)
    begun = ONES.format(fence=FENCE)
    run(product(begun, "add.s64 %d6, %d6, 2;", MULTIPLY, DONE), out, threads=128, shared=16384)
    with pytest.raises(Trap, match=what):
        run(product(begun, change, MULTIPLY, DONE), out, threads=128, shared=16384)


SWIZZLES = {128: 1, 64: 2}


def descriptor(start: int, leading: int, stride: int, span: int) -> int:
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | SWIZZLES[span] << 62


def swizzled(row: int, byte: int, span: int) -> int:
    """Where a byte of a row of the swizzle lies: pieces of 16 bytes change places within each of eight rows."""
    which = {128: row & 7, 64: row >> 1 & 3}[span]
    return row * span + ((byte // 16) ^ which) * 16 + byte % 16


@pytest.mark.parametrize("span", SWIZZLES)
@pytest.mark.parametrize("column", [0, 16])
def test_a_k_major_operand_lies_where_a_copy_puts_it(span: int, column: int) -> None:
    """Of 24 rows of K, from `column` on; tiles of eight rows lie one after another, or with another matrix between."""
    base = 6 * 1024
    for apart in (1, 2):
        matrix = decode(descriptor(base + column * 2, 0, 8 * span * apart, span))
        found = element_addresses(matrix, 24, False)
        for r in range(24):
            row = r // 8 * 8 * apart + r % 8
            assert found[r].tolist() == [base + swizzled(row, (column + c) * 2, span) for c in range(16)]


@pytest.mark.parametrize("span", SWIZZLES)
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_an_mn_major_operand_lies_where_a_copy_puts_it(span: int, rows: int) -> None:
    """A copy's boxes have K as rows: eight of them to a tile, and as many elements side by side as fill a row."""
    base, wide = 9 * 1024, span // 2
    for stride, leading in ((8 * span, 16 * span), (32 * span, 8 * span)):
        found = element_addresses(decode(descriptor(base, leading, stride, span)), rows, True)
        for r in range(rows):
            tile = base + r // wide * leading
            assert found[r].tolist() == [
                tile + c // 8 * stride + swizzled(c % 8, r % wide * 2, span) for c in range(16)
            ]


@pytest.mark.parametrize("span", SWIZZLES)
def test_a_matrix_stays_in_the_rows_of_its_swizzle(span: int) -> None:
    repeat, wide = 8 * span, span // 2
    for later in (span, 2 * span, repeat - 16):
        with pytest.raises(Trap, match=f"in a later row of the swizzle's {repeat} bytes"):
            decode(descriptor(4096 + later, 0, repeat, span))
    assert decode(descriptor(4096 + repeat, 0, repeat, span)).start == 4096 + repeat
    with pytest.raises(Trap, match=f"not multiples of {repeat}"):
        element_addresses(decode(descriptor(4096, 0, repeat + 64, span)), 8, False)
    with pytest.raises(Trap, match=f"not multiples of {repeat}"):
        element_addresses(decode(descriptor(4096, repeat + 64, repeat, span)), 2 * wide, True)
    for start, rows, transposed in ((span - 32, 8, False), (32, wide - 16, True)):
        element_addresses(decode(descriptor(4096 + start, repeat, repeat, span)), rows, transposed)
        with pytest.raises(Trap, match=f"past the {span} bytes of the swizzle's row"):
            element_addresses(decode(descriptor(4096 + start + 16, repeat, repeat, span)), rows, transposed)


@pytest.mark.parametrize("mode", [0, 3])
def test_other_layouts_of_matrices_are_not_known(mode: int) -> None:
    with pytest.raises(Unknown, match="without a swizzle of 128 or 64 bytes"):
        decode(mode << 62)


def test_a_fence_lies_between_a_product_and_other_uses_of_its_registers() -> None:
    """ptxas puts a missing one there, or serialises, and says so."""
    out = np.zeros(128, np.float32)
    begun, fence = ONES.format(fence=FENCE), "wgmma.fence.sync.aligned;"
    for use in ("mov.f32 %f32, 0f00000000;", "add.f32 %f40, %f1, %f1;"):
        between = MULTIPLY.replace(fence, fence + use)
        run(product(begun, use, MULTIPLY, DONE), out, threads=128, shared=16384)
        run(product(begun, MULTIPLY.replace(fence, fence + use + fence), DONE), out, threads=128, shared=16384)
        with pytest.raises(Trap, match=r"registers that other instructions use behind the wgmma\.fence"):
            run(product(begun, between, DONE), out, threads=128, shared=16384)
    # What the product does not use is free.
    unused = MULTIPLY.replace(fence, fence + "mov.f32 %f40, 0f00000000;")
    run(product(begun, unused, DONE), out, threads=128, shared=16384)


def test_a_warpgroup_agrees_whether_accumulators_count() -> None:
    out = np.zeros(128, np.float32)
    begun, some = ONES.format(fence=FENCE), MULTIPLY.replace("%d6, 0, 1", "%d6, %p3, 1")
    run(product(begun, "setp.lt.u32 %p3, %r0, 128;", some, DONE), out, threads=128, shared=16384)
    with pytest.raises(Trap, match="give different scale-d"):
        run(product(begun, "setp.lt.u32 %p3, %r0, 64;", some, DONE), out, threads=128, shared=16384)


def test_all_warps_of_a_warpgroup_set_their_registers() -> None:
    body = "setp.lt.u32 %p1, %r0, {}; @!%p1 bra END; setmaxnreg.dec.sync.aligned.u32 40; END: bar.sync 0;"
    options: dict[str, Any] = {"threads": 384, "bounds": BOUNDS, "group": 384}
    run(body.format(256), np.zeros(1, np.uint32), **options)
    with pytest.raises(Trap, match=r"deadlock: .*setmaxnreg\.dec"):
        run(body.format(224), np.zeros(1, np.uint32), **options)


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


# Clusters and exits ------------------------------------------------------------------------------------------------


def test_a_cta_has_started_before_another_uses_its_memory() -> None:
    body = f"""mov.u32 %r1, tile; mov.u32 %r2, %cluster_ctarank; xor.b32 %r2, %r2, 1; shl.b32 %r3, %r0, 2;
    add.s32 %r1, %r1, %r3; mapa.shared::cluster.u32 %r5, %r1, %r2; {{first}} st.shared::cluster.u32 [%r5], %r0;
    {TOGETHER}"""
    out = np.zeros(1, np.uint32)
    run(body.format(first=""), out, cluster=2)
    with pytest.raises(Trap, match=r"shared memory of CTA [01], which need not have started"):
        run(body.format(first=""), out, cluster=2, races="practice")
    run(body.format(first=TOGETHER), out, cluster=2, races="letter")
    # To have arrived is enough: nothing has to be published.
    run(body.format(first=TOGETHER.replace("arrive", "arrive.relaxed")), out, cluster=2, races="letter")


LOAD = f"""{INIT.format(count=1)} add.s32 %r2, %r1, 16; mov.u32 %r5, 16; {{before}}
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 16;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d0], %r5, [%r1];"""
LOADED = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0; @!%p2 bra WAIT;"


def test_a_cta_exits_behind_its_copies() -> None:
    """Its shared memory may be another CTA's by the time they land."""
    source = np.zeros(4, np.uint32)
    run(LOAD.format(before="") + LOADED, source)
    copy = "mov.u32 %r1, tile; @{} cp.async.ca.shared.global [%r1], [%d0], 4; {}"
    one = "setp.eq.s32 %p1, %r0, 0;"
    run(one + copy.format("%p1", "cp.async.wait_all;"), source)
    landed = 0
    for seed in range(8):
        for body in (LOAD.format(before=""), one + copy.format("%p1", "")):
            try:
                run(body, source, seed=seed)
            except Trap as trap:
                assert "in shared memory of CTA 0, which has exited" in str(trap)
                landed += 1
    assert landed >= 8
    store = f"""mov.u32 %r1, tile; mov.u32 %r5, 16; {one} st.shared.v4.u32 [%r1], {{%r0, %r0, %r0, %r0}};
    fence.proxy.async.shared::cta; @%p1 cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1], %r5;
    cp.async.bulk.commit_group; """
    run(store + "cp.async.bulk.wait_group.read 0;", source)
    with pytest.raises(Trap, match="thread 0 of CTA 0 exits before its bulk copies have read shared memory"):
        run(store, source)


def test_registers_that_nothing_has_written_are_not_zero() -> None:
    out = np.zeros((2, 32), np.float32)
    run(f"{element(4)} st.global.f32 [%d10], %f9; st.global.u32 [%d10+128], %r9;", out)
    assert np.isnan(out[0]).all() and (out[1].view(np.int32) == -1).all()


# Proxies and grids -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("races", ["unchecked", "practice"])
def test_copies_write_behind_a_fence_where_ordinary_code_wrote(races: Any) -> None:
    source, fence = np.zeros(4, np.uint32), "fence.mbarrier_init.release.cluster;"
    run(LOAD.format(before=fence) + LOADED, source, races=races)
    writes = f"{fence} @%p1 st.shared.u32 [%r2], %r0;"
    with pytest.raises(Trap, match=r"asynchronous(ly)? write.*|no fence\.proxy\.async"):
        run(LOAD.format(before=writes) + LOADED, source, races=races)
    run(LOAD.format(before=writes + FENCE) + LOADED, source, races=races)


def test_to_the_letter_copies_write_behind_a_fence_where_ordinary_code_read() -> None:
    """CUTLASS frees buffers that ldmatrix has read without one."""
    source, out = np.zeros(4, np.uint32), np.zeros(32, np.uint32)
    again = f"""{{fence}} bar.sync 0; @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 16;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d0], %r5, [%r1];
    AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 1; @!%p2 bra AGAIN;
    {element(4, 1)} st.global.u32 [%d10], %r6;"""
    body = LOAD.format(before="fence.mbarrier_init.release.cluster;") + LOADED + "ld.shared.u32 %r6, [%r2];" + again
    run(body.format(fence=""), source, out, races="practice")
    run(body.format(fence=FENCE), source, out, races="letter")
    with pytest.raises(Trap, match=r"asynchronously writes .* read or was .* no fence\.proxy\.async"):
        run(body.format(fence=""), source, out, races="letter")
    # The thread that copies knows of its own fence, but that one says nothing of what others read.
    with pytest.raises(Trap, match=r"asynchronously writes .* read or was .* no fence\.proxy\.async"):
        run(body.format(fence=f"@%p1 {FENCE}"), source, out, races="letter")


def test_copies_read_global_memory_behind_a_fence_for_global_memory() -> None:
    memory, init = np.zeros(4, np.uint32), "fence.mbarrier_init.release.cluster;"
    writes = init + "@%p1 st.global.u32 [%d0], %r0; {}"
    run(LOAD.format(before=writes.format("fence.proxy.async;")) + LOADED, memory, races="letter")
    for fence in ("", FENCE):
        with pytest.raises(Trap, match=r"asynchronous|no fence\.proxy\.async"):
            run(LOAD.format(before=writes.format(fence)) + LOADED, memory, races="practice")
    with pytest.raises(Unknown, match="proxy fence for global memory alone"):
        run("fence.proxy.async.global;", memory)


@pytest.mark.parametrize("load", ["ld.global", "ld.global.nc"])
@pytest.mark.parametrize("between", [False, True], ids=["next", "one between"])
def test_what_an_overlapping_grid_writes_is_not_read_past_the_order_of_memory(load: str, between: bool) -> None:
    """A kernel that another dependent one follows lets it in behind its own wait, or both may run beside the first."""
    a, b = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    memory = GlobalMemory()
    addresses = [struct.pack("<Q", memory.add(name, array)) for name, array in (("a", a), ("b", b))]

    def launch(body: str, ahead: Any, pdl: bool) -> Any:
        geometry = Geometry((1, 1, 1), 32, 0, pdl=pdl)
        program = parse(text(body, 2), "kernel")
        return interpret(program, geometry, addresses, memory, races="practice", ahead=ahead)

    write = f"{element(4, 0)} st.global.u32 [%d10], %r0;"
    read = f"griddepcontrol.wait; {element(4, 0)} {load}.u32 %r1, [%d10]; {element(4, 1)} st.global.u32 [%d10], %r1;"
    last = launch(f"{write} griddepcontrol.launch_dependents;", None, False)
    if between:
        launch(read, launch("griddepcontrol.wait; griddepcontrol.launch_dependents;", last, True), True)
        last = launch("griddepcontrol.launch_dependents; griddepcontrol.wait;", last, True)
    launch(read, last, False)
    if load == "ld.global":
        launch(read, last, True)
        return
    with pytest.raises(Trap, match=r"ld\.global\.nc of byte 0 of 'a', which the launch ahead writes"):
        launch(read, last, True)


# Launches ----------------------------------------------------------------------------------------------------------


def _kernel(machine: Interpreted) -> Kernel:
    made = Kernel(parse(text("", 0), "kernel"), 0x77, KernelSource("tiny.cu", "kernel"))
    machine._kernels[made.function] = made
    return made


def test_the_driver_refuses_what_a_target_does_not_have() -> None:
    """The tiny kernel has 4096 bytes of static shared memory."""
    whole = Geometry((16, 1, 1), 32, 227 * 1024 - 4096, cluster=16)
    with interpreted("sm_90a") as machine:
        Launcher(_kernel(machine), whole, ())(0)
        with pytest.raises(Trap, match="232449 bytes of shared memory where sm_90a has 232448"):
            Launcher(_kernel(machine), replace(whole, smem_bytes=whole.smem_bytes + 1), ())(0)
    nothing_allowed = mock.patch.object(Interpreted, "_allow", lambda *given: None)
    for geometry in (replace(whole, cluster=1), replace(whole, smem_bytes=0)):
        with (
            nothing_allowed,
            interpreted("sm_90a") as machine,
            pytest.raises(Trap, match="than the kernel was allowed"),
        ):
            Launcher(_kernel(machine), geometry, ())(0)
    for geometry in (Geometry((2, 1, 1), 32, 0, cluster=2), Geometry((2, 1, 1), 32, 0, pdl=True)):
        with interpreted("sm_80") as machine, pytest.raises(Trap, match="a cluster or a dependent launch on sm_80"):
            Launcher(_kernel(machine), geometry, ())(0)
