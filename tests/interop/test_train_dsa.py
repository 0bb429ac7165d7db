"""The example that trains: both twins run, leave their curves, and learn; without kernels it says what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cupymla import driver

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "scripts" / "examples" / "train_dsa.py"


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def trained(framework: str, size: str, out: Path) -> Any:
    pytest.importorskip(framework)
    pytest.importorskip("matplotlib")
    done = start("--framework", framework, "--size", size, "--out", str(out))
    assert done.returncode == 0, done.stderr[-4000:]
    for name in ("loss.png", "recall.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    return json.loads((out / "curves.json").read_text())


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_runs_and_leaves_curves(framework: str, tmp_path: Path) -> None:
    content = trained(framework, "test", tmp_path / "curves")
    assert set(content["curves"]) == {"warm-up, dense", "dense", "indexer", "random"}
    warm = content["curves"]["warm-up, dense"]
    assert warm[-1][1] < warm[0][1], "nothing was learned"
    assert all(0 <= recall <= 1 for rows in content["curves"].values() for _, _, recall in rows)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_trained_indexer_loses_less_than_a_random_selection(tmp_path: Path) -> None:
    """The point of sparse attention with an indexer: the gap to dense attention is smaller than random's."""
    ends = trained("jax", "toy", tmp_path / "curves")["ends"]
    losses = {name: end["loss"] for name, end in ends.items()}
    assert losses["indexer"] - losses["dense"] < 0.7 * (losses["random"] - losses["dense"])


@pytest.mark.skipif(driver.available(), reason="there is a GPU")
def test_says_what_is_missing(tmp_path: Path) -> None:
    done = start("--device", "cuda", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "for want of a CUDA GPU" in done.stderr and "--device cpu" in done.stderr
