"""`python -m cupymla_lab emulate`: what it prints, runs and refuses."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupymla import driver
from cupymla_lab.__main__ import main
from cupymla_lab.emulate.host import machine

KERNEL = """
.version 8.8
.target sm_100a
.address_size 64
.visible .entry scale(.param .u64 p_data, .param .f32 p_factor)
.maxntid 32, 1, 1
{
    .reg .b32 %r<4>; .reg .b64 %d<6>; .reg .f32 %f<2>;
    ld.param.b64 %d0, [p_data];
    ld.param.f32 %f0, [p_factor];
    mov.b32 %r0, %f0;
    mov.b64 %d1, {%r0, %r0};
    mov.u32 %r1, %tid.x;
    mad.wide.u32 %d0, %r1, 8, %d0;
    ld.global.b64 %d2, [%d0];
    mul.rn.f32x2 %d3, %d2, %d1;
    st.global.b64 [%d0], %d3;
    ret;
}
"""


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    file = tmp_path / "scale.ptx"
    file.write_text(KERNEL)
    np.save(tmp_path / "data.npy", np.arange(64, dtype=np.float32))
    return file


def test_the_translation_is_listed_and_written(kernel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["emulate", str(kernel), "--json", "--out", str(kernel.parent / "out")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kernels"] == ["scale"] and [site["line"] for site in told["sites"]] == [16, 18]
    assert ".target sm_90a" in (kernel.parent / "out" / "scale.sm_90a.ptx").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--entry", "scaled"], "argument '--entry': expected one of scale, got 'scaled'"),
        (["--arg", "f32:1.5"], "argument '--block': expected threads per CTA"),
    ],
)
def test_what_a_translation_alone_would_leave_out_is_refused(
    kernel: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    """Whoever names a kernel or its arguments wants it run, and would take a translation for a run without failure."""
    assert main(["emulate", str(kernel), *words]) == 2
    assert message in capsys.readouterr().err


def test_registers_that_are_used_before_they_are_loaded_are_told(
    kernel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = KERNEL.replace("    st.global", "    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r1];\n    st.global")
    use = "    add.u32 %r3, %r2, %r2;\n    tcgen05.wait::ld.sync.aligned;\n    ret;"
    kernel.write_text(text.replace("    ret;", use), encoding="utf-8")
    assert main(["emulate", str(kernel)]) == 0
    assert "line 19 uses %r2 before tcgen05.wait::ld: add.u32" in capsys.readouterr().out
    assert main(["emulate", str(kernel), "--json"]) == 0
    assert [use["line"] for use in json.loads(capsys.readouterr().out)["early_uses"]] == [19]


@pytest.mark.compile
@pytest.mark.skipif(not machine.available(), reason="needs a C++ compiler on x86-64")
def test_a_kernel_of_arrays_and_numbers_runs_in_every_mode(kernel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = kernel.parent
    words = ["--block", "32", "--arg", str(folder / "data.npy"), "--arg", "f32:1.5", "--on", "host"]
    assert main(["emulate", str(kernel), "--json", "--out", str(folder), *words]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [run["mode"] for run in told["runs"]] == ["eager", "lazy", "random"]
    for mode in ("eager", "lazy", "random"):
        np.testing.assert_array_equal(np.load(folder / f"data.{mode}.npy"), 1.5 * np.arange(64, dtype=np.float32))


@pytest.mark.parametrize(
    "words",
    [
        ["--grid", "4"],
        ["--arg", "f99:1"],
        ["--arg", "missing.npy"],
        ["--entry", "other"],
        ["--resident-clusters", "-1"],
        ["--block", "0"],
        ["--block", "-1"],
        ["--block", "1025"],
        ["--grid=-1,1,1"],
        ["--cluster", "0"],
        ["--cluster", "3"],
        ["--smem", "-1"],
        ["--smem", "232449"],
        ["--arg", "i32:2147483648"],
        ["--arg", "u64:-1"],
        ["--arg", "empty.npy"],
        ["--arg", "text.npy"],
        ["--out", "text.npy"],
        ["--on", "gpu"],
    ],
    ids=" ".join,
)
@pytest.mark.skipif(not machine.available() or driver.available(), reason="needs a C++ compiler on x86-64, and no GPU")
def test_bad_options_are_refused(
    kernel: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(kernel.parent)
    Path("empty.npy").touch()
    Path("text.npy").write_text("no array", encoding="utf-8")
    given = ["--arg", "data.npy", "--arg", "f32:1.5"] if words[0] != "--arg" else []
    assert main(["emulate", str(kernel), "--block", "32", "--on", "host", *given, *words]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.compile
@pytest.mark.skipif(not machine.available(), reason="needs a C++ compiler on x86-64")
def test_arrays_are_told_apart_and_guarded(
    kernel: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A write past an array would hit whatever lies there, and two arrays of one file would leave one result."""
    monkeypatch.chdir(kernel.parent)
    kernel.write_text(KERNEL.replace("p_factor)", "p_factor, .param .u64 p_other)"), encoding="utf-8")
    words = ["--block", "32", "--on", "host", "--mode", "eager", "--arg", "data.npy", "--arg", "f32:1.5", "--out", "."]
    assert main(["emulate", str(kernel), *words, "--arg", "data.npy"]) == 0
    np.testing.assert_array_equal(np.load("data.0.eager.npy"), 1.5 * np.arange(64, dtype=np.float32))
    np.testing.assert_array_equal(np.load("data.2.eager.npy"), np.arange(64, dtype=np.float32))
    np.save("data.npy", np.ones(62, np.float32))
    assert main(["emulate", str(kernel), *words, "--arg", "u64:0"]) == 1
    assert "array 1 was written past its ends" in capsys.readouterr().out
    assert main(["emulate", str(kernel), *words, "--arg", "i32:0"]) == 2
    assert "expected 8 bytes as number 2, got 4" in capsys.readouterr().err


@pytest.mark.skipif(not machine.available(), reason="needs a C++ compiler on x86-64")
@pytest.mark.parametrize("text", ["tanh.approx.bf16x2 %r1, %r2;", "mbarrier.complete.b64 %d1, [%d2], 3;"])
def test_what_the_host_does_not_know_is_named_with_the_line_of_its_file(
    kernel: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel.write_text(KERNEL.replace("    st.global", f"    {text}\n    st.global"), encoding="utf-8")
    words = ["--block", "32", "--arg", "u64:0", "--arg", "f32:1.5", "--on", "host"]
    assert main(["emulate", str(kernel), *words]) == 1
    told = capsys.readouterr().err
    assert "scale.ptx:17: " in told and text in told


def test_a_file_that_is_no_ptx_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.ptx"
    file.write_text(KERNEL.replace("mul.rn.f32x2", "tcgen05.dream"))
    assert main(["emulate", str(file)]) == 1
    assert "x.ptx:16" in capsys.readouterr().err
    assert main(["emulate", str(tmp_path / "none.ptx")]) == 2
    file.write_bytes(b"\x7fELF\xff\xfe")
    assert main(["emulate", str(file)]) == 2
    assert "expected a file of text" in capsys.readouterr().err


@pytest.mark.compile
@pytest.mark.skipif(not machine.available(), reason="needs a C++ compiler on x86-64")
def test_modes_that_leave_different_arrays_are_an_error(
    kernel: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kernel is right when all modes give its result."""
    launch = machine.HostProgram.launch

    def uneven(program: Any, geometry: Any, parameters: Any, settings: Any) -> None:
        launch(program, geometry, parameters, settings)
        if settings.mode == "lazy":
            ctypes.c_float.from_address(parameters[0].value + 8).value = 7.5

    words = ["emulate", str(kernel), "--on", "host", "--block", "32", "--json"]
    words += ["--arg", str(kernel.parent / "data.npy"), "--arg", "f32:1.5"]
    assert main(words) == 0
    monkeypatch.setattr(machine.HostProgram, "launch", uneven)
    capsys.readouterr()
    assert main(words) == 1
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert {run["mode"]: run["error"] for run in runs} == {
        "eager": None,
        "lazy": "array 1 is not what mode eager left",
        "random": None,
    }
