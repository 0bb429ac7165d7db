"""The estimate of cycles: what is recorded does not depend on the schedule, and what is replayed keeps to the rates."""

from __future__ import annotations

import ctypes
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from cycles_kit import recorded, warps_of

from cupymla.build.source import cuda_root
from cupymla.ops import mla_cases
from cupymla.ops.xl_paged_attention import plan
from cupymla.ops.xl_paged_attention.cuda import Parameters
from cupymla.testing.operators import Subject
from cupymla_lab import ab, cycles, machine_code
from cupymla_lab.interpret import Program
from cupymla_lab.interpret.cycles import Rates, Recorder, Replayed, Stuck, replay, report, trace
from cupymla_lab.interpret.cycles.rates import FROM_MEMORY
from cupymla_lab.interpret.cycles.trace import Named
from cupymla_lab.interpreted import interpreted

ROOT = Path(__file__).resolve().parents[2]
BAD_RATES = ("l2_latency=nan", "l2_latency=-1", "l2_latency=inf", "gather_bytes=0", "memory_bytes=0", "warp_products=0")


@pytest.mark.parametrize(("stride", "cycles_"), [(4, 1), (8, 2), (128, 32), (0, 1)])
def test_bank_conflicts_are_counted(stride: int, cycles_: int) -> None:
    found = recorded(f"mad.lo.u32 %r2, %r0, {stride}, %r1;\nld.shared.u32 %r3, [%r2];")
    accesses = [event for event in found.warps[0].events if isinstance(event, trace.Shared)]
    assert [event.wavefronts for event in accesses] == [cycles_]


@pytest.mark.parametrize(("stride", "cycles_"), [(16, 4), (32, 8), (128, 32)])
def test_bank_conflicts_of_wide_accesses(stride: int, cycles_: int) -> None:
    body = f"mad.lo.u32 %r2, %r0, {stride}, %r1;\nst.shared.v4.f32 [%r2], {{%f0, %f1, %f2, %f3}};"
    accesses = [event for event in recorded(body).warps[0].events if isinstance(event, trace.Shared)]
    assert [event.wavefronts for event in accesses] == [cycles_]


def test_sectors_of_global_accesses_are_counted() -> None:
    body = """mad.wide.u32 %rd2, %r0, 4, %rd1; st.global.f32 [%rd2], %f0;
    mad.wide.u32 %rd3, %r0, 64, %rd1; red.global.add.f32 [%rd3], %f0;"""
    accesses = [event for event in recorded(body).warps[0].events if isinstance(event, trace.Global)]
    assert [(event.bytes, event.reduces) for event in accesses] == [(128, False), (1024, True)]


def test_loads_come_before_uses_that_their_addresses_do_not_need() -> None:
    body = """mad.wide.u32 %rd2, %r0, 4, %rd1;
    ld.global.f32 %f1, [%rd2]; add.f32 %f3, %f1, %f1;
    ld.global.f32 %f2, [%rd2+128]; add.f32 %f4, %f2, %f2;"""
    kinds = [type(event) for event in recorded(body).warps[0].events if isinstance(event, trace.Global | trace.Use)]
    assert kinds == [trace.Global, trace.Global, trace.Use, trace.Use]


@pytest.mark.parametrize("other_use", ["", "setp.gt.u32 %p1, %r4, 100;"])
def test_a_load_whose_address_was_loaded_stays_behind(other_use: str) -> None:
    body = f"""mad.wide.u32 %rd2, %r0, 4, %rd1;
    ld.global.u32 %r4, [%rd2]; {other_use} and.b32 %r5, %r4, 3; mad.wide.u32 %rd3, %r5, 4, %rd1;
    ld.global.f32 %f2, [%rd3]; add.f32 %f4, %f2, %f2;"""
    kinds = [type(event) for event in recorded(body).warps[0].events if isinstance(event, trace.Global | trace.Use)]
    assert kinds == [trace.Global, trace.Use, trace.Global, trace.Use]


def test_what_a_launch_stores_is_no_load_from_memory() -> None:
    """Nor where the replay has the reader ahead of the writer, who is another CTA."""
    load = "mad.wide.u32 %rd2, %r0, 4, %rd1; ld.global.f32 %f1, [%rd2]; add.f32 %f3, %f1, %f1;"
    ends = [replay(recorded(body), FROM_MEMORY).cycles for body in (load, load + "st.global.f32 [%rd2], %f3;")]
    assert ends[0] > FROM_MEMORY.memory_latency > ends[1] > FROM_MEMORY.l2_latency


STARTED = """
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra started;
    mbarrier.init.shared.b64 [%r1], 32;
started:
    bar.sync 0;
"""
PING_PONG = (
    STARTED
    + """    setp.ge.u32 %p1, %r0, 32;
    @%p1 bra waits;
    mbarrier.arrive.shared.b64 _, [%r1];
    bra done;
waits:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;
    @!%p2 bra waits;
done:
"""
)


def test_a_wait_is_one_event_however_often_it_polls() -> None:
    found = [recorded(PING_PONG, threads=64, seed=seed) for seed in range(4)]
    for each in found:
        waits = [event for warp in each.warps for event in warp.events if isinstance(event, trace.Wait)]
        assert waits == [trace.Wait(0, 1)]
    assert len({replay(each).cycles for each in found}) == 1


LOOK = """
again:
    mbarrier.test_wait.parity.shared.b64 %p1, [%r1], 0;
    ld.shared.f32 %f0, [%r1+64];
    add.f32 %f1, %f0, %f0;
"""


def test_what_follows_a_look_is_recorded_as_if_it_had_found_nothing() -> None:
    """The warp that looked goes on: here it loads, and is itself the one who arrives."""
    arrives = "mbarrier.arrive.shared.b64 %rd2, [%r1];"
    (warp,) = recorded(STARTED + LOOK + arrives).warps
    kinds = (trace.Shared, trace.Use, trace.Wait, trace.Arrive)
    assert [type(event) for event in warp.events if isinstance(event, kinds)] == [trace.Shared, trace.Use, trace.Arrive]


def test_a_loop_of_looks_is_a_wait() -> None:
    """However often it goes round, what it does is recorded for one look in vain and the one that found something."""
    loop = f"setp.ge.u32 %p2, %r0, 32; @!%p2 bra arrives; {LOOK} @!%p1 bra again; bra done;"
    slow = "".join(f"add.u32 %r{2 + k % 2}, %r{3 - k % 2}, {k};" for k in range(400))
    body = STARTED + loop + f"arrives: {slow} mbarrier.arrive.shared.b64 %rd2, [%r1];\ndone:"
    for seed in range(3):
        events = next(each for each in recorded(body, threads=64, seed=seed).warps if each.warp == 1).events
        assert [event for event in events if isinstance(event, trace.Wait)] == [trace.Wait(0, 1)]
        assert sum(isinstance(event, trace.Shared) for event in events) in (1, 2)


def test_a_barrier_that_others_wait_at_is_one_event() -> None:
    """It is tried again and again while the second warpgroup goes round its loop, and may not count as its branches."""
    trace = recorded(
        """
        setp.lt.u32 %p1, %r0, 128;
        @%p1 bra MEET;
        mov.u32 %r2, 0;
    AGAIN:
        add.u32 %r2, %r2, 1;
        setp.lt.u32 %p2, %r2, 500;
        @%p2 bra AGAIN;
    MEET:
        barrier.sync 1, 256;
        """,
        threads=256,
    )
    assert [sum(isinstance(event, Named) for event in warp.events) for warp in trace.warps] == [1] * 8


@pytest.mark.parametrize("seed", [1, 5])
def test_a_recording_does_not_depend_on_the_schedule(seed: int) -> None:
    """But for where in global memory this process has its arrays."""
    subject = Subject("sparse_mla_fwd")
    inputs = subject.cases.inputs(mla_cases.sized(16, 576, 130, 2, 300), 0)

    def warps(with_seed: int) -> Counter[tuple[object, ...]]:
        recorders: list[Recorder] = []

        def watch(program: Program) -> Recorder:
            recorders.append(Recorder(program))
            return recorders[-1]

        with interpreted("sm_90a", cycles.MULTIPROCESSORS, seed=with_seed) as machine:
            machine.watch = watch
            machine.results(subject, inputs)
        return Counter(tuple(map(without_numbers, warp.events)) for warp in recorders[0].trace.warps)

    first = warps(0)
    assert first == warps(seed)
    assert sum(isinstance(event, trace.Product) for warp in first for event in warp) > 0


def without_numbers(event: trace.Event) -> object:
    """An event without what is numbered in the order of the recording, and without the sectors' numbers."""
    if isinstance(event, trace.Arrive | trace.Wait | trace.GatherArrive | trace.Landing):
        return type(event).__name__, getattr(event, "arrivals", 0), getattr(event, "phases", 0)
    if isinstance(event, trace.Global | trace.Gather | trace.Prefetch):
        return event._replace(sectors=())
    return event


def test_products_keep_to_the_tensor_cores_rate() -> None:
    group: list[trace.Event] = [*[trace.Product(256, 0)] * 10, trace.ProductCommit(), trace.ProductWait(0)]
    rates = replace(Rates(), product_latency=7.0)
    alone = replay(warps_of(group), rates)
    assert alone.cycles == pytest.approx(10 * 128 + 7, abs=2)
    # Warps 0 and 4 are of one scheduler, warp 1 is of another.
    assert replay(warps_of(group, group), rates).cycles == alone.cycles
    assert replay(warps_of(group, [], [], [], group), rates).cycles == pytest.approx(2 * alone.cycles, rel=0.01)


def test_a_wait_for_more_groups_than_there_are_is_none() -> None:
    group: list[trace.Event] = [trace.Product(64, 0), trace.ProductCommit()]
    assert replay(warps_of([*group, trace.ProductWait(3)])).warps[0].done[-1] < 10
    gathered: list[trace.Event] = [trace.Gather(512), trace.GatherCommit(), trace.GatherWait(3)]
    assert replay(warps_of(gathered)).warps[0].done[-1] < 10


@pytest.mark.parametrize("work", [0, 24, 60])
def test_products_that_have_just_ended_are_late_all_the_same(work: int) -> None:
    group: list[trace.Event] = [trace.Product(64, 0), trace.ProductCommit()]
    rates = replace(Rates(), solo=1.0, product_latency=30.0)
    done = replay(warps_of([*group, trace.Run(work, 0, 0, 0), trace.ProductWait(0)]), rates).warps[0].done[-1]
    assert done == pytest.approx(max(32 + 30, work + 2), abs=3)


def test_a_wait_for_all_but_one_group_lets_the_last_go_on() -> None:
    groups: list[trace.Event] = [trace.Product(64, 0), trace.ProductCommit()] * 2
    early = replay(warps_of([*groups, trace.ProductWait(1)])).warps[0].done[-1]
    late = replay(warps_of([*groups, trace.ProductWait(0)])).warps[0].done[-1]
    assert late - early == pytest.approx(32, abs=1)


def test_shared_memory_holds_products_up() -> None:
    group: list[trace.Event] = [*[trace.Product(64, 65536)] * 4, trace.ProductCommit(), trace.ProductWait(0)]
    four = warps_of(group, group, group, group)
    assert replay(four).cycles >= 4 * 65536 / Rates().shared_bytes
    assert replay(four, replace(Rates(), shared_bytes=1e9)).cycles < 300


def test_gathered_bytes_keep_to_their_rate_and_arrive_late() -> None:
    events: list[trace.Event] = [*[trace.Gather(512)] * 50, trace.GatherArrive(0, 32), trace.Wait(0, 1)]
    rates = replace(Rates(), gather_bytes=32.0, l2_latency=500.0, wake=0.0)
    assert replay(warps_of(events, barriers=(32,)), rates).cycles == pytest.approx(50 * 16 + 500, rel=0.02)


def test_copies_are_counted_by_their_mbarrier() -> None:
    events: list[trace.Event] = [trace.Arrive(0, 1, 4096, 0), trace.Landing(0, 4096, 0, False), trace.Wait(0, 1)]
    rates = replace(Rates(), gather_bytes=32.0, l2_latency=300.0)
    assert replay(warps_of(events, barriers=(1,)), rates).cycles == pytest.approx(4096 / 32 + 300, rel=0.15)


def test_a_warp_that_waits_for_nothing_is_named() -> None:
    with pytest.raises(Stuck, match=r"CTA 0 warp 0 at Wait\(barrier=0, phases=1\)"):
        replay(warps_of([trace.Wait(0, 1)], barriers=(1,)))


def test_a_cluster_meets_when_all_have_come() -> None:
    first: list[trace.Event] = [trace.ClusterArrive(32, True), trace.ClusterWait()]
    second: list[trace.Event] = [trace.Run(2000, 0, 0, 0), *first]
    found = replay(warps_of(first, second, ctas=2), replace(Rates(), solo=1.0))
    assert min(warp.end for warp in found.warps) > 2000


def test_a_barrier_of_all_waits_for_those_that_have_not_exited() -> None:
    meets: list[trace.Event] = [trace.Named(0, 0, 32, True)]
    found = replay(warps_of(meets, [trace.Run(500, 0, 0, 0), *meets], []), replace(Rates(), solo=1.0))
    assert [warp.end >= 500 for warp in found.warps] == [True, True, False]


def test_warps_of_a_scheduler_share_its_issue_slots() -> None:
    run: list[trace.Event] = [trace.Run(1000, 0, 0, 0)]
    rates = replace(Rates(), solo=1.0)
    assert replay(warps_of(run, run, run, run), rates).cycles == pytest.approx(1000)
    assert replay(warps_of(*[run] * 8), rates).cycles == pytest.approx(2000, rel=0.02)


def test_a_kernel_takes_no_less_than_its_products() -> None:
    subject = Subject("sparse_mla_fwd")
    case = mla_cases.sized(64, 576, 256, 1, 300)
    launches = cycles.record(subject, case, ab.here(), multiprocessors=1)
    assert [launch.kernel for launch in launches] == ["sparse_mla_fwd"]
    found = replay(launches[0].trace)
    # 4 blocks of 64 slots: 64 heads x 64 slots x (576 + 512) multiply-adds at 2048 a cycle.
    assert report.busy(found)["tensor core"] * report.last_end(found) == pytest.approx(4 * 2176)
    assert 4 * 2176 < found.cycles < 40 * 2176
    places = [share.place for share in report.shares(launches[0].trace, report.leaders(found)[0], True)]
    assert any("consumer.cuh" in place for place in places)


def test_the_command_compares_variants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them a folder whose kernel waits longer."""
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "cuda"
    shutil.copytree(ROOT / "cuda", folder, ignore=shutil.ignore_patterns("third_party"))
    slower = folder / "sparse_mla_fwd" / "sm90" / "consumer.cuh"
    before = "    storage.q_full.wait(q_parity);\n"
    assert before in slower.read_text()
    slower.write_text(slower.read_text().replace(before, before + "    __threadfence();\n" * 20))
    options = ["--queries", "1", "--rate", "gpu_fence=5000", "--against", str(folder)]
    status = cycles.main(["sparse_mla_fwd", "--case", "h128_d576_k256_q2_kv1000", *options])
    printed = capsys.readouterr().out
    assert status == 0
    assert "cycles, estimated" in printed
    assert "consumer.cuh" in printed
    last = [line for line in printed.splitlines() if "sparse_mla_fwd" in line][-2:]
    here, fenced = (int(re.findall(r"\d+", line.split("sparse_mla_fwd")[-1])[0]) for line in last)
    assert fenced - here == pytest.approx(20 * 5000, rel=0.1)


def test_a_variant_is_what_is_recorded() -> None:
    """Where merging costs more, the slots of the only query are not shared."""
    subject = Subject("sparse_mla_fwd")
    case = mla_cases.sized(16, 576, 512, 1, 600)

    def warps(variant: ab.Variant) -> int:
        (launch,) = cycles.record(subject, case, variant, multiprocessors=2)
        return len(launch.trace.warps)

    assert warps(ab.here()) == 2 * warps(ab.constant(subject, "plan._MERGE_PAIRS=9"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "h1_k1"], "expected a case of cupymla/ops/sparse_mla_fwd/cases.py such as"),
        (["--case", "h128_d576_k256_q2_kv1000", "--rate", "l2=5"], "NAME=NUMBER"),
        *((["--case", "h128_d576_k256_q2_kv1000", "--rate", rate], "NAME=NUMBER") for rate in BAD_RATES),
        (["--case", "h16_d576_k65_q0_kv100"], "a case that launches a kernel"),
        (["--case", "h128_d576_k256_q2_kv1000", "--queries", "0"], "at least 1"),
        (["--case", "h128_d576_k256_q2_kv1000", "--multiprocessors", "-1"], "--multiprocessors': expected at least 1"),
        (["--case", "h128_d576_k256_q2_kv1000", "--multiprocessors", "0"], "--multiprocessors': expected at least 1"),
        (["--case", "h128_d576_k256_q2_kv1000", "--ctas", "0"], "--ctas': expected at least 1, got 0"),
        (["--case", "h128_d576_k256_q2_kv1000", "--resident", "0"], "--resident': expected at least 1, got 0"),
        (["--case", "h128_d576_k256_q2_kv1000", "--resident", "-2"], "--resident': expected at least 1, got -2"),
        (["--case", "h128_d576_k256_q2_kv1000", "--arch", "sm_100f"], "such as sm_90a"),
        (["--case", "h128_d576_k256_q2_kv1000", "--arch", "sm_80"], "sm_80"),
        (
            ["--case", "h16_d576_k130_q3_kv300", "--queries", "1", "--in-l2", "kw"],
            "arguments, got 'kw'",
        ),
    ],
)
def test_the_command_refuses(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cycles.main(["sparse_mla_fwd", *arguments])
    assert message in capsys.readouterr().err


def test_a_folder_with_another_parameter_record_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "_FEW_GAIN", -1e9)  # of the kernel for any work
    for name in ("common", "xl_paged_attention"):
        shutil.copytree(cuda_root() / name, tmp_path / name)
    record = tmp_path / "xl_paged_attention" / "sm80" / "params.cuh"
    record.write_text(record.read_text().replace("float score_log2;", "float score_log2, another, third;"))
    words = ["xl_paged_attention", "--case", "gqa4-2x64_b4_c0-90_lse2", "--ctas", "1", "--against", str(tmp_path)]
    assert cycles.main(words) == 1
    said = capsys.readouterr().err
    size = ctypes.sizeof(Parameters)
    expected = f"parameter record of {size + 8} bytes, its twin {Parameters.__module__}.Parameters has {size}"
    assert f"error: xl_paged_attention/sm80/xl_paged_attention.cu: {expected}" in said
    assert "wants its own checkout" in said


@pytest.mark.parametrize("name", ["nvfp4_gemv", "xl_paged_attention"])
def test_kernels_whose_products_are_mma_are_estimated(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a launch for a whole GPU as many CTAs as share a multiprocessor."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(plan, "_FEW_GAIN", -1e9)  # of the kernel for any work
    found: list[list[cycles.Launch]] = []

    def watched(*arguments: object) -> list[cycles.Launch]:
        found.append(record(*arguments))  # type: ignore[arg-type]
        return found[-1]

    record = cycles.record
    monkeypatch.setattr(cycles, "record", watched)
    case = {"nvfp4_gemv": "m4096_k4096_l1_n1", "xl_paged_attention": "gqa4-2x64_b4_c0-90_dense"}[name]
    assert cycles.main([name, "--case", case, "--resident", "2"]) == 0
    printed = capsys.readouterr().out
    assert "2 CTAs, 2 to a multiprocessor" in printed
    (launches,) = found
    shared, apart = (replay(launches[0].trace, resident=resident).cycles for resident in (2, 1))
    assert shared > apart
    row = next(line for line in printed.splitlines() if " here " in line)
    assert re.findall(r"[\d.]+", row)[-3] == f"{shared:.0f}"
    assert [len(launch.trace.clusters) for launch in launches] == [2]
    events = [event for warp in launches[0].trace.warps for event in warp.events]
    assert {event.multiplications for event in events if isinstance(event, trace.WarpProduct)} == {16 * 8 * 16}


def test_the_longest_launch_is_the_one_whose_last_cta_ends_last() -> None:
    def launch(name: str, *lengths: int) -> tuple[cycles.Launch, Replayed]:
        runs: list[list[trace.Event]] = [[trace.Run(length, 0, 0, 0)] for length in lengths]
        made = warps_of(*runs, ctas=2)
        return cycles.Launch(name, made, False), replay(made, replace(Rates(), solo=1.0))

    found = [launch("even", 600, 600), launch("uneven", 100, 900)]
    kernel, taken = cycles.longest(found)
    assert kernel.kernel == "uneven"
    assert report.last_end(taken) == pytest.approx(100)
    assert taken.cycles == pytest.approx(900)
    assert cycles.microseconds(1755) == pytest.approx(1)


def test_the_command_says_what_it_went_by(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a disassembler it is the PTX too."""
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["sparse_mla_fwd", "--case", "h16_d576_k130_q3_kv300", "--queries", "1"]

    def first_cta(*options: str) -> tuple[str, int]:
        assert cycles.main([*arguments, *options]) == 0
        lines = capsys.readouterr().out.splitlines()
        by = next(line for line in lines if line.startswith("Instructions counted in "))
        row = next(line for line in lines if " sparse_mla_fwd " in line)
        last, microseconds = re.findall(r"[\d.]+", row)[-3:-1]
        assert float(microseconds) == pytest.approx(int(last) / 1755, abs=0.01)
        return by.split("counted in ")[1].split(";")[0], int(last)

    by_ptx = first_cta("--ptx-costs")
    assert by_ptx[0] == "PTX"
    if machine_code.disassembler() is not None:
        by_code = first_cta()
        assert by_code[0] == "machine code" and by_code[1] != by_ptx[1]
    monkeypatch.setattr(machine_code, "by_ptx_line", lambda made: None)
    assert first_cta() == by_ptx
    from_memory = first_cta("--ptx-costs", "--from-memory")[1]
    assert from_memory > by_ptx[1]
    assert first_cta("--ptx-costs", "--from-memory", "--in-l2", "kv")[1] < from_memory
    # That much for each of 19 bytes, where memory is all that is waited for.
    assert first_cta("--ptx-costs", "--from-memory", "--rate", "memory_bytes=0.1")[1] > 50 * from_memory


def test_ctas_that_others_wait_for_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """The gradients' launch finds sums that nobody has set to zero."""
    with pytest.raises(SystemExit):
        cycles.main(["sparse_mla_bwd", "--case", "h64_d576_k130_q3_kv300", "--ctas", "1"])
    message = capsys.readouterr().err
    assert "--ctas" in message and "read of unwritten memory" in message
