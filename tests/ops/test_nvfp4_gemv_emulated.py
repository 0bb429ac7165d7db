"""nvfp4_gemv's sm_100f kernels without a GPU, in the host emulator: the streaming one with native conversion, and the
tcgen05 one, through the operator's own plans and bindings.

The cheapest cases of each intent run always, in the modes in turn; `--interpret-all` runs all small ones in all modes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from sass_kit import machine_code

from cupymla import arch as arches
from cupymla import build, nvfp4_gemv
from cupymla.build import KernelSource
from cupymla.ops.nvfp4_gemv import cases, formats, model, plan
from cupymla.testing import compare
from cupymla_lab.emulate import MODES, Settings, Site, mutation
from cupymla_lab.emulate.host.machine import HostProgram
from cupymla_lab.emulate.settings import Mode
from cupymla_lab.emulated import DeviceArray, emulated
from cupymla_lab.problems import nvfp4_gemv as problems
from cupymla_lab.subjects import Subject, cheapest

pytestmark = pytest.mark.compile

SUBJECT = Subject("nvfp4_gemv")
# Every SM has a CTA of the streaming kernel, with 512 threads; the other one shares tiles where there are many SMs.
STREAM_SMS, TENSOR_SMS = (1, 5, 3), (1, 148, 4)
MOST_FLOPS = 2e6
STREAM_THREADS, TENSOR_THREADS = 512, 192


def parameters(chosen: list[Any], every: list[Any], multiprocessors: tuple[int, ...]) -> Iterator[object]:
    for number, case in enumerate(every):
        for turn in range(len(MODES)):
            runs = case in chosen and turn == number % len(MODES)
            marks = [] if runs else [pytest.mark.interpret_all]
            count = multiprocessors[(number // len(MODES) + turn) % len(multiprocessors)]
            yield pytest.param(case, MODES[turn], count, id=f"{case.name}-{MODES[turn]}-{count}", marks=marks)


SMALL = [case for case in problems.CASES if cases.flops(case) <= MOST_FLOPS]
TENSOR = [case for case in SMALL if case.intent == "tensor"]
STREAM = [case for case in SMALL if case.intent != "tensor"]
# Beside what is cheapest of each intent: every two of a format, an operand and 1, 8 or 16 columns, part of them with
# whole chunks of k; of what overflows, each format and each operand.
STREAM_NAMED = (
    *("m45_k1104_l2_n9_128x4", "m45_k1104_l2_n9_w4a16h_128x4", "m45_k1104_l2_n9_w4a16_mxfp4_128x4"),
    "m45_k1280_l1_n9_mxfp4_128x4",
    *("m70_k512_l1_n2_overflow", "m70_k512_l1_n2_w4a16_overflow", "m70_k512_l1_n2_w4a16h_mxfp4_overflow"),
    "m70_k512_l1_n2_zero",
)
STREAM_ALWAYS = cheapest(SUBJECT, 2, keep=lambda case: case in STREAM) + [
    next(case for case in STREAM if case.name == name) for name in STREAM_NAMED
]
TENSOR_ALWAYS = [case for case in TENSOR if not case.name.startswith("m66") or case.format == "nvfp4"]


def prefer(monkeypatch: pytest.MonkeyPatch, tensor: bool) -> None:
    """Take the choice between the kernels out of the model's hands."""
    monkeypatch.setattr(model, "tensor_core_is_faster", lambda problem, multiprocessors: tensor)


@pytest.mark.parametrize(("case", "mode", "multiprocessors"), list(parameters(STREAM_ALWAYS, SMALL, STREAM_SMS)))
def test_the_streaming_kernel_meets_the_accuracy_criterion(
    case: cases.GemvCase, mode: Mode, multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer(monkeypatch, False)
    with emulated("sm_100f", multiprocessors, Settings(mode, seed=multiprocessors, races="hardware")) as machine:
        compare.require(machine.check("nvfp4_gemv", case))
        assert {geometry.block for geometry in machine.launches} <= {STREAM_THREADS}


@pytest.mark.parametrize(("case", "mode", "multiprocessors"), list(parameters(TENSOR_ALWAYS, TENSOR, TENSOR_SMS)))
def test_the_tcgen05_kernel_meets_the_accuracy_criterion(
    case: cases.GemvCase, mode: Mode, multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer(monkeypatch, True)
    with emulated("sm_100f", multiprocessors, Settings(mode, seed=multiprocessors, races="hardware")) as machine:
        compare.require(machine.check("nvfp4_gemv", case))
        assert {geometry.block for geometry in machine.launches} == {TENSOR_THREADS}


def named(name: str) -> cases.GemvCase:
    return next(case for case in problems.CASES if case.name == name)


def judge(found: npt.NDArray[Any], inputs: dict[str, Any]) -> None:
    """The accuracy criterion, for inputs that are no case's."""
    with np.errstate(all="ignore"):
        (same,), (exact,) = SUBJECT.reference(inputs, "same"), SUBJECT.reference(inputs, "float64")
        compare.require([compare.compare("c", found, same, exact)])


def test_the_order_of_threads_and_copies_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight CTAs share each tile of this case, and each adds up in up to four accumulators."""
    prefer(monkeypatch, True)
    inputs = cases.inputs(named("m70_k3104_l1_n9_tma"), 7)
    found, clusters = [], set()
    for seed, mode in enumerate(MODES):
        with emulated("sm_100f", 148, Settings(mode, seed=seed, races="hardware")) as machine:
            found.append(machine.run(SUBJECT, inputs)[0])
            clusters |= {geometry.cluster for geometry in machine.launches}
    assert clusters == {8}
    assert np.isfinite(found[0]).any()
    for other in found[1:]:
        np.testing.assert_array_equal(other.view(np.uint16), found[0].view(np.uint16))


@pytest.mark.parametrize("tensor", [True, False], ids=["tcgen05", "stream"])
def test_infinities_and_nan_of_alpha_and_bias_stay_in_their_rows(tensor: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, tensor)
    case = named("m66_k288_l2_n3_tma_rows_batch")
    inputs = cases.inputs(case, 3)
    inputs["alpha"][:3] = np.inf, -np.inf, np.nan
    inputs["bias"][5:8, 1] = np.inf, -np.inf, np.nan
    with emulated("sm_100f", 4, Settings("lazy", seed=1, races="hardware")) as machine:
        (found,) = machine.run(SUBJECT, inputs)
    judge(found, inputs)
    (wanted,) = SUBJECT.reference(inputs, "float64")
    special = ~np.isfinite(wanted)
    assert special[:3].all() and special[5:8, :, 1].all() and special.sum() == 2 * 3 * 3 + 3 * 3


@pytest.mark.parametrize("argument", ["sfa", "sfb"])
@pytest.mark.parametrize("code", [0x80, 0xFE, 0xFF], ids=["minus zero", "-448", "nan"])
def test_scales_with_a_sign(argument: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Tensor Core has none for E4M3: with all scales of one side at that code, signs must come out right."""
    prefer(monkeypatch, True)
    inputs = cases.inputs(named("m140_k800_l1_n1_tma_full"), 11)
    inputs["out_dtype"] = "float32"
    inputs[argument][...] = code
    with emulated("sm_100f", 148, Settings("random", seed=code, races="hardware")) as machine:
        (found,) = machine.run(SUBJECT, inputs)
    judge(found, inputs)
    nan, zero = np.isnan(found), found == 0
    assert nan.all() == (code == 0xFF) and zero.all() == (code == 0x80)


def test_arrays_that_tma_cannot_read_go_to_the_streaming_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear scales, weight-only vectors, and rows at other steps than 16 bytes; all of them are served."""
    prefer(monkeypatch, True)
    for name in ("m128_k256_l1_n1", "m140_k176_l1_n1_nan_128x4", "m131_k208_l1_n2_w4a16_none_128x4"):
        with emulated("sm_100f", 2, Settings("eager", races="hardware")) as machine:
            compare.require(machine.check("nvfp4_gemv", named(name)))
            assert {geometry.block for geometry in machine.launches} == {STREAM_THREADS}


def test_a_repeated_layout_at_an_odd_address_changes_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alignment is no part of a layout: calls alike but for an address must not share a binding that TMA reads by."""
    prefer(monkeypatch, True)
    inputs = cases.inputs(named("m66_k288_l2_n3_tma_none_rows"), 5)
    with emulated("sm_100f", 4, Settings("eager", races="hardware")) as machine:
        given = machine.arguments(inputs)
        odd = machine.array(np.zeros(given["a"].host.nbytes + 8, np.uint8)).host
        moved = np.moveaxis(odd[8:].reshape(np.moveaxis(inputs["a"], -1, 0).shape), 0, -1)
        moved[...] = inputs["a"]
        for a in (given["a"], DeviceArray(moved), given["a"]):
            judge(nvfp4_gemv(**{**given, "a": a}).get(), inputs)
        assert [geometry.block for geometry in machine.launches] == [TENSOR_THREADS, STREAM_THREADS, TENSOR_THREADS]


# What taking these away does cannot be seen: nothing asynchronous comes before the first barrier, `ready` waits for
# what `full` waits for, here the shared memory of a CTA outlives it, and the warp's barriers in front of the cluster's
# only bring lanes together.
UNSEEN = ("before_thread_sync", "after_thread_sync", "try_wait", "barrier.cluster.wait", *2 * ["bar.warp.sync"])


@pytest.mark.slow
def test_waits_fences_and_commits_are_missed_when_they_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once with tiles that clusters share, once with a ring that goes round."""
    prefer(monkeypatch, True)
    left = survivors("m140_k3104_l1_n1_tma", 1, survivors("m140_k800_l1_n1_tma_full", 148))
    found = Counter(next((word for word in UNSEEN if word in site.text), site.text) for site in left)
    assert found <= Counter(UNSEEN)


def survivors(name: str, multiprocessors: int, of: list[Site] | None = None) -> list[Site]:
    """The mutants of the kernel that a case runs, or of some of them, that it does not notice."""
    inputs = SUBJECT.cases.inputs(named(name), 0)
    expected = [SUBJECT.expected(inputs, precision) for precision in ("same", "float64")]

    def run(settings: Settings) -> float:
        with emulated("sm_100f", multiprocessors, settings) as machine:
            results = machine.results(SUBJECT, inputs)
            programs[:] = [kernel.host for kernel in machine.kernels]
        return float(sum(bool(report.failure) for report in SUBJECT.compared(results, *expected)))

    programs: list[HostProgram] = []
    assert run(Settings("eager", races="hardware")) == 0
    (program,) = programs
    sites = {site.number: site for site in program.translation.sites}
    return mutation.uncaught(run, [sites[site.number] for site in of] if of is not None else list(sites.values()))


# What the compiler made ------------------------------------------------------------------------------------------

TENSOR_SOURCES = [source for source in plan.sources("sm_100f") if source.path.endswith("tcgen05.cu")]


@pytest.mark.parametrize("source", TENSOR_SOURCES, ids=str)
def test_what_the_tcgen05_kernel_is_made_of(source: KernelSource) -> None:
    text = build.ptx(source)
    mxfp4 = dict(source.defines)["CUPYMLA_MXFP4"]
    kind = "mxf4.block_scale.block32" if mxfp4 else "mxf4nvf4.block_scale.block16"
    assert text.count(f"kind::{kind}") == 4
    assert text.count("tcgen05.cp.cta_group::1.32x128b.warpx4") == (4 if mxfp4 else 8)
    assert text.count("cp.async.bulk.tensor.4d") == 4
    assert text.count("tcgen05.commit") == 2
    made = build.cubin(source, fail_on_spill=True)
    assert (made.facts["tile_rows"], made.facts["chunk"]) == (model.TILE_ROWS, model.CHUNK)
    assert made.facts["cluster"] == model.SPLITS[-1]
    assert 2 * (made.facts["smem_bytes"] + made.resources.static_smem_bytes + 1024) <= 228 * 1024
    assert 2 * made.facts["threads"] * made.resources.registers <= 65536


@pytest.mark.parametrize("source", TENSOR_SOURCES, ids=str)
def test_machine_code_of_the_tcgen05_kernel(source: KernelSource, tmp_path: Path) -> None:
    code = machine_code(build.cubin(source), tmp_path)
    mxfp4 = dict(source.defines)["CUPYMLA_MXFP4"]
    assert code.count("UTCOMMA") == 4
    assert code.count("UTCCP") == (4 if mxfp4 else 8)
    assert code.count("UTMALDG.4D") == 4
    assert "LDTM" in code and "BRA.U.ANY" not in code
    assert "LDL" not in code and "STL" not in code


@pytest.mark.parametrize("target", ["sm_90", "sm_100f"])
@pytest.mark.parametrize("fmt", formats.FORMATS, ids=lambda fmt: fmt.name)
def test_the_streaming_kernel_converts_by_instruction_where_there_is_one(target: str, fmt: formats.BlockFormat) -> None:
    native = target != "sm_90"
    # Of variants those that other tests compile too, but for the one whose products have scales as bfloat16.
    for b_dtype, columns in (("e2m1", 16), ("float16", 16), ("bfloat16", 1)):
        n = columns if native else 8
        text = build.ptx(plan.variant(arches.named(target), format=fmt.name, b_dtype=b_dtype, n=n))
        assert ("cvt.rn.f16x2.e2m1x2" in text) == (native and b_dtype != "bfloat16")
        assert ("cvt.rn.bf16x2.ue8m0x2" in text) == (native and fmt == formats.MXFP4)
