"""A small DSA layer with random weights, for tests that need no model of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from interop_kit import placed

from cupymla.interop.jax import dsa

NOPE, WIDE, HIDDEN, INDEX_HEADS = 16, 24, 48, 4


def random_layer(tokens: int, *, heads: int = 2, topk: int = 6, family: str = "deepseek_v32") -> SimpleNamespace:
    """Parameters, two sequences of hidden states, a slope of outputs, rotary and conventions. It has sinks."""
    rng = np.random.default_rng(7)
    shapes = {"q_a_proj": (32, HIDDEN), "q_b_proj": (heads * (NOPE + 64), 32), "kv_a_proj_with_mqa": (576, HIDDEN)}
    shapes |= {"kv_b_proj": (heads * (NOPE + WIDE), 512), "o_proj": (HIDDEN, heads * WIDE)}
    shapes |= {"indexer.wq_b": (INDEX_HEADS * 128, 32), "indexer.wk": (128, HIDDEN)}
    shapes |= {"indexer.weights_proj": (INDEX_HEADS, HIDDEN)}
    made: dict[str, Any] = {f"{n}.weight": rng.standard_normal(s) * s[1] ** -0.5 for n, s in shapes.items()}
    made |= {"q_a_layernorm.weight": np.ones(32), "kv_a_layernorm.weight": np.ones(512)}
    made |= {"indexer.k_norm.weight": np.ones(128), "indexer.k_norm.bias": np.zeros(128), "sinks": np.ones(heads)}
    hidden, slope = (placed(rng.standard_normal((2, tokens, HIDDEN)), jnp.bfloat16) for _ in range(2))
    return SimpleNamespace(
        params={name: placed(array, jnp.bfloat16) for name, array in made.items()},
        hidden=hidden,
        slope=slope,
        rotary=dsa.rotary(jnp.arange(tokens)[None].repeat(2, 0), 10000.0 ** -(np.arange(32) / 32)),
        conventions=dsa.conventions(family, topk=topk, scale=(NOPE + 64) ** -0.5),
    )


def gradients(given: SimpleNamespace, layer: Any) -> Any:
    """((output, selection), (gradients of parameters, of hidden states)) of layer(params, hidden, rotary).

    Those of the indexer are of its KL loss, where the layer has one.
    """

    def outputs(params: Any, hidden: Any) -> Any:
        made = layer(params, hidden, given.rotary)
        aux = getattr(made, "aux", None)
        total = (made[0].astype(jnp.float32) * given.slope).sum()
        return total if aux is None else total + aux.sum(), made[:2]

    (_, results), grads = jax.jit(jax.value_and_grad(outputs, (0, 1), has_aux=True))(given.params, given.hidden)
    return results, grads


def error(found: Any, exact: Any) -> float:
    """The relative error of the whole, in float32."""
    found, exact = (np.asarray(array, np.float32) for array in (found, exact))
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
