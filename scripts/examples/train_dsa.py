"""Trains a small language model with DeepSeek sparse attention on the Python standard library's sources.

A byte-level transformer with multi-head latent attention learns with dense attention for a while, and its lightning
indexer learns to imitate that attention. Then training goes on three ways from the same point: dense as before; sparse,
each query attending to the tokens that the indexer selects; and sparse with a random selection, for comparison. cupymla
computes the indexer's selection, the sparse attention, its gradient, and the attention distribution that the indexer
learns from. The scores that the indexer learns by are the framework's own.

    python scripts/examples/train_dsa.py --framework jax --size toy --device cpu --out /tmp/dsa

writes loss.png, recall.png and curves.json. `--size full` is for a GPU: two minutes of an H200 in JAX
(docs/benchmarks/h200/train_dsa_jax), 197 seconds in torch (train_dsa_torch beside it). Both runs are of a version
before `indexer_topk`: the framework selected, from float32 scores. No GPU has run this version.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from dsa.needs import missing_on_gpu, missing_packages, seed_of
from dsa.setting import SETTINGS, Setting, Text

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cupymla.bench import machine
from cupymla.cli.terminal import Terminal

KINDS = ("dense", "indexer", "random")
NEEDED = ("indexer_topk", "sparse_mla_fwd", "sparse_mla_bwd", "attn_dist")


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--framework", choices=("jax", "torch"), default="jax")
    parser.add_argument("--size", choices=tuple(SETTINGS), default="toy")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=Path("dsa"), help="folder for the curves")
    parser.add_argument("--commit", metavar="HASH", help="the commit to record (default: ask git)")
    parser.add_argument("--seed", type=seed_of, default=0)
    return parser.parse_args()


class Run:
    """One training, with the curves that it leaves."""

    def __init__(self, setting: Setting, model: Any, text: Text, step: Any) -> None:
        self._setting, self._text, self._say = setting, text, step
        self._held_out = text.held_out()
        self.model = model
        self.curves: dict[str, list[tuple[int, float, float]]] = {}

    def train(self, name: str, kind: str, model: Any, first: int, steps: int) -> None:
        """Let a model learn, and note (step, held-out loss, recall) along the way under `name`."""
        curve = self.curves.setdefault(name, [])
        for number in range(first, first + steps + 1):
            if (number - first) % self._setting.eval_every == 0 or number == first + steps:
                found = [model.evaluate(batch, kind) for batch in self._held_out]
                loss, recall = (sum(f[n] for f in found) / len(found) for n in ("loss", "recall"))
                curve.append((number, loss, recall))
            if number < first + steps:
                parts = model.step(self._text.batch(number), kind)
                self._say(f"{name} {number}: loss {parts['loss']:.3f}, indexer {parts['kl']:.3f}")


def draw(curves: dict[str, list[tuple[int, float, float]]], column: int, label: str, file: Path) -> None:
    """One curve for each training, as PNG: all of them, and on the right those that the warm-up ends in, larger."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    whole, end = figure.subplots(1, 2)
    for number, (name, rows) in enumerate(curves.items()):
        for axes in (whole, end) if name in KINDS else (whole,):
            axes.plot([r[0] for r in rows], [r[column] for r in rows], marker=".", color=f"C{number}", label=name)
    for axes in (whole, end):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    whole.set_ylabel(label)
    whole.legend()
    figure.savefig(file, dpi=150)


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
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as refused:
        print(f"cannot write to {options.out}: {refused.strerror}", file=sys.stderr)
        return 2
    build = import_module(f"dsa.model_{options.framework}").Model
    begun = time.perf_counter()
    total = setting.warm_steps + len(KINDS) * setting.sparse_steps
    with terminal.progress("step", total) as step:
        run = Run(setting, build(setting, options.device, options.seed), Text(setting, options.seed), step)
        run.train("warm-up, dense", "dense", run.model, 0, setting.warm_steps)
        for kind in KINDS:
            run.train(kind, kind, run.model.copy(), setting.warm_steps, setting.sparse_steps)
    seconds = time.perf_counter() - begun
    ends = {name: {"loss": rows[-1][1], "recall": rows[-1][2]} for name, rows in run.curves.items()}
    ran = {"framework": options.framework, "size": options.size, "device": options.device, "seconds": seconds}
    content = {"commit": options.commit or machine.commit(), **ran}
    (options.out / "curves.json").write_text(
        json.dumps({**content, "ends": ends, "curves": run.curves}, indent=2), encoding="utf-8"
    )
    draw(run.curves, 1, "held-out loss, nats per byte", options.out / "loss.png")
    draw(run.curves, 2, f"share of the {setting.topk} most attended tokens selected", options.out / "recall.png")
    rows = [(name, f"{end['loss']:.3f}", f"{end['recall']:.1%}") for name, end in ends.items()]
    terminal.table(f"{options.framework}, {seconds:.0f} s", ("attention", "held-out loss", "indexer recall"), rows)
    terminal.line(f"wrote {options.out}/loss.png, recall.png and curves.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
