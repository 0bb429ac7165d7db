"""The competition entry in scripts/examples: its layouts are taken as they are, and its results are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from script_kit import script

import cupymla
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
@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_entry_on_the_gpu(entry: Any, framework: str, scales_on_cpu: bool) -> None:
    """With CuPy's arrays, and with the competition's own: torch's."""
    cp, library = pytest.importorskip("cupy"), pytest.importorskip(framework)
    host = entry.problem(4096, 7168, 2, np)
    data = [strided_like(cp, array) for array in host]
    if scales_on_cpu:
        data[2:4] = host[2:4]
    if framework == "torch":
        data = list(map(library.from_dlpack, data))
    c = entry.custom_kernel(tuple(data))
    require_right(cp.from_dlpack(c).get(), host)
