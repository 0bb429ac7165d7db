"""Tensor copies that Hopper's TMA does not have: gathers and scatters of four rows, copies for a pair's other CTA."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device import Kernel, Memory, Where, tile_map

from cupymla.launch import Geometry
from cupymla.tensormap import TileMap
from cupymla_lab.emulate import EmulationError, Settings
from cupymla_lab.emulate.settings import MODES, Mode

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


# Four rows of shared memory, swizzled like a gather's, to rows of the tensor; `{column}` is the first column.
SCATTER = """
    {{
    .reg .b32 %word, %value, %place, %line;
    mov.b32 %word, 0;
fill:
    mad.lo.u32 %value, %word, 0x20002, 0x10000;
    shl.b32 %place, %word, 2;
    add.u32 %place, %place, %smem;
    shr.u32 %line, %place, 3;
    and.b32 %line, %line, 0x70;
    xor.b32 %place, %place, %line;
    st.shared.b32 [%place], %value;
    add.u32 %word, %word, 1;
    setp.lt.u32 %p, %word, {words};
    @%p bra fill;
    }}
    {fence}
    mov.b32 %r1, {column};
    mov.b32 %r2, {rows[0]}; mov.b32 %r3, {rows[1]}; mov.b32 %r4, {rows[2]}; mov.b32 %r5, {rows[3]};
    cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [%map, {{%r1, %r2, %r3, %r4, %r5}}], [%smem];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
"""
FENCE = "fence.proxy.async.shared::cta;"


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


def scattered(
    rows: tuple[int, ...], column: int, where: Where, settings: Settings, width: int = WIDTH, box: int = 1,
    fence: str = FENCE, dtype: str = "uint16",
) -> np.ndarray[Any, Any]:  # fmt: skip
    """The tensor after one scatter of the numbers 0, 1, ... (as 16-bit words)."""
    data = Memory(source(), where)
    size = {"uint16": 2, "uint32": 4}[dtype]
    request = TileMap(data.pointer, dtype, (2 * COLUMNS // size, ROWS), (2 * COLUMNS,), (2 * width // size, box))
    text = SCATTER.format(words=4 * width // 2, rows=rows, column=column * 2 // size, fence=fence)
    kernel = Kernel(HEAD + text + TAIL, "scatter.ptx", where, 32)
    out = Memory(np.zeros((4, WIDTH), np.uint16), where)
    kernel.launch(Geometry((1, 1, 1), 32, 1024), [tile_map(request, where), out.parameter], settings)
    return data.read()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("column", "width", "dtype"), [(8, 64, "uint16"), (96, 64, "uint16"), (-16, 32, "uint32")])
def test_scatter(column: int, width: int, dtype: str, mode: Mode, where: Where) -> None:
    """Four rows go where they are told to; what would lie outside the tensor is dropped, to all sides."""
    wanted = source()
    given = np.arange(4 * width, dtype=np.uint16).reshape(4, width)
    first, last = max(column, 0), min(column + width, COLUMNS)
    for at, row in ((0, 63), (3, 5)):
        wanted[row, first:last] = given[at, first - column : last - column]
    for seed in range(3):
        found = scattered((63, 64, -1, 5), column, where, Settings(mode, seed), width, dtype=dtype)
        np.testing.assert_array_equal(found, wanted)


def test_what_a_scatter_needs(where: Where) -> None:
    """A fence before it, for its last row too, its wait at the end, and a map of single rows."""
    with pytest.raises(EmulationError, match=r"fence\.proxy\.async"):
        scattered((1, 2, 3, 4), 0, where, Settings("eager"), fence="")
    with pytest.raises(EmulationError, match="2 and 1"):
        scattered((1, 2, 3, 4), 0, where, Settings("eager"), box=4)


def test_a_scatter_that_nobody_waits_for(where: Where) -> None:
    data = Memory(source(), where)
    request = TileMap(data.pointer, "uint16", (COLUMNS, ROWS), (2 * COLUMNS,), (WIDTH, 1))
    text = SCATTER.format(words=128, rows=(1, 2, 3, 4), column=0, fence=FENCE).replace(".wait_group 0", ".wait_group 1")
    kernel = Kernel(HEAD + text + TAIL, "scatter.ptx", where, 32)
    parameters = [tile_map(request, where), Memory(np.zeros((4, WIDTH), np.uint16), where).parameter]
    with pytest.raises(EmulationError, match="bulk store"):
        kernel.launch(Geometry((1, 1, 1), 32, 1024), parameters, Settings("lazy"))


def test_a_gather_needs_a_map_of_single_rows(where: Where) -> None:
    with pytest.raises(EmulationError, match="2 and 1"):
        run(GATHER, 4, 1, where, "eager")


def test_a_map_that_nobody_spoke_of_is_a_failure(where: Where) -> None:
    with pytest.raises(EmulationError, match="tensor map"):
        run(GATHER, 1, 1, where, "eager", told=False)
