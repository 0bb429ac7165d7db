"""Attention over several devices gives what one device gives: JAX over CPU devices, torch over gloo processes."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupymla import InputError, driver

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def start(program: str, *arguments: str, **settings: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **settings}
    return subprocess.Popen(
        [sys.executable, str(HERE / program), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def require_right(process: subprocess.Popen[str]) -> None:
    out, err = process.communicate(timeout=200)
    assert out.strip().endswith("right"), err[-4000:]


@pytest.mark.parametrize(
    "what",
    [
        *("plain", "causal", "batch", "distribution", "replicated", "two_axes"),
        *("explicit", "explicit_problems", "explicit_outside", "scaling"),
    ],
)
def test_jax_over_four_devices(what: str) -> None:
    pytest.importorskip("jax")
    devices = "--xla_force_host_platform_device_count=4"
    require_right(start("jax_devices.py", what, XLA_FLAGS=devices, JAX_PLATFORMS="cpu"))


@pytest.mark.parametrize("start", [True, 1.5, "0", None])
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_a_position_is_an_integer(framework: str, start: object) -> None:
    """A device's own position is added to it, so the operator would see a number."""
    module = pytest.importorskip(framework) and import_module(f"cupymla.interop.{framework}.parallel")
    words: dict[str, Any] = {"axis_name": "x"} if framework == "jax" else {}
    q, kv, indices = np.zeros((4, 2, 576)), np.zeros((4, 576)), np.zeros((4, 3), np.int32)
    with pytest.raises(InputError, match="'q_start': expected an integer, got"):
        module.sparse_mla_fwd(q, kv, indices, causal=True, q_start=start, **words)
    with pytest.raises(InputError, match="'q_start': expected an integer, got"):
        module.attn_dist(q, kv, indices, np.zeros((4, 2)), causal=True, q_start=start, **words)


def test_a_flag_of_the_backward_is_looked_at_in_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after it, when the gradient is asked for, nor never."""
    torch = pytest.importorskip("torch")
    module: Any = import_module("cupymla.interop.torch.parallel")
    monkeypatch.setattr(module.dist, "get_rank", lambda group: 0)
    arrays = torch.zeros(4, 2, 576), torch.zeros(4, 576), torch.zeros(4, 3, dtype=torch.int32)
    for wrong in (1, "yes", None):
        with pytest.raises(InputError, match="'deterministic': expected True or False"):
            module.sparse_mla_fwd(*arrays, deterministic=wrong)


@pytest.mark.parametrize("what", ["plain", "causal", "batch"])
def test_torch_over_two_ranks(what: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ranks = [start("torch_ranks.py", str(rank), "2", str(tmp_path / "meet"), what) for rank in range(2)]
    for process in ranks:
        require_right(process)


@pytest.mark.gpu
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_over_all_gpus(framework: str, tmp_path: Path) -> None:
    """The forward; gradients take the same collectives and are compared on CPU devices."""
    pytest.importorskip(framework)
    count = driver.device_count()
    if count < 2:
        pytest.skip("needs two GPUs")
    if driver.compute_capability(0) != (9, 0):
        pytest.skip("the kernel is for Hopper")
    if framework == "jax":
        require_right(start("jax_devices.py", "gpus"))
        return
    ranks = [start("torch_ranks.py", str(rank), str(count), str(tmp_path / "meet"), "gpu") for rank in range(count)]
    for process in ranks:
        require_right(process)
