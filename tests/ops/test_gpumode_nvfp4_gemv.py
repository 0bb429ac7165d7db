"""The competition entry in scripts/examples: its layouts are taken as they are, and its results are right.

On a GPU every example runs as it stands there.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from script_kit import EXAMPLES, script

import cupymla
from cupymla import driver
from cupymla.testing.poison import strided_like


@pytest.fixture(scope="module")
def entry() -> Any:
    return script("gpumode_nvfp4_gemv")


def expected(data: tuple[Any, ...]) -> Any:
    """float64, from arrays on the host; one half's rounding is left out."""
    a, b, sfa, sfb = data[:4]
    weights = cupymla.dequantize_nvfp4(a, sfa).astype(np.float64)
    vector = cupymla.dequantize_nvfp4(b[:1], sfb[:1]).astype(np.float64)
    return np.einsum("mkl,nkl->mnl", weights, vector)


def require_right(c: Any, data: tuple[Any, ...]) -> None:
    exact = expected(data)
    # Half a unit in the last place of float16, and float32's sum over k.
    assert np.all(np.abs(c.astype(np.float64) - exact) <= 2.0**-11 * np.abs(exact) + 1e-3)


@pytest.mark.parametrize("permuted", [False, True])
def test_entry_on_the_cpu(entry: Any, monkeypatch: pytest.MonkeyPatch, permuted: bool) -> None:
    """With the linear scales, and with the permuted ones, as where the linear ones are on another device."""
    if permuted:
        monkeypatch.setattr(entry, "_place", lambda array: str(array.ctypes.data))
    data = entry.problem(130, 208, 3, np)
    c = entry.custom_kernel(data)
    assert c is data[-1]
    require_right(c, data)


def test_entry_takes_torch_tensors(entry: Any) -> None:
    torch = pytest.importorskip("torch")
    data = entry.problem(128, 256, 2, np)
    tensors = [torch.from_numpy(array) for array in data]
    c = entry.custom_kernel(tuple(tensors))
    assert c is tensors[-1]
    require_right(c.numpy(), data)


def test_blocks_are_views(entry: Any) -> None:
    data = entry.problem(256, 512, 2, np)
    assert np.shares_memory(entry._blocks(data[4]), data[4])
    with pytest.raises(ValueError, match="would have to be copied"):
        entry._blocks(np.ascontiguousarray(data[4]))


class Device(np.ndarray):
    """An array that comes to the host as CuPy's do: in C order of its axes, whatever its strides are."""

    def get(self) -> Any:
        return np.array(self, order="C", subok=False)


@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_the_example_checks_itself(entry: Any, monkeypatch: pytest.MonkeyPatch, on_a_gpu: bool) -> None:
    made = entry.problem

    def problem(m: int, k: int, batches: int, xp: Any) -> tuple[Any, ...]:
        return tuple(array.view(Device) for array in made(m, k, batches, np))

    if on_a_gpu:
        monkeypatch.setattr(entry, "problem", problem)
    assert entry.main() == 0


def test_the_example_s_check_can_fail(entry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "custom_kernel", lambda data: data[-1])
    assert entry.main() == 1


@pytest.mark.gpu
@pytest.mark.parametrize("scales_on_cpu", [False, True])
def test_entry_on_the_gpu(entry: Any, scales_on_cpu: bool) -> None:
    cp = pytest.importorskip("cupy")
    host = entry.problem(4096, 7168, 2, np)
    data = [strided_like(cp, array) for array in host]
    if scales_on_cpu:
        data[2:4] = host[2:4]
    c = entry.custom_kernel(tuple(data))
    require_right(c.get(), host)


TRAINING = ("--device", "cuda", "--size", "test", "--framework")
DECODING = ("--device", "cuda", "--size", "small", "--framework")
RUNS: dict[str, tuple[str, ...]] = {
    "gpumode_nvfp4_gemv": ("gpumode_nvfp4_gemv",),
    "standalone_gemv": ("standalone_gemv",),
    "standalone_launch": ("standalone_launch",),
    "decode_dsa in cupy": ("decode_dsa", *DECODING, "cupy"),
    "decode_dsa in jax": ("decode_dsa", *DECODING, "jax"),
    "train_dsa in jax": ("train_dsa", *TRAINING, "jax"),
    "train_dsa in torch": ("train_dsa", *TRAINING, "torch"),
}
"""Each run of an example: the script's name and its arguments."""


def test_no_example_is_left_out() -> None:
    assert {run[0] for run in RUNS.values()} == {file.stem for file in EXAMPLES.glob("*.py")}


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_training_says_what_it_lacks(framework: str) -> None:
    with mock.patch.object(driver, "available", lambda: False):
        assert script("train_dsa").missing_on_gpu(framework, ("topk",)) == ["a CUDA GPU"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", RUNS)
def test_every_example_runs_on_the_gpu_and_judges_itself(name: str, tmp_path: Path) -> None:
    program, *arguments = RUNS[name]
    pytest.importorskip("cupy")
    if program == "standalone_launch" and driver.compute_capability(0) != (9, 0):
        pytest.skip("it launches a kernel for Hopper")
    if program == "train_dsa":
        arguments += ["--out", str(tmp_path)]
    if program in ("train_dsa", "decode_dsa"):
        pytest.importorskip(RUNS[name][-1])
        module = script(program)
        if missing := module.missing_on_gpu(RUNS[name][-1], module.NEEDED):
            pytest.skip(f"it needs {', '.join(missing)}")
    # From another folder: examples find the package by themselves.
    command = [sys.executable, str(EXAMPLES / f"{program}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
