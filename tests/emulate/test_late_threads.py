"""Mode random lets threads and copies be late: faults that show in no other way, and the same kernels without them."""

from __future__ import annotations

import numpy as np
import pytest
from device import Kernel, Memory, Where

from cupymla.launch import Geometry
from cupymla_lab.emulate import EmulationError, Settings

pytestmark = pytest.mark.compile

WARP, ROUNDS = 32, 32
SEEDS = range(1, 7)
RIGHT = sum(range(ROUNDS))


def wait(name: str, barrier: str, parity: str = "%odd") -> str:
    return f"""
{name}:
    mbarrier.try_wait.parity.shared::cta.b64 %p, [{barrier}], {parity};
    @!%p bra {name};
"""


def arrive(barrier: str) -> str:
    return f"mbarrier.arrive.shared::cta.b64 _, [{barrier}];\n"


PAUSE = "nanosleep.u32 1000000;\n"
TOGETHER = "bar.sync 1, 64;\n"
WRITE = "st.shared.b32 [%word], %i;\n"
READ = "ld.shared.b32 %r0, [%word]; add.u32 %sum, %sum, %r0;\n"
COUNT = "add.u32 %sum, %sum, %i;\n"
COPY = """
    st.shared.b32 [%source], %i;
    fence.proxy.async.shared::cta;
    bar.warp.sync -1;
    setp.ne.u32 %p, %lane, 0;
    @%p bra others;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%full], 128;
    cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%words], [%from], 128, [%full];
    bra issued;
others:
    mbarrier.arrive.shared::cta.b64 _, [%full];
issued:
"""

KERNELS = {
    # Full's two phases of a round lie a long time apart, but only `empty` keeps the second from being over before the
    # other warp has looked for the first. To be late behind another wait shows nothing: the first warp waits as well.
    "a wait that begins late": (
        (
            wait("start", "%ready") + arrive("%full") + PAUSE + arrive("%full"),
            arrive("%ready") + wait("one", "%full", "0") + wait("two", "%full", "1") + COUNT,
        ),
        (
            wait("start", "%ready") + arrive("%full") + wait("seen", "%empty") + arrive("%full"),
            arrive("%ready") + wait("one", "%full", "0") + arrive("%empty") + wait("two", "%full", "1") + COUNT,
        ),
    ),
    "a place that is given back before it is read": (
        (WRITE + arrive("%full") + wait("free", "%empty"), wait("filled", "%full") + arrive("%empty") + READ),
        (WRITE + arrive("%full") + wait("free", "%empty"), wait("filled", "%full") + READ + arrive("%empty")),
    ),
    "a place that is handed on before it is written": (
        (arrive("%full") + WRITE + wait("free", "%empty"), wait("filled", "%full") + READ + arrive("%empty")),
        (WRITE + arrive("%full") + wait("free", "%empty"), wait("filled", "%full") + READ + arrive("%empty")),
    ),
    # As long as a thread that waits for the copy has it at once, the other one finds it there too.
    "a copy that another thread has waited for": (
        (
            COPY + arrive("%ready") + wait("come", "%full") + wait("free", "%empty"),
            wait("begun", "%ready") + PAUSE + READ + arrive("%empty"),
        ),
        (
            COPY + arrive("%ready") + wait("come", "%full") + wait("free", "%empty"),
            wait("begun", "%ready") + PAUSE + wait("here", "%full") + READ + arrive("%empty"),
        ),
    ),
    "one named barrier where two are needed": (
        (WRITE + TOGETHER + PAUSE, TOGETHER + READ),
        (WRITE + TOGETHER + PAUSE + TOGETHER, TOGETHER + READ + TOGETHER),
    ),
}


def kernel(first: str, second: str, where: Where) -> Kernel:
    """Every lane of warp 0 does `first` and every lane of warp 1 `second`, in each round %i with parity %odd; what warp
    1 has in %sum at the end is written to %out.

    Both have mbarriers %ready, %full and %empty of 32 arrivals each, and %word in shared memory, one for each lane,
    from %words on.
    """

    def rounds(role: str, body: str) -> str:
        return f"""
    mov.u32 %i, 0;
{role}:
    and.b32 %odd, %i, 1;
    {body}
    add.u32 %i, %i, 1;
    setp.lt.u32 %p, %i, {ROUNDS};
    @%p bra {role};
    bra over;
"""

    text = f"""
.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 p_out)
.maxntid {2 * WARP}, 1, 1
{{
    .reg .pred %p; .reg .b32 %thread, %lane, %i, %odd, %word, %words, %source, %from;
    .reg .b32 %ready, %full, %empty, %sum, %r0; .reg .b64 %out;
    .shared .align 8 .b64 barriers[3];
    .shared .align 16 .b32 words[{WARP}];
    .shared .align 16 .b32 sources[{WARP}];
    mov.u32 %thread, %tid.x; mov.u32 %lane, %laneid; mov.u32 %sum, 0;
    mov.u32 %ready, barriers; add.u32 %full, %ready, 8; add.u32 %empty, %ready, 16;
    mov.u32 %words, words; mad.lo.u32 %word, %lane, 4, %words;
    mov.u32 %from, sources; mad.lo.u32 %source, %lane, 4, %from;
    ld.param.b64 %out, [p_out]; mad.wide.u32 %out, %lane, 4, %out;
    setp.ne.u32 %p, %thread, 0;
    @%p bra made;
    mbarrier.init.shared::cta.b64 [%ready], {WARP};
    mbarrier.init.shared::cta.b64 [%full], {WARP};
    mbarrier.init.shared::cta.b64 [%empty], {WARP};
made:
    bar.sync 0;
    setp.ge.u32 %p, %thread, {WARP};
    @%p bra second_begins;
    {rounds("first", first)}
second_begins:
    {rounds("second", second)}
over:
    bar.sync 0;
    setp.lt.u32 %p, %thread, {WARP};
    @%p bra end;
    st.global.b32 [%out], %sum;
end:
    ret;
}}
"""
    return Kernel(text, "late.ptx", where, 2 * WARP)


def right(loaded: Kernel, where: Where, stalls: bool = True) -> list[bool]:
    """Seed by seed, whether the kernel comes to its end with the right sums."""
    found = []
    for seed in SEEDS:
        memory = Memory(np.zeros(WARP, np.uint32), where)
        try:
            settings = Settings("random", seed, patience_seconds=1.0, stalls=stalls)
            loaded.launch(Geometry((1, 1, 1), 2 * WARP, 0), [memory.parameter], settings)
            found.append(bool((memory.read() == RIGHT).all()))
        except EmulationError:
            found.append(False)
        finally:
            memory.free()
    return found


@pytest.mark.parametrize("fault", KERNELS)
def test_a_fault_that_shows_only_where_something_is_late(fault: str, where: Where) -> None:
    broken, sound = (kernel(*roles, where) for roles in KERNELS[fault])
    assert all(right(sound, where))
    if where == "gpu":
        return  # there what the broken one does to its mbarriers is a fault, which takes the process its GPU
    assert all(right(broken, where, stalls=False))
    assert not all(right(broken, where))
