"""Trains a small language model with DeepSeek sparse attention on the Python standard library's sources.

A byte-level transformer with multi-head latent attention learns with dense attention for a while, and its lightning
indexer learns to imitate that attention. Then training goes on three ways from the same point: dense as before; sparse,
each query attending to the tokens that the indexer selects; and sparse with a random selection, for comparison.
`indexer_loss_dense` is the indexer's loss beside dense attention. `indexer_topk` selects, and `dsa_attention` is the
sparse step: attention, its gradients, and those of the indexer's KL loss, by one pass of each kernel. Dense attention
itself is plain framework code.

    python scripts/examples/train_dsa.py --framework jax --size toy --device cpu --out /tmp/dsa

writes loss.png, overlap.png and curves.json, and ends with 1 where the model or its indexer has not learned. Stopped,
it goes on from the last evaluation when it is started again, by checkpoint.npz in the same folder. `--size full` is for
a GPU: it takes 96 s of an H200 in JAX and 109 s in torch (docs/benchmarks/h200/train_dsa_jax, train_dsa_torch).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

# NumPy and torch read it when they are imported. A small model's products are too small to share: on two cores two
# threads take 73 s for the toy size in torch, one takes 35 s (2026-11-30). Where other programs have the cores as well,
# each wait of threads for each other is a scheduler's time slice: 2.5 s a step in place of 0.12 s.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from dsa.needs import missing_on_gpu, missing_packages, seed_of
from dsa.record import Checkpoint, OtherRunError, Progress, Row, draw
from dsa.setting import SETTINGS, Setting, Text

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cupymla.bench import machine
from cupymla.cli.terminal import Terminal, exit_with

WARM_UP = "warm-up, dense"
FRAMEWORKS = ("jax", "torch")
KINDS = ("dense", "indexer", "random")
TELLING = 100
"""Steps of the warm-up after which the indexer's selection is told from chance."""
NEEDED = (
    *("indexer_loss_dense", "indexer_topk"),
    *("sparse_mla_fwd", "sparse_mla_bwd", "indexer_loss", "indexer_bwd"),
)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--framework", choices=FRAMEWORKS, default="jax")
    parser.add_argument("--size", choices=tuple(SETTINGS), default="toy")
    parser.add_argument("--steps", type=steps_of, help="of the warm-up, and of each training after it; by the size")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=Path("dsa"), help="folder for the curves and the checkpoint")
    parser.add_argument("--commit", metavar="HASH", help="the commit to record (default: ask git)")
    parser.add_argument("--seed", type=seed_of, default=0)
    return parser.parse_args()


def steps_of(text: str) -> int:
    """A number of steps. Raises ArgumentTypeError."""
    if not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text}")
    return int(text)


@dataclasses.dataclass(frozen=True)
class Part:
    """A training: its name, its kind of attention, its first step, and how many it has."""

    name: str
    kind: str
    first: int
    steps: int

    @property
    def end(self) -> int:
        """The step after its last."""
        return self.first + self.steps


def parts_of(setting: Setting) -> tuple[Part, ...]:
    """What is trained, in order."""
    warm = Part(WARM_UP, "dense", 0, setting.warm_steps)
    return warm, *(Part(kind, kind, warm.end, setting.sparse_steps) for kind in KINDS)


class Run:
    """A run, from where its progress says."""

    def __init__(self, setting: Setting, model: Any, text: Text, progress: Progress, checkpoint: Checkpoint) -> None:
        self._setting, self._text, self._checkpoint = setting, text, checkpoint
        self._held_out = text.held_out()
        self._model, self.progress = model, progress
        self._begun = time.perf_counter() - progress.seconds

    def remaining(self) -> int:
        """Steps that are left."""
        parts = parts_of(self._setting)[self.progress.part :]
        return sum(part.end - part.first for part in parts) - (self.progress.step - parts[0].first)

    def train(self, say: Any) -> None:
        """Train what is left, evaluating and saving along the way."""
        parts = parts_of(self._setting)
        # A step's losses are read once the next one is on its way: a GPU never waits for what is printed.
        begun: list[tuple[str, dict[str, Any]]] = []

        def tell() -> None:
            name, found = begun.pop(0)
            say(f"{name}: loss {float(found['loss']):.3f}, indexer {float(found['kl']):.3f}")

        for number in range(self.progress.part, len(parts)):
            part = parts[number]
            if self.progress.part != number:
                self.progress.part, self.progress.step, self.progress.state = number, part.first, self.progress.warm
            if self.progress.state is not None:
                self._model.load(self.progress.state)
            for step in range(self.progress.step, part.end + 1):
                if (step - part.first) % self._setting.eval_every == 0 or step == part.end:
                    self._evaluate(part, step)
                if step < part.end:
                    begun.append((f"{part.name} {step}", self._model.step(self._text.batch(step), part.kind)))
                    if len(begun) == 2:
                        tell()
        if begun:
            tell()

    def _evaluate(self, part: Part, step: int) -> None:
        """Note the step, the held-out loss and the overlap, and save; not once more where a run goes on."""
        progress = self.progress
        curve = progress.curves.setdefault(part.name, [])
        if curve and curve[-1][0] == step:
            return
        found = [self._model.evaluate(batch, part.kind) for batch in self._held_out]
        loss, overlap = (sum(float(each[n]) for each in found) / len(found) for n in ("loss", "overlap"))
        curve.append((step, loss, overlap))
        progress.step, progress.state = step, self._model.state()
        progress.seconds = time.perf_counter() - self._begun
        is_warm = part.name == WARM_UP and step == part.end
        progress.warm = progress.state if is_warm else progress.warm
        self._checkpoint.save(progress, is_warm)


def main() -> int:
    """Train, draw, summarise."""
    options = parsed()
    terminal = Terminal(False)
    # Asked before anything is computed: the curves are drawn last.
    lacking = missing_packages(options.framework, "matplotlib")
    if lacking:
        print("cannot train here, for want of " + ", ".join(lacking), file=sys.stderr)
        return 2
    if options.device == "cuda":
        lacking = missing_on_gpu(options.framework, NEEDED)
        if lacking:
            print("cannot train here, for want of " + ", ".join(lacking) + "; --device cpu can", file=sys.stderr)
            return 2
    setting = SETTINGS[options.size]
    if options.steps is not None:
        setting = dataclasses.replace(setting, warm_steps=options.steps, sparse_steps=options.steps)
    identity = {name: getattr(options, name) for name in ("framework", "size", "steps", "device", "seed")}
    checkpoint = Checkpoint(options.out)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        progress = checkpoint.load(identity)
    except OSError as refused:
        print(f"cannot write to {options.out}: {refused.strerror}", file=sys.stderr)
        return 2
    except OtherRunError as refused:
        print(refused, file=sys.stderr)
        return 2
    if progress.curves:
        terminal.line(f"going on from {checkpoint.file}")
    build = import_module(f"dsa.model_{options.framework}").Model
    model, text = build(setting, options.device, options.seed), Text(setting, options.seed)
    run = Run(setting, model, text, progress, checkpoint)
    with terminal.progress("step", run.remaining()) as step:
        run.train(step)
    summarise(terminal, options, setting, run.progress)
    checkpoint.remove()
    wrong = not_learned(run.progress.curves, setting.warm_steps)
    for each in wrong:
        print(each, file=sys.stderr)
    if not wrong and setting.warm_steps >= TELLING:
        terminal.line("the indexer has learned: it selects more than chance of what dense attention attends to")
    return 1 if wrong else 0


def not_learned(curves: dict[str, list[Row]], warm_steps: int) -> list[str]:
    """What these curves have that those of a model and an indexer that learn do not, in words."""
    if not all(map(math.isfinite, (number for rows in curves.values() for row in rows for number in row))):
        return ["a loss or an overlap is not finite"]
    found = []
    if not curves[WARM_UP][-1][1] < curves[WARM_UP][0][1]:
        found.append("the held-out loss did not fall in the warm-up")
    (_, _, selected), (_, _, chance) = (curves[kind][0] for kind in ("indexer", "random"))
    if warm_steps >= TELLING and not selected > 1.5 * chance:
        found.append(f"after the warm-up the indexer's selection has {selected:.1%}, a random one {chance:.1%}")
    return found


def summarise(terminal: Terminal, options: argparse.Namespace, setting: Setting, progress: Progress) -> None:
    """Write the curves and their plots, and print how they end."""
    curves, seconds = progress.curves, progress.seconds
    ends = {name: {"loss": rows[-1][1], "overlap": rows[-1][2]} for name, rows in curves.items()}
    ran = {"commit": options.commit or machine.commit(), **progress.identity, "seconds": seconds}
    content = {**ran, "ends": ends, "curves": curves}
    (options.out / "curves.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    title = f"{options.framework}, size {options.size}, {options.device}: top {setting.topk} of {setting.length} tokens"
    overlap = f"overlap with dense attention's top {setting.topk}"
    draw(curves, 1, "held-out loss (nats per byte)", title, options.out / "loss.png")
    draw(curves, 2, overlap, title, options.out / "overlap.png")
    rows = [(name, f"{end['loss']:.3f}", f"{end['overlap']:.1%}") for name, end in ends.items()]
    terminal.table(f"{options.framework}, {seconds:.0f} s", ("attention", "held-out loss", overlap), rows)
    terminal.line(f"wrote {options.out}/loss.png, overlap.png and curves.json")


if __name__ == "__main__":
    exit_with(main)
