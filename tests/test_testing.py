"""The test kit catches what it is there to catch. Nothing else checks the checker."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupymla.errors import InputError
from cupymla.ops import registry
from cupymla.ops.mla_cases import sized
from cupymla.ops.registry import KernelEntry, OperatorEntry
from cupymla.testing import bench, evidence, gpu, machine, operators, report, timing, training_step, without_gpu
from cupymla.testing.compare import Mismatch, Report, compare, dissimilarity, half_ulp, require
from cupymla.testing.interpreted import Interpreted
from cupymla.testing.poison import GUARD_BYTES, Guarded, strided_like
from cupymla.testing.timing import Ceilings

Array = npt.NDArray[Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype(np.float32), np.dtype(np.float16), BF16]
ROWS, COLUMNS = 24, 96


@pytest.fixture
def product() -> tuple[Array, Array]:
    """A matrix product as float64 and as float32 operands give it, the latter to be stored as bf16."""
    rng = np.random.default_rng(7)
    a, b = rng.standard_normal((ROWS, 64)), rng.standard_normal((64, COLUMNS))
    return a @ b, (a.astype(np.float32) @ b.astype(np.float32)).astype(BF16)


def failure(got: Array, product: tuple[Array, Array]) -> str | None:
    exact, same = product
    return compare("out", got, same, exact).failure


def test_correctly_rounded_result_passes(product: tuple[Array, Array]) -> None:
    exact, _ = product
    assert failure(exact.astype(BF16), product) is None


def test_same_precision_result_in_another_order_passes(product: tuple[Array, Array]) -> None:
    """A kernel sums in its own order; that alone must not fail it."""
    rng = np.random.default_rng(7)
    a, b = rng.standard_normal((ROWS, 64)).astype(np.float32), rng.standard_normal((64, COLUMNS)).astype(np.float32)
    total = np.zeros((ROWS, COLUMNS), np.float32)
    for k in range(63, -1, -1):
        total += a[:, k : k + 1] * b[k]
    assert failure(total.astype(BF16), product) is None


def test_nan_leak_is_caught(product: tuple[Array, Array]) -> None:
    got = product[1].copy()
    got[3, 5] = np.nan
    message = failure(got, product)
    assert message is not None
    assert "NaN" in message
    assert "[3, 5]" in message


def test_swapped_rows_are_caught(product: tuple[Array, Array]) -> None:
    got = product[1].copy()
    got[[2, 9]] = got[[9, 2]]
    assert "out" in (failure(got, product) or "")


@given(row=st.integers(0, ROWS - 1), column=st.integers(0, COLUMNS - 1), up=st.booleans())
def test_one_wrong_element_is_caught(row: int, column: int, up: bool) -> None:
    """Anything past the limit at a single place fails, and the message leads there."""
    rng = np.random.default_rng(7)
    exact = rng.standard_normal((ROWS, 64)) @ rng.standard_normal((64, COLUMNS))
    same = exact.astype(BF16)
    limit = compare("out", same, same, exact).limit
    got = same.astype(np.float32)
    got[row, column] = exact[row, column] + (1.01 if up else -1.01) * limit
    found = compare("out", got.astype(np.float64), same, exact)
    # In float64 the output rounds to nothing, so its own limit is the reference's part alone, which is smaller.
    assert found.failure is not None
    assert f"[{row}, {column}]" in found.failure


def test_scaled_result_is_caught(product: tuple[Array, Array]) -> None:
    """An error of 1% everywhere can stay below the absolute bound of a bf16 output; the similarity sees it."""
    exact, same = product
    report_ = compare("out", (exact * 1.01).astype(BF16), same, exact)
    assert report_.failure is not None
    assert report_.dissimilarity > 1e-5


def test_systematic_error_below_the_absolute_bound_is_caught() -> None:
    """One outlier makes the absolute bound generous; a relative error everywhere else must still fail."""
    exact = np.full(4096, 1.0)
    exact[0] = 64.0
    same = exact.astype(BF16)
    same[0] = 64.5
    got = (exact * 1.01).astype(BF16)
    got[0] = 64.0
    found = compare("out", got, same, exact)
    assert found.error <= found.limit
    assert "dissimilarity" in (found.failure or "")


@pytest.mark.parametrize("dtype", [*FLOATS, np.dtype(np.int32), np.dtype(np.uint8)])
def test_unwritten_output_is_caught(dtype: np.dtype[Any]) -> None:
    """What was never written still holds poison, in every dtype."""
    exact = np.arange(60.0).reshape(3, 20) % 17
    same = exact.astype(dtype)
    guarded = Guarded(np, (3, 20), dtype)
    assert compare("out", guarded.array, same, exact).failure is not None
    guarded.array[...] = same
    assert compare("out", guarded.array, same, exact).failure is None
    guarded.poison()
    guarded.array[:2] = same[:2]
    assert compare("out", guarded.to_numpy(), same, exact).failure is not None


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_infinities_and_nan_belong_where_the_reference_has_them(value: float) -> None:
    exact = np.array([1.0, value, 2.0])
    good = exact.astype(np.float32)
    assert compare("lse", good, good, exact).failure is None
    for wrong in (np.inf, -np.inf, np.nan, 3e38):
        if not (math.isnan(value) and math.isnan(wrong)) and wrong != value:
            bad = good.copy()
            bad[1] = wrong
            assert compare("lse", bad, good, exact).failure is not None
    misplaced = good[[1, 0, 2]]
    assert compare("lse", misplaced, good, exact).failure is not None


def test_overflow_counts_as_right_only_where_the_dtype_cannot_hold_the_value() -> None:
    exact = np.array([70000.0, 60000.0])
    good = np.array([np.inf, 60000.0], np.float16)
    assert compare("c", good, good, exact).failure is None
    assert compare("c", np.array([65504.0, 60000.0], np.float16), good, exact).failure is not None
    assert compare("c", np.array([np.inf, np.inf], np.float16), good, exact).failure is not None


def test_integers_have_to_be_equal() -> None:
    exact = np.arange(10)
    assert compare("codes", exact.astype(np.uint8), exact, exact).failure is None
    wrong = exact.astype(np.uint8)
    wrong[4] += 1
    assert "[4]: expected 4, got 5" in (compare("codes", wrong, exact, exact).failure or "")


def test_wrong_shape_is_caught() -> None:
    assert "shape" in (compare("out", np.zeros((2, 3)), np.zeros((3, 2)), np.zeros((3, 2))).failure or "")


def test_empty_and_all_zero_outputs_are_right() -> None:
    for shape in ((0, 4), (3, 4)):
        zeros = np.zeros(shape)
        assert compare("out", zeros.astype(BF16), zeros.astype(BF16), zeros).failure is None
    almost = np.zeros(4, np.float32)
    almost[1] = 1e-30
    assert compare("out", almost, np.zeros(4, np.float32), np.zeros(4)).failure is not None


def test_require_raises_with_every_failure() -> None:
    good, bad = np.ones(3, np.float32), np.zeros(3, np.float32)
    require([compare("a", good, good, np.ones(3))])
    with pytest.raises(Mismatch) as caught:
        require([compare("first", bad, good, np.ones(3)), compare("second", bad, good, np.ones(3))])
    assert "first" in str(caught.value)
    assert "second" in str(caught.value)


@given(st.floats(1e-30, 1e30))
def test_dissimilarity_is_the_published_formula(scale: float) -> None:
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal(50), rng.standard_normal(50)
    assert dissimilarity(x * scale, y * scale) == pytest.approx(1 - 2 * x @ y / (x @ x + y @ y), rel=1e-9)
    assert dissimilarity(x, -x) == pytest.approx(2)
    assert dissimilarity(np.zeros(3), np.zeros(3)) == 0


@pytest.mark.parametrize("dtype", FLOATS)
@given(value=st.floats(1e-3, 6e4))
def test_half_ulp_is_what_rounding_can_do(dtype: np.dtype[Any], value: float) -> None:
    """No rounding is larger, and at the midpoint between two neighbours one is exactly that large."""
    assert abs(float(np.float64(value).astype(dtype)) - value) <= half_ulp(value, dtype)
    power = 2.0 ** math.floor(math.log2(value))
    middle = power + half_ulp(power, dtype)
    assert abs(float(np.float64(middle).astype(dtype)) - middle) == half_ulp(power, dtype)


@pytest.mark.parametrize("offset", [-GUARD_BYTES, -1, 0, GUARD_BYTES - 1])
def test_writes_outside_an_output_are_caught(offset: int) -> None:
    guarded = Guarded(np, (4, 3), np.float32)
    guarded.check("out")
    memory = guarded.array.base
    while memory.base is not None:
        memory = memory.base
    end = GUARD_BYTES + guarded.array.nbytes
    memory[GUARD_BYTES + offset if offset < 0 else end + offset] ^= 1
    with pytest.raises(Mismatch, match="outside: 1 guard bytes"):
        guarded.check("out")


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16, np.dtype(np.int32)])
def test_copies_keep_their_strides_and_poison_their_gaps(dtype: np.dtype[Any]) -> None:
    wide = np.arange(6 * 4 * 10).reshape(6, 4, 10).astype(dtype)
    for view in (wide[::2, 1:3, :7], wide.transpose(2, 0, 1), np.broadcast_to(wide[:1, :, :5], (3, 4, 5)), wide):
        copy = strided_like(np, view)
        assert copy.strides == view.strides
        np.testing.assert_array_equal(copy.astype(np.float64), view.astype(np.float64))
        assert not np.shares_memory(copy, wide)
    gaps = strided_like(np, wide[::2, :, :7])
    extent = 1 + sum((n - 1) * stride for n, stride in zip(gaps.shape, gaps.strides, strict=True)) // dtype.itemsize
    memory = np.lib.stride_tricks.as_strided(gaps, (extent,), (dtype.itemsize,))
    poisoned = np.isnan(memory.astype(np.float64)) | (memory.astype(np.float64) == -1)
    assert np.count_nonzero(poisoned) == extent - gaps.size


def test_a_training_step_counts_both_ways() -> None:
    """Rates follow from the time of both passes, the empty kernel's taken off where operations are counted."""
    case = training_step.CASES[0]
    assert (case.h_q, case.s_q, case.s_kv, case.topk, case.wants_dist) == (128, 8192, 8192, 2048, True)
    limits = Ceilings(800.0, 4.0, 4.4, 4.0)
    found = training_step.row(case, (1000.0, 3000.0, 4004.0), limits, 7, 9)
    forward = 2 * 8192 * 2048 * 128 * (576 + 512)
    backward = 2 * 8192 * 2048 * 128 * (3 * 576 + 2 * 512)
    assert found.of_ceiling == pytest.approx((forward + backward) / 4e-3 / 800e12, rel=1e-3)
    assert found.tokens_per_second == pytest.approx(8192 / 4004e-6, rel=1e-3)
    assert (found.forward_us, found.backward_us, found.peak_bytes, found.input_bytes) == (1000.0, 3000.0, 7, 9)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_training_step_is_measured() -> None:
    limits = Ceilings(800.0, 4.0, 4.4, 4.0)
    found = training_step.measure(sized(64, 576, 128, 256, 512, wants_dist=True), timing.Timer(), limits)
    assert 0 < found.forward_us < found.step_us
    # The forward's results, the distribution and the gradients at least.
    assert found.peak_bytes >= 256 * 64 * (512 * 2 + 4 + 576 * 2) + 256 * 128 * 4 + 512 * 576 * 2


# Evidence --------------------------------------------------------------------------------------------------------


def a_kernel() -> tuple[OperatorEntry, KernelEntry]:
    return next((entry, kernel) for entry in registry.OPERATORS for kernel in entry.kernels)


def some_evidence(digest: str) -> evidence.Evidence:
    entry, kernel = a_kernel()
    errors = {"out": {"error": 1e-3, "limit": 2e-3}}
    return evidence.Evidence(
        entry.name,
        kernel.name,
        kernel.arch,
        digest,
        "NVIDIA H200",
        "580.1",
        "nvrtc 13.0.88 cccl 3001002 cuda 13000",
        7,
        errors,
        "hardware",
        "2026-01-02",
    )


def row_of(rows: list[evidence.Support]) -> evidence.Support:
    entry, kernel = a_kernel()
    return next(row for row in rows if (row.operator, row.kernel, row.arch) == (entry.name, kernel.name, kernel.arch))


def test_evidence_counts_only_for_the_sources_that_ran(tmp_path: Path) -> None:
    """A kernel edited since its last GPU run shows as unverified."""
    entry, kernel = a_kernel()
    assert row_of(evidence.support_rows(tmp_path)).evidence == "none"
    digest = evidence.current_hash(entry, kernel)
    assert digest is not None
    file = evidence.write(some_evidence(digest), tmp_path)
    assert file is not None
    assert evidence.read(file) == some_evidence(digest)
    row = row_of(evidence.support_rows(tmp_path))
    assert (row.evidence, row.current) == ("hardware", True)
    assert evidence.status(row) == "verified: 7 cases on NVIDIA H200, nvrtc 13.0.88, 2026-01-02"
    evidence.write(some_evidence("0" * 64), tmp_path)
    row = row_of(evidence.support_rows(tmp_path))
    assert (row.evidence, row.current) == ("hardware", False)
    assert evidence.status(row).startswith("unverified")


def test_evidence_that_sanitizers_saw_gives_way_only_to_its_like(tmp_path: Path) -> None:
    """A test run without sanitizers would otherwise erase what the full check had found of the same sources."""
    plain = some_evidence("1" * 64)
    full = replace(plain, repeats={"cases": 16, "runs": 20}, sanitizers={"memcheck": "ERROR SUMMARY: 0 errors"})
    file = evidence.write(plain, tmp_path)
    assert file is not None
    assert evidence.write(full, tmp_path) == file
    assert evidence.read(file) == full
    assert evidence.write(plain, tmp_path) is None
    assert evidence.read(file) == full
    edited = replace(plain, content_hash="2" * 64)
    assert evidence.write(edited, tmp_path) == file
    assert evidence.read(file) == edited


def test_a_run_without_a_gpu_never_verifies(tmp_path: Path) -> None:
    """It is told beside what GPUs have shown, and only while it is of the present sources."""
    entry, kernel = a_kernel()
    digest = evidence.current_hash(entry, kernel)
    assert digest is not None
    errors = {"out": {"error": 1e-3, "limit": 2e-3}}
    told = evidence.WithoutGpu(
        entry.name, kernel.name, kernel.arch, digest, "interpreted", "", "nvrtc", 5, 9, errors, "2026-01-03"
    )
    evidence.write_without_gpu(told, tmp_path)
    row = row_of(evidence.support_rows(tmp_path))
    assert (row.evidence, row.current, row.without_gpu) == ("none", False, told)
    note = "without a GPU: 5 of 9 cases interpreted, 2026-01-03"
    assert evidence.status(row) == f"unverified: not run on a GPU yet; {note}"
    evidence.write(some_evidence("0" * 64), tmp_path)
    assert evidence.status(row_of(evidence.support_rows(tmp_path))).endswith(f"2026-01-02; {note}")
    evidence.write(some_evidence(digest), tmp_path)
    assert evidence.status(row_of(evidence.support_rows(tmp_path))).startswith("verified: 7 cases on NVIDIA H200")
    evidence.write_without_gpu(replace(told, content_hash="0" * 64), tmp_path)
    assert row_of(evidence.support_rows(tmp_path)).without_gpu is None


@pytest.mark.compile
def test_cases_run_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command runs what is small enough and leaves evidence; nothing where a case fails."""
    kept: list[evidence.WithoutGpu] = []
    monkeypatch.setattr(evidence, "write_without_gpu", kept.append)
    assert without_gpu.main(["attn_dist", "--arch", "sm_90a", "--most-flops", "2e5"]) == 0
    assert [(found.operator, found.ran, found.cases) for found in kept] == [("attn_dist", "interpreted", 3)]
    assert 0 < kept[0].cases < kept[0].of
    fails = Report("dist", 1.0, 0.0, 0.5, 0.0, failure="too far away")
    monkeypatch.setattr(Interpreted, "check", lambda *_: [fails])
    assert without_gpu.main(["attn_dist", "--arch", "sm_90a", "--most-flops", "2e5"]) == 1
    assert len(kept) == 1


def test_chosen_cases_run_without_a_gpu_and_leave_no_evidence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evidence, "write_without_gpu", lambda found: pytest.fail("wrote evidence"))
    cases = operators.Subject("attn_dist").cases
    case = min((case for case in cases.CASES if cases.flops(case) > 0), key=cases.flops)
    assert without_gpu.main(["attn_dist", "--arch", "sm_90a", "--case", case.name]) == 0
    assert f"attn_dist sm_90a {case.name}: ok" in capsys.readouterr().out
    with pytest.raises(InputError, match="--case"):
        without_gpu.main(["attn_dist", "--case", "no such case"])


def test_evidence_from_before_repeats_and_sanitizers_is_read(tmp_path: Path) -> None:
    file = evidence.write(some_evidence("1" * 64), tmp_path)
    assert file is not None
    told = json.loads(file.read_text())
    del told["repeats"], told["sanitizers"]
    file.write_text(json.dumps(told))
    assert evidence.read(file) == some_evidence("1" * 64)


def test_full_check_records_repeats_and_sanitizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was checked is in the evidence as numbers and as the tools' own words."""
    kept: dict[str, Any] = {}

    def write(self: evidence.Recorder, **told: Any) -> list[Path]:
        kept.update(told)
        return []

    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\necho '========= ERROR SUMMARY: 0 errors'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(gpu, "run_cases", lambda *_: "fine")
    monkeypatch.setattr(gpu, "check_same_bits", lambda *_: None)
    monkeypatch.setattr(evidence.Recorder, "write", write)
    subject = operators.Subject(a_kernel()[0].name)
    steps = gpu.check(subject, tmp_path, ["memcheck"], 60)
    assert [step.name for step in steps if step.passed] == ["cases", "same bits", "memcheck", "evidence"]
    assert kept == {
        "repeats": {"cases": len(gpu.repeatable(subject)), "runs": gpu.REPEATS},
        "sanitizers": {"memcheck": "ERROR SUMMARY: 0 errors"},
    }


@pytest.mark.parametrize("content", ["", "{", "[]", '{"operator": "x"}'])
def test_damaged_evidence_is_no_evidence(tmp_path: Path, content: str) -> None:
    entry, kernel = a_kernel()
    evidence.path(entry.name, kernel, tmp_path).write_text(content)
    row = row_of(evidence.support_rows(tmp_path))
    assert (row.evidence, row.current) == ("none", False)


def test_support_rows_name_every_operator_and_kernel_once() -> None:
    rows = [(row.operator, row.kernel, row.arch) for row in evidence.support_rows()]
    assert len(set(rows)) == len(rows)
    wanted = {(e.name, k.name, k.arch) for e in registry.OPERATORS for k in e.kernels}
    assert wanted <= set(rows)
    assert {operator for operator, _, _ in rows} == {entry.name for entry in registry.OPERATORS}


def test_incomplete_or_failed_runs_leave_no_evidence(tmp_path: Path) -> None:
    """Evidence speaks for all of an operator's cases or is not written."""
    entry, _ = a_kernel()
    cases = operators.Subject(entry.name).cases.CASES
    recorder = evidence.Recorder(tmp_path)
    good = compare("out", np.ones(2), np.ones(2), np.ones(2))
    for case in cases[1:]:
        recorder.record(entry.name, case, [good])
    recorder.record(entry.name, cases[0], [compare("out", np.zeros(2), np.ones(2), np.ones(2))])
    assert recorder.write() == []
    assert list(tmp_path.iterdir()) == []


def test_worst_error_is_the_one_nearest_its_limit() -> None:
    far = compare("out", np.array([100.5], np.float32), np.array([101], np.float32), np.array([100.0]))
    near = compare("out", np.array([1.9], np.float32), np.array([1.5], np.float32), np.array([1.0]))
    assert evidence.worst([[far], [near]])["out"] == {"error": near.error, "limit": near.limit}


# Reports ---------------------------------------------------------------------------------------------------------

LIMITS = Ceilings(cublas_bf16_tflops=800.0, copy_tbps=4.0, read_tbps=4.5, empty_us=3.5)


class FakeCases:
    """100 MFLOP and 45 MB a call."""

    BENCH: tuple[Any, ...] = ()

    @staticmethod
    def flops(case: object) -> int:
        return 100_000_000

    @staticmethod
    def bytes_moved(case: object) -> int:
        return 45_000_000


class FakeSubject:
    cases = FakeCases

    def __init__(self, name: str) -> None:
        self.name = name


@pytest.mark.parametrize(("operator", "share"), [("attn_dist", 0.0125), ("nvfp4_gemv", 1.0)])
def test_rates_are_taken_without_the_empty_kernel(operator: str, share: float) -> None:
    """13.5 us as read are 10 us of work: 10 TFLOPS of 800, or 4.5 TB/s of 4.5, by the ceiling that binds."""
    entry = registry.OPERATORS[0]
    case = operators.Subject(entry.name).cases.BENCH[0]
    row = bench.row(FakeSubject(operator), case, 13.5, LIMITS)  # type: ignore[arg-type]
    assert (row.us, row.tflops, row.tbps, row.of_ceiling) == (13.5, 10.0, 4.5, share)


def test_benchmark_files_read_back_and_hold_the_agreed_keys(tmp_path: Path) -> None:
    rows = [report.Row("m7168_k16384_l1_n1", 18.1, 20.0, 4.1, 0.9)]
    beside = [report.RivalRow("m7168_k16384_l1_n1", "another library", 34.5)]
    made = report.Benchmark("NVIDIA H200", "580.1", "2026-01-02", "abc", LIMITS.as_dict(), rows, beside)
    file = made.write(tmp_path, "nvfp4_gemv")
    assert file == tmp_path / "h200" / "nvfp4_gemv.json"
    assert report.Benchmark.read(file) == made
    content = json.loads(file.read_text())
    assert list(content) == ["gpu", "driver", "date", "commit", "ceilings", "rows", "rivals"]
    assert list(content["ceilings"]) == ["cublas_bf16_tflops", "copy_tbps", "read_tbps", "empty_us"]
    assert list(content["rows"][0]) == ["case", "us", "tflops", "tbps", "of_ceiling"]
    del content["rivals"]
    file.write_text(json.dumps(content))
    assert report.Benchmark.read(file).rows == rows, "files from before there were rivals"


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [report.Row("m7168_k16384_l1_n1", 18.1, 20.0, 4.1, 0.9)]
    made = report.Benchmark("NVIDIA H200", "580.1", "2026-01-02", "abc", LIMITS.as_dict(), rows)
    report.draw_benchmark(made, "nvfp4_gemv", tmp_path / "bench.png")
    report.draw_demo("demo", ["a", "b"], [0.1, 20.0], [0.3, 0.9], tmp_path / "demo.png")
    for name in ("bench.png", "demo.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
        ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"),
    ],
)
def test_gpu_folders(name: str, slug: str) -> None:
    assert machine.gpu_slug(name) == slug


# Operators -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", registry.OPERATORS, ids=lambda entry: entry.name)
def test_every_operator_offers_what_the_kit_reads(entry: OperatorEntry) -> None:
    subject = operators.Subject(entry.name)
    assert subject.outputs
    names = [case.name for case in subject.cases.CASES]
    assert len(set(names)) == len(names), "evidence counts cases by name"
    bench_names = [case.name for case in subject.cases.BENCH]
    assert bench_names
    assert len(set(bench_names)) == len(bench_names)
    for case in subject.cases.BENCH:
        assert subject.cases.flops(case) > 0
        assert subject.cases.bytes_moved(case) > 0
    assert {case.intent for case in subject.small_grid()} <= {case.intent for case in subject.cases.CASES}


@pytest.mark.parametrize("entry", registry.OPERATORS, ids=lambda entry: entry.name)
def test_public_call_keeps_the_law_on_a_small_grid(entry: OperatorEntry) -> None:
    """The CPU back end, through the public door and into given outputs, against float64."""
    subject = operators.Subject(entry.name)
    for case in subject.small_grid(per_intent=1):
        host = subject.cases.inputs(case, 3)
        same, exact = subject.reference(host, "same"), subject.reference(host, "float64")
        outputs = {name: Guarded(np, like.shape, like.dtype) for name, like in zip(subject.outputs, same, strict=False)}
        subject.call(**host, **{name: guarded.array for name, guarded in outputs.items()})
        for (name, guarded), like, true in zip(outputs.items(), same, exact, strict=True):
            guarded.check(name)
            require([compare(name, guarded.array, like, true)])


@pytest.mark.parametrize("entry", registry.OPERATORS, ids=lambda entry: entry.name)
def test_repetition_takes_only_what_promises_equal_bits(entry: OperatorEntry) -> None:
    """With a `deterministic` option, the runs without it may differ; without one, none may."""
    cases = gpu.repeatable(operators.Subject(entry.name))
    assert cases
    if entry.name == "sparse_mla_bwd":
        assert all(case.deterministic for case in cases)  # type: ignore[attr-defined]


def test_kernels_are_chosen_by_compute_capability() -> None:
    entry = OperatorEntry(
        "x", "", kernels=(KernelEntry("plain", "sm_80"), KernelEntry("hopper", "sm_90a"), KernelEntry("b", "sm_100a"))
    )
    chosen = {c: operators.kernel_for(entry, c) for c in ((7, 5), (8, 6), (9, 0), (10, 0), (12, 0))}
    names = {capability: kernel.name if kernel else None for capability, kernel in chosen.items()}
    assert names == {(7, 5): None, (8, 6): "plain", (9, 0): "hopper", (10, 0): "b", (12, 0): None}


def test_unknown_benchmark_case_is_an_input_error() -> None:
    subject = operators.Subject(registry.OPERATORS[0].name)
    with pytest.raises(InputError, match="no_such_case"):
        bench.chosen(subject, ["no_such_case"])
