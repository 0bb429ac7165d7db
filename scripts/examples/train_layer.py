"""Trains a small JAX language model whose attention is `dsa.layer`, on the Python standard library's sources.

What a training of one's own needs of that layer: parameters of all layers stacked for `jax.lax.scan`, each layer
computed again in the backward pass (`jax.checkpoint`), tokens sharded over all devices (`jax.shard_map`), the indexers
trained beside the model, one compiled step.

    python scripts/examples/train_layer.py --size small --device cpu

prints the loss of every tenth step and the indexers' KL loss, a mean over layers and tokens, and ends with 1 where the
model has not learned.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any

from dsa.needs import missing_on_gpu, missing_packages, seed_of
from dsa.setting import Setting, Text

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cupymla.cli.terminal import exit_with

FRAMEWORKS = ("jax",)
NEEDED = ("indexer_topk", "sparse_mla_fwd", "sparse_mla_bwd", "indexer_loss", "indexer_bwd")

SETTINGS = {
    # Two seconds of steps on a CPU, after ten of compiling.
    "small": Setting(2, 32, 2, 2, 32, 8, 0, 20, 10, 1e-2, 1 << 16, d_index=128),
    "brief": Setting(2, 256, 16, 2, 2048, 256, 0, 60, 10, 3e-3, 1 << 20, d_query=128, d_index=128),
}

LEARNED = 0.75
"""The last loss over the first one, at most, of a model that has learned."""


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--framework", choices=FRAMEWORKS, default="jax")
    parser.add_argument("--size", choices=tuple(SETTINGS), default="small")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=seed_of, default=0)
    return parser.parse_args()


def shapes(setting: Setting) -> dict[str, tuple[int, int]]:
    """Of one layer's matrices, [out, in] as in transformers: those of attention by its names, then the network's."""
    s = setting
    return {
        "q_a_proj.weight": (s.d_query, s.width),
        "q_b_proj.weight": (s.heads * (s.d_nope + 64), s.d_query),
        "kv_a_proj_with_mqa.weight": (576, s.width),
        "kv_b_proj.weight": (s.heads * (s.d_nope + s.d_value), 512),
        "o_proj.weight": (s.width, s.heads * s.d_value),
        "indexer.wq_b.weight": (s.index_heads * s.d_index, s.d_query),
        "indexer.wk.weight": (s.d_index, s.width),
        "indexer.weights_proj.weight": (s.index_heads, s.width),
        "up": (4 * s.width, s.width),
        "down": (s.width, 4 * s.width),
    }


def parameters(setting: Setting, seed: int) -> dict[str, Any]:
    """All parameters in float32; those of layers stacked along a first axis."""
    import jax
    import jax.numpy as jnp

    s, (key, last) = setting, jax.random.split(jax.random.key(seed))
    layers = {
        name: jax.random.normal(jax.random.fold_in(key, number), (s.layers, *shape)) * shape[1] ** -0.5
        for number, (name, shape) in enumerate(shapes(s).items())
    }
    ones = {"q_a_layernorm.weight": s.d_query, "kv_a_layernorm.weight": 512, "indexer.k_norm.weight": s.d_index}
    layers |= {name: jnp.ones((s.layers, size)) for name, size in ones.items()}
    layers["indexer.k_norm.bias"] = jnp.zeros((s.layers, s.d_index))
    return {"layers": layers, "bytes": jax.random.normal(last, (s.vocabulary, s.width)) * s.width**-0.5}


def step_of(setting: Setting, mesh: Any) -> Any:
    """A compiled step: parameters, Adam's two moments, the step's number, bytes [batch, length + 1]; the first three
    anew, loss, KL loss."""
    import jax
    import jax.numpy as jnp

    from cupymla.interop.jax import dsa

    conventions = dsa.conventions("deepseek_v32", topk=setting.topk, scale=setting.sm_scale)
    whole, tokens = jax.P(), jax.P(None, "context")

    def rms(x: Any) -> Any:
        return (x * jax.lax.rsqrt(jnp.square(x.astype(jnp.float32)).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)

    def hidden(layers: Any, x: Any, rotary: Any, loss_weight: Any) -> Any:
        """On each device: its tokens through all layers, and what stands for the KL loss: [layers, batch, length]."""

        def layer(x: Any, params: Any) -> tuple[Any, Any]:
            options = {"context_axis": "context", "loss_weight": loss_weight}
            attended = dsa.layer(params, rms(x), rotary, conventions, **options)
            x = x + attended.out
            up, down = params["up"].astype(x.dtype), params["down"].astype(x.dtype)
            return x + jax.nn.gelu(rms(x) @ up.T) @ down.T, attended.aux

        x, aux = jax.lax.scan(jax.checkpoint(layer), x, layers)
        return rms(x), aux

    made = tokens, jax.P(None, None, "context")
    spread = jax.shard_map(hidden, mesh=mesh, in_specs=(whole, tokens, tokens, whole), out_specs=made)

    def loss(params: Any, loss_weight: Any, text: Any) -> Any:
        known, wanted = text[:, :-1], text[:, 1:]
        rotary = dsa.rotary(jnp.arange(setting.length)[None], 10000.0 ** -(jnp.arange(32) / 32))
        rotary = tuple(jnp.broadcast_to(x, (setting.batch, *x.shape[1:])) for x in rotary)
        x, aux = spread(params["layers"], params["bytes"][known].astype(jnp.bfloat16), rotary, loss_weight)
        logits = (x @ params["bytes"].astype(x.dtype).T).astype(jnp.float32)
        value = -jnp.take_along_axis(jax.nn.log_softmax(logits), wanted[..., None], -1).mean()
        return value + aux.sum(), value

    def step(params: Any, first: Any, second: Any, number: Any, text: Any) -> Any:
        # The gradient with respect to the weight of the KL loss is the KL loss, here of all layers and tokens.
        each = jnp.float32(1 / (setting.layers * setting.batch * setting.length))
        (gradients, kl), value = jax.grad(loss, (0, 1), has_aux=True)(params, each, text)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, gradients)

        def moved(p: Any, m: Any, v: Any) -> Any:
            root = jnp.sqrt(v / (1 - 0.99**number)) + 1e-8
            return p - setting.rate * m / (1 - 0.9**number) / root

        return jax.tree.map(moved, params, first, second), first, second, value, kl * each

    return jax.jit(step, donate_argnums=(0, 1, 2))


def train(setting: Setting, seed: int) -> list[float]:
    """The loss of every step."""
    import jax
    import jax.numpy as jnp

    devices = math.gcd(len(jax.devices()), setting.length)  # each has as many tokens
    mesh = jax.make_mesh((devices,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    text, step = Text(setting, seed), step_of(setting, mesh)
    params = jax.device_put(parameters(setting, seed), jax.sharding.NamedSharding(mesh, jax.P()))
    first, second = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    losses: list[float] = []
    for number in range(1, setting.sparse_steps + 1):
        params, first, second, loss, kl = step(params, first, second, float(number), text.batch(number))
        losses.append(float(loss))
        if number % setting.eval_every == 0:
            print(f"step {number}: loss {losses[-1]:.3f}, KL {float(kl):.4f}", flush=True)
    return losses


def main() -> int:
    """Train, and judge; 2 where something is missing."""
    options = parsed()
    missing = missing_packages("jax")
    if not missing and options.device == "cuda":
        missing = missing_on_gpu("jax", NEEDED)
    if missing:
        print(f"cannot train here, for want of {', '.join(missing)}", file=sys.stderr)
        return 2
    if options.device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    losses = train(SETTINGS[options.size], options.seed)
    learned = losses[-1] <= LEARNED * losses[0]
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}: the model has {'' if learned else 'not '}learned")
    return 0 if learned else 1


if __name__ == "__main__":
    exit_with(main)
