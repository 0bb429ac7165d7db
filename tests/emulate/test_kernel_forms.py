"""Instructions that whole sm_100a kernels are made of, beside tcgen05: reductions, distributed shared memory, warps.

Every kernel here is a few lines of PTX in a cluster of two CTAs, and its result is compared with NumPy's.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from device import Kernel, Memory, Where, blank, tile_map
from device import run as run_operation
from forms_kit import BARRIER, CTAS, EVERYBODY, NUMBERED, THREADS, WAIT, loaded, numbers, require_real
from isa_oracle import Array

from cupymla.launch import Geometry
from cupymla.tensormap import TileMap
from cupymla_lab.emulate import EmulationError, Settings
from cupymla_lab.emulate.host import library
from cupymla_lab.emulate.host.machine import HostError
from cupymla_lab.emulate.settings import MODES, Mode

pytestmark = pytest.mark.compile


def run(
    body: str,
    given: Array,
    out: Array,
    where: Where,
    mode: Mode = "eager",
    target: str = "sm_100a",
    pdl: bool = False,
    removed: int = 0,
) -> Array:
    """What a kernel leaves in `out`.

    Args:
        body: PTX. %thread, %cta and %rank (32 bits) say who runs it, %n is thread + 64 cta; %in and %out hold addresses
            (64 bits), %smem that of 8 KB of shared memory, %bar that of an mbarrier; %r0 to %r15, %d0 to %d7, %f0 to
            %f7, %h0 to %h3, %p and %q are free.
        given, out: what %in and %out point to.
        pdl: whether it is a dependent launch.
        removed: 1 where the body's first instruction that can be is taken away.
    """
    source, target_memory = Memory(given, where), Memory(out, where)
    parameters: list[Any] = [source.parameter, target_memory.parameter]
    geometry = Geometry((CTAS, 1, 1), THREADS, 8192, cluster=CTAS, pdl=pdl)
    together = (body,) if target != "sm_100a" else launches() if pdl or removed or body in launches() else bodies()
    number = together.index(body)
    kernel, lines = loaded(together, where, target)
    first = next((site.number for site in kernel.sites if site.line > lines[number]), 0)
    settings = Settings(mode, removed=first if removed else 0)
    kernel.launch(geometry, [*parameters, ctypes.c_uint32(number)], settings)
    return target_memory.read()


@functools.cache
def bodies() -> tuple[str, ...]:
    """Of all ordinary launches, compiled at once."""
    return (
        *(vector_sum(width) for width in (2, 4)),
        *(bulk_sum(kind) for kind in ("f32", "bf16", "f16", "u32", "s32")),
        *(peers(form) for form in ("st", "generic", "st.async", "bulk", "reduction")),
        *(matrices(count, transposed) for count in (1, 2, 4) for transposed in (False, True)),
        *(byte_matrices(*each) for each in BYTE_MATRICES),
        *(byte_stores(count) for count in (1, 2, 4)),
        *(wide(vector) for vector in ("v8.f32", "v4.b64")),
        *(request(multicast) for multicast in (False, True)),
        *(nowhere(form) for form in ("load", "store", "copy")),
        *(alignment(), packed_sum(), counter(), election(), nothing(), unfenced(), commit_to_both(), NUMBERED),
    )


@pytest.mark.parametrize("target", ["sm_100a", "sm_100f", "sm_103a"])
def test_targets(target: str, where: Where) -> None:
    found = run(NUMBERED, numbers(1), np.zeros(CTAS * THREADS, np.uint32), where, target=target)
    np.testing.assert_array_equal(found, np.arange(CTAS * THREADS))


def vector_sum(width: int) -> str:
    registers = ", ".join(f"%f{i}" for i in range(width))
    return f"""
    mad.wide.u32 %d0, %n, {4 * width}, %in;
    ld.global.v{width}.f32 {{{registers}}}, [%d0];
    and.b32 %r0, %n, 3;
    mad.wide.u32 %d1, %r0, {4 * width}, %out;
    red.global.add.v{width}.f32 [%d1], {{{registers}}};
"""


@pytest.mark.parametrize("width", [2, 4])
def test_vectors_of_floats_are_added_to_global_memory(width: int, where: Where) -> None:
    """red.global.add.v2.f32 and .v4.f32: every thread of both CTAs adds its own numbers to one of four places."""
    given = numbers(CTAS * THREADS * width)
    found = run(vector_sum(width), given, np.ones(4 * width, np.float32), where)
    np.testing.assert_array_equal(found.reshape(4, width), 1 + given.reshape(-1, 4, width).sum(axis=0))


def alignment() -> str:
    body = "and.b32 %r0, %smem, 1023; mul.wide.u32 %d0, %n, 4; add.u64 %d0, %d0, %out; st.global.b32 [%d0], %r0;"
    return body


def test_dynamic_shared_memory_is_aligned(where: Where) -> None:
    """Behind the eight static bytes of an mbarrier it begins at the next 1024."""
    assert not run(alignment(), numbers(1), np.ones(CTAS * THREADS, np.uint32), where).any()


def packed_sum() -> str:
    return """
    mad.wide.u32 %d0, %n, 4, %in;
    ld.global.b32 %r0, [%d0];
    and.b32 %r1, %n, 3;
    mad.wide.u32 %d1, %r1, 4, %out;
    red.global.add.noftz.bf16x2 [%d1], %r0;
"""


def test_packed_bf16_is_added_to_global_memory(where: Where) -> None:
    given = np.sign(numbers(2 * CTAS * THREADS)).astype(ml_dtypes.bfloat16)
    found = run(packed_sum(), given, np.zeros(8, ml_dtypes.bfloat16), where)
    wanted = given.astype(np.float32).reshape(-1, 4, 2).sum(axis=0)
    np.testing.assert_array_equal(found.astype(np.float32).reshape(4, 2), wanted)


FILL = """
    mad.wide.u32 %d0, %n, 16, %in;
    ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%d0];
    mad.lo.u32 %r4, %thread, 16, %smem;
    st.shared.v4.b32 [%r4], {%r0, %r1, %r2, %r3};
    fence.proxy.async.shared::cta;
    bar.sync 1, 64;
    setp.ne.u32 %p, %thread, 0;
"""


def bulk_sum(kind: str) -> str:
    suffix = f"noftz.{kind}" if kind in ("bf16", "f16") else kind
    return f"""{FILL}
    @!%p cp.reduce.async.bulk.global.shared::cta.bulk_group.add.{suffix} [%out], [%smem], 1024;
    @!%p cp.async.bulk.commit_group;
    @!%p cp.async.bulk.wait_group 0;
"""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["f32", "bf16", "f16", "u32", "s32"])
def test_bulk_reductions_to_global_memory(kind: str, mode: Mode, where: Where) -> None:
    """cp.reduce.async.bulk: both CTAs add a kilobyte to the same place."""
    dtypes = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16, "u32": np.uint32, "s32": np.int32}
    dtype: Any = dtypes[kind]
    count = 1024 // np.dtype(dtype).itemsize
    given = np.abs(numbers(CTAS * count)).astype(dtype) if kind == "u32" else numbers(CTAS * count, dtype)
    found = run(bulk_sum(kind), given, np.ones(count, dtype), where, mode)
    wanted = 1 + given.astype(np.float64).reshape(CTAS, count).sum(axis=0)
    np.testing.assert_array_equal(found.astype(np.float64), wanted)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int32"])
def test_tile_reductions_take_the_maps_numbers(kind: str, mode: Mode, where: Where) -> None:
    """cp.reduce.async.bulk.tensor adds what the tensor map says the elements are, and nothing outside the tensor."""
    size = 2 if kind == "bfloat16" else 4
    dtype = np.dtype(ml_dtypes.bfloat16 if size == 2 else kind)
    columns, rows = 64 // size, 12
    given = numbers(CTAS * 1024 // size, dtype)
    out = Memory(np.ones((rows, columns), dtype), where)
    request = TileMap(out.pointer, kind, (columns, rows), (columns * size,), (columns, 8), 0)
    encoded = tile_map(request, where)
    text = f"""
.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry k(.param .u64 p_in, .param .align 128 .b8 p_map[128])
.maxntid {THREADS}, 1, 1
{{
    .reg .pred %p; .reg .b32 %r<16>, %n, %thread, %cta, %smem; .reg .b64 %d<8>, %in;
    mov.u32 %smem, dynamic; mov.u32 %thread, %tid.x; mov.u32 %cta, %ctaid.x;
    mad.lo.u32 %n, %cta, {THREADS}, %thread;
    ld.param.b64 %in, [p_in];
{FILL}
    mov.b64 %d1, p_map; cvta.param.u64 %d1, %d1;
    mov.b32 %r5, 0; shl.b32 %r6, %cta, 3;
    @!%p cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%d1, {{%r5, %r6}}], [%smem];
    @!%p cp.async.bulk.commit_group;
    @!%p cp.async.bulk.wait_group 0;
    ret;
}}
"""
    require_real(text, "sm_100a")
    source = Memory(given, where)
    kernel = Kernel(text, "tiles.ptx", where, THREADS)
    kernel.launch(Geometry((CTAS, 1, 1), THREADS, 8192), [source.parameter, encoded], Settings(mode))
    boxes = given.astype(np.float64).reshape(CTAS, -1)[:, : 8 * columns].reshape(CTAS * 8, columns)[:rows]
    np.testing.assert_array_equal(out.read().astype(np.float64), 1 + boxes)


PEER = "xor.b32 %r10, %rank, 1;"
LEAVE = """
    mad.lo.u32 %r4, %thread, 16, %smem;
    ld.shared.v4.b32 {%r0, %r1, %r2, %r3}, [%r4];
    mad.wide.u32 %d1, %n, 16, %out;
    st.global.v4.b32 [%d1], {%r0, %r1, %r2, %r3};
"""


def peers(form: str) -> str:
    load = "mad.wide.u32 %d0, %n, 16, %in; ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%d0];"
    load += "mad.lo.u32 %r4, %thread, 16, %smem;"
    peer = f"{PEER} mapa.shared::cluster.u32 %r5, %r4, %r10; mapa.shared::cluster.u32 %r6, %bar, %r10;"
    expect = "setp.ne.u32 %p, %thread, 0; @!%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 1024;"
    bodies = {
        "st": f"{load} {peer} st.shared::cluster.v4.b32 [%r5], {{%r0, %r1, %r2, %r3}}; {EVERYBODY}",
        "generic": f"""{load} {PEER}
            cvt.u64.u32 %d2, %r4; cvta.shared.u64 %d2, %d2; mapa.u64 %d3, %d2, %r10; getctarank.u64 %r11, %d3;
            setp.ne.u32 %q, %r11, %r10; @%q trap;
            st.v4.b32 [%d3], {{%r0, %r1, %r2, %r3}}; {EVERYBODY}""",
        "st.async": f"""{load} {peer} {expect}
            st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r5], {{%r0, %r1, %r2, %r3}}, [%r6];
            {WAIT}""",
        "bulk": f"""{FILL} {PEER} {expect}
            add.u32 %r7, %smem, 4096;
            mapa.shared::cluster.u32 %r5, %r7, %r10; mapa.shared::cluster.u32 %r6, %bar, %r10;
            @!%p cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r5], [%smem], 1024, [%r6];
            {WAIT} add.u32 %smem, %smem, 4096;""",
        "reduction": f"""{FILL} {PEER} mov.b32 %r8, 0;
            st.shared.v4.b32 [%r4+4096], {{%r8, %r8, %r8, %r8}}; fence.proxy.async.shared::cta; {EVERYBODY} {expect}
            add.u32 %r7, %smem, 4096;
            mapa.shared::cluster.u32 %r5, %r7, %r10; mapa.shared::cluster.u32 %r6, %bar, %r10;
            @!%p cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32
                [%r5], [%smem], 1024, [%r6];
            {WAIT} add.u32 %smem, %smem, 4096;""",
    }
    return BARRIER + bodies[form] + LEAVE


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ["st", "generic", "st.async", "bulk", "reduction"])
def test_the_peers_shared_memory(form: str, mode: Mode, where: Where) -> None:
    """mapa, generic addresses of it, st.async and bulk copies between CTAs: each CTA gets the other one's numbers."""
    given = np.arange(CTAS * THREADS * 4, dtype=np.uint32)
    found = run(peers(form), given, np.zeros_like(given), where, mode)
    np.testing.assert_array_equal(found.reshape(CTAS, -1), given.reshape(CTAS, -1)[::-1])


def counter() -> str:
    body = f"""{BARRIER} {PEER}
    mov.b32 %r0, 5;
    setp.ne.u32 %p, %thread, 0;
    @!%p st.shared.b32 [%smem], %r0;
    @!%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {4 * THREADS};
    {EVERYBODY}
    mapa.shared::cluster.u32 %r5, %smem, %r10; mapa.shared::cluster.u32 %r6, %bar, %r10;
    red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r5], %n, [%r6];
    {WAIT}
    ld.shared.b32 %r1, [%smem];
    mad.wide.u32 %d1, %cta, 4, %out;
    @!%p st.global.b32 [%d1], %r1;
"""
    body = body.replace("@!%p st.global", "setp.ne.u32 %p, %thread, 0; @!%p st.global")
    return body


def test_a_counter_at_the_peer(where: Where) -> None:
    """red.async adds to the peer's shared memory and counts bytes at its barrier."""
    found = run(counter(), numbers(1), np.zeros(CTAS, np.uint32), where)
    sums = np.arange(CTAS * THREADS).reshape(CTAS, THREADS).sum(axis=1)
    np.testing.assert_array_equal(found, 5 + sums[::-1])


def matrices(count: int, transposed: bool) -> str:
    registers = "{" + ", ".join(f"%r{8 + i}" for i in range(count)) + "}"
    trans = ".trans" if transposed else ""
    return f"""
    mad.wide.u32 %d0, %n, 16, %in; ld.global.v4.b32 {{%r0, %r1, %r2, %r3}}, [%d0];
    mad.lo.u32 %r4, %thread, 16, %smem; st.shared.v4.b32 [%r4], {{%r0, %r1, %r2, %r3}};
    bar.sync 1, 64;
    ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {registers}, [%r4];
    add.u32 %r4, %r4, 4096;
    st.shared.v4.b32 [%r4], {{%r0, %r1, %r2, %r3}};
    bar.warp.sync -1;
    stmatrix.sync.aligned.m8n8.x{count}.shared.b16 [%r4], {registers};
    bar.sync 1, 64;
    add.u32 %smem, %smem, 4096;
    {LEAVE}
"""


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_through_a_warp(count: int, transposed: bool, where: Where) -> None:
    """stmatrix writes what ldmatrix has read, transposed when that does so: matrices of 8x8 numbers of 16 bits."""
    given = np.arange(CTAS * THREADS * 8, dtype=np.uint16)
    found = run(matrices(count, transposed), given, np.zeros_like(given), where).reshape(-1, 4, 8, 8)
    wanted = given.reshape(-1, 4, 8, 8).copy()
    if transposed:
        wanted[:, :count] = wanted[:, :count].swapaxes(-1, -2)
    np.testing.assert_array_equal(found, wanted)


def election() -> str:
    return """
    elect.sync %r0|%p, 0xffffffff;
    selp.b32 %r1, 1, 0, %p;
    redux.sync.add.u32 %r2, %r1, 0xffffffff;
    sub.u32 %r3, 40, %n;
    redux.sync.min.s32 %r3, %r3, 0xffffffff;
    mad.wide.u32 %d1, %n, 8, %out;
    st.global.v2.b32 [%d1], {%r2, %r3};
"""


def test_election_and_reductions_over_a_warp(where: Where) -> None:
    found = run(election(), numbers(1), np.zeros((CTAS * THREADS, 2), np.int32), where)
    np.testing.assert_array_equal(found[:, 0], 1)
    np.testing.assert_array_equal(found[:, 1], 40 - (np.arange(CTAS * THREADS) // 32 * 32 + 31))


def wide(vector: str) -> str:
    letter = "f" if vector == "v8.f32" else "d"
    registers = "{" + ", ".join(f"%{letter}{i}" for i in range(8 if letter == "f" else 4)) + "}"
    return f"""
    mov.u32 %r0, %n;
    mad.wide.u32 %d5, %r0, 32, %in; mad.wide.u32 %d6, %r0, 32, %out;
    ld.global.nc.L1::no_allocate.L2::evict_first.{vector} {registers}, [%d5];
    st.global.L2::evict_last.{vector} [%d6], {registers};
"""


@pytest.mark.parametrize("vector", ["v8.f32", "v4.b64"])
def test_loads_of_32_bytes_past_the_cache(vector: str, where: Where) -> None:
    """ld.global.nc of 32 bytes, and st of 32 bytes."""
    given = np.arange(CTAS * THREADS * 8, dtype=np.float32)
    np.testing.assert_array_equal(run(wide(vector), given, np.zeros_like(given), where), given)


def nothing() -> str:
    return """
    griddepcontrol.launch_dependents;
    griddepcontrol.wait;
    fence.proxy.tensormap::generic.release.gpu;
    fence.proxy.tensormap::generic.acquire.gpu [%in], 128;
    prefetch.global.L2 [%in];
    createpolicy.fractional.L2::evict_first.b64 %d0, 1.0;
    cp.async.bulk.prefetch.L2.global [%in], 16;
    ld.global.nc.L2::cache_hint.b32 %r0, [%in], %d0;
    fence.acq_rel.cluster;
    mad.wide.u32 %d1, %n, 4, %out;
    st.global.b32 [%d1], %r0;
"""


def test_what_changes_nothing_here_is_accepted(where: Where) -> None:
    """griddepcontrol, fence.proxy.tensormap, prefetches and hints."""
    found = run(nothing(), np.full(32, 7, np.uint32), np.zeros(CTAS * THREADS, np.uint32), where)
    np.testing.assert_array_equal(found, 7)


def test_a_warpgroup_gives_registers_back_and_takes_some(where: Where) -> None:
    """All of its threads; the kernels here have half as many."""
    smem, tmem = blank()
    text = "setmaxnreg.dec.sync.aligned.u32 160; setmaxnreg.inc.sync.aligned.u32 232;"
    after, _ = run_operation(text, smem, tmem, [], by="warps", where=where)
    np.testing.assert_array_equal(after, tmem)


USES_OF_GLOBAL_MEMORY = {
    "load": "ld.global.b32 %r0, [%in];",
    "generic load": "ld.b32 %r0, [%in];",
    "load of 32 bytes": "ld.global.nc.v4.b64 {%d0, %d1, %d2, %d3}, [%in];",
    "store": "mad.wide.u32 %d1, %n, 4, %out; st.global.b32 [%d1], %n;",
    "reduction": "red.global.add.u32 [%out], %n;",
    "vector of a reduction": "red.global.add.v2.f32 [%out], {%f0, %f1};",
    "cp.async": "cp.async.ca.shared.global [%smem], [%in], 4; cp.async.wait_all;",
    "bulk copy": f"""{BARRIER} mov.u32 %r0, 16;
    @!%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 16;
    @!%p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%smem], [%in], %r0, [%bar]; {WAIT}""",
    "bulk copy out": """mad.lo.u32 %r1, %thread, 16, %smem; st.shared.v4.b32 [%r1], {%n, %n, %n, %n};
    fence.proxy.async; bar.sync 0; mov.u32 %r0, 16; setp.ne.u32 %p, %n, 0;
    @!%p cp.async.bulk.global.shared::cta.bulk_group [%out], [%smem], %r0;
    @!%p cp.async.bulk.commit_group; @!%p cp.async.bulk.wait_group 0;""",
    "prefetch": "prefetch.global.L2 [%in];",
    "bulk prefetch": "cp.async.bulk.prefetch.L2.global [%in], 16;",
}


@functools.cache
def launches() -> tuple[str, ...]:
    """Each use by itself, behind the wait and ahead of it."""
    wait = "griddepcontrol.wait;"
    every = [each for use in USES_OF_GLOBAL_MEMORY.values() for each in (use, f"{wait} {use}", f"{use} {wait}")]
    return *every, shared_alone()


@pytest.mark.parametrize("use", USES_OF_GLOBAL_MEMORY)
def test_a_dependent_launch_waits_before_it_uses_global_memory(use: str) -> None:
    """An error names CTA, thread and instruction; behind the wait, and in an ordinary launch, there is none."""

    def launch(body: str, pdl: bool, removed: int = 0) -> None:
        out = np.zeros(CTAS * THREADS, np.uint32)
        run(body, np.zeros(64, np.uint32), out, "host", mode="random", pdl=pdl, removed=removed)

    body = USES_OF_GLOBAL_MEMORY[use]
    launch(body, pdl=False)
    launch(f"griddepcontrol.wait; {body}", pdl=True)
    for early, removed in ((f"{body} griddepcontrol.wait;", 0), (f"griddepcontrol.wait; {body}", 1)):
        with pytest.raises((HostError, EmulationError), match=r"before its griddepcontrol\.wait") as caught:
            launch(early, pdl=True, removed=removed)
        text = str(caught.value)
        assert "CTA" in text and "thread" in text and (".global" in text or "ld.b32" in text)


def shared_alone() -> str:
    return f"""
    mad.lo.u32 %r0, %thread, 4, %smem; st.shared.b32 [%r0], %n;
    cvt.u64.u32 %d0, %r0; cvta.shared.u64 %d0, %d0; ld.b32 %r1, [%d0];
    {EVERYBODY}
    xor.b32 %r2, %rank, 1; mapa.shared::cluster.u32 %r3, %r0, %r2; ld.shared::cluster.b32 %r1, [%r3];
    {EVERYBODY}
    griddepcontrol.wait;
    mad.wide.u32 %d1, %n, 4, %out; st.global.b32 [%d1], %r1;
"""


def test_what_is_not_global_memory_is_free_before_the_wait() -> None:
    """Shared memory, also by generic addresses, and that of the other CTA."""
    found = run(shared_alone(), numbers(1), np.zeros(CTAS * THREADS, np.uint32), "host", pdl=True)
    np.testing.assert_array_equal(found, (np.arange(CTAS * THREADS) + THREADS) % (CTAS * THREADS))


ROW_FORMATS = {"b8": 8, "b8x16.b6x16_p32": 6, "b8x16.b4x16_p64": 4}


BYTE_MATRICES = [
    *(("m16n16", count, form) for count in (1, 2) for form in ROW_FORMATS),
    *(("m8n16", count, form) for count in (1, 2, 4) for form in ROW_FORMATS if form != "b8"),
]


def packed_rows(elements: Array, bits: int) -> Array:
    """Rows of 16 elements as rows of 16 bytes: narrow ones at the front, ones behind them."""
    places = np.ones((len(elements), 128), np.uint8)
    places[:, : 16 * bits] = (elements[..., None] >> np.arange(bits) & 1).reshape(len(elements), -1)
    return np.packbits(places, axis=1, bitorder="little")


def byte_matrices(shape: str, count: int, form: str) -> str:
    tall = shape == "m16n16"
    registers = count * (2 if tall else 1)
    listed = "{" + ", ".join(f"%r{8 + i}" for i in range(registers)) + "}"
    body = f"""
    mad.wide.u32 %d0, %n, 16, %in; ld.global.v4.b32 {{%r0, %r1, %r2, %r3}}, [%d0];
    xor.b32 %r4, %thread, 5; mad.lo.u32 %r4, %r4, 32, %smem; st.shared.v4.b32 [%r4], {{%r0, %r1, %r2, %r3}};
    bar.sync 1, {THREADS};
    ldmatrix.sync.aligned.{shape}.x{count}{".trans" if tall else ""}.shared.{form} {listed}, [%r4];
    mad.wide.u32 %d1, %n, {4 * registers}, %out;
""" + "".join(f"st.global.b32 [%d1+{4 * i}], %r{8 + i};\n" for i in range(registers))
    return body


@pytest.mark.parametrize(
    ("shape", "count", "form"),
    BYTE_MATRICES,
)
def test_matrices_of_bytes_are_loaded(shape: str, count: int, form: str, where: Where) -> None:
    """Rows lie in any order, with gaps; a register of a quad's lane holds four neighbours, transposed or not."""
    tall = shape == "m16n16"
    registers, height = count * (2 if tall else 1), 16 if tall else 8
    bits = ROW_FORMATS[form]
    elements = np.random.default_rng(count).integers(0, 1 << bits, (CTAS * THREADS, 16)).astype(np.uint8)
    given = np.ascontiguousarray(packed_rows(elements, bits)).view(np.uint32)
    out = np.zeros((CTAS * THREADS, registers), np.uint32)
    found = run(byte_matrices(shape, count, form), given, out, where).view(np.uint8)
    rows = elements.reshape(-1, 32, 16)[:, : count * height].reshape(-1, count, height, 16)
    matrices = rows.swapaxes(-1, -2) if tall else rows
    # (warp, matrix, half, row, quad's lane, byte) to (warp, row and lane, matrix and half, byte).
    wanted = matrices.reshape(-1, count, registers // count, 8, 4, 4).transpose(0, 3, 4, 1, 2, 5)
    np.testing.assert_array_equal(found.reshape(-1, 8, 4, count, registers // count, 4), wanted)


def byte_stores(count: int) -> str:
    return f"""
    mad.wide.u32 %d0, %n, 16, %in; ld.global.v4.b32 {{%r0, %r1, %r2, %r3}}, [%d0];
    mad.lo.u32 %r4, %thread, 16, %smem;
    mov.b32 %r5, 0; st.shared.v4.b32 [%r4], {{%r5, %r5, %r5, %r5}};
    bar.warp.sync -1;
    stmatrix.sync.aligned.m16n8.x{count}.trans.shared.b8 [%r4], {{{", ".join(f"%r{i}" for i in range(count))}}};
    bar.sync 1, {THREADS};
    {LEAVE}
"""


@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_of_bytes_are_stored(count: int, where: Where) -> None:
    """A lane's register holds two neighbours of a row of eight and two of the row eight below; memory has columns."""
    given = np.random.default_rng(count).integers(0, 256, (CTAS * THREADS, 16)).astype(np.uint8)
    found = run(byte_stores(count), given.view(np.uint32), np.zeros_like(given), where)
    # (warp, row, quad's lane, matrix, lower half, neighbour): column 2 lane + neighbour, row + 8 half of a matrix.
    lanes = given.reshape(-1, 8, 4, 4, 2, 2)[:, :, :, :count]
    wanted = np.zeros((len(lanes), 32, 16), np.uint8)
    wanted[:, : 8 * count] = lanes.transpose(0, 3, 2, 5, 4, 1).reshape(-1, 8 * count, 16)
    np.testing.assert_array_equal(found.reshape(-1, 32, 16), wanted)


def unfenced() -> str:
    return f"""
    mad.lo.u32 %r4, %thread, 16, %smem; mov.b32 %r0, 7;
    stmatrix.sync.aligned.m16n8.x4.trans.shared.b8 [%r4], {{%r0, %r0, %r0, %r0}};
    bar.sync 1, {THREADS};
    setp.eq.u32 %p, %thread, 0;
    @%p cp.async.bulk.global.shared::cta.bulk_group [%out], [%smem], 512;
    @%p cp.async.bulk.commit_group; @%p cp.async.bulk.wait_group 0;
"""


def test_matrices_of_bytes_need_a_fence_before_a_bulk_copy(where: Where) -> None:
    given = np.zeros((CTAS * THREADS, 16), np.uint8)
    with pytest.raises(EmulationError, match=r"fence\.proxy\.async"):
        run(unfenced(), given, given, where)


def request(multicast: bool) -> str:
    form = ".multicast::cluster::all" if multicast else ""
    asks = "setp.ne.u32 %q, %n, 0;" if multicast else "setp.ne.u32 %q, %thread, 0;"
    return f"""{BARRIER}
    mov.b32 %r0, -1;
    @!%p st.shared.v4.b32 [%smem], {{%r0, %r0, %r0, %r0}};
    @!%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 16;
    {EVERYBODY}
    {asks}
    @!%q clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes{form}.b128 [%smem], [%bar];
    {WAIT}
    {{
    .reg .b128 answer;
    ld.shared.b128 answer, [%smem];
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p, answer;
    mov.b128 {{%d2, %d3}}, answer;
    }}
    selp.b32 %r1, 1, 0, %p;
    cvt.u32.u64 %r2, %d2;
    mad.wide.u32 %d1, %n, 8, %out;
    st.global.v2.b32 [%d1], {{%r1, %r2}};
"""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("multicast", [False, True])
def test_no_more_work_is_to_be_had_from_the_scheduler(multicast: bool, mode: Mode, where: Where) -> None:
    """clusterlaunchcontrol: the answer arrives at the barrier, in one CTA or in all, and says no."""
    found = run(request(multicast), numbers(1), np.ones((CTAS * THREADS, 2), np.uint32), where, mode)
    assert found[:, 0].any() == 0
    np.testing.assert_array_equal(found[:, 1], 0)


def commit_to_both() -> str:
    return f"""{BARRIER}
    setp.ne.u32 %p, %n, 0; mov.b16 %h0, 3;
    @!%p tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%bar], %h0;
    {WAIT} {NUMBERED}
"""


@pytest.mark.parametrize("mode", MODES)
def test_a_cta_by_itself_commits_to_the_barriers_of_both(mode: Mode, where: Where) -> None:
    found = run(commit_to_both(), numbers(1), np.zeros(CTAS * THREADS, np.uint32), where, mode)
    np.testing.assert_array_equal(found, np.arange(CTAS * THREADS))


def nowhere(form: str) -> str:
    bodies = {
        "load": "mov.b64 %d0, 0x70000000000; ld.global.b32 %r0, [%d0]; st.global.b32 [%out], %r0;",
        "store": "mov.b64 %d0, 0x70000000000; setp.eq.u32 %p, %n, 70; @%p st.global.b32 [%d0], %n;",
        "copy": f"""{FILL} mov.b64 %d0, 0x70000000000;
            @!%p cp.async.bulk.global.shared::cta.bulk_group [%d0], [%smem], 1024;
            @!%p cp.async.bulk.commit_group; @!%p cp.async.bulk.wait_group 0;""",
    }
    return bodies[form]


@pytest.mark.skipif(not library.available(), reason="needs a C++ compiler on x86-64")
@pytest.mark.parametrize("form", ["load", "store", "copy"])
def test_an_address_where_nothing_is_ends_the_kernel_not_the_process(form: str) -> None:
    given = np.zeros(CTAS * THREADS * 4, np.uint32)
    who = {"load": "thread", "store": r"thread 6 of CTA \(1, 0, 0\)", "copy": "a bulk copy"}[form]
    with pytest.raises(HostError, match=f"{who}.* address 0x7000000[0-9a-f]+, where nothing is"):
        run(nowhere(form), given, given, "host")
    found = run(NUMBERED, given, given, "host")
    np.testing.assert_array_equal(found[: CTAS * THREADS], np.arange(CTAS * THREADS))
