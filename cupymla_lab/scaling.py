"""How sparse attention over several GPUs scales, in JAX and in torch, and a DSA layer's training step in JAX, without
and with its indexer's: one problem on 1, 2, 4, ... of them.

    python -m cupymla_lab scaling --out docs/benchmarks

Queries and tokens are sharded, keys all-gathered (`interop.jax.parallel`, `interop.torch.parallel`); of the layer
(`interop.jax.dsa`) tokens are, and parameters are on every device; or its attention heads are, and every device has all
tokens and scores all of them. The problem stays the same, so perfect scaling halves the time. Writes
<out>/<gpu>/scaling.json; rows that are not measured now, such as those of more GPUs than there are, stay in it with
their own date and commit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cupymla.bench import machine, report
from cupymla.cli.terminal import exit_with

REPEATS = 10
WARM_UP = 3
INNER = 5
"""Calls between two looks at the clock, so that what the host does once is spread over them."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Sizes, of all devices together."""

    s_q: int = 16384
    s_kv: int = 65536
    h_q: int = 128
    d_qk: int = 576
    topk: int = 2048


@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes of a layer of DeepSeek-V3.2, and tokens of all devices together."""

    tokens: int = 32768
    hidden: int = 7168
    q_rank: int = 1536
    heads: int = 128
    channels: int = 128  # of a head's key without rotation, and of its value
    index_heads: int = 64
    topk: int = 2048

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Of the weights of projections."""
        return {
            "q_a_proj": (self.q_rank, self.hidden),
            "q_b_proj": (self.heads * (self.channels + 64), self.q_rank),
            "kv_a_proj_with_mqa": (512 + 64, self.hidden),
            "kv_b_proj": (self.heads * 2 * self.channels, 512),
            "o_proj": (self.hidden, self.heads * self.channels),
            "indexer.wq_b": (self.index_heads * 128, self.q_rank),
            "indexer.wk": (128, self.hidden),
            "indexer.weights_proj": (self.index_heads, self.hidden),
        }


def median_ms(run: Callable[[], object], wait: Callable[[], object]) -> float:
    """Median time of one call, from an idle device to an idle device."""
    samples = []
    for _ in range(REPEATS + WARM_UP):
        wait()
        start = time.perf_counter()
        for _ in range(INNER):
            run()
        wait()
        samples.append((time.perf_counter() - start) / INNER * 1e3)
    return statistics.median(samples[WARM_UP:])


def mesh_of(devices: int, axis: str = "context") -> Any:
    """The first so many JAX devices, along one axis."""
    import jax

    kinds = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((devices,), (axis,), axis_types=kinds, devices=jax.devices()[:devices])


def measure_jax(problem: Problem, devices: int) -> float:
    """One process, a mesh of that many devices."""
    import jax
    import jax.numpy as jnp

    from cupymla.interop.jax import parallel

    mesh = mesh_of(devices)
    rows = jax.sharding.NamedSharding(mesh, jax.P("context"))

    def make(key: Any) -> tuple[Any, Any, Any]:
        keys = jax.random.split(key, 3)
        q = jax.random.normal(keys[0], (problem.s_q, problem.h_q, problem.d_qk), jnp.bfloat16)
        kv = jax.random.normal(keys[1], (problem.s_kv, problem.d_qk), jnp.bfloat16)
        return q, kv, jax.random.randint(keys[2], (problem.s_q, problem.topk), 0, problem.s_kv)

    arguments = jax.jit(make, out_shardings=(rows, rows, rows))(jax.random.key(0))
    spread = jax.jit(parallel.over_mesh(mesh, "context"))
    latest: list[Any] = []

    def run() -> None:
        latest[:] = [spread(*arguments)]

    return median_ms(run, lambda: jax.block_until_ready(latest))


def measure_layer(problem: Layer, devices: int, axis: str = "context", loss_weight: float | None = None) -> float:
    """The step of a DSA layer in one process: its output, and gradients of parameters and hidden states. Tokens lie
    along `axis`, "context", or attention heads do, "heads"; with `loss_weight` the step trains the indexer."""
    import jax
    import jax.numpy as jnp

    from cupymla.interop.jax import dsa

    mesh = mesh_of(devices, axis)
    tokens = jax.P(None, "context") if axis == "context" else jax.P()
    conventions = dsa.conventions("deepseek_v32", topk=problem.topk, scale=(problem.channels + 64) ** -0.5)

    def make(key: Any) -> tuple[Any, Any, Any]:
        weights = {
            f"{name}.weight": jax.random.normal(jax.random.fold_in(key, number), shape, jnp.bfloat16) * shape[1] ** -0.5
            for number, (name, shape) in enumerate(problem.shapes().items())
        }
        sizes = {"q_a_layernorm.weight": problem.q_rank, "kv_a_layernorm.weight": 512, "indexer.k_norm.weight": 128}
        ones = {name: jnp.ones(size, jnp.bfloat16) for name, size in sizes.items()}
        params = {**weights, **ones, "indexer.k_norm.bias": jnp.zeros(128, jnp.bfloat16)}
        hidden = jax.random.normal(key, (1, problem.tokens, problem.hidden), jnp.bfloat16)
        return params, hidden, dsa.rotary(jnp.arange(problem.tokens)[None], 10000.0 ** -(jnp.arange(32) / 32))

    names = jax.eval_shape(make, jax.random.key(0))[0]
    of_heads = {"q_b_proj.weight": jax.P(axis), "kv_b_proj.weight": jax.P(axis), "o_proj.weight": jax.P(None, axis)}
    specs = {name: of_heads.get(name, jax.P()) if axis == "heads" else jax.P() for name in names}
    places = jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), (specs, tokens, tokens))
    params, hidden, rotary = jax.jit(make, out_shardings=places)(jax.random.key(0))

    def local(params: Any, hidden: Any, rotary: Any) -> Any:
        axes: dict[str, Any] = {f"{axis}_axis": axis}
        found = dsa.layer(params, hidden, rotary, conventions, loss_weight=loss_weight, **axes)
        return found.out, found.aux

    made = tokens, None if loss_weight is None else tokens
    spread = jax.shard_map(local, mesh=mesh, in_specs=(specs, tokens, tokens), out_specs=made)

    def step(params: Any, hidden: Any, rotary: Any) -> Any:
        def loss(params: Any, hidden: Any) -> Any:
            out, aux = spread(params, hidden, rotary)
            return jnp.square(out.astype(jnp.float32)).mean() + (0 if aux is None else aux.sum())

        return jax.grad(loss, (0, 1))(params, hidden)

    compiled = jax.jit(step)
    latest: list[Any] = []

    def run() -> None:
        latest[:] = [compiled(params, hidden, rotary)]

    return median_ms(run, lambda: jax.block_until_ready(latest))


def measure_torch(problem: Problem, devices: int) -> float:
    """A process for each device, which meet in a file."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "cupymla_lab.scaling", "--ranks", str(devices), "--meet", f"{folder}/meet"]
        command += ["--problem", json.dumps(asdict(problem))]
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank)], stdout=subprocess.PIPE, encoding="utf-8", errors="replace"
            )
            for rank in range(devices)
        ]
        told = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise RuntimeError(f"a rank failed: {[process.returncode for process in ranks]}")
    return max(float(text.split()[-1]) for text in told)


def rank_ms(problem: Problem, rank: int, ranks: int, meet: str) -> float:
    """This rank's time of one call."""
    import torch
    import torch.distributed as dist

    from cupymla.interop.torch import parallel

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{meet}", rank=rank, world_size=ranks, device_id=device)
    torch.manual_seed(rank)
    q = torch.randn(problem.s_q // ranks, problem.h_q, problem.d_qk, dtype=torch.bfloat16, device=device)
    kv = torch.randn(problem.s_kv // ranks, problem.d_qk, dtype=torch.bfloat16, device=device)
    indices = torch.randint(0, problem.s_kv, (len(q), problem.topk), dtype=torch.int32, device=device)

    def wait() -> None:
        torch.cuda.synchronize()
        dist.barrier()

    with torch.no_grad():
        ms = median_ms(lambda: parallel.sparse_mla_fwd(q, kv, indices), wait)
    dist.destroy_process_group()
    return ms


LOSS_WEIGHT = 1e-3
"""Of the rows that train the indexer."""

MEASURES: dict[str, Callable[[], Callable[[Any, int], float]]] = {
    "jax": lambda: measure_jax,
    "torch": lambda: measure_torch,
    "jax_layer": lambda: measure_layer,
    "jax_layer_loss": lambda: partial(measure_layer, loss_weight=LOSS_WEIGHT),
    "jax_layer_heads": lambda: partial(measure_layer, axis="heads", loss_weight=LOSS_WEIGHT),
}
"""What is timed, by the rows' `framework`; a "layer" takes a `Layer`."""


def rows(problem: Problem, layer: Layer, counts: Sequence[int], frameworks: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each framework and number of devices."""
    found = []
    for framework in frameworks:
        alone = None
        for devices in counts:
            ms = MEASURES[framework]()(layer if "layer" in framework else problem, devices)
            alone = alone or ms * devices
            speedup = alone / ms
            row = {"framework": framework, "devices": devices, "ms": round(ms, 3)}
            found.append({**row, "speedup": round(speedup, 3), "efficiency": round(speedup / devices, 3)})
            print(found[-1], flush=True)
    return found


def kept(before: dict[str, Any], content: dict[str, Any], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of an earlier file of the same sizes that this run did not measure, with the date and commit of theirs."""
    measured = {(row["framework"], row["devices"]) for row in found}
    return [
        {**{name: before[name] for name in ("date", "commit")}, **row}
        for row in before["rows"]
        if (row["framework"], row["devices"]) not in measured
        and (size := "layer" if "layer" in row["framework"] else "problem") in before
        and before[size] == content[size]
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write, or be a rank of a measurement."""
    from cupymla import driver

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder of benchmark files")
    parser.add_argument(
        "--devices", type=int, nargs="*", help="how many GPUs (default: 1, 2, 4, ... of those there are)"
    )
    parser.add_argument("--frameworks", nargs="*", choices=tuple(MEASURES), default=tuple(MEASURES))
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    parser.add_argument("--commit", help="what to call the commit (default: what git says)")
    parser.add_argument("--problem", type=json.loads, default={}, help="sizes as JSON")
    parser.add_argument("--layer", type=json.loads, default={}, help="the same of the layer")
    options = parser.parse_args(arguments)
    problem = Problem(**options.problem)
    if options.rank is not None:
        print(rank_ms(problem, options.rank, options.ranks, options.meet))
        return 0
    there = driver.device_count()
    counts = options.devices or [n for n in (1, 2, 4, 8) if n <= there]
    if not there:
        print("scaling is measured on CUDA GPUs, and there is none", file=sys.stderr)
        return 2
    layer = Layer(**options.layer)
    found = rows(problem, layer, counts, options.frameworks)
    if options.out:
        where = machine.provenance(options.commit)
        content = {**where, "problem": asdict(problem), "layer": asdict(layer)}
        file = options.out / machine.gpu_slug(where["gpu"]) / "scaling.json"
        before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"rows": []}
        report.write(options.out, "scaling", {**content, "rows": [*found, *kept(before, content, found)]})
    return 0


if __name__ == "__main__":
    exit_with(main)
