"""Accesses to global memory that nothing orders, within a launch, are found in every mode; ordered kernels pass."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import HOST
from races_kit import FENCE, Claim, Claims, ordered, raced, refused

from cupymla.build.source import cuda_root
from cupymla.ops.xl_paged_attention import cases, plan
from cupymla.testing import compare
from cupymla_lab.emulate import Settings
from cupymla_lab.emulate.host.machine import HostError
from cupymla_lab.emulated import emulated

# One worker has them all: what it runs is made once.
pytestmark = [HOST, pytest.mark.compile, pytest.mark.xdist_group("emulated grid races")]
CLAIMS, NARROW = Claims(), Claims()

# Each thread stores its number in global memory and reads that of a thread of another warp, or lane.
NEIGHBOUR = """xor.b32 %r3, %r0, {bit}; mul.wide.u32 %d12, %r3, 4; add.s64 %d12, %d12, %d1;
    st.global.u32 [%d11], %r0; {between} ld.{space}u32 %r4, [%d12]; {behind}"""


@CLAIMS.test(space=("global.", ""))
def test_a_cta_hands_global_memory_on_behind_its_barriers(space: str) -> Iterator[Claim]:
    for bit, between in ((1, "bar.warp.sync -1;"), (32, "bar.sync 0;")):
        yield ordered(NEIGHBOUR.format(bit=bit, between=between, behind="", space=space), threads=64)
        yield raced(NEIGHBOUR.format(bit=bit, between="", behind="", space=space), "reads global memory .*", threads=64)
    again = "bar.sync 0; st.global.u32 [%d12], %r4;"
    yield ordered(NEIGHBOUR.format(bit=32, between="bar.sync 0;", behind=again, space=space), threads=64)
    yield raced("st.global.u32 [%d1], %r0;", "writes global memory .*")


@NARROW.test()
def test_what_is_written_by_bytes_and_halves_is_kept_apart() -> Iterator[Claim]:
    for bits, shift in ((8, 0), (16, 1)):
        body = f"shl.b32 %r2, %r0, {shift}; cvt.u64.u32 %d12, %r2; add.s64 %d12, %d12, %d1; "
        body += f"cvt.u16.u32 %h, %r0; st.global.u{bits} [%d12], %h;"
        yield ordered(".reg .b16 %h; " + body)


@CLAIMS.test()
def test_the_stack_is_a_threads_own() -> Iterator[Claim]:
    """Generic addresses may lie there."""
    body = """.local .align 4 .b8 stack[64]; mov.u64 %d12, stack; cvta.local.u64 %d12, %d12; {{ st.u32 [%d12], %r0; }}
    ld.u32 %r4, [%d12]; st.global.u32 [%d11], %r4;"""
    body = body.replace("{{", "").replace("}}", "")
    yield ordered(body, gives=lambda found: found[:32].tolist() == list(range(32)))


# Cluster 0 writes a number and counts up, cluster 1 reads the number when it finds the count changed.
HANDED = """mov.u32 %r8, %ctaid.x; setp.eq.u32 %p3, %r8, 0; add.s64 %d12, %d1, 512; @!%p3 bra READ;
    st.global.u32 [%d1], 7; {release} bra END;
    READ: {acquire} setp.eq.u32 %p2, %r4, 0; @%p2 bra READ; {behind} ld.global{how}.u32 %r4, [%d1];
    st.global.u32 [%d1+1024], %r4; END:"""
RELEASES = {
    "atomic": "atom.add.release.gpu.global.u32 %r4, [%d12], 1;",
    "acq_rel": "atom.add.acq_rel.gpu.global.u32 %r4, [%d12], 1;",
    "store": "st.release.gpu.global.u32 [%d12], 1;",
    "fence": "fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [%d12], 1;",
    "membar": "membar.gl; st.volatile.global.u32 [%d12], 1;",
}
ACQUIRES = {
    "load": ("ld.acquire.gpu.global.u32 %r4, [%d12];", ""),
    "fence": ("ld.relaxed.gpu.global.u32 %r4, [%d12];", "fence.acq_rel.gpu;"),
    "atomic": ("atom.add.acquire.gpu.global.u32 %r4, [%d12], 0;", ""),
}
ONE: dict[str, Any] = {"threads": 1, "ctas": 2}


@CLAIMS.test(release=RELEASES, acquire=ACQUIRES)
def test_clusters_hand_global_memory_on_by_release_and_acquire(
    release: str, acquire: tuple[str, str]
) -> Iterator[Claim]:
    take, behind = acquire
    good = {"release": release, "acquire": take, "behind": behind, "how": ""}
    yield ordered(HANDED.format(**good), gives=lambda found: bool(found[256] == 7), **ONE)
    relaxed = "ld.relaxed.gpu.global.u32 %r4, [%d12];"
    yield raced(HANDED.format(**good | {"acquire": relaxed, "behind": ""}), "reads global memory .*", **ONE)
    bare = "red.relaxed.gpu.global.add.u32 [%d12], 1;"
    yield raced(HANDED.format(**good | {"release": bare}), "cluster 1 .* reads .* thread 0 of cluster 0 wrote", **ONE)
    plain = "st.global.u32 [%d12], 1;"
    yield raced(HANDED.format(**good | {"release": plain}), "(reads|writes) global memory .*", **ONE)
    yield raced(HANDED.format(**good | {"how": ".nc"}), r"ld\.global\.nc", **ONE)


@CLAIMS.test()
def test_what_a_cluster_was_told_it_tells_others() -> Iterator[Claim]:
    """Cluster 2 never meets cluster 0; within cluster 1 an mbarrier hands on what its first thread was told."""
    body = """mov.u32 %r8, %ctaid.x; add.s64 %d12, %d1, 512; @%p1 mbarrier.init.shared::cta.b64 [%r1], 1; bar.sync 0;
    setp.eq.u32 %p3, %r8, 1; @%p3 bra MIDDLE; @!%p1 bra END; setp.eq.u32 %p3, %r8, 2; @%p3 bra LAST;
    st.global.u32 [%d1], 7; st.release.gpu.global.u32 [%d12], 1; bra END;
    MIDDLE: @!%p1 bra SECOND; FIRST: ld.acquire.gpu.global.u32 %r4, [%d12]; setp.eq.u32 %p2, %r4, 0; @%p2 bra FIRST;
    mbarrier.arrive{order}.shared::cta.b64 _, [%r1]; bra END;
    SECOND: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0; @!%p2 bra SECOND; setp.eq.u32 %p2, %r0, 32;
    @%p2 st.release.gpu.global.u32 [%d12+4], 1; bra END;
    LAST: ld.acquire.gpu.global.u32 %r4, [%d12+4]; setp.eq.u32 %p2, %r4, 0; @%p2 bra LAST; ld.global.u32 %r4, [%d1];
    st.global.u32 [%d1+1024], %r4; END:"""
    yield ordered(body.format(order=""), gives=lambda found: bool(found[256] == 7), threads=64, ctas=3)
    yield raced(
        body.format(order=".relaxed.cta"), "cluster 2 .* reads .* thread 0 of cluster 0 wrote", threads=64, ctas=3
    )


@CLAIMS.test()
def test_atomic_operations_do_not_race_with_each_other_but_with_others() -> Iterator[Claim]:
    add = "red.relaxed.gpu.global.add.f32 [%d1], 0f3F800000; "
    yield ordered(add, gives=lambda found: bool(found[0] == 0x43800000), threads=64, ctas=4)
    # Of several that nothing orders the last is remembered: others have come to it behind the pause.
    yield raced(add + "nanosleep.u32 100000; ld.global.u32 %r4, [%d1];", "reads global memory .*", threads=64, ctas=4)
    yield raced("st.global.u32 [%d11], 0; " + add, "writes global memory .*", threads=64)


# Every thread writes a number to shared memory, thread 0 has the TMA store them, a thread of another warp reads one.
STORED = f"""shl.b32 %r2, %r0, 2; add.s32 %r2, %r2, %r1; st.shared.u32 [%r2], %r0; {FENCE} bar.sync 0; @!%p1 bra REST;
    {{bulk}} [%d1], [%r1], 256; cp.async.bulk.commit_group; {{wait}} REST: bar.sync 0; {{after}}
    @%p1 cp.async.bulk.wait_group 0;"""
STORE, ADD = "cp.async.bulk.global.shared::cta.bulk_group", "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32"


@CLAIMS.test()
def test_what_tma_stores_is_there_for_those_who_are_told_behind_a_wait() -> Iterator[Claim]:
    good = {"bulk": STORE, "wait": "cp.async.bulk.wait_group 0;", "after": "ld.global.u32 %r4, [%d11];"}
    yield ordered(STORED.format(**good), threads=64)
    reads = "cp.async.bulk.wait_group.read 0;"
    for wait in ("", reads):
        for after in ("ld.global.u32 %r4, [%d11];", "st.global.u32 [%d11], 1;"):
            found = "(reads|writes) global memory .* a bulk store of thread 0 wrote"
            yield refused(STORED.format(**good | {"wait": wait, "after": after}), found, threads=64)
    yield ordered(STORED.format(**good | {"bulk": ADD, "wait": reads, "after": ""}), threads=64, ctas=3)
    yield raced(
        STORED.format(**good | {"after": ""}), "writes global memory .* a bulk store of thread 0", threads=64, ctas=3
    )


@CLAIMS.test()
def test_what_tma_loads_lies_behind_a_proxy_fence() -> Iterator[Claim]:
    body = """add.s32 %r6, %r1, 2048; @%p1 mbarrier.init.shared::cta.b64 [%r6], 1; st.global.u32 [%d11], %r0;
    {fence} bar.sync 0; @!%p1 bra END; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r6], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d1], 256, [%r6];
    WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r6], 0; @!%p2 bra WAIT; END:"""
    yield ordered(body.format(fence="fence.proxy.async.global;"), threads=64)
    yield raced(body.format(fence=""), r"asynchronously reads global memory .* no fence\.proxy\.async", threads=64)


def test_ctas_that_share_a_sequence_meet_by_a_counter_with_an_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """xl_paged_attention adds up what its CTAs left in a workspace; a relaxed counter does not say that it is there."""
    # By the kernel that is the smallest.
    traits: dict[str, Any] = {"dtype": "float32", "kv_layout": "NHD", "num_heads": 2, "num_kv_heads": 1}
    case = cases.make("dtypes", "shared", head_size=32, context_lens=(300, 5), **traits)
    settings = Settings("random", 1, patience_seconds=20.0, races="hardware")
    with emulated("sm_100f", 7, settings) as machine:
        compare.require(machine.check("xl_paged_attention", case))
    folder = tmp_path / "cuda"
    shutil.copytree(cuda_root(), folder, ignore=shutil.ignore_patterns("third_party"))
    counter = folder / "common" / "counter.cuh"
    text = counter.read_text()
    assert text.count("atom.add.acq_rel.gpu.global.u32") == 1
    counter.write_text(text.replace("atom.add.acq_rel", "atom.add.relaxed"))
    ours = plan.variant
    monkeypatch.setattr(plan, "variant", lambda *given, **named: replace(ours(*given, **named), root=str(folder)))
    told = r"race: .* (reads|writes) global memory .* of cluster \d+ wrote .* nothing orders the two"
    with emulated("sm_100f", 7, settings) as machine, pytest.raises(HostError, match=told):
        machine.check("xl_paged_attention", case)
