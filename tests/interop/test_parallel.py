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
PATIENCE = 900
"""Seconds for processes that take half a minute each on a core of their own."""


Told = tuple[list[str], str]
"""The lines and the errors of a program."""


def told_by(program: str, *arguments: str, **settings: str) -> Told:
    command = [sys.executable, str(HERE / program), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **settings}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE, check=False)
    return done.stdout.splitlines(), done.stderr


def require_right(what: str, told: Told, ranks: int = 1) -> None:
    """So many found this right."""
    lines, errors = told
    own = errors.partition(f"wrong: {what}\n")[2].partition("\nwrong: ")[0]
    assert lines.count(f"right: {what}") == ranks, own[-4000:] or errors[-4000:]


ON_DEVICES = (
    *("plain", "causal", "batch", "distribution", "replicated", "two_axes"),
    *("explicit", "explicit_problems", "explicit_outside", "scaling", "dsa_layer", "pools", "dsa_attention"),
    "indexer_training",
)
ON_RANKS = ("plain", "causal", "batch", "dsa_attention")


@pytest.fixture(scope="session")
def on_devices() -> Told:
    """What one process says of all that is looked at on four devices: most of its time it imports JAX and compiles."""
    pytest.importorskip("jax")
    devices = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    return told_by("jax_devices.py", *ON_DEVICES, XLA_FLAGS=devices, JAX_PLATFORMS="cpu")


@pytest.fixture(scope="session")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """The same of two ranks."""
    pytest.importorskip("torch")
    return told_by("torch_ranks.py", "2", str(tmp_path_factory.mktemp("ranks") / "meet"), *ON_RANKS)


@pytest.mark.slow  # their program
@pytest.mark.timeout(PATIENCE + 100)
@pytest.mark.xdist_group("four devices")
@pytest.mark.parametrize("what", ON_DEVICES)
def test_jax_over_four_devices(what: str, on_devices: Told) -> None:
    require_right(what, on_devices)


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


@pytest.mark.timeout(PATIENCE + 100)
@pytest.mark.xdist_group("two ranks")
@pytest.mark.parametrize("what", ON_RANKS)
def test_torch_over_two_ranks(what: str, on_ranks: Told) -> None:
    require_right(what, on_ranks, ranks=2)


def require_gpus(framework: str) -> int:
    """How many there are; skips the test without two that have the kernels."""
    pytest.importorskip(framework)
    if driver.device_count() < 2:
        pytest.skip("needs two GPUs")
    if driver.compute_capability(0) != (9, 0):
        pytest.skip("the kernels are for Hopper")
    return driver.device_count()


@pytest.mark.gpu
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_over_all_gpus(framework: str, tmp_path: Path) -> None:
    """The forward; gradients take the same collectives and are compared on CPU devices."""
    count = require_gpus(framework)
    if framework == "jax":
        require_right("gpus", told_by("jax_devices.py", "gpus"))
        return
    require_right("gpu", told_by("torch_ranks.py", str(count), str(tmp_path / "meet"), "gpu"), ranks=count)


@pytest.mark.gpu
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_a_step_over_two_gpus(framework: str, tmp_path: Path) -> None:
    """`dsa_attention` with its gradients, and in JAX tokens over them as well; by NCCL in both frameworks."""
    require_gpus(framework)
    if framework == "jax":
        require_right("gpus dsa_attention", told_by("jax_devices.py", "gpus dsa_attention"))
        return
    told = told_by("torch_ranks.py", "2", str(tmp_path / "meet"), "gpu dsa_attention")
    require_right("gpu dsa_attention", told, ranks=2)
