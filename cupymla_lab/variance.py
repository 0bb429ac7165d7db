"""Run-to-run variance: how far results of sparse_mla_bwd differ from run to run, and whether deterministic ones do not.

    python -m cupymla_lab variance --out docs/benchmarks

Writes <out>/<gpu>/variance.json. By default dkv is summed by atomics, in an order that other work on the GPU decides
too, so there is some beside the runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cupymla.bench import machine, report
from cupymla.cli.terminal import exit_with
from cupymla.ops.mla_cases import MlaCase, sized

from .subjects import Subject

CASES: tuple[tuple[MlaCase, int], ...] = (
    *((sized(h, 576, 2048, 256, 8192, sink="finite"), 100) for h in (128, 64, 16)),
    *((sized(h, 576, 2048, 256, 8192, "_det", sink="finite", deterministic=True), 1000) for h in (128, 64, 16)),
)
"""With how many runs of each; three kernels, each the usual way and deterministic."""


@dataclass(frozen=True, slots=True)
class VarianceRow:
    """A result of one case.

    Attributes:
        case: its name.
        deterministic: whether it was asked to be.
        result: which one.
        runs: how many.
        differing: the share of its elements that were not the same in all of them.
        largest_difference: the largest difference between two runs of an element, over the root mean square of all
            elements.
    """

    case: str
    deterministic: bool
    result: str
    runs: int
    differing: float
    largest_difference: float


def rows(xp: Any, name: str, deterministic: bool, results: Sequence[str], run: Callable[[], Any], runs: int) -> Any:
    """A row for each result of a call that is run so often; `xp` is the arrays' module."""
    least: list[Any] = []
    most: list[Any] = []
    for _ in range(runs):
        values = [value.astype(xp.float32) for value in run()]
        least = [xp.minimum(a, b) for a, b in zip(least, values, strict=True)] if least else values
        most = [xp.maximum(a, b) for a, b in zip(most, values, strict=True)] if most else values
    for result, low, high in zip(results, least, most, strict=True):
        scale = float(xp.sqrt(xp.mean(xp.square(high)))) or 1.0
        differing = float(xp.mean((low != high).astype(xp.float32)))
        yield VarianceRow(name, deterministic, result, runs, differing, float(xp.max(high - low)) / scale)


def measure(case: MlaCase, runs: int) -> list[VarianceRow]:
    """The rows of a case on this GPU, with other work on it at the same time."""
    import cupy

    subject = Subject("sparse_mla_bwd")
    prepared = subject.call.prepare(**subject.cases.inputs(case, 0, cupy))
    noise, busy = cupy.cuda.Stream(non_blocking=True), cupy.ones((2048, 2048), cupy.float32)

    def run() -> Any:
        with noise:
            cupy.matmul(busy, busy)
        return prepared()

    found = list(rows(cupy, case.name, bool(case.options.get("deterministic")), subject.outputs, run, runs))
    cupy.get_default_memory_pool().free_all_blocks()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; 1 where a deterministic result differs, 2 without a GPU."""
    from cupymla import driver

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder of benchmark files")
    parser.add_argument("--commit", help="the commit to record (default: ask git)")
    options = parser.parse_args(arguments)
    if not driver.available():
        print("runs are compared on a CUDA GPU, and there is none", file=sys.stderr)
        return 2
    found: list[VarianceRow] = []
    for case, runs in CASES:
        found += measure(case, runs)
        print(*found[-3:], sep="\n", flush=True)
    if options.out:
        content = {**machine.provenance(options.commit), "rows": [asdict(row) for row in found]}
        report.write(options.out, "variance", content)
    return int(any(row.deterministic and row.largest_difference != 0 for row in found))


if __name__ == "__main__":
    exit_with(main)
