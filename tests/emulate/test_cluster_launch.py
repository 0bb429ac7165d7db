"""clusterlaunchcontrol where requests succeed: clusters that have not begun are handed to those that ask.

On the host alone: what has begun on a GPU is its scheduler's affair, and every request is refused there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from device import Kernel, Memory

from cupymla.errors import InputError
from cupymla.launch import Geometry
from cupymla_lab.emulate import EmulatedKernel, EmulationError, Settings
from cupymla_lab.emulate.host import library
from cupymla_lab.emulate.host.machine import HostError, load
from cupymla_lab.emulate.settings import MODES, Mode

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(not library.available(), reason="needs a C++ compiler on x86-64"),
]

GRID, CTAS = (4, 3, 2), 2
TILES = GRID[0] * GRID[1] * GRID[2]

# Every CTA counts the tile that it was launched for in the first array, then every tile that it does in the second.
# `{ask}` asks for another one, `{again}` says when.
KERNEL = """
.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 16 .b8 dynamic[];
.visible .entry k(.param .u64 p_begun, .param .u64 p_done)
.maxntid 32, 1, 1
{{
    .reg .pred %p, %leads; .reg .b32 %x, %y, %z, %gx, %gy, %thread, %rank, %smem, %bar, %phase, %r<8>;
    .reg .b64 %begun, %done, %d<4>; .reg .b128 %answer;
    .shared .align 8 .b64 barrier;
    mov.u32 %smem, dynamic; mov.u32 %bar, barrier; mov.u32 %thread, %tid.x; mov.u32 %rank, %cluster_ctarank;
    mov.u32 %x, %ctaid.x; mov.u32 %y, %ctaid.y; mov.u32 %z, %ctaid.z; mov.u32 %gx, %nctaid.x; mov.u32 %gy, %nctaid.y;
    ld.param.b64 %begun, [p_begun]; ld.param.b64 %done, [p_done];
    mov.b32 %phase, 0;
    setp.eq.u32 %leads, %thread, 0;
    @%leads mbarrier.init.shared::cta.b64 [%bar], 1;
    @%leads fence.mbarrier_init.release.cluster;
    mad.lo.u32 %r0, %z, %gy, %y; mad.lo.u32 %r0, %r0, %gx, %x;
    mad.wide.u32 %d0, %r0, 4, %begun; mov.b32 %r1, 1;
    @%leads red.global.add.u32 [%d0], %r1;
tile:
    mad.lo.u32 %r0, %z, %gy, %y; mad.lo.u32 %r0, %r0, %gx, %x;
    mad.wide.u32 %d0, %r0, 4, %done; mov.b32 %r1, 1;
    @%leads red.global.add.u32 [%d0], %r1;
    {again}
    @%leads mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 16;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    {ask}
waiting:
    mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar], %phase;
    @!%p bra waiting;
    xor.b32 %phase, %phase, 1;
    ld.shared.b128 %answer, [%smem];
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p, %answer;
    @!%p bra over;
    {first}
    add.u32 %x, %x, %rank;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    bra tile;
over:
    {over}
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    ret;
}}
"""
REQUEST = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
MULTICAST = f"""
    setp.eq.u32 %p, %rank, 0; and.pred %p, %p, %leads;
    @%p {REQUEST}.multicast::cluster::all.b128 [%smem], [%bar];
"""
ALONE = f"@%leads {REQUEST}.b128 [%smem], [%bar];"
VECTOR = "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%x, %y, %z, _}, %answer;"
ONE_BY_ONE = "\n".join(f"clusterlaunchcontrol.query_cancel.get_first_ctaid::{d}.b32.b128 %{d}, %answer;" for d in "xyz")
# Once a CTA has asked, it does not ask again.
ONCE = "setp.ne.u32 %p, %phase, 0; @%p bra over;"


def run(
    settings: Settings, ask: str = MULTICAST, first: str = VECTOR, again: str = "", over: str = "", cluster: int = CTAS
) -> tuple[Any, Any]:
    """How often each CTA of the grid has begun, and how often its tile was done."""
    text = KERNEL.format(ask=ask, first=first, again=again, over=over)
    memories = [Memory(np.zeros(TILES, np.uint32), "host") for _ in range(2)]
    parameters = [memory.parameter for memory in memories]
    Kernel(text, "handed.ptx", "host").launch(Geometry(GRID, 32, 1024, cluster=cluster), parameters, settings)
    return memories[0].read(), memories[1].read()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("resident", [0, 1, 3, 11, 12, 50])
@pytest.mark.parametrize("first", [VECTOR, ONE_BY_ONE], ids=["vector", "one by one"])
def test_every_tile_is_done_once_and_only_residents_begin(resident: int, first: str, mode: Mode) -> None:
    for seed in range(3):
        begun, done = run(Settings(mode, seed, resident_clusters=resident), first=first)
        assert (done == 1).all()
        assert begun.max() == 1 and begun.sum() == CTAS * min(resident or TILES, TILES // CTAS)


def test_clusters_of_one_cta_are_answered_in_their_own() -> None:
    begun, done = run(Settings("lazy", resident_clusters=5), ALONE, cluster=1)
    assert (done == 1).all() and begun.sum() == 5


@pytest.mark.parametrize("mode", MODES)
def test_what_nobody_asks_for_begins_when_there_is_room(mode: Mode) -> None:
    """Who asks once takes one cluster over; the rest begin in the order of the grid."""
    begun, done = run(Settings(mode, resident_clusters=2), again=ONCE)
    assert (done == 1).all() and CTAS * 2 < begun.sum() < TILES
    assert (begun.reshape(-1, CTAS) == begun.reshape(-1, CTAS)[:, :1]).all()


def test_who_was_refused_may_not_ask_again() -> None:
    again = "@%leads mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 16;\n" + MULTICAST
    with pytest.raises(EmulationError, match="seen a request fail"):
        run(Settings("eager"), over=again)


# Reads the answer without waiting for it; what is there at first is 0xFF.
EARLY = """
    bra tile;
early:
    ld.shared.b128 %answer, [%smem];
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p, %answer;
"""


def test_an_answer_that_has_not_arrived_is_found_out() -> None:
    with pytest.raises(EmulationError, match="has not arrived"):
        run(Settings("lazy", resident_clusters=1), MULTICAST + "bra early;\n", VECTOR + EARLY)


def test_a_barrier_for_the_whole_grid_needs_the_whole_grid() -> None:
    """Clusters that have not begun do not come, which is reported and no endless wait."""
    wait = f"""
    mov.b64 %d1, %done; mov.b32 %r2, 0;
all:
    ld.acquire.gpu.global.b32 %r3, [%d1+{4 * (TILES - 1)}];
    add.u32 %r2, %r2, 1; setp.eq.u32 %p, %r3, 0; @%p bra all;
"""
    settings = Settings("eager", resident_clusters=1, patience_seconds=0.2)
    program = load(KERNEL.format(ask=MULTICAST, first=VECTOR, again=wait, over=""))
    memories = [Memory(np.zeros(TILES, np.uint32), "host") for _ in range(2)]
    with pytest.raises(HostError, match="does not end"):
        parameters = [memory.parameter for memory in memories]
        program.launch(Geometry(GRID, 32, 1024, cluster=CTAS), parameters, settings, switches=100_000)


def test_the_number_of_residents_is_checked() -> None:
    with pytest.raises(InputError, match="resident_clusters"):
        dataclasses.replace(Settings(), resident_clusters=-1)


def test_a_gpu_refuses_the_setting_before_anything_is_launched() -> None:
    kernel = EmulatedKernel.__new__(EmulatedKernel)
    with pytest.raises(InputError, match="resident_clusters"):
        kernel.start(Geometry(GRID, 32, 0), [], 0, Settings(resident_clusters=1))
