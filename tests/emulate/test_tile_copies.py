"""Tensor copies that Hopper's TMA does not have: gathers of four rows, copies for the other CTA of a pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device import Kernel, Memory, Where, tile_map

from cupymla.emulate import EmulationError, Settings
from cupymla.emulate.run import MODES, Mode
from cupymla.launch import Geometry
from cupymla.tensormap import TileMap

pytestmark = pytest.mark.compile

ROWS, COLUMNS, WIDTH = 64, 128, 64
BYTES = 4 * WIDTH * 2

HEAD = """
.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry k(.param .align 128 .b8 p_map[128], .param .u64 p_out)
.maxntid 32, 1, 1
{
    .reg .pred %p; .reg .b32 %r<10>, %bar, %smem, %cta; .reg .b64 %map, %out, %n; .reg .b16 %mask;
    .shared .align 8 .b64 barrier;
    mov.u32 %smem, dynamic;
    mov.u32 %bar, barrier;
    mov.u32 %cta, %cluster_ctarank;
    mov.b64 %map, p_map;
    cvta.param.u64 %map, %map;
    ld.param.b64 %out, [p_out];
    mov.u32 %r0, %tid.x;
    setp.ne.u32 %p, %r0, 0;
    @%p bra made;
    mbarrier.init.shared::cta.b64 [%bar], 1;
    fence.mbarrier_init.release.cluster;
made:
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    @%p bra issued;
"""
TAIL = f"""
issued:
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    shl.b32 %r1, %r0, 2;
    mad.wide.u32 %out, %cta, {BYTES}, %out;
write:
    add.u32 %r2, %smem, %r1;
    ld.shared.b32 %r3, [%r2];
    cvt.u64.u32 %n, %r1;
    add.u64 %n, %n, %out;
    st.global.b32 [%n], %r3;
    add.u32 %r1, %r1, 128;
    setp.lt.u32 %p, %r1, {BYTES};
    @%p bra write;
    ret;
}}
"""
WAIT = """
waiting:
    mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar], 0;
    @!%p bra waiting;
"""
GATHER = f"""
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {BYTES};
    mov.b32 %r1, 8; mov.b32 %r2, 5; mov.b32 %r3, 63; mov.b32 %r4, 64; mov.b32 %r5, -1;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes
        [%smem], [%map, {{%r1, %r2, %r3, %r4, %r5}}], [%bar];
{WAIT}
"""
# Both CTAs load; only the first one's barrier counts, and only the first one waits.
PAIR = f"""
    and.b32 %bar, %bar, 0xFEFFFFFF;
    mov.b32 %r1, 8;
    shl.b32 %r2, %cta, 2;
    setp.ne.u32 %p, %cta, 0;
    @!%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {2 * BYTES};
    cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.mbarrier::complete_tx::bytes
        [%smem], [%map, {{%r1, %r2}}], [%bar];
    @%p bra issued;
{WAIT}
"""
# Both CTAs gather four rows of their own; the leader's barrier counts for both.
PAIRED_GATHER = f"""
    and.b32 %bar, %bar, 0xFEFFFFFF;
    mad.lo.u32 %r6, %cta, 20, 0;
    mov.b32 %r1, 8; add.u32 %r2, %r6, 7; add.u32 %r3, %r6, 7; mov.b32 %r4, -5; add.u32 %r5, %r6, 1;
    setp.ne.u32 %p, %cta, 0;
    @!%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {2 * BYTES};
    cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes.cta_group::2
        [%smem], [%map, {{%r1, %r2, %r3, %r4, %r5}}], [%bar];
    @%p bra issued;
{WAIT}
"""
# The first CTA's copy reaches both CTAs, whose barriers count it each for itself.
MULTICAST = f"""
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {BYTES};
    mov.b32 %r1, 8; mov.b32 %r2, 12; mov.b16 %mask, 3;
    setp.ne.u32 %p, %cta, 0;
    @!%p cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [%smem], [%map, {{%r1, %r2}}], [%bar], %mask;
{WAIT}
"""


def source() -> np.ndarray[Any, Any]:
    return np.arange(ROWS * COLUMNS, dtype=np.uint16).reshape(ROWS, COLUMNS)


def run(text: str, box_rows: int, ctas: int, where: Where, mode: Mode, told: bool = True) -> np.ndarray[Any, Any]:
    """What the CTAs' shared memory holds afterwards: (CTAs, 4 rows, 64) uint16."""
    data, out = Memory(source(), where), Memory(np.zeros((ctas, 4, WIDTH), np.uint16), where)
    request = TileMap(data.pointer, "uint16", (COLUMNS, ROWS), (2 * COLUMNS,), (WIDTH, box_rows))
    encoded = tile_map(request, where)
    if not told:
        encoded.request = None
    geometry = Geometry((ctas, 1, 1), 32, 1024, cluster=ctas)
    kernel = Kernel(HEAD + text + TAIL, "tiles.ptx", where, 32)
    kernel.launch(geometry, [encoded, out.parameter], Settings(mode))
    return out.read()


def swizzled(rows: np.ndarray[Any, Any], first: int) -> np.ndarray[Any, Any]:
    """Rows of 128 bytes as the 128-byte swizzle leaves them: chunk c of line i stands at c ^ (i % 8)."""
    found = np.empty_like(rows)
    for i, row in enumerate(rows):
        chunks = row.reshape(8, 8)
        for chunk in range(8):
            found[i].reshape(8, 8)[chunk ^ ((first + i) % 8)] = chunks[chunk]
    return found


@pytest.mark.parametrize("mode", MODES)
def test_gather(mode: Mode, where: Where) -> None:
    """Four rows in the order asked for; rows outside the tensor are zero and count as copied."""
    wanted = np.stack([source()[5, 8:72], source()[63, 8:72], np.zeros(64), np.zeros(64)]).astype(np.uint16)
    np.testing.assert_array_equal(run(GATHER, 1, 1, where, mode)[0], swizzled(wanted, 0))


@pytest.mark.parametrize("mode", MODES)
def test_a_pair_counts_at_its_first_ctas_barrier(mode: Mode, where: Where) -> None:
    found = run(PAIR, 4, 2, where, mode)
    for cta in (0, 1):
        np.testing.assert_array_equal(found[cta], swizzled(source()[4 * cta : 4 * cta + 4, 8:72], 0))


@pytest.mark.parametrize("mode", MODES)
def test_a_pairs_gathers_count_at_the_leaders_barrier(mode: Mode, where: Where) -> None:
    found = run(PAIRED_GATHER, 1, 2, where, mode)
    for cta in (0, 1):
        rows = [source()[20 * cta + 7, 8:72]] * 2 + [np.zeros(64), source()[20 * cta + 1, 8:72]]
        np.testing.assert_array_equal(found[cta], swizzled(np.stack(rows).astype(np.uint16), 0))


@pytest.mark.parametrize("mode", MODES)
def test_a_multicast_reaches_all_ctas_and_their_barriers(mode: Mode, where: Where) -> None:
    found = run(MULTICAST, 4, 2, where, mode)
    for cta in (0, 1):
        np.testing.assert_array_equal(found[cta], swizzled(source()[12:16, 8:72], 0))


def test_a_map_that_nobody_spoke_of_is_a_failure(where: Where) -> None:
    with pytest.raises(EmulationError, match="tensor map"):
        run(GATHER, 1, 1, where, "eager", told=False)
