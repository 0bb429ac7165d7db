"""Decodes with DeepSeek sparse attention from paged caches, and compares every token with a dense loop in float64.

A step projects the newest token of each request, writes its key into the cache of latents and into the indexer's,
selects tokens with `paged_indexer_topk`, attends to them with `sparse_mla_decode`, and takes the likeliest next token.
In CuPy a step is one CUDA graph of prepared calls. In JAX all steps are one `lax.scan`, to which caches are donated.

    python scripts/examples/decode_dsa.py                               NumPy references, small, within a minute
    python scripts/examples/decode_dsa.py --device cuda                 CuPy on a GPU, at the sizes of both models
    python scripts/examples/decode_dsa.py --device cuda --framework jax

The models are V3.2, with a cache of 656 bytes a token, and V4, with one of 584 and a window of the newest tokens beside
what the indexer selects. V4's compressor is left out. Weights are made so that the model continues its prompt's cycle:
what it decodes is known, and a wrong slot or length shows. docs/decode_loop.md explains the arrays. An H100 has run it.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from decode.dense import decoded
from decode.setting import SHAPES, SIZES, Prompts, Shape, Size, Weights, shape_of, weights_of
from dsa.needs import missing_on_gpu, missing_packages, seed_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cupymla.cli.terminal import Terminal

NEEDED = (
    "quantize_fp8",
    "concat_and_cache_mla",
    "indexer_k_quant_and_cache",
    "paged_indexer_topk",
    "sparse_mla_decode",
)
MOST_OFF = 2.0**-4
"""How far logits may be off: no channel of a cache is rounded by a larger share of it."""

FRAMEWORKS = ("cupy", "jax")
TIMES = ("step", "project", "write", "select", "attend", "next token")


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--framework", choices=FRAMEWORKS, default="cupy")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=tuple(SHAPES), action="append", help="this one; repeatable (default: all)")
    parser.add_argument("--size", choices=tuple(SIZES), help="default: small on a CPU, full on a GPU")
    parser.add_argument("--out", type=Path, help="folder for the times, such as docs/benchmarks")
    parser.add_argument("--commit", metavar="HASH", help="the commit to record (default: ask git)")
    parser.add_argument("--seed", type=seed_of, default=0)
    return parser.parse_args()


class Reference:
    """What float64 decodes, of the requests that a size names; requests are the same in every batch."""

    def __init__(self, shape: Shape, weights: Weights, size: Size, seed: int) -> None:
        prompts = Prompts(size, size.checked, seed)
        self._found = [decoded(shape, weights, prompts, number, size.steps) for number in range(size.checked)]

    def judged(self, prompts: Prompts, tokens: Any, logits: Any) -> tuple[int, float]:
        """How many tokens [steps, B] are right, and how far the first step's logits [B, vocabulary] are off.

        That is the largest difference of a request's logits, as a share of the largest of them. Of the requests that
        float64 did not decode, tokens are right where they continue the prompt's cycle.
        """
        wanted, off = prompts.continued(), 0.0
        for number, (column, first) in enumerate(self._found[: prompts.batch]):
            wanted[:, number] = column
            off = max(off, float(abs(logits[number] - first).max() / abs(first).max()))
        return int((tokens == wanted).sum()), off


def rows_of(name: str, options: argparse.Namespace, step: Any) -> list[dict[str, Any]]:
    """A row for each batch of a model."""
    size, shape = SIZES[options.size], shape_of(name, options.size)
    weights = weights_of(shape, options.seed)
    reference = Reference(shape, weights, size, options.seed)
    step(f"{name}, float64")
    decode = import_module(f"decode.loop_{options.framework}").decode
    rows = []
    for batch in size.batches:
        prompts = Prompts(size, batch, options.seed)
        tokens, logits, times = decode(shape, weights, prompts, size.steps, options.device == "cuda")
        right, off = reference.judged(prompts, tokens, logits)
        us = {part: round(value, 2) for part, value in times.items()}
        row = {"model": name, "batch": batch, "context": size.context, "tokens": tokens.size, "right": right}
        rows.append({**row, "logits_off": float(f"{off:.2g}"), "us": us})
        step(f"{name}, batch {batch}")
    return rows


def main() -> int:
    """Decode, compare, and show what a step takes."""
    options = parsed()
    terminal = Terminal(False)
    on_gpu = options.device == "cuda"
    if options.out is not None and not on_gpu:
        print("--out takes times, and none are taken on a CPU: leave it out, or add --device cuda", file=sys.stderr)
        return 2
    options.size = options.size or ("full" if on_gpu else "small")
    lacking = missing_packages(*(() if options.framework == "cupy" and not on_gpu else (options.framework,)))
    if on_gpu and not lacking:
        lacking = missing_on_gpu(options.framework, NEEDED)
    if lacking:
        print(f"cannot decode here, for want of {', '.join(lacking)}; --device cpu can", file=sys.stderr)
        return 2
    if not on_gpu:
        terminal.line("On a CPU: NumPy references of the operators, few heads, nothing timed.")
    names = options.model or list(SHAPES)
    total = sum(1 + len(SIZES[options.size].batches) for _ in names)
    with terminal.progress("decoded", total) as step:
        rows = [row for name in names for row in rows_of(name, options, step)]
    timed = [part for part in TIMES if all(part in row["us"] for row in rows)]
    columns = ("model", "batch", "context", "tokens right", "logits off by", *(f"{part}, us" for part in timed))
    cells = [
        (
            row["model"],
            row["batch"],
            row["context"],
            f"{row['right']} of {row['tokens']}",
            f"{row['logits_off']:.1%}",
            *(f"{row['us'][part]:.1f}" for part in timed),
        )
        for row in rows
    ]
    where = f"{options.framework} on a GPU" if on_gpu else "NumPy" if options.framework == "cupy" else "JAX on a CPU"
    terminal.table(f"{where}, {SIZES[options.size].steps} steps", columns, cells)
    if options.out is not None:
        from cupymla.bench import machine, report

        content = {**machine.provenance(options.commit), "framework": options.framework, "rows": rows}
        terminal.line(f"wrote {report.write(options.out, f'decode_dsa_{options.framework}', content)}")
    wrong = [row for row in rows if row["right"] != row["tokens"] or not row["logits_off"] <= MOST_OFF]
    for row in wrong:
        print(f"{row['model']}, batch {row['batch']}: not what float64 decodes", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
