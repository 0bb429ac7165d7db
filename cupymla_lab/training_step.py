"""What a training step of sparse attention takes: forward, then backward with the attention distribution.

    python -m cupymla_lab training-step --out docs/benchmarks

Writes <out>/<gpu>/training_step.json: times, tokens per second, and the most memory that a step holds beside its
inputs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cupymla.bench import machine, report, timing
from cupymla.bench.timing import Ceilings, Timer
from cupymla.cli.terminal import exit_with
from cupymla.ops.mla_cases import MlaCase, sized

from .subjects import Subject

CASES: tuple[MlaCase, ...] = tuple(
    sized(h, 576, 2048, 8192, kv, wants_dist=True) for h in (128, 64) for kv in (8192, 65536)
)


@dataclass(frozen=True, slots=True)
class StepRow:
    """One measured step.

    Attributes:
        case: its name.
        forward_us: the forward alone, as measured, in microseconds.
        backward_us: the backward with the distribution alone, likewise.
        step_us: both, one behind the other.
        tokens_per_second: query tokens.
        of_ceiling: operations of both per time less the empty kernel's, as a share of the bf16 matrix rate.
        peak_bytes: the most that a step holds beside its inputs: outputs, gradients and workspaces.
        input_bytes: q, kv, indices and dout.
    """

    case: str
    forward_us: float
    backward_us: float
    step_us: float
    tokens_per_second: float
    of_ceiling: float
    peak_bytes: int
    input_bytes: int


def row(
    case: MlaCase, us: tuple[float, float, float], ceilings: Ceilings, peak_bytes: int, input_bytes: int
) -> StepRow:
    """Measured times (forward, backward, both) as a row."""
    flops = sum(Subject(name).cases.flops(case) for name in ("sparse_mla_fwd", "sparse_mla_bwd"))
    forward_us, backward_us, step_us = us
    busy_us = max(step_us - ceilings.empty_us, 1e-3)
    return StepRow(
        case.name,
        round(forward_us, 2),
        round(backward_us, 2),
        round(step_us, 2),
        tokens_per_second=round(case.queries / step_us * 1e6, 1),
        of_ceiling=round(flops / busy_us / 1e6 / ceilings.cublas_bf16_tflops, 4),
        peak_bytes=peak_bytes,
        input_bytes=input_bytes,
    )


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


def measure(case: MlaCase, timer: Timer, ceilings: Ceilings) -> StepRow:
    """Time a step of the case on the current device."""
    import cupy

    forward, backward = (Subject(name).call for name in ("sparse_mla_fwd", "sparse_mla_bwd"))
    given = Subject("sparse_mla_bwd").cases.inputs(case, 0, cupy)
    shared = {name: given[name] for name in ("q", "kv", "indices")}
    dout = given["dout"]

    def step() -> object:
        out, _, lse = forward(**shared)
        dist = cupy.empty((case.s_q, case.topk), cupy.float32)
        return backward(**shared, out=out, dout=dout, lse=lse, attn_dist=dist), dist

    step()
    most = peak_bytes(step)
    out, _, lse = forward(**shared)
    dist = cupy.empty((case.s_q, case.topk), cupy.float32)
    first = forward.prepare(**shared)
    second = backward.prepare(**shared, out=out, dout=dout, lse=lse, attn_dist=dist)
    us = timer.us(first), timer.us(second), timer.us(lambda: (first(), second()))
    cupy.get_default_memory_pool().free_all_blocks()
    return row(case, us, ceilings, most, dout.nbytes + sum(array.nbytes for array in shared.values()))


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
    rows = []
    for case in CASES:
        rows.append(measure(case, timer, limits))
        print(rows[-1], flush=True)
    content = {"ceilings": limits.as_dict(), "rows": [asdict(found) for found in rows]}
    if options.out:
        report.write(options.out, "training_step", {**machine.provenance(options.commit), **content})
    return 0


if __name__ == "__main__":
    exit_with(main)
