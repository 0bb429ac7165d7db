"""The example that trains: both models run, leave their curves, and learn; without kernels it says what is missing."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupymla import driver

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "scripts" / "examples" / "train_dsa.py"


def start(*arguments: str, first: Path = ROOT, program: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    """The script's run, or that of what stands for it; modules of the folder `first` hide others."""
    path = os.pathsep.join(map(str, (first, ROOT)))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def learned(out: Path) -> Any:
    """The curves of a run, which has left its plots as well and has learned something."""
    for name in ("loss.png", "overlap.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    content = json.loads((out / "curves.json").read_text())
    assert content["commit"] == "0123abc"
    assert set(content["curves"]) == {"warm-up, dense", "dense", "indexer", "random"}
    warm = content["curves"]["warm-up, dense"]
    assert warm[-1][1] < warm[0][1], "nothing was learned"
    assert all(0 <= overlap <= 1 for rows in content["curves"].values() for _, _, overlap in rows)
    assert not list(out.glob("*.npz")), "the checkpoint of a run that has ended was left"
    return content


def ran(out: Path, *more: str) -> int:
    """The exit status of a short run in torch, here: importing it takes longer."""
    arguments = ["--framework", "torch", "--size", "test", "--out", str(out), "--commit", "0123abc", *more]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["train_dsa.py", *arguments])
        return int(import_module("train_dsa").main())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of such a run."""
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    out = tmp_path_factory.mktemp("whole") / "curves"
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(SCRIPT.parent))
        assert ran(out) == 0
    return out


TRAINED = pytest.mark.xdist_group("trained in torch")


@TRAINED
def test_runs_and_leaves_curves_in_torch(whole: Path) -> None:
    """In JAX the training below does, as a program."""
    learned(whole)


FEWER_STEPS = """
import dataclasses, runpy, sys

sys.path.insert(0, {folder!r})
from dsa import setting

setting.SETTINGS["brief"] = dataclasses.replace(setting.SETTINGS["brief"], warm_steps=120, eval_every=60)
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_a_trained_indexer_tracks_dense_attention_and_a_random_selection_does_not(tmp_path: Path) -> None:
    """At the switch from dense attention: it selects twice as much of what that attends to, and the loss grows less
    than half as much.

    In JAX, with two seeds, the loss grew by -0.01 and 0.02, and by 0.09 with a random selection; overlaps were
    2.7 and 2.6 times those by chance.
    """
    pytest.importorskip("jax")
    pytest.importorskip("matplotlib")
    out, program = tmp_path / "curves", tmp_path / "fewer_steps.py"
    program.write_text(FEWER_STEPS.format(folder=str(SCRIPT.parent), script=str(SCRIPT)))
    arguments = ("--framework", "jax", "--size", "brief", "--out", str(out), "--commit", "0123abc")
    done = start(*arguments, program=program)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "the indexer has learned" in done.stdout
    curves = learned(out)["curves"]
    (_, indexer, overlap), (_, random, chance) = (curves[name][0] for name in ("indexer", "random"))
    dense = curves["warm-up, dense"][-1][1]
    assert overlap > 2 * chance
    assert indexer - dense < 0.5 * (random - dense)


@pytest.mark.skipif(driver.available(), reason="there is a GPU")
def test_says_what_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    pytest.importorskip("matplotlib")
    done = start("--device", "cuda", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "for want of a CUDA GPU" in done.stderr and "--device cpu" in done.stderr


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_a_framework_that_sees_no_gpu_is_told(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a driver and kernels for the GPU, such as beside a torch built for CPUs."""
    pytest.importorskip(framework)
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    needs = import_module("dsa.needs")
    if driver.available():
        monkeypatch.setattr(needs, "sees_gpu", lambda name: False)
    monkeypatch.setattr(driver, "available", lambda: True)
    monkeypatch.setattr(driver, "compute_capability", lambda index: (9, 0))
    assert needs.missing_on_gpu(framework, import_module("train_dsa").NEEDED) == [f"a {framework} that sees the GPU"]


@pytest.mark.parametrize("package", ["matplotlib", "jax", "torch"])
def test_a_package_that_is_not_installed_is_missed_before_anything_is_computed(package: str, tmp_path: Path) -> None:
    """The curves are drawn last: minutes of training would be lost."""
    others = {"matplotlib", "jax", "torch"} - {package}
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u; found = u.find_spec\n"
        f"u.find_spec = lambda n, *a: None if n == {package!r} else True if n in {others!r} else found(n, *a)\n"
    )
    framework = "torch" if package == "torch" else "jax"
    done = start("--framework", framework, "--size", "test", "--out", str(tmp_path / "out"), first=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"cannot train here, for want of the package {package}\n"


@pytest.mark.parametrize("seed", ["-1", "1.5", "x", "2147483648"])
def test_a_seed_that_some_framework_would_not_take_is_refused(seed: str) -> None:
    done = start(f"--seed={seed}")
    assert done.returncode == 2
    assert f"argument --seed: expected an integer from 0 to 2147483647, got {seed}" in done.stderr


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    pytest.importorskip("matplotlib")
    (tmp_path / "taken").touch()
    done = start("--size", "test", "--out", str(tmp_path / "taken"))
    assert (done.returncode, done.stderr) == (2, f"cannot write to {tmp_path}/taken: File exists\n")


@pytest.mark.parametrize("steps", ["0", "-1", "1.5", "x"])
def test_a_number_of_steps_that_is_none_is_refused(steps: str) -> None:
    done = start(f"--steps={steps}")
    assert done.returncode == 2
    assert f"argument --steps: expected a positive integer, got {steps}" in done.stderr


LEARNED = {
    "warm-up, dense": [(0, 6.0, 0.2), (100, 2.0, 0.6)],
    "indexer": [(100, 2.0, 0.6)],
    "random": [(100, 3.0, 0.3)],
}


@pytest.mark.parametrize(
    ("part", "row", "steps", "said"),
    [
        ("random", (100, 3.0, 0.3), 100, []),
        ("random", (100, float("nan"), 0.3), 100, ["a loss or an overlap is not finite"]),
        ("warm-up, dense", (100, 6.0, 0.6), 100, ["the held-out loss did not fall in the warm-up"]),
        ("indexer", (100, 2.0, 0.44), 100, ["after the warm-up the indexer's selection has 44.0%, a random one 30.0%"]),
        ("indexer", (100, 2.0, 0.44), 99, []),
    ],
)
def test_a_run_that_has_not_learned_says_so(
    part: str, row: tuple[int, float, float], steps: int, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    assert import_module("train_dsa").not_learned({**LEARNED, part: [*LEARNED[part][:-1], row]}, steps) == said


class Stopped(Exception):
    """As if by Ctrl-C."""


@TRAINED
@pytest.mark.parametrize("stopped_at", [2, 8])
def test_a_run_that_was_stopped_goes_on_to_the_same_end(
    whole: Path, dsa: Any, stopped_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the warm-up, and in the last part, whose selections are random."""
    model_torch, _ = dsa
    monkeypatch.setattr(import_module("train_dsa"), "draw", lambda *arguments: None)  # takes as long as the steps
    step = model_torch.Model.step
    taken: list[Any] = []

    def stopping(self: Any, *arguments: Any) -> Any:
        taken.append(arguments)
        if len(taken) > stopped_at:
            raise Stopped
        return step(self, *arguments)

    out = tmp_path / "stopped"
    with monkeypatch.context() as patched:
        patched.setattr(model_torch.Model, "step", stopping)
        with pytest.raises(Stopped):
            ran(out)
    assert ran(out, "--seed", "1") == 2, "another run's checkpoint was taken"
    assert ran(out) == 0
    ended, wanted = (json.loads((folder / "curves.json").read_text()) for folder in (out, whole))
    assert ended["curves"] == wanted["curves"]


def test_a_state_in_jax_is_all_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded is what a step begins with; the run above does it in torch."""
    pytest.importorskip("jax")
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    module, setting = import_module("dsa.model_jax"), import_module("dsa.setting")
    model = module.Model(setting.SETTINGS["test"], "cpu", 0)
    state = {name: np.full_like(array, number) for number, (name, array) in enumerate(model.state().items(), 1)}
    model.load(state)
    seen: list[Any] = []

    def noted(given: Any, *_: Any) -> Any:
        seen.append(given)
        return given, {"loss": 0.0, "kl": 0.0}

    monkeypatch.setattr(module, "update", noted)
    model.step(np.zeros((2, 33), np.int32), "dense")
    assert [np.unique(array).tolist() for array in seen[0]] == [[1], [2], [3], [4]]


@pytest.fixture
def dsa(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules behind the script."""
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return import_module("dsa.model_torch"), import_module("dsa.setting")


def test_a_random_selection_is_another_one_each_step(dsa: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations draw the same numbers every time; what training draws must not begin anew after each."""
    import torch

    model_torch, setting = dsa
    size = setting.SETTINGS["test"]
    model, text = model_torch.Model(size, "cpu", 0), setting.Text(size)
    drawn: list[Any] = []
    draw = torch.rand

    def noted(*arguments: Any, **options: Any) -> Any:
        drawn.append(draw(*arguments, **options))
        return drawn[-1]

    monkeypatch.setattr(torch, "rand", noted)
    for number in range(3):
        model.evaluate(text.batch(0), "random")
        model.step(text.batch(number), "random")
    evaluations, steps = drawn[::2], drawn[1::2]
    assert all(torch.equal(each, evaluations[0]) for each in evaluations)
    assert not any(torch.equal(a, b) for place, a in enumerate(steps) for b in steps[:place])


def clear_batch(model_torch: Any, network: Any, text: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A batch for which each query's selection is clear: the last score that is in well above the next one.

    Frameworks round differently, and what is selected where two scores are as good as equal is luck.
    """
    import torch

    from cupymla.interop import torch as mla

    gaps: list[float] = []
    select = model_torch.indexed

    def noted(q: Any, k: Any, weights: Any, count: int) -> Any:
        best = mla.indexer_logits(q, k, weights, causal=True).topk(count + 1).values
        known = best[best[..., -1] > -torch.inf]
        gaps.append(float((known[:, -2] - known[:, -1]).min() / known.std()))
        return select(q, k, weights, count)

    with monkeypatch.context() as patched:
        patched.setattr(model_torch, "indexed", noted)
        for number in range(200):
            batch = text.batch(number)
            gaps.clear()
            network(torch.from_numpy(batch), model_torch.loss_weights(network.setting, "cpu"), "indexer")
            if min(gaps) > 2**-8:
                return batch
    raise AssertionError("no selection is clear")


@pytest.mark.parametrize("kind", ["dense", "indexer"])
def test_both_models_compute_the_same(dsa: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal parameters: the loss, the KL loss of every layer, and the gradient of every parameter."""
    import torch

    jax = pytest.importorskip("jax")
    model_jax = import_module("dsa.model_jax")
    model_torch, setting = dsa
    size = dataclasses.replace(setting.SETTINGS["test"], layers=2, batch=1)

    def named(tree: Any, name: str) -> Any:
        for part in name.split("."):
            tree = tree[int(part) if part.isdigit() else part]
        return np.array(tree)

    on_cpu = jax.default_device(jax.devices("cpu")[0])
    with on_cpu:
        params = model_jax.initial(size, 0)
    network = model_torch.Transformer(size)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(torch.from_numpy(named(params, name)))
        batch = clear_batch(model_torch, network, setting.Text(size), monkeypatch)
    with on_cpu:
        graded = jax.jit(jax.grad(model_jax.losses, (0, 1), has_aux=True), static_argnums=(3, 4))
        weights = model_jax.loss_weights(size)
        (grads, kl), parts = graded(params, weights, batch, size, kind, jax.random.key(0))
    weights = model_torch.loss_weights(size, "cpu")
    total, other = network(torch.from_numpy(batch), weights, kind)
    total.backward()
    assert float(other["loss"].detach()) == pytest.approx(float(parts["loss"]), rel=1e-3)
    np.testing.assert_allclose(weights.grad, kl, rtol=0, atol=2**-6 * float(kl.max()))
    for name, parameter in network.named_parameters():
        wanted = named(grads, name)
        # Queries, tokens and outputs are rounded to bfloat16 on the way.
        np.testing.assert_allclose(parameter.grad, wanted, rtol=0, atol=2**-6 * np.abs(wanted).max(), err_msg=name)
