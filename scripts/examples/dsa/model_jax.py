"""The model and its training step in JAX.

Multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv:2405.04434, section 2.1) and the lightning indexer
of DeepSeek-V3.2 (section 2.1): index scores are sums over index heads of weight * relu(query . key), with rotary
positions; `indexer_topk` selects the top-k tokens by score, from bfloat16 queries and keys; they are attended to; the
indexer alone is trained by the KL divergence between its softmax and the attention distribution. In the sparse training
that is over the selected tokens, and `dsa_attention` makes all these gradients in one backward; beside dense attention
it is over all tokens, by `indexer_loss_dense`. The KL loss counts by a weight for each layer, and the gradient of that
weight is the sum of the losses itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from cupymla.interop import jax as mla

from .setting import D_LATENT, D_ROPE, Setting

Params = dict[str, Any]

STATE = ("params", "first", "second", "count")
"""A model in training: all parameters as a vector, their mean slopes and squares of slopes, and how many steps."""


def initial(setting: Setting, seed: int) -> Params:
    """Fresh parameters, by NumPy: JAX would compile longer than a small model trains."""
    s, rng = setting, np.random.default_rng(seed)

    def matrix(*shape: int, fan: int) -> Any:
        return rng.standard_normal(shape, np.float32) * np.float32(fan**-0.5)

    def layer() -> Params:
        return {
            "down_q": matrix(s.width, s.d_query, fan=s.width),
            "up_q": matrix(s.d_query, s.heads, s.d_nope + D_ROPE, fan=s.d_query),
            "absorb_k": matrix(s.heads, s.d_nope, D_LATENT, fan=D_LATENT),
            "down_kv": matrix(s.width, D_LATENT, fan=s.width),
            "rope_k": matrix(s.width, D_ROPE, fan=s.width),
            "up_v": matrix(s.heads, D_LATENT, s.d_value, fan=D_LATENT),
            "out": matrix(s.heads, s.d_value, s.width, fan=s.heads * s.d_value),
            "up": matrix(s.width, 4 * s.width, fan=s.width),
            "down": matrix(4 * s.width, s.width, fan=4 * s.width),
            "norms": np.ones((2, s.width), np.float32),
            "index_q": matrix(s.width, s.index_heads, s.d_index, fan=s.width),
            "index_k": matrix(s.width, s.d_index, fan=s.width),
            "index_w": matrix(s.width, s.index_heads, fan=s.width),
        }

    return {
        "embed": matrix(s.vocabulary, s.width, fan=1),
        "layers": [layer() for _ in range(s.layers)],
        "norm": np.ones(s.width, np.float32),
        "head": matrix(s.width, s.vocabulary, fan=s.width),
    }


def rms(x: Any, scale: Any = 1.0) -> Any:
    """Root-mean-square normalisation."""
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def rotary(x: Any) -> Any:
    """Rotary positions on the last axis, position along axis 1."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    angles = angles.reshape(1, x.shape[1], *[1] * (x.ndim - 3), half)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), a * jnp.sin(angles) + b * jnp.cos(angles)], -1)


def absorbed(p: Params, x: Any, setting: Setting) -> tuple[Any, Any]:
    """q [batch, s, heads, 576] and kv [batch, s, 576], bfloat16."""
    heads = jnp.einsum("bsd,dhe->bshe", rms(x @ p["down_q"]), p["up_q"])
    nope, rope = heads[..., : setting.d_nope], heads[..., setting.d_nope :]
    q = jnp.concatenate([jnp.einsum("bshe,hec->bshc", nope, p["absorb_k"]), rotary(rope)], -1)
    kv = jnp.concatenate([rms(x @ p["down_kv"]), rotary(x @ p["rope_k"])], -1)
    return q.astype(jnp.bfloat16), kv.astype(jnp.bfloat16)


def projected(p: Params, x: Any) -> tuple[Any, Any, Any]:
    """The indexer's queries [batch, s, heads, channels] and keys [batch, s, channels], bfloat16, and its weights
    [batch, s, heads]."""
    q, k = rotary(rms(jnp.einsum("bsd,dhe->bshe", x, p["index_q"]))), rotary(rms(x @ p["index_k"]))
    return q.astype(jnp.bfloat16), k.astype(jnp.bfloat16), x @ p["index_w"] * q.shape[-1] ** -0.5


def indexed(q: Any, k: Any, weights: Any, topk: int) -> Any:
    """The tokens that the indexer selects, [batch, s, topk] int32; -1 where a query has fewer. It has no gradient."""
    q, k, weights = jax.lax.stop_gradient((q, k, weights))
    return mla.indexer_topk(q, k, weights, min(topk, k.shape[1]), causal=True)[0]


def causal(length: int) -> Any:
    """Which token a query may see."""
    return jnp.arange(length)[None, :] <= jnp.arange(length)[:, None]


def dense_scores(q: Any, kv: Any, scale: float) -> Any:
    """Attention's scores [batch, s, heads, s] in float32, by JAX alone; -inf on tokens to come."""
    scores = jnp.einsum("bshc,btc->bsht", q, kv, preferred_element_type=jnp.float32) * scale
    return jnp.where(causal(q.shape[1])[:, None], scores, -jnp.inf)


def dense_attention(q: Any, kv: Any, scale: float) -> tuple[Any, Any]:
    """(out, lse [batch, s, heads]) of attention to every token so far: what sparse attention is measured by."""
    scores = dense_scores(q, kv, scale)
    weights = jax.nn.softmax(scores, -1)
    out = jnp.einsum("bsht,btc->bshc", weights.astype(kv.dtype), kv[..., :D_LATENT])
    return out, jax.nn.logsumexp(jax.lax.stop_gradient(scores), -1)


def selected(scores: Any, topk: int) -> Any:
    """The tokens of largest score, [batch, s, topk] int32; -1 where a query has fewer."""
    values, indices = jax.lax.top_k(scores, min(topk, scores.shape[-1]))
    return jnp.where(values > -jnp.inf, indices, -1).astype(jnp.int32)


def random_selection(key: Any, setting: Setting, shape: tuple[int, ...]) -> Any:
    """Tokens that every query of every layer may see, drawn anew for each: [layers, batch, s, topk] int32."""
    order = jax.random.uniform(key, (setting.layers, *shape, shape[-1]))
    return selected(jnp.where(causal(shape[-1]), order, -jnp.inf), setting.topk)


def overlap(q: Any, kv: Any, chosen: Any, setting: Setting) -> Any:
    """How many of a query's topk most attended tokens are selected, over queries that have to choose."""
    attended = jax.nn.softmax(dense_scores(q, kv, setting.sm_scale), -1).sum(2)
    wanted = selected(jnp.where(causal(q.shape[1]), attended, -jnp.inf), setting.topk)
    hit = (wanted[..., :, None] == chosen[..., None, :]).any(-1)
    return hit[:, setting.topk :].mean()


def attention(
    p: Params, x: Any, weight: Any, chosen: Any, setting: Setting, kind: str, measure: bool
) -> tuple[Any, Any, Any]:
    """The layer's update of x, what the indexer adds to the loss, and the selection's overlap if it is asked for.
    `chosen` is a selection that is not the indexer's, or None."""
    q, kv = absorbed(p, x, setting)
    constants = jax.lax.stop_gradient((q, kv))
    indexer = projected(p, jax.lax.stop_gradient(x))
    indices = indexed(*indexer, setting.topk) if chosen is None else chosen
    if kind == "dense":
        out, lse = dense_attention(q, kv, setting.sm_scale)
        options = {"mla_lse": lse, "sm_scale": setting.sm_scale, "causal": True}
        added = weight * mla.indexer_loss_dense(*indexer, *constants, **options)[0].sum()
    else:
        options = {"loss_weight": weight, "sm_scale": setting.sm_scale}
        out, _, aux = mla.dsa_attention(q, kv, *indexer, indices, **options)
        added = aux.sum()
    values = jnp.einsum("bshc,hce->bshe", out.astype(jnp.float32), p["up_v"])
    found = overlap(*constants, indices, setting) if measure else jnp.zeros(())
    return jnp.einsum("bshe,hed->bsd", values, p["out"]), added, found


def losses(
    params: Params, weights: Any, batch: Any, setting: Setting, kind: str, key: Any, measure: bool = False
) -> tuple[Any, dict[str, Any]]:
    """What is differentiated, and the loss and the overlap. `weights` [layers] are those of the KL loss."""
    inputs = batch[:, :-1]
    x = rms(params["embed"][inputs])
    chosen = random_selection(key, setting, inputs.shape) if kind == "random" else [None] * setting.layers
    added, found = jnp.zeros(()), jnp.zeros(())
    for p, weight, own in zip(params["layers"], weights, chosen, strict=True):
        update, more, hit = attention(p, rms(x, p["norms"][0]), weight, own, setting, kind, measure)
        x = x + update
        x = x + jax.nn.gelu(rms(x, p["norms"][1]) @ p["up"]) @ p["down"]
        added, found = added + more, found + hit / setting.layers
    logits = rms(x, params["norm"]) @ params["head"]
    entropy = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch[:, 1:, None], -1).mean()
    return entropy + added, {"loss": entropy, "overlap": found}


def loss_weights(setting: Setting) -> Any:
    """Weights of the KL loss of each layer's queries, [layers]: those of all queries are `kl_weight` together."""
    return jnp.full(setting.layers, setting.kl_weight / setting.queries)


@functools.cache
def as_tree(setting: Setting) -> Callable[[Any], Params]:
    """What makes parameters of one vector of all of them."""
    made: Callable[[Any], Params] = ravel_pytree(initial(setting, 0))[1]
    return made


@functools.partial(jax.jit, static_argnames=("setting", "kind"))
def update(state: Any, batch: Any, setting: Setting, kind: str) -> tuple[Any, dict[str, Any]]:
    """One step of AdamW (arXiv:1711.05101) with betas 0.9 and 0.95."""
    params, first, second, count = state
    key = jax.random.key(count)
    graded = jax.grad(losses, (0, 1), has_aux=True)
    (grads, kl), parts = graded(as_tree(setting)(params), loss_weights(setting), batch, setting, kind, key)
    slope = ravel_pytree(grads)[0]
    count = count + 1
    first = 0.9 * first + 0.1 * slope
    second = 0.95 * second + 0.05 * slope * slope
    step = (first / (1 - 0.9**count)) / (jnp.sqrt(second / (1 - 0.95**count)) + 1e-8)
    params = params - setting.rate * jnp.minimum(1, count / 20) * (step + 0.01 * params)
    return (params, first, second, count), {**parts, "kl": kl.sum() / setting.queries}


@functools.partial(jax.jit, static_argnames=("setting", "kind"))
def measured(params: Any, batch: Any, setting: Setting, kind: str) -> dict[str, Any]:
    """The loss on a batch, and the selection's overlap."""
    return losses(as_tree(setting)(params), loss_weights(setting), batch, setting, kind, jax.random.key(0), True)[1]


class Model:
    """Parameters in training, for train_dsa.py."""

    def __init__(self, setting: Setting, device: str, seed: int = 0) -> None:
        self._setting = setting
        self._device = jax.devices("cpu" if device == "cpu" else "gpu")[0]
        # One vector of all parameters, and two as long: optimizer steps of every matrix would take long to compile.
        params = np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(initial(setting, seed))])
        zeros = np.zeros_like(params)
        self._state: Any = jax.device_put((params, zeros, zeros, np.int32(0)), self._device)

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        """All that a model needs to go on from here."""
        return {name: np.array(leaf) for name, leaf in zip(STATE, self._state, strict=True)}

    def load(self, state: dict[str, np.ndarray[Any, Any]]) -> None:
        """Go on from a state."""
        self._state = jax.device_put(tuple(state[name] for name in STATE), self._device)

    def step(self, batch: np.ndarray[Any, Any], kind: str) -> dict[str, Any]:
        """Learn from a batch with "dense", "indexer" or "random" attention; losses that a GPU may still be at."""
        self._state, parts = update(self._state, jax.device_put(batch, self._device), self._setting, kind)
        return {name: parts[name] for name in ("loss", "kl")}

    def evaluate(self, batch: np.ndarray[Any, Any], kind: str) -> dict[str, Any]:
        """Loss on a batch, and the selection's overlap; a GPU may still be at them."""
        found: dict[str, Any] = measured(self._state[0], jax.device_put(batch, self._device), self._setting, kind)
        return found
