"""With races looked for, a kernel on the host uses the arrays of its call and nothing else of global memory, reads what
something has written, and leaves alone what is there to be read."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from conftest import HOST
from races_kit import HEAD

from cupymla.emulate import MODES, Settings
from cupymla.emulate.host.machine import HostArray, HostError, HostProgram, load
from cupymla.launch import Geometry

pytestmark = HOST

# Thread 0 alone; %d0 names the first array, %d1 the second.
ALONE = "@!%p1 bra END; {body} END:"
BULK = """mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster; fence.proxy.async;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], {bytes}; add.u32 %r3, %r1, 128;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [{source}], {bytes}, [%r1];
    WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0; @!%p2 bra WAIT; {behind}"""
STORE = """st.shared.v4.u32 [%r1], {%r0, %r0, %r0, %r0}; fence.proxy.async.shared::cta;
    cp.async.bulk.global.shared::cta.bulk_group [%d1+4080], [%r1], {bytes}; cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;"""
COPY = "cp.async.ca.shared.global [%r1], [{source}], 4, {bytes}; cp.async.wait_all;"


def program(body: str) -> HostProgram:
    return load(HEAD.format(body=ALONE.format(body=body)))


def run(made: HostProgram, mode: str = "eager", races: str = "practice", told: bool = True) -> np.ndarray:
    """Run on 4096 bytes that are there to be read, and 4096 bytes to be written, of which the first 16 are written.
    Memory goes on before and behind both, so that what lies there is memory all the same."""
    around = [np.zeros(3 * 1024, np.uint32) for _ in range(2)]
    places = [memory.ctypes.data + 4096 for memory in around]
    written = np.arange(4096) < 16
    arrays = [HostArray("given", places[0], 4096, False), HostArray("made", places[1], 4096, True, written)]
    parameters = [ctypes.c_uint64(place) for place in places]
    settings = Settings(mode, 1, checks=(), races=races)  # type: ignore[arg-type]
    made.launch(Geometry((1, 1, 1), 32, 0), parameters, settings, arrays=arrays if told else ())
    return written


@pytest.mark.parametrize(
    "body",
    [
        "ld.global.u32 %r4, [%d0+4092];",
        "ld.u32 %r4, [%d1+12]; atom.global.add.u32 %r4, [%d1], 1;",
        "st.global.u64 [%d1+4088], %d0; ld.global.u32 %r4, [%d1+4092];",
        COPY.format(source="%d0+4092", bytes=4),
        COPY.format(source="%d0+4096", bytes=0),
        BULK.format(source="%d0+4080", bytes=16, behind=""),
        STORE.replace("{bytes}", "16") + "ld.global.u32 %r4, [%d1+4080];",
        ".local .align 8 .b8 own[8]; mov.u64 %d2, own; cvta.local.u64 %d2, %d2; st.u32 [%d2], 1; ld.u32 %r4, [%d2];",
        "cvta.shared.u64 %d2, tile; st.u32 [%d2], 1; ld.u32 %r4, [%d2];",
    ],
)
def test_what_a_kernel_may_use_passes(body: str) -> None:
    made = program(body)
    for mode in MODES:
        run(made, mode)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.u32 %r4, [%d0+4096];", r"reads 4 bytes of global memory at byte 4096 of 'given' \(4096 bytes\)"),
        ("ld.global.u32 %r4, [%d0+-4];", "outside of every array"),
        ("ld.v2.u32 {%r4, %r5}, [%d1+4096];", "reads 8 bytes .* byte 4096 of 'made'"),
        ("st.global.u32 [%d1+4096], %r0;", "writes 4 bytes .* byte 4096 of 'made'"),
        ("red.global.add.u32 [%d1+4096], 1;", "reads 4 bytes .* byte 4096 of 'made'"),
        (COPY.format(source="%d0+4096", bytes=4), "reads 4 bytes .* byte 4096 of 'given'"),
        (BULK.format(source="%d0+4080", bytes=32, behind=""), "reads 32 bytes .* byte 4080 of 'given'"),
        (STORE.replace("{bytes}", "32"), "writes 32 bytes .* byte 4080 of 'made'"),
        ("st.global.u32 [%d0], %r0;", "writes 4 bytes .* byte 0 of 'given' .*, which is there to be read"),
        ("ld.global.u32 %r4, [%d1+16];", "reads 4 bytes .* byte 16 of 'made' .*, which nothing has written"),
        ("red.global.add.u32 [%d1+16], 1;", "which nothing has written"),
        (COPY.format(source="%d1+16", bytes=1), "reads 1 bytes .* byte 16 of 'made' .*, which nothing has written"),
        (BULK.format(source="%d1", bytes=32, behind=""), "which nothing has written"),
    ],
)
def test_other_memory_is_an_error(body: str, message: str) -> None:
    made = program(body)
    run(made, races="unchecked")
    run(made, told=False)
    for mode in MODES:
        with pytest.raises(HostError, match=message):
            run(made, mode)


def test_what_is_written_stays_written_for_the_next_launch() -> None:
    assert np.flatnonzero(run(program("st.global.u64 [%d1+24], %d0;"))).tolist() == [*range(16), *range(24, 32)]
