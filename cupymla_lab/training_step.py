"""What a training step of one DSA layer takes: selection, attention, its backward, and the indexer's loss and backward.

    python -m cupymla_lab training-step --out docs/benchmarks

Writes <out>/<gpu>/training_step.json and .png: times, each operator's share, tokens per second, and the memory that a
step holds beside its inputs and results. Queries see all tokens up to their own, of which the indexer selects 2048.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cupymla.bench import machine, report, timing
from cupymla.bench.timing import Timer
from cupymla.cli.terminal import exit_with

D_QK, D_V, INDEX_HEADS, D_INDEX = 576, 512, 64, 128

COLORS = {
    "indexer_topk": "#4477aa",
    "sparse_mla_fwd": "#228833",
    "sparse_mla_bwd": "#cc6677",
    "indexer_loss": "#ddaa33",
    "indexer_bwd": "#882255",
}
"""The operators in their order, and the colours of their parts of a bar."""

RESULTS = ("out", "dq", "dkv", "loss", "d_index_q", "d_index_k", "d_weights")
"""What a step leaves; the rest is for nobody after it."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step: query heads, tokens, and the tokens that a query selects."""

    heads: int
    tokens: int
    topk: int = 2048

    @property
    def name(self) -> str:
        """As its row is called."""
        return f"h{self.heads}_t{self.tokens}_k{self.topk}_index{INDEX_HEADS}"


CASES = tuple(Step(heads, tokens) for tokens in (8192, 65536) for heads in (128, 64, 16))


@dataclass(frozen=True, slots=True)
class StepRow:
    """One measured step.

    Attributes:
        case: its name.
        operator_us: each operator alone, as measured, in microseconds.
        step_us: all of them, one behind the other.
        tokens_per_second: query tokens.
        working_bytes: the most that a step holds beside its inputs and results.
        input_bytes, result_bytes: of these.
    """

    case: str
    operator_us: dict[str, float]
    step_us: float
    tokens_per_second: float
    working_bytes: int
    input_bytes: int
    result_bytes: int


Arrays = dict[str, Any]

ROWS_AT_A_TIME = 1024


def arrays(step: Step, xp: Any, seed: int = 0) -> Arrays:
    """Random inputs of a step: normal queries and keys, bf16, and weights that are positive, float32."""
    import ml_dtypes

    rng = xp.random.default_rng(seed)

    def normal(*shape: int) -> Any:
        # By bits, rounded half up: CuPy knows no bfloat16. A few rows at a time, for they are twice as large before.
        bits = xp.empty(shape, xp.uint16)
        for first in range(0, shape[0], ROWS_AT_A_TIME):
            rows = bits[first : first + ROWS_AT_A_TIME]
            wide = rng.standard_normal(rows.shape, dtype=xp.float32).view(xp.uint32)
            rows[...] = ((wide + xp.uint32(1 << 15)) >> 16).astype(xp.uint16)
        return bits.view(ml_dtypes.bfloat16)

    return {
        "q": normal(step.tokens, step.heads, D_QK),
        "kv": normal(step.tokens, D_QK),
        "dout": normal(step.tokens, step.heads, D_V),
        "index_q": normal(step.tokens, INDEX_HEADS, D_INDEX),
        "index_k": normal(step.tokens, D_INDEX),
        "weights": xp.abs(rng.standard_normal((step.tokens, INDEX_HEADS), dtype=xp.float32)) / INDEX_HEADS,
    }


def operators(
    step: Step, given: Arrays, xp: Any
) -> Mapping[str, tuple[Callable[[], Arrays], Callable[[Sequence[Any]], None]]]:
    """For each operator, in order: its arguments, made of `given`, and a function that adds its results to `given`."""
    index = ("index_q", "index_k", "weights")

    def indexer() -> Arrays:
        return dict(zip(("q", "k", "weights"), (given[name] for name in index), strict=True))

    def chosen() -> Arrays:
        return {"indices": given["indices"], "topk_length": given["count"]}

    def attention() -> Arrays:
        return {"q": given["q"], "kv": given["kv"], "sm_scale": math.sqrt(1 / D_QK), **chosen()}

    def backward() -> Arrays:
        dist = xp.empty((step.tokens, step.topk), xp.float32)
        return {**attention(), **{name: given[name] for name in ("out", "dout", "lse")}, "attn_dist": dist}

    def keeps(*names: str) -> Callable[[Sequence[Any]], None]:
        return lambda results: given.update(zip(names, results, strict=True))

    return {
        "indexer_topk": (lambda: {**indexer(), "topk": step.topk, "causal": True}, keeps("indices", "count")),
        "sparse_mla_fwd": (attention, keeps("out", "max_logits", "lse")),
        "sparse_mla_bwd": (backward, keeps("dq", "dkv", "attn_dist")),
        "indexer_loss": (
            lambda: {**indexer(), **chosen(), "target": given["attn_dist"]},
            keeps("loss", "grad_logits"),
        ),
        "indexer_bwd": (
            lambda: {**indexer(), **chosen(), "grad_logits": given["grad_logits"]},
            keeps("d_index_q", "d_index_k", "d_weights"),
        ),
    }


def run(step: Step, given: Arrays, xp: Any) -> Arrays:
    """One step by ordinary calls: `given` with all that they return."""
    import cupymla

    for name, (arguments, keep) in operators(step, given, xp).items():
        keep(results_of(getattr(cupymla, name), arguments()))
    return given


def results_of(operator: Callable[..., Any], arguments: Arrays) -> tuple[Any, ...]:
    """What a call returns, and behind it the distribution that it was given a place for."""
    returned = tuple(operator(**arguments))
    dist = arguments.get("attn_dist")
    return returned if dist is None or any(array is dist for array in returned) else (*returned, dist)


def peak_bytes(step: Callable[[], object]) -> int:
    """The most bytes of CuPy's pool that a call holds at a time, beside what was held before."""
    import cupy

    class Watch(cupy.cuda.MemoryHook):  # type: ignore[misc]
        name = "peak"

        def __init__(self) -> None:
            self.held: dict[int, int] = {}
            self.most = 0

        def malloc_postprocess(self, **of: Any) -> None:
            self.held[of["pmem_id"]] = of["mem_size"]
            self.most = max(self.most, sum(self.held.values()))

        def free_postprocess(self, **of: Any) -> None:
            self.held.pop(of["pmem_id"], None)

    with Watch() as watch:
        step()
    cupy.cuda.get_current_stream().synchronize()
    return int(watch.most)


def measure(step: Step, timer: Timer) -> StepRow:
    """Time a step on the current device."""
    import cupy

    import cupymla

    inputs = arrays(step, cupy)
    made = run(step, dict(inputs), cupy)
    result_bytes = sum(made[name].nbytes for name in RESULTS)
    calls = {
        name: getattr(cupymla, name).prepare(**arguments())
        for name, (arguments, _) in operators(step, made, cupy).items()
    }
    operator_us = {name: round(timer.us(call), 2) for name, call in calls.items()}
    step_us = timer.us(lambda: [call() for call in calls.values()])
    made.clear()
    calls.clear()
    cupy.get_default_memory_pool().free_all_blocks()
    most = peak_bytes(lambda: run(step, dict(inputs), cupy))
    input_bytes = sum(array.nbytes for array in inputs.values())
    per_second = round(step.tokens / step_us * 1e6, 1)
    return StepRow(
        step.name, operator_us, round(step_us, 2), per_second, most - result_bytes, input_bytes, result_bytes
    )


def draw(rows: Sequence[StepRow], title: str, file: Path) -> None:
    """One bar a step, of its operators' shares; time, tokens a second and memory beside it. Needs matplotlib."""
    from matplotlib import pyplot

    names, size = [row.case for row in rows], report.LABEL_SIZE
    figure, (axes,) = report.panels(names, 1, 10.0)
    for place, row in enumerate(rows):
        left, whole = 0.0, sum(row.operator_us.values())
        for name, color in COLORS.items():
            share = 100 * row.operator_us[name] / whole
            axes.barh(place, share, left=left, color=color, height=0.7, label=name if place == 0 else None)
            if share >= 4:
                middle = left + share / 2
                axes.text(middle, place, f"{share:.0f}%", ha="center", va="center", fontsize=size, color="#ffffff")
            left += share
        told = (
            f"{row.step_us / 1e3:.1f} ms, {row.tokens_per_second / 1e3:.0f}k tokens/s, {row.working_bytes / 1e9:.2f} GB"
        )
        axes.text(101, place, told, va="center", fontsize=size)
    report.frame(axes, len(rows), 0, 100)
    axes.set_yticks(range(len(rows)), names, fontsize=size)
    axes.set_xlabel("share of the operators' time, percent; memory beside inputs and results", fontsize=size + 1)
    figure.legend(loc="outside lower center", ncols=len(COLORS), fontsize=size, frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; 2 without a GPU."""
    from cupymla import driver

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder of benchmark files")
    parser.add_argument("--commit", help="the commit to record (default: ask git)")
    options = parser.parse_args(arguments)
    if not driver.available():
        print("a training step is timed on a CUDA GPU, and there is none", file=sys.stderr)
        return 2
    timer = Timer()
    limits = timing.ceilings(timer)
    rows: list[StepRow] = []
    for case in CASES:
        rows.append(measure(case, timer))
        print(rows[-1], flush=True)
        if options.out:
            content = {"ceilings": limits.as_dict(), "rows": [asdict(found) for found in rows]}
            found = machine.provenance(options.commit)
            file = report.write(options.out, "training_step", {**found, **content})
            draw(rows, f"training step of a DSA layer on {found['gpu']}, {found['date']}", file.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    exit_with(main)
