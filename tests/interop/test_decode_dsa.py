"""The example that decodes: both loops decode what float64 does, and what goes wrong in them is noticed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interop_kit import placed

from cupymla import driver

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "scripts" / "examples" / "decode_dsa.py"


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize("framework", ["cupy", "jax"])
def test_both_models_decode_what_float64_does(framework: str) -> None:
    if framework == "jax":
        pytest.importorskip("jax")
    done = start("--framework", framework)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("18 of 18") == 2
    assert "On a CPU: NumPy references" in done.stdout and "step, us" not in done.stdout


@pytest.mark.skipif(driver.available(), reason="there is a GPU")
def test_a_cpu_has_no_times_to_write(tmp_path: Path) -> None:
    done = start("--out", str(tmp_path))
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (2, "", [])
    assert "--out takes times" in done.stderr


def test_says_what_is_missing() -> None:
    pytest.importorskip("cupy")
    done = start("--device", "cuda")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "cannot decode here, for want of a CUDA GPU; --device cpu can\n"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script's modules."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return import_module("decode_dsa"), import_module("decode.setting"), import_module("decode.loop_cupy")


def right(example: Any, loop: Any, steps: int) -> tuple[int, float]:
    """How many tokens of so many steps are right, and how far the logits of the first one are off."""
    script, setting, _ = example
    size = setting.Size((2,), context=150, steps=steps, period=60, checked=1)
    tokens, logits = [], None
    for _ in range(steps):
        loop.step()
        tokens.append(loop.token.copy())
        logits = loop.logits.copy() if logits is None else logits
    shape = loop._shape
    reference = script.Reference(shape, setting.weights_of(shape, 3), size, 3)
    found: tuple[int, float] = reference.judged(setting.Prompts(size, 2, 3), np.stack(tokens), logits)
    return found


def a_loop(example: Any, model: str = "v3.2") -> Any:
    _, setting, loops = example
    shape = setting.shape_of(model, "small")
    size = setting.Size((2,), context=150, steps=4, period=60, checked=1)
    return loops.Loop(np, shape, setting.weights_of(shape, 3), setting.Prompts(size, 2, 3))


def test_a_loop_that_is_right(example: Any) -> None:
    count, off = right(example, a_loop(example), 4)
    assert count == 8 and off < example[0].MOST_OFF


WRONG = {
    "tables of others": lambda loop: loop._tables.__setitem__(slice(None), loop._tables[::-1].copy()),
    "lengths": lambda loop: loop.lengths.__ifloordiv__(4),
    "latents that nobody wrote": lambda loop: loop._caches[0].fill(0),
    "keys that nobody wrote": lambda loop: loop._index_cache.fill(0),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_shows(example: Any, what: str) -> None:
    loop = a_loop(example)
    WRONG[what](loop)
    count, off = right(example, loop, 3)
    assert count < 6 or not off <= example[0].MOST_OFF


def test_new_keys_are_read_by_the_steps_behind(example: Any) -> None:
    """Without the writers a window of what is decoded holds NaN."""
    loop = a_loop(example, "v4")
    loop.parts = {name: part for name, part in loop.parts.items() if name != "write"}
    count, _ = right(example, loop, 1)
    assert count < 2


def test_requests_are_the_same_in_every_batch(example: Any) -> None:
    """So that float64 decodes each once."""
    _, setting, _ = example
    size = setting.SIZES["small"]
    one, many = setting.Prompts(size, 1, 5), setting.Prompts(size, 4, 5)
    positions = np.arange(-1, 200)
    assert one.lengths[0] == many.lengths[0]
    np.testing.assert_array_equal(one.tokens(0, positions), many.tokens(0, positions))
    assert len(np.unique(many.tables)) == many.tables.size == many.blocks


def test_jax_writes_donated_caches_in_place(example: Any) -> None:
    """The program of all steps has no room for a copy of a cache."""
    jax = pytest.importorskip("jax")
    _, setting, _ = example
    loops = import_module("decode.loop_jax")
    shape = setting.shape_of("v3.2", "small")
    size = setting.Size((2,), context=5000, steps=4, period=60, checked=1)
    prompts = setting.Prompts(size, 2, 0)
    given = setting.weights_of(shape, 0).on(placed)
    caches = tuple(jax.numpy.zeros((prompts.blocks, setting.PAGE, width), "uint8") for width in (656, 132))
    state = (prompts.tables, *prompts.newest(), prompts.lengths)
    program = loops.scanned.lower(shape, size.steps, caches, given, *state).compile()
    assert program.memory_analysis().temp_size_in_bytes < min(cache.nbytes for cache in caches)
