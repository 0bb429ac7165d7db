"""What instructions cost in the estimate of cycles, by PTX and by machine code, and what comes from device memory."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from cycles_kit import recorded, text_of, warps_of

from cupymla import build
from cupymla.ops import registry
from cupymla.testing import operators
from cupymla_lab import machine_code
from cupymla_lab.interpret import parse
from cupymla_lab.interpret.cycles import Rates, costs, replay, report, trace
from cupymla_lab.interpret.cycles.rates import FROM_MEMORY
from cupymla_lab.interpreted import interpreted

NOTHING = trace.Run(0, 0, 0, 0)

# Products of single warps ------------------------------------------------------------------------------------------

MMA = """mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
    {%f0, %f1, %f2, %f3}, {%r2, %r3, %r4, %r5}, {%r6, %r7}, {%f4, %f5, %f6, %f7};"""


def test_products_of_a_warp_are_recorded_with_the_first_use_of_their_sums() -> None:
    found = recorded(f"{MMA}\nadd.f32 %f8, %f0, %f0;").warps[0].events
    kinds = [event for event in found if isinstance(event, trace.WarpProduct | trace.Use)]
    assert kinds == [trace.WarpProduct(16 * 8 * 16, 0), trace.Use((0,))]


def test_products_of_warps_keep_to_their_schedulers_tensor_core() -> None:
    rates = replace(Rates(), warp_products=256.0, warp_product_latency=33.0)
    products: list[trace.Event] = [trace.WarpProduct(2048, 0)] * 10
    alone = replay(warps_of([*products, trace.Use((0,))]), rates)
    assert alone.cycles == pytest.approx(9 * 8 + 33, abs=1)
    assert replay(warps_of(products, products), rates).cycles < alone.cycles
    five = replay(warps_of(products, [], [], [], products), rates)
    assert five.cycles == pytest.approx(19 * 8, abs=2)
    assert report.busy(five)["tensor core"] == pytest.approx(20 * 8 / five.cycles)


# Device memory -----------------------------------------------------------------------------------------------------


def test_sectors_that_an_access_touches() -> None:
    body = """mad.wide.u32 %rd2, %r0, 4, %rd1; ld.global.f32 %f0, [%rd2];
    mad.wide.u32 %rd3, %r0, 64, %rd1; ld.global.f32 %f1, [%rd3];
    st.global.f32 [%rd2+512], %f2;"""
    near, far, store = (event for event in recorded(body).warps[0].events if isinstance(event, trace.Global))
    ((first, behind),) = near.sectors
    assert behind - first == 4
    assert far.sectors == tuple((first + 2 * k, first + 2 * k + 1) for k in range(32))
    assert store.sectors == ((first + 16, first + 20),)


def test_what_cp_async_gathers_comes_in_sectors() -> None:
    """Sixteen bytes a lane, of the first half of the lanes; of a size of zero none."""
    body = """setp.ge.u32 %p0, %r0, 16; selp.u32 %r3, 0, 16, %p0;
    mad.wide.u32 %rd2, %r0, 16, %rd1; mad.lo.u32 %r2, %r0, 16, %r1;
    cp.async.cg.shared.global [%r2], [%rd2], 16, %r3; cp.async.wait_all;"""
    (found,) = (event for event in recorded(body).warps[0].events if isinstance(event, trace.Gather))
    ((first, behind),) = found.sectors
    assert (found.bytes, behind - first) == (256, 8)


@pytest.mark.parametrize(
    ("instruction", "sectors"),
    [
        ("prefetch.global.L2 [%rd1+40];", 4),
        ("cp.async.bulk.prefetch.L2.global [%rd1+16], %r2;", 3),
    ],
)
def test_prefetches_name_their_sectors(instruction: str, sectors: int) -> None:
    """A line of 128 bytes, or 64 bytes of which the first are in the middle of a sector."""
    body = f"mov.u32 %r2, 64; setp.eq.u32 %p0, %r0, 0; ld.global.f32 %f0, [%rd1]; @%p0 {instruction}"
    events = recorded(body).warps[0].events
    start = next(event for event in events if isinstance(event, trace.Global)).sectors[0][0]
    (found,) = (event for event in events if isinstance(event, trace.Prefetch))
    assert found == trace.Prefetch(32 * sectors, ((start, start + sectors),))


def load(first: int, sectors: int, number: int = 0) -> trace.Global:
    return trace.Global(32 * sectors, number, False, ((first, first + sectors),))


MEMORY = replace(Rates(), memory_bytes=16.0, memory_latency=900.0, l2_latency=200.0, gather_bytes=64.0, solo=1.0)
LATER = trace.Run(3000, 0, 0, 0)


def took(*events: trace.Event, rates: Rates = MEMORY) -> float:
    return replay(warps_of(list(events)), rates).cycles


def test_what_is_asked_for_first_comes_from_memory() -> None:
    assert took(load(0, 64), trace.Use((0,))) == pytest.approx(2048 / 16 + 900, abs=2)
    # In L2 then: the same sectors, and none of others.
    again = took(load(0, 64), trace.Use((0,)), load(0, 64, 1), trace.Use((1,))) - took(load(0, 64), trace.Use((0,)))
    assert again == pytest.approx(2048 / 64 + 200, abs=2)
    half = took(load(0, 64), trace.Use((0,)), load(32, 64, 1), trace.Use((1,))) - took(load(0, 64), trace.Use((0,)))
    assert half == pytest.approx(1024 / 16 + 900, abs=2)
    assert took(load(0, 64), trace.Use((0,)), rates=Rates()) == pytest.approx(2048 / 37 + 700, abs=2)


def test_memory_serves_a_multiprocessor_at_its_rate() -> None:
    loads = [load(64 * k, 64, k) for k in range(8)]
    assert took(*loads, trace.Use(tuple(range(8)))) == pytest.approx(8 * 128 + 900, abs=4)
    gathers: list[trace.Event] = [trace.Gather(2048, ((64 * k, 64 * k + 64),)) for k in range(8)]
    assert took(*gathers, trace.GatherWait(-1)) == pytest.approx(8 * 128 + 900, abs=4)


def test_what_is_under_way_is_waited_for() -> None:
    """Asked for by somebody else a moment before: no bytes more, and no sooner."""
    first: list[trace.Event] = [load(0, 64), trace.Use((0,))]
    second: list[trace.Event] = [trace.Run(50, 0, 0, 0), load(0, 64), trace.Use((0,))]
    both = replay(warps_of(first, second), MEMORY)
    assert [warp.end for warp in both.warps] == pytest.approx([128 + 900] * 2, abs=2)
    assert both.multiprocessors[0].memory.busy == 128
    apart = replay(warps_of(first, second, ctas=2), MEMORY)
    assert [sm.memory.busy for sm in apart.multiprocessors] == [128, 0]


def test_prefetches_bring_into_l2() -> None:
    """And cost nothing where all is there anyway."""
    prefetch = trace.Prefetch(2048, ((0, 64),))
    early = took(prefetch, LATER, load(0, 64), trace.Use((0,)))
    assert early == pytest.approx(3000 + 2048 / 64 + 200, abs=4)
    late = took(prefetch, trace.Run(300, 0, 0, 0), load(0, 64), trace.Use((0,)))
    assert late == pytest.approx(128 + 900, abs=4)
    assert took(trace.Prefetch(2048), load(0, 64), trace.Use((0,))) == pytest.approx(128 + 900, abs=4)
    assert took(prefetch, rates=Rates()) < 2


def test_what_was_stored_is_in_l2() -> None:
    store = trace.Global(2048, -1, False, ((0, 64),))
    assert took(store, LATER, load(0, 64), trace.Use((0,))) == pytest.approx(3000 + 32 + 200, abs=60)


def test_bulk_copies_come_from_memory() -> None:
    """All of them, as nobody knows from where."""
    copy: list[trace.Event] = [trace.Arrive(0, 1, 4096, 0), trace.Landing(0, 4096, 0, False), trace.Wait(0, 1)]
    rates = replace(MEMORY, wake=0.0)
    assert replay(warps_of(copy, barriers=(1,)), rates).cycles == pytest.approx(4096 / 16 + 900, abs=40)
    stored: list[trace.Event] = [trace.Arrive(0, 1, 4096, 0), trace.Landing(0, 4096, 0, True), trace.Wait(0, 1)]
    assert replay(warps_of(stored, barriers=(1,)), rates).multiprocessors[0].memory.busy == 0


def test_the_rates_from_memory_are_below_those_of_l2() -> None:
    assert FROM_MEMORY.memory_bytes < FROM_MEMORY.gather_bytes
    assert FROM_MEMORY.memory_latency > FROM_MEMORY.l2_latency


# CTAs that share a multiprocessor ----------------------------------------------------------------------------------


# How many of three CTAs, neighbours, each multiprocessor has.
SHARED = {1: [1, 1, 1], 2: [2, 1], 3: [3], 8: [3]}


@pytest.mark.parametrize(("resident", "cycles"), [(1, 1000), (2, 2000), (3, 3000), (8, 3000)])
def test_ctas_share_a_multiprocessor(resident: int, cycles: int) -> None:
    run: list[trace.Event] = [trace.Run(1000, 0, 0, 0)]
    found = replay(warps_of(run, run, run, ctas=3), replace(Rates(), solo=1.0), resident)
    assert found.cycles == pytest.approx(cycles, rel=0.05)
    numbers = [id(sm) for sm in found.multiprocessors]
    assert [len(list(same)) for _, same in itertools.groupby(numbers)] == SHARED[resident]
    assert report.busy(found)["issue"] == pytest.approx(1.0, rel=0.05)


def test_how_busy_a_shared_multiprocessor_was_goes_by_its_last_cta() -> None:
    found = replay(warps_of([trace.Run(100, 0, 0, 0)], [trace.Run(900, 0, 0, 0)], ctas=2), Rates(), resident=2)
    assert report.busy(found, 0) == report.busy(found, 1)
    assert 0.5 < report.busy(found)["issue"] <= 1


# Instructions ------------------------------------------------------------------------------------------------------


def test_integer_products_have_half_of_the_fp32_pipe() -> None:
    rates = replace(Rates(), solo=1.0)

    def cycles(*run: int) -> float:
        return replay(warps_of([trace.Run(*run)]), rates).cycles

    assert cycles(240, 0, 240, 0) == pytest.approx(240)
    assert cycles(240, 0, 240, 0, 240) == pytest.approx(480)
    # The other half takes fp32 in the meantime.
    assert cycles(240, 0, 240, 0, 120) == pytest.approx(240)
    both = report.busy(replay(warps_of([trace.Run(240, 0, 240, 0, 60)]), rates))
    assert both["fp32 pipe"] == pytest.approx(1.0)
    assert both["integer products"] == pytest.approx(0.5)


SASS = """
	.section	.text.k,"ax",@progbits
.text.k:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
	//## File ".nv_debug_ptx_txt", line 10
        /*0010*/                   S2R R0, SR_TID.X ;
        /*0020*/                   IMAD.WIDE.U32 R2, R0, 0x4, R2 ;
        /*0030*/              @!P0 LDG.E R4, desc[UR4][R2.64] ;
	//## File ".nv_debug_ptx_txt", line 11
        /*0040*/                   BRA.DIV UR5, `(.L_x_2) ;
.L_x_1:
        /*0050*/                   SHFL.BFLY PT, R5, R4, 0x10, 0x1f ;
	//## File ".nv_debug_ptx_txt", line 12
        /*0060*/              @P1  FFMA R5, R4, R4, R5 ;
        /*0070*/                   MUFU.EX2 R5, R5 ;
        /*0080*/               @P0 BRA `(.L_x_3) ;
	//## File ".nv_debug_ptx_txt", line 13
        /*0090*/              @!PT LDS RZ, [RZ] ;
        /*00a0*/                   UIADD3 UR4, UR4, 0x1, URZ ;
        /*00b0*/                   EXIT ;
.L_x_2:
	//## File ".nv_debug_ptx_txt", line 11
        /*00c0*/                   IMAD.MOV.U32 R6, RZ, RZ, -0x1 ;
        /*00d0*/                   WARPSYNC.COLLECTIVE R6, `(.L_x_4) ;
.L_x_5:
        /*00e0*/                   SHFL.BFLY P1, R5, R4, R7, R8 ;
        /*00f0*/                   ENDCOLLECTIVE ;
.L_x_4:
	//## File ".nv_debug_ptx_txt", line 12
        /*0100*/               @P0 BRA `(.L_x_3) ;
        /*0110*/                   BRA `(.L_x_1) ;
.L_x_3:
	//## File ".nv_debug_ptx_txt", line 14
        /*0120*/                   IADD3 R5, R5, 0x1, RZ ;
        /*0130*/                   EXIT ;
        .type           $__internal_0_$__cuda_sm20_div_u64,@function
$__internal_0_$__cuda_sm20_div_u64:
        /*0140*/                   IADD3 R5, R5, 0x1, RZ ;
        /*0150*/                   RET.REL.NODEC R2 `(k) ;
        /*0160*/                   NOP ;
"""


def test_machine_code_is_counted_by_lines_of_ptx() -> None:
    """Neither what stands apart for warps that have diverged nor subroutines, which no line is told of."""
    assert costs.of_machine_code(SASS) == {
        10: trace.Run(2, 0, 1, 0, 1),
        11: trace.Run(1, 0, 0, 0),
        12: trace.Run(3, 0, 1, 1),
        13: trace.Run(3, 0, 0, 0),
        14: trace.Run(2, 1, 0, 0),
    }


def test_machine_code_without_line_numbers_says_nothing() -> None:
    assert costs.of_machine_code(re.sub(r".*//##.*\n", "", SASS)) == {}


def test_machine_code_takes_the_place_of_the_ptx() -> None:
    """Lines that nothing became cost nothing, but for divisions of 64 bits, which are subroutines."""
    body = """add.u32 %r2, %r0, 1;
    mul.lo.u32 %r3, %r2, %r2;
    div.u64 %rd2, %rd1, %rd1;
    st.shared.u32 [%r1], %r3;"""
    lines = {step.parts[0]: step.line for step in parse(text_of(body), "k").steps}
    runs = [event for event in recorded(body).warps[0].events if isinstance(event, trace.Run)]
    assert runs == [trace.Run(42, 21, 13, 2, 7)]
    counts = {
        lines["mul"]: trace.Run(5, 1, 2, 0, 1),
        lines["st"]: trace.Run(3, 1, 0, 0),
        lines["div"]: trace.Run(900, 0, 0, 0),
    }
    found = [e for e in recorded(body, machine_code=counts).warps[0].events if isinstance(e, trace.Run | trace.Shared)]
    assert found == [trace.Run(45, 21, 14, 2, 7), trace.Shared(1, -1), trace.Run(3, 1, 0, 0)]


COMPILED = [
    ("sparse_mla_fwd", "sm_90a", ("CUPYMLA_D_QK=576", "CUPYMLA_HEADS=16", "CUPYMLA_FP16=0", "CUPYMLA_SPLIT=0")),
    ("nvfp4_gemv", "sm_90", ("CUPYMLA_MXFP4=0", "CUPYMLA_VECTORS=0", "CUPYMLA_MOST_COLUMNS=1")),
]


@pytest.mark.compile
@pytest.mark.parametrize(("name", "target", "defines"), COMPILED)
def test_lines_of_a_compiled_kernel(name: str, target: str, defines: tuple[str, ...]) -> None:
    """They are those of the PTX that is interpreted, and every opcode is of a class."""
    pytest.importorskip("cupy", reason="compiling goes through CuPy's NVRTC bindings")
    source = operators.defining(operators.variants(registry.named(name), [target]), defines)[0]
    text = machine_code.by_ptx_line(build.cubin(source))
    if text is None:
        pytest.skip(f"needs nvdisasm of the CUDA toolkit (pip install {machine_code.WHEEL})")
    assert {opcode for opcode in machine_code.opcodes(text) if not costs.is_known(opcode)} == set()
    found = costs.of_machine_code(text)
    steps = {step.line: step for step in parse(build.ptx(source), source.entry).steps}
    # But for what comes before the first.
    assert sum(run.issue for line, run in found.items() if line not in steps) <= 4
    exponentials = [line for line, step in steps.items() if step.parts[0] in ("ex2", "rcp")]
    assert [found[line].xu for line in exponentials] == [1] * len(exponentials)
    products = [line for line, step in steps.items() if step.parts[0] == "fma" and step.parts[-1] == "f32"]
    assert sum(found[line].fma - found[line].imad for line in products if line in found) >= 0.9 * len(products)
    total = sum(run.issue for run in found.values())
    assert 0.5 * machine_code.opcodes(text).total() < total < machine_code.opcodes(text).total()


@pytest.mark.parametrize("gap", [0, 8])
def test_arrays_lie_as_on_a_gpu(gap: int) -> None:
    """So that their rows begin with a sector; also those with gaps between rows, of which nothing is lost."""
    keys = np.arange(3 * 40, dtype=np.int16).reshape(3, 40)[:, : 40 - gap]
    with interpreted() as machine:
        made = machine.array(keys)
    assert made.data.ptr % 512 == 0
    assert (made.strides, made.get().tolist()) == (keys.strides, keys.tolist())
