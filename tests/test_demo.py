"""The demonstration: what it compiles, what it shows and when, and what it says of a machine that lacks something."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupymla import arch as arches
from cupymla import cli, driver
from cupymla.arch import Gpu
from cupymla.build import KernelSource, compiler
from cupymla.build.cubin import Resources
from cupymla.build.precompile import Outcome
from cupymla.cli import demo, doctor
from cupymla.cli.demo import Part, Shown
from cupymla.cli.terminal import Terminal
from cupymla.errors import CompileError, DriverError
from cupymla.ops import registry
from cupymla.ops.attn_dist import cases as attn_dist_cases
from cupymla.testing import operators
from cupymla.testing.compare import Report
from cupymla_lab import demo as lab
from cupymla_lab.emulate.host import machine
from cupymla_lab.subjects import Subject

OPERATORS = [entry.name for entry in registry.OPERATORS]
HOPPER = Gpu(arches.named("sm_90a"), (9, 0), 132)


def source(name: str) -> KernelSource:
    return KernelSource(f"{name}.cu", name)


def done(each: KernelSource, error: str = "") -> Outcome:
    return Outcome(each, kept=True, resources=None if error else Resources(100, 0, 0, 0, 0), error=error)


def report(error: float = 1.0, failure: str | None = None) -> Report:
    return Report("out", error, error, 4.0, 0.0, failure)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "available", lambda: False)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that has a name and runs nothing, on which every operator takes two kernels, of which they share one."""
    monkeypatch.setattr(doctor, "examine", lambda: [])
    monkeypatch.setattr(demo, "gpu_here", lambda: HOPPER)
    monkeypatch.setattr(driver, "device_name", lambda index: "NVIDIA H200")

    def part(name: str, gpu: Gpu) -> Part:
        return Part(Subject(name), {}, gpu, (source("shared"), source(name)))

    monkeypatch.setattr(demo, "part", part)
    monkeypatch.setattr(demo, "show", lambda part: Shown(part.subject.name, "NVIDIA H200", "t", "c", 1.0, (report(),)))


# The whole of it ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As a user sees it: every reference right, one kernel compiled for a GPU elsewhere, a plot on disk."""
    assert cli.main(["demo", "--json", "--out", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {check["name"] for check in found["checks"]} >= {"GPU", "cache"}
    assert [row["operator"] for row in found["operators"]] == OPERATORS
    for row in found["operators"]:
        assert row["passed"] and 0 <= row["worst_share_of_limit"] <= 1 and row["ms"] > 0, row["operator"]
        assert row["case"] == row["checked"] == Subject(row["operator"]).cases.DEMO.name
    (kernel,) = found["kernels"]
    assert (kernel["kernel"], kernel["arch"], kernel["error"]) == ("attn_dist", "sm_100f", "")
    assert kernel["registers"] > 0
    assert Path(found["plot"]).read_bytes().startswith(b"\x89PNG")


def test_its_problems_take_references_seconds() -> None:
    """A query of 128 heads and 2048 slots takes the references of all precisions 0.3 to 1.6 s on a core."""
    for name in OPERATORS:
        cases = Subject(name).cases
        assert cases.flops(cases.DEMO) <= 1.5e9, name
        assert cases.bytes_moved(cases.DEMO) <= 4e7, name
        assert cases.DEMO.intent != "speed", f"{name}: timing cases have outputs drawn at random among their inputs"


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_an_unusable_folder_is_refused_before_it_works(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(doctor, "examine", lambda: pytest.fail("worked"))
    assert cli.main(["demo", "--json", "--out", str(tmp_path / name)]) == 2
    assert "--out" in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.usefixtures("no_gpu")
def test_that_there_is_no_compiler_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUPYMLA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUPYMLA_COMPILER", "nvcc")
    monkeypatch.setenv("CUPYMLA_NVCC", "/nowhere/nvcc")
    monkeypatch.setattr(demo, "show", lambda part: Shown(part.subject.name, "CPU reference", "t", "c", 1.0, ()))
    monkeypatch.setattr(demo, "_plot", lambda *_: None)
    assert cli.main(["demo", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out.count("no kernel was compiled: nvcc: /nowhere/nvcc does not run") == 1
    assert "WRONG" not in said.out and "Traceback" not in said.err


# On a GPU -------------------------------------------------------------------------------------------------------------


def test_a_gpu_takes_the_kernels_of_both_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the checked problem, whose inputs are NumPy's, and of the timed one, whose inputs the GPU draws."""
    pool = SimpleNamespace(free_all_blocks=lambda: None)
    cupy = SimpleNamespace(get_default_memory_pool=lambda: pool)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(attn_dist_cases, "inputs", lambda case, seed, xp=np: {"case": case, "xp": xp})
    asked: list[tuple[str, object]] = []

    def sources(subject: operators.Subject, inputs: dict[str, Any], gpu: Gpu) -> tuple[KernelSource, ...]:
        assert gpu is HOPPER
        asked.append((inputs["case"].name, inputs["xp"]))
        return source("both"), source(inputs["case"].name)

    monkeypatch.setattr(operators.Subject, "sources", sources)
    chosen = demo.part("attn_dist", HOPPER)
    small, timed = attn_dist_cases.DEMO, attn_dist_cases.BENCH[0]
    assert asked == [(small.name, np), (timed.name, cupy)]
    assert chosen.sources == (source("both"), source(small.name), source(timed.name))
    assert (chosen.small, chosen.timed, chosen.gpu) == (small, timed, HOPPER)


def test_an_operator_without_a_kernel_for_the_gpu_is_shown_on_the_cpu() -> None:
    assert not operators.kernels_for(registry.named("sparse_mla_bwd_phase1"), HOPPER.capability)
    chosen = demo.part("sparse_mla_bwd_phase1", HOPPER)
    assert (chosen.gpu, chosen.sources, chosen.timed) == (None, (), chosen.small)
    assert chosen.device == "CPU reference"


@pytest.mark.usefixtures("h200")
def test_an_operator_is_shown_as_soon_as_its_kernels_are_compiled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each kernel is compiled once, all at once; the last operator's are the first to be there."""
    wanted: list[KernelSource] = []
    shown: list[list[str]] = []

    def compile_ahead(sources: Sequence[KernelSource], progress: Any) -> list[Outcome]:
        wanted.extend(sources)
        for each in reversed(sources):
            progress(done(each))
            rows = capsys.readouterr().out.splitlines()
            shown.append([row.split()[0] for row in rows if row.endswith("ok")])
        return []

    monkeypatch.setattr(demo, "precompile", compile_ahead)
    monkeypatch.setattr(demo, "_plot", lambda *_: None)
    assert cli.main(["demo", "--out", str(tmp_path)]) == 0
    assert wanted == [source("shared"), *map(source, OPERATORS[:1]), *map(source, OPERATORS[1:])]
    # "shared" comes last of all here, and every operator needs it.
    assert shown == [*([] for _ in OPERATORS), OPERATORS]

    monkeypatch.setattr(demo, "part", lambda name, gpu: Part(Subject(name), {}, gpu, (source(name),)))
    shown.clear()
    assert cli.main(["demo", "--out", str(tmp_path)]) == 0
    assert shown == [[name] for name in reversed(OPERATORS)]


@pytest.mark.usefixtures("h200")
def test_a_kernel_that_is_not_compiled_costs_its_own_operators(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def compile_ahead(sources: Sequence[KernelSource], progress: Any) -> None:
        for each in sources:
            progress(done(each, "ptxas died" if each.entry == "attn_dist" else ""))

    monkeypatch.setattr(demo, "precompile", compile_ahead)
    assert cli.main(["demo", "--json", "--out", str(tmp_path)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {row["operator"] for row in found["operators"] if not row["passed"]} == {"attn_dist"}
    assert {row["kernel"] for row in found["kernels"] if row["error"]} == {"attn_dist"}
    assert found["plot"], "of the others"
    assert cli.main(["demo", "--out", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "ptxas died" in told and "1 failed" in told


# What is shown of an operator -----------------------------------------------------------------------------------------


def test_a_call_that_fails_is_shown_as_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (DriverError(700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an address", "launching"), MemoryError("full")):

        def fail(part: Part, error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(demo, "_check", fail)
        made = demo.show(Part(Subject("attn_dist"), {}, None, ()))
        assert not made.passed and made.failures == [f"{type(error).__name__}: {error}"]
        demo.show_row(Terminal(False), made)
        first, second = capsys.readouterr().out.splitlines()
        assert first.startswith("attn_dist ") and first.endswith(" WRONG") and str(error) in second


def test_an_error_beyond_its_limit_is_shown_as_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    reports = (report(), report(5.0, "out: 5 where 4 is allowed"))
    made = Shown("attn_dist", "NVIDIA H200", "case", "checked", 0.0123, reports)
    demo.show_row(Terminal(False), made)
    assert capsys.readouterr().out.splitlines() == [
        f"{'attn_dist':21} GPU {'case':28} 0.0123 ms   125% WRONG",
        "  out: 5 where 4 is allowed",
    ]
    assert not made.passed and made.share == 1.25
    assert replace(made, reports=reports[:1]).passed


@pytest.mark.parametrize("name", OPERATORS)
def test_rows_fit_a_terminal(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """80 columns, of the longest names that there are."""
    cases = Subject(name).cases
    for case in (cases.DEMO, cases.BENCH[0]):
        demo.show_row(Terminal(False), Shown(name, "NVIDIA H200", case.name, "", 0.0123, (report(),)))
        (row,) = capsys.readouterr().out.splitlines()
        assert len(row) <= 80 and f"{name} " in row and f" {case.name} " in row


# What a checkout shows beside it --------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [0, 1, 2])
@pytest.mark.parametrize("gpu", [True, False])
def test_a_checkout_goes_on_to_the_engine_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int, gpu: bool
) -> None:
    asked: list[list[str]] = []

    def product(words: list[str]) -> int:
        asked.append(words)
        print("{}")
        return status

    def run_in_engine() -> int:
        print("in the engine")
        return 0

    monkeypatch.setattr(cli, "main", product)
    monkeypatch.setattr(driver, "available", lambda: gpu)
    monkeypatch.setattr(lab, "run_in_engine", run_in_engine)
    assert lab.main(["--json", "--out", "somewhere"]) == status
    assert asked == [["demo", "--json", "--out", "somewhere"]]
    told = capsys.readouterr()
    assert told.out == "{}\n"
    assert ("in the engine" in told.err) == (not gpu and status == 0)


def test_what_the_engine_lacks_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def lacking() -> None:
        raise CompileError("nvcc", "not installed")

    monkeypatch.setattr(machine, "available", lambda: False)
    assert lab.run_in_engine() == 0
    assert "a C++ compiler: one called c++" in capsys.readouterr().out
    monkeypatch.setattr(machine, "available", lambda: True)
    monkeypatch.setattr(compiler, "toolchain", lacking)
    assert lab.run_in_engine() == 0
    assert "not installed" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.skipif(not machine.available(), reason="no C++ compiler")
def test_a_kernel_runs_in_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """The one that the product's part has compiled, so that it is compiled once."""
    subject = Subject(lab.OPERATOR)
    (case,) = subject.those(subject.cases.CASES, [lab.CASE])
    wanted = [subject.sources(subject.cases.inputs(each, 0), demo.ELSEWHERE) for each in (case, subject.cases.DEMO)]
    assert wanted[0] == wanted[1]
    assert lab.run_in_engine() == 0
    assert "ok" in capsys.readouterr().out
