"""The examples: on a GPU every one runs as a program of its own, in every framework that it offers, and judges itself.

What runs without a GPU is tested beside what they show: test_raw_scripts, ops/test_gpumode_nvfp4_gemv,
interop/test_decode_dsa and interop/test_train_dsa; train_layer here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from script_kit import script

from cupymla import driver
from cupymla.bench import machine
from cupymla_lab import examples, pages
from cupymla_lab.gpu_tests import FileResult

FRAMEWORKS = ("cupy",)
"""Of an example that does not name its own."""


def test_no_example_and_no_framework_is_left_out() -> None:
    pytest.importorskip("cupy")
    programs = [file.stem for file in examples.FOLDER.glob("*.py")]
    offered = {(name, each) for name in programs for each in getattr(script(name), "FRAMEWORKS", FRAMEWORKS)}
    assert {(run.program, run.framework) for run in examples.RUNS.values()} == offered


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_training_says_what_it_lacks(framework: str) -> None:
    with mock.patch.object(driver, "available", lambda: False):
        assert script("train_dsa").missing_on_gpu(framework, ("topk",)) == ["a CUDA GPU"]


@pytest.mark.slow
def test_a_model_of_layers_learns_on_two_devices(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    command = [sys.executable, str(examples.FOLDER / "train_layer.py"), "--size", "small"]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PYTHONPATH": str(machine.ROOT)}
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", check=False, cwd=tmp_path, env=os.environ | flags
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the model has learned" in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("name", examples.RUNS)
def test_runs_on_the_gpu_and_judges_itself(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    run = examples.RUNS[name]
    pytest.importorskip("cupy")
    pytest.importorskip(run.framework)
    if run.program == "standalone_launch" and driver.compute_capability(0) != (9, 0):
        pytest.skip("it launches a kernel for Hopper")
    module = script(run.program)
    if missing := module.missing_on_gpu(run.framework, module.NEEDED) if hasattr(module, "NEEDED") else ():
        pytest.skip(f"it needs {', '.join(missing)}")
    # From another folder, where it leaves what it writes: examples find the package by themselves.
    command = [sys.executable, str(examples.FOLDER / f"{run.program}.py"), *run.arguments]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.says in done.stdout, done.stdout + done.stderr
    record_property("example", name)


def test_the_page_says_what_ran_and_what_was_edited_since() -> None:
    def result(content_hash: str, seconds: dict[str, float]) -> FileResult:
        where = ("NVIDIA H200", "580", "2026-11-26", "abc", 1)
        return FileResult("tests/test_x.py", 3, 0, 0, 9.0, *where, {}, "none", seconds, content_hash)

    names = list(examples.RUNS)
    now = result(examples.content_hash(), {names[0]: 3.4, names[1]: 2.0})
    before = result("other", {names[2]: 5.0})
    lines = pages.example_runs([now, before]).splitlines()
    told = [line.split(" | ")[-1].removesuffix(" |") for line in lines if line.startswith("| `")]
    assert told == [
        "passed on NVIDIA H200, 2026-11-26, in 3 s",
        "passed on NVIDIA H200, 2026-11-26, in 2 s",
        "not run; edited since it passed on NVIDIA H200, 2026-11-26, in 5 s",
        *["not run"] * (len(names) - 3),
    ]


def test_words_of_an_example_are_no_part_of_what_ran(tmp_path: Path) -> None:
    def of(text: str) -> str:
        (tmp_path / "a.py").write_text(text, encoding="utf-8")
        return examples.content_hash(tmp_path)

    code = 'def f(x):\n    y = "#"\n    return y * x\n'
    spoken = code.replace('y = "#"\n', '"""Does."""\n    # And how.\n    y = "#"  # so\n')
    spoken = '"""Says.\n\nMore."""\n\n\n' + spoken.replace("x):", "x):  # why")
    assert of(code) == of(spoken)
    assert of(code) != of(code.replace('"#"', '"# "')) != of(code.replace("y * x", "x * y"))
