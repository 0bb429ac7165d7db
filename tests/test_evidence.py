"""Evidence counts for the sources that ran and for nothing else; the support table says no more than it holds."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupymla import driver, evidence
from cupymla.bench import machine
from cupymla.build import pack
from cupymla.build.source import cuda_root
from cupymla.ops import registry
from cupymla.ops.case import Case
from cupymla.ops.registry import KernelEntry, OperatorEntry
from cupymla.ops.sparse_mla_fwd import plan
from cupymla.testing import operators
from cupymla.testing.compare import Report, compare
from cupymla_lab import gpu, pages, recorder, subjects, without_gpu
from cupymla_lab.emulate import MODES, program
from cupymla_lab.emulated import Emulated
from cupymla_lab.subjects import Subject


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
    """A kernel edited since its last GPU run shows as not run."""
    entry, kernel = a_kernel()
    assert evidence.told(row_of(evidence.support_rows(tmp_path))) == "not run"
    digest = evidence.current_hash(entry, kernel)
    assert digest is not None
    file = recorder.write(some_evidence(digest), tmp_path)
    assert file is not None
    assert evidence.read(file) == some_evidence(digest)
    row = row_of(evidence.support_rows(tmp_path))
    assert (row.status, row.current) == ("verified", True)
    there = len(Subject(entry.name).cases_of(kernel))
    said = "verified: 7 cases on NVIDIA H200, nvrtc 13.0.88, 2026-01-02"
    assert evidence.told(row) == f"{said} ({there - 7} further cases came since)"
    whole = replace(row, found=replace(some_evidence(digest), cases=there))
    assert evidence.told(whole) == f"verified: {there} cases on NVIDIA H200, nvrtc 13.0.88, 2026-01-02"
    part = replace(some_evidence(digest), ran="emulated", of=9)
    assert recorder.write(part, tmp_path) is None, "hardware says more"
    file.unlink()
    recorder.write(part, tmp_path)
    assert recorder.write(replace(part, cases=6), tmp_path) is None, "so do more cases"
    row = row_of(evidence.support_rows(tmp_path))
    said = "emulated: 7 of 9 cases on NVIDIA H200, nvrtc 13.0.88, 2026-01-02"
    assert (row.status, evidence.told(row)) == ("emulated", f"{said} ({there - 9} further cases came since)")
    recorder.write(replace(part, content_hash="0" * 64), tmp_path)
    row = row_of(evidence.support_rows(tmp_path))
    said = "not run: edited since 7 of 9 cases were emulated on NVIDIA H200, nvrtc 13.0.88, 2026-01-02"
    assert (row.status, row.current, evidence.told(row)) == ("not run", False, said)
    recorder.write(some_evidence("1" * 64), tmp_path)
    row = row_of(evidence.support_rows(tmp_path))
    assert evidence.told(row) == "not run: edited since 7 cases passed on NVIDIA H200, nvrtc 13.0.88, 2026-01-02"
    assert row.as_dict() == {
        "operator": entry.name,
        "kernel": kernel.name,
        "arch": kernel.arch,
        "status": "not run",
        "detail": "edited since 7 cases passed on NVIDIA H200, nvrtc 13.0.88, 2026-01-02",
        "evidence": [
            {
                "ran": "hardware",
                "gpu": "NVIDIA H200",
                "current": False,
                "cases": 7,
                "of": 7,
                "cases_since": there - 7,
                "compiler": "nvrtc 13.0.88",
                "date": "2026-01-02",
            }
        ],
    }


def test_without_all_sources_nobody_says_that_they_were_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without CUTLASS's headers, which kernels are hashed with."""
    recorder.write(some_evidence("1" * 64), tmp_path)
    monkeypatch.setattr(evidence, "current_hash", lambda entry, kernel: None)
    rows = evidence.support_rows(tmp_path)
    row = row_of(rows)
    assert (row.status, row.current) == ("unknown", None)
    ran = "7 cases passed on NVIDIA H200, nvrtc 13.0.88, 2026-01-02"
    assert evidence.told(row) == f"unknown: {ran}; whether with these sources cannot be told"
    (run,) = row.as_dict()["evidence"]
    assert (run["current"], run["cases"], run["gpu"], run["date"]) == (None, 7, "NVIDIA H200", "2026-01-02")
    others = [other for other in rows if other is not row and other.arch != "cpu"]
    assert {other.status for other in others} == {"not run"}, "of which there is no evidence"


def test_an_operator_without_a_kernel_has_none() -> None:
    row = evidence.Support("new", "reference", "cpu")
    assert row.status == "none" and evidence.told(row).startswith("none: NumPy reference only")


@pytest.mark.parametrize("ran", ["emulated", "emulated"])
@pytest.mark.parametrize("where", ["a CPU", "a GPU", "both"])
def test_what_was_emulated_is_never_called_verified(ran: Any, where: str) -> None:
    """Whatever stood in for the GPU, and however many of the cases passed there."""
    gpu_found = replace(some_evidence("1" * 64), ran="emulated", of=7)
    cpu_found = evidence.WithoutGpu("op", "k", "sm_80", "1" * 64, ran, "", "nvrtc 12.9.86", 7, 7, {}, "2026-01-03")
    row = evidence.Support(
        gpu_found.operator,
        gpu_found.kernel,
        gpu_found.arch,
        current=where != "a CPU",
        found=None if where == "a CPU" else gpu_found,
        without_gpu=None if where == "a GPU" else cpu_found,
    )
    assert row.status == "emulated" and evidence.told(row).startswith("emulated: 7 cases on ")
    assert "verified" not in evidence.told(row)


def test_evidence_that_sanitizers_saw_gives_way_only_to_its_like(tmp_path: Path) -> None:
    """A test run without sanitizers would otherwise erase what the full check had found of the same sources."""
    plain = some_evidence("1" * 64)
    full = replace(plain, repeats={"cases": 16, "runs": 20}, sanitizers={"memcheck": "ERROR SUMMARY: 0 errors"})
    file = recorder.write(plain, tmp_path)
    assert file is not None
    assert recorder.write(full, tmp_path) == file
    assert evidence.read(file) == full
    assert recorder.write(plain, tmp_path) is None
    assert evidence.read(file) == full
    edited = replace(plain, content_hash="2" * 64)
    assert recorder.write(edited, tmp_path) == file
    carried = replace(edited, carried_from="sm_100a", cases=8)
    file.unlink()
    assert recorder.write(carried, tmp_path) == file
    assert recorder.write(edited, tmp_path) == file, "a run says more than what was carried over"
    assert evidence.read(file) == edited


def test_what_is_too_large_to_be_emulated_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Evidence of an emulated run needs all other cases, and says of how many they are."""
    entry, kernel = a_kernel()
    subject = Subject(entry.name)
    small, *_, large = sorted(subject.cases_of(kernel), key=subject.cases.flops)
    monkeypatch.setattr(f"cupymla_lab.problems.{subject.name}.CASES", (small, large))
    monkeypatch.setattr(subjects, "MOST_EMULATED_FLOPS", subject.cases.flops(small))
    monkeypatch.setattr(driver, "device_name", lambda index: "some GPU")
    monkeypatch.setattr(machine, "driver_text", lambda: "1.2")
    report = Report("out", 1e-3, 0.0, 2e-3, 0.0)
    runs: tuple[tuple[evidence.Ran, int], ...] = ("hardware", 0), ("emulated", 1)
    for ran, files in runs:
        kept = recorder.Recorder(tmp_path, ran, how="modes: eager" if ran == "emulated" else "")
        kept.record(entry.name, kernel, small, [report])
        written = kept.write()
        assert len(written) == files
    found = evidence.read(written[0])
    assert found is not None and (found.ran, found.cases, found.of) == ("emulated", 1, 2)
    assert (found.how, found.emulator) == ("modes: eager", program.identity())


def test_evidence_names_every_mode_that_a_case_ran_in() -> None:
    told = gpu.modes_text()
    assert all(settings.mode in told for settings in gpu.MODES)
    assert all(f"seed {settings.seed}" in told for settings in gpu.MODES if settings.mode == "random")
    assert "tcgen05" in told and "proxy" in told and "init" in told


def test_a_run_without_a_gpu_counts_where_no_gpu_ran(tmp_path: Path) -> None:
    """And only while it is of the present sources."""
    entry, kernel = a_kernel()
    digest = evidence.current_hash(entry, kernel)
    assert digest is not None
    errors = {"out": {"error": 1e-3, "limit": 2e-3}}
    told = evidence.WithoutGpu(
        entry.name,
        kernel.name,
        kernel.arch,
        digest,
        "emulated",
        "",
        "nvrtc 12.9.86 cccl",
        5,
        9,
        errors,
        "2026-01-03",
    )
    recorder.write_without_gpu(told, tmp_path)
    row = row_of(evidence.support_rows(tmp_path))
    assert (row.status, row.current, row.without_gpu) == ("emulated", False, told)
    said = "emulated: 5 of 9 cases on a CPU, nvrtc 12.9.86, 2026-01-03"
    assert evidence.told(row) == said
    recorder.write(some_evidence("0" * 64), tmp_path)
    before = "edited since 7 cases passed on NVIDIA H200, nvrtc 13.0.88, 2026-01-02"
    assert evidence.told(row_of(evidence.support_rows(tmp_path))) == f"{said}; {before}"
    recorder.write(some_evidence(digest), tmp_path)
    assert evidence.told(row_of(evidence.support_rows(tmp_path))).startswith("verified: 7 cases on NVIDIA H200")
    recorder.write_without_gpu(replace(told, content_hash="0" * 64), tmp_path)
    assert row_of(evidence.support_rows(tmp_path)).without_gpu is None


@pytest.mark.compile
def test_cases_run_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command runs what is small enough and leaves evidence; nothing where a case fails."""
    kept: list[evidence.WithoutGpu] = []
    monkeypatch.setattr(recorder, "write_without_gpu", kept.append)
    assert without_gpu.main(["attn_dist", "--arch", "sm_90a", "--most-flops", "2e5"]) == 0
    told = [(found.operator, found.kernel, found.ran, found.cases) for found in kept]
    expected = [("attn_dist", 4), ("attn_dist_packed", 1)]
    assert told == [("attn_dist", kernel, "emulated", cases) for kernel, cases in expected]
    assert all(0 < found.cases < found.of for found in kept)
    fails = Report("dist", 1.0, 0.0, 0.5, 0.0, failure="too far away")
    monkeypatch.setattr(Emulated, "check", lambda *_: [fails])
    assert without_gpu.main(["attn_dist", "--arch", "sm_90a", "--most-flops", "2e5"]) == 1
    assert len(kept) == len(expected)


def test_cases_run_with_another_constant_and_leave_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan chooses by a limit can be had of a small case."""
    seen: list[tuple[str, str, int]] = []

    def run(subject: Subject, kernel: KernelEntry, cases: list[Case], *_: object) -> list[object]:
        seen.extend((kernel.arch, case.name, plan._MERGE_STEPS) for case in cases)
        return []

    monkeypatch.setattr(without_gpu, "run_cases", run)
    monkeypatch.setattr(without_gpu, "run_kernel", pytest.fail)
    usual, name = plan._MERGE_STEPS, "h16_d576_k63_q3_kv300"
    words = ["sparse_mla_fwd", "--arch", "sm_90a", "--set", "plan._MERGE_STEPS=7"]
    assert without_gpu.main([*words, "--case", name]) == 0
    assert (seen, plan._MERGE_STEPS) == ([("sm_90a", name, 7)], usual)
    seen.clear()
    assert without_gpu.main(words) == 0
    assert len(seen) == len(without_gpu.small_cases(Subject("sparse_mla_fwd")))
    with pytest.raises(SystemExit):
        without_gpu.main([*words, "--set", "plan.MISSING=7"])


def tensor_kernel() -> tuple[Subject, KernelEntry]:
    subject = Subject("nvfp4_gemv")
    return subject, next(kernel for kernel in subject.entry.kernels if kernel.name == "nvfp4_gemv_tcgen05")


RELATED = {
    "nvfp4_gemv/sm80": {"amax", "dequantize", "quantize", "swizzle"},
    "xl_paged_attention/sm80": {"copy_blocks", "rel_shift", "relative_scores", "reshape_and_cache", "spread_bias"},
}
"""Translation units of related functions: their tests run on a GPU (`tests/evidence/gpu_tests.json`)."""


def test_evidence_speaks_for_every_unit_of_an_operators_calls() -> None:
    """An edit of one that no row speaks for would leave its operator verified: name it in `KernelEntry.units`."""
    spoken, compiled = set(), set()
    for entry in registry.subjects():
        spoken |= {unit.path for kernel in entry.kernels for unit in operators.units(entry, kernel)}
        compiled |= {source.path for source in operators.variants(entry)}
    assert compiled - spoken == {f"{folder}/{name}.cu" for folder, names in RELATED.items() for name in names}


@pytest.mark.compile
def test_what_is_said_of_a_kernel_has_come_from_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a target has two kernels, the one asked for runs, though the plan would take the other one."""
    subject, kernel = tensor_kernel()
    cases = without_gpu.small_cases(subject, kernel=kernel)
    assert 0 < len(cases) < len(subject.cases.CASES) and {case.intent for case in cases} == {"tensor"}
    case = min(cases, key=subject.cases.flops)
    assert without_gpu.run_cases(subject, kernel, [case]) is not None
    choices = subject.cases.CHOICES
    monkeypatch.setitem(choices, kernel.name, choices["nvfp4_gemv"])
    assert without_gpu.run_cases(subject, kernel, [case]) is None
    assert "launched nvfp4_gemv in the place of nvfp4_gemv_tcgen05" in capsys.readouterr().out


def test_a_case_that_launched_nothing_has_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However right its results are; but for cases in which there is nothing to do."""
    monkeypatch.setattr(Emulated, "check", lambda *_: [compare("out", np.ones(2), np.ones(2), np.ones(2))])
    entry, kernel = a_kernel()
    subject = Subject(entry.name)
    some = min((case for case in subject.cases.CASES if subject.cases.flops(case) > 0), key=subject.cases.flops)
    assert without_gpu.run_cases(subject, kernel, [some]) is None
    assert f"launched nothing in the place of {kernel.name}" in capsys.readouterr().out
    empty = next(case for case in subject.cases.CASES if subject.cases.flops(case) == 0)
    assert without_gpu.run_cases(subject, kernel, [empty]) is not None


def test_every_kernel_that_has_another_beside_it_can_be_chosen() -> None:
    for entry in registry.OPERATORS:
        subject = Subject(entry.name)
        for kernel in entry.kernels:
            assert subject.cases_of(kernel), kernel


def test_numbers_of_multiprocessors_go_through_all_operands_and_modes() -> None:
    """nvfp4_gemv's cases come in sixes, one for each pair of operands, and emulated ones in each of three modes."""
    numbers = without_gpu.multiprocessors("nvfp4_gemv")
    assert set(without_gpu.MULTIPROCESSORS) < set(numbers)
    assert math.gcd(len(numbers), 6 * len(MODES)) == 1


@pytest.mark.compile
def test_chosen_cases_run_without_a_gpu_and_leave_no_evidence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recorder, "write_without_gpu", lambda found: pytest.fail("wrote evidence"))
    of = Subject("merge_attention")
    case = min((case for case in without_gpu.small_cases(of) if of.cases.flops(case) > 0), key=of.cases.flops)
    assert without_gpu.main(["merge_attention", "--arch", "sm_90", "--case", case.name]) == 0
    ran = capsys.readouterr().out.splitlines()
    wanted = [f"merge_attention sm_90 {case.name} {n} SM {mode}" for n, mode in zip((1, 132, 3), MODES, strict=True)]
    assert [line.partition(": ok")[0] for line in ran] == wanted
    assert all(line.endswith("(merge_attention)") for line in ran)


@pytest.mark.compile
def test_kernels_of_another_folder_run_and_leave_no_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recorder, "write_without_gpu", lambda found: pytest.fail("wrote evidence"))
    for name in ("common", "merge_attention", "mla_cache"):
        shutil.copytree(cuda_root() / name, tmp_path / name)
    kernel = tmp_path / "merge_attention" / "sm80" / "merge_attention.cu"
    of = Subject("merge_attention")
    case = min((case for case in without_gpu.small_cases(of) if of.cases.flops(case) > 0), key=of.cases.flops)
    words = ["merge_attention", "--arch", "sm_90", "--case", case.name, "--sources", str(tmp_path)]
    assert without_gpu.main(words) == 0
    assert capsys.readouterr().out.count(": ok, ") == 3
    kernel.write_text(kernel.read_text() + '#error "the copy"\n')
    assert without_gpu.main(words) == 1
    assert f"{kernel}: " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        without_gpu.main([*words[:-1], str(tmp_path / "common")])
    assert "argument '--sources': expected a folder like this project's cuda/" in capsys.readouterr().err


def test_names_of_cases_are_shown_and_helped_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert without_gpu.main(["attn_dist", "--list"]) == 0
    cases = without_gpu.small_cases(Subject("attn_dist"))
    assert capsys.readouterr().out.splitlines() == [f"{case.name}  ({case.intent})" for case in cases]
    with pytest.raises(SystemExit, match="2"):
        without_gpu.main(["attn_dist", "--case", cases[0].name + "0"])
    assert f"such as {cases[0].name}" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        without_gpu.main(["no such operator", "--list"])
    assert "sparse_mla_fwd" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        without_gpu.main(["nvfp4_gemv", "--kernel", "no such kernel"])
    assert "one of nvfp4_gemv, nvfp4_gemv_tcgen05" in capsys.readouterr().err
    streaming = next(case for case in Subject("nvfp4_gemv").cases.CASES if case.intent != "tensor")
    with pytest.raises(SystemExit, match="2"):
        without_gpu.main(["nvfp4_gemv", "--kernel", "nvfp4_gemv_tcgen05", "--case", streaming.name])
    assert "cases of nvfp4_gemv_tcgen05" in capsys.readouterr().err


def test_evidence_from_before_repeats_and_sanitizers_is_read(tmp_path: Path) -> None:
    file = recorder.write(some_evidence("1" * 64), tmp_path)
    assert file is not None
    told = json.loads(file.read_text())
    del told["repeats"], told["sanitizers"]
    file.write_text(json.dumps(told))
    assert evidence.read(file) == some_evidence("1" * 64)


def test_full_check_records_repeats_and_sanitizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was checked is in the evidence as numbers and as the tools' own words."""
    kept: dict[str, Any] = {}

    def write(self: recorder.Recorder, **told: Any) -> list[Path]:
        kept.update(told)
        return []

    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\necho '========= ERROR SUMMARY: 0 errors'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(recorder.Recorder, "write", write)
    entry, kernel = a_kernel()
    subject = Subject(entry.name)
    steps = gpu.check(subject, kernel, tmp_path, ["memcheck"], 60, gpu.Runner(lambda job: []))
    assert [step.name for step in steps if step.passed] == ["cases", "same bits", "memcheck", "evidence"]
    assert kept == {
        "repeats": {"cases": len(gpu.repeatable(subject, kernel)), "runs": gpu.REPEATS},
        "sanitizers": {"memcheck": "ERROR SUMMARY: 0 errors"},
    }


@pytest.mark.parametrize("content", ["", "{", "[]", '{"operator": "x"}'])
def test_damaged_evidence_is_no_evidence(tmp_path: Path, content: str) -> None:
    entry, kernel = a_kernel()
    evidence.path(entry.name, kernel, tmp_path).write_text(content)
    row = row_of(evidence.support_rows(tmp_path))
    assert (row.status, row.current) == ("not run", False)


def test_counts_of_cases_are_of_the_present_ones() -> None:
    assert (evidence.FOLDER / pack.COUNTS).read_text(encoding="utf-8") == pages.counts()


def test_support_rows_name_every_operator_and_kernel_once() -> None:
    rows = [(row.operator, row.kernel, row.arch) for row in evidence.support_rows()]
    assert len(set(rows)) == len(rows)
    wanted = {(e.name, k.name, k.arch) for e in registry.subjects() for k in e.kernels}
    assert wanted <= set(rows)
    assert {operator for operator, _, _ in rows} == {entry.name for entry in registry.subjects()}


def test_incomplete_or_failed_runs_leave_no_evidence(tmp_path: Path) -> None:
    """Evidence speaks for all of a kernel's cases or is not written."""
    entry, kernel = a_kernel()
    cases = Subject(entry.name).cases.CASES
    kept = recorder.Recorder(tmp_path)
    good = compare("out", np.ones(2), np.ones(2), np.ones(2))
    for case in cases[1:]:
        kept.record(entry.name, kernel, case, [good])
    kept.record(entry.name, kernel, cases[0], [compare("out", np.zeros(2), np.ones(2), np.ones(2))])
    assert kept.write() == []
    assert list(tmp_path.iterdir()) == []


def test_worst_error_is_the_one_nearest_its_limit() -> None:
    far = compare("out", np.array([100.5], np.float32), np.array([101], np.float32), np.array([100.0]))
    near = compare("out", np.array([1.9], np.float32), np.array([1.5], np.float32), np.array([1.0]))
    assert recorder.worst([[far], [near]])["out"] == {"error": near.error, "limit": near.limit}
