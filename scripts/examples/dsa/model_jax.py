"""The model and its training step in JAX.

Multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv:2405.04434, section 2.1) and the lightning indexer
of DeepSeek-V3.2 (section 2.1): index scores are sums over index heads of weight * relu(query . key), with rotary
positions; `indexer_topk` selects the top-k tokens by score, from bfloat16 queries and keys; they are attended to; the
indexer alone is trained by the KL divergence between its softmax and the attention distribution, over the selected
tokens.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cupymla.interop import jax as mla

from .setting import D_LATENT, D_ROPE, Setting

Params = dict[str, Any]


@functools.partial(jax.jit, static_argnames="setting")
def initial(setting: Setting, seed: int) -> Params:
    """Fresh parameters. As one program: each shape's own would take longer to compile than a small model to train."""
    s = setting
    keys = iter(jax.random.split(jax.random.key(seed), 4 + 16 * s.layers))

    def matrix(*shape: int, fan: int) -> Any:
        return jax.random.normal(next(keys), shape) * fan**-0.5

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
            "norms": jnp.ones((2, s.width)),
            "index_q": matrix(s.width, s.index_heads, s.d_index, fan=s.width),
            "index_k": matrix(s.width, s.d_index, fan=s.width),
            "index_w": matrix(s.width, s.index_heads, fan=s.width),
        }

    return {
        "embed": matrix(s.vocabulary, s.width, fan=1),
        "layers": [layer() for _ in range(s.layers)],
        "norm": jnp.ones(s.width),
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
    """The indexer's queries [batch, s, heads, channels], keys [batch, s, channels] and weights [batch, s, heads]."""
    q = rotary(rms(jnp.einsum("bsd,dhe->bshe", x, p["index_q"])))
    return q, rotary(rms(x @ p["index_k"])), x @ p["index_w"] * q.shape[-1] ** -0.5


def index_scores(q: Any, k: Any, weights: Any) -> Any:
    """The indexer's score of every token for every query, [batch, s, s], to learn from; -inf on tokens to come."""
    products = jax.nn.relu(jnp.einsum("bshe,bte->bsth", q, k))
    return jnp.where(causal(q.shape[1]), jnp.einsum("bsth,bsh->bst", products, weights), -jnp.inf)


def indexed(q: Any, k: Any, weights: Any, topk: int) -> Any:
    """The tokens that the indexer selects, [batch, s, topk] int32; -1 where a query has fewer. It has no gradient."""
    q, k, weights = (jax.lax.stop_gradient(part) for part in (q, k, weights))
    topk = min(topk, k.shape[1])
    return mla.indexer_topk(q.astype(jnp.bfloat16), k.astype(jnp.bfloat16), weights, topk, causal=True)[0]


def causal(length: int) -> Any:
    """Which token a query may see."""
    return jnp.arange(length)[None, :] <= jnp.arange(length)[:, None]


def dense_attention(q: Any, kv: Any, scale: float) -> tuple[Any, Any]:
    """(out, lse) of attention to every token so far, by JAX alone: what sparse attention is measured against."""
    scores = jnp.einsum("bshc,btc->bhst", q, kv, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(causal(q.shape[1]), scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, -1)
    weights = jnp.exp(scores - lse[..., None]).astype(kv.dtype)
    return jnp.einsum("bhst,btc->bshc", weights, kv[..., :D_LATENT]), lse.transpose(0, 2, 1)


def selected(scores: Any, topk: int) -> Any:
    """The tokens of largest score, [batch, s, topk] int32; -1 where a query has fewer."""
    values, indices = jax.lax.top_k(scores, min(topk, scores.shape[-1]))
    return jnp.where(values > -jnp.inf, indices, -1).astype(jnp.int32)


def divergence(target: Any, scores: Any, indices: Any) -> Any:
    """KL divergence between the attention distribution and the indexer's softmax, over each query's tokens."""
    chosen = jnp.take_along_axis(scores, jnp.maximum(indices, 0), -1)
    log_index = jax.nn.log_softmax(jnp.where(indices >= 0, chosen, -jnp.inf), -1)
    term = target * (jnp.log(jnp.maximum(target, 1e-20)) - log_index)
    return jnp.where(target > 0, term, 0).sum(-1).mean()


def recall(q: Any, kv: Any, chosen: Any, setting: Setting) -> Any:
    """How many of a query's topk most attended tokens the indexer selects, over queries that have to choose."""
    lse = dense_attention(q, kv, setting.sm_scale)[1]
    everything = jnp.broadcast_to(jnp.arange(q.shape[1], dtype=jnp.int32), (*q.shape[:2], q.shape[1]))
    attended = mla.attn_dist(q, kv, everything, lse, sm_scale=setting.sm_scale, causal=True)
    wanted = selected(jnp.where(causal(q.shape[1]), attended, -jnp.inf), setting.topk)
    hit = (wanted[..., :, None] == chosen[..., None, :]).any(-1)
    return hit[:, setting.topk :].mean()


def attention(p: Params, x: Any, setting: Setting, kind: str, key: Any, measure: bool) -> tuple[Any, Any, Any]:
    """The layer's update of x, the indexer's loss, and its recall where that is asked for."""
    q, kv = absorbed(p, x, setting)
    indexer = projected(p, jax.lax.stop_gradient(x))
    scores = index_scores(*indexer)
    if kind == "dense":
        indices = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), (*x.shape[:2], x.shape[1]))
        indices = jnp.where(causal(x.shape[1]), indices, -1)
        out, lse = dense_attention(q, kv, setting.sm_scale)
    else:
        if kind == "random":
            order = jnp.where(causal(x.shape[1]), jax.random.uniform(key, scores.shape), -jnp.inf)
            indices = selected(order, setting.topk)
        else:
            indices = indexed(*indexer, setting.topk)
        out, _, lse = mla.sparse_mla_fwd(q, kv, indices, sm_scale=setting.sm_scale)
    still = [jax.lax.stop_gradient(array) for array in (q, kv, indices, lse)]
    target = mla.attn_dist(*still, sm_scale=setting.sm_scale, normalize="l1")
    values = jnp.einsum("bshc,hce->bshe", out.astype(jnp.float32), p["up_v"])
    found = recall(still[0], still[1], indexed(*indexer, setting.topk), setting) if measure else jnp.zeros(())
    return jnp.einsum("bshe,hed->bsd", values, p["out"]), divergence(target, scores, indices), found


@functools.partial(jax.jit, static_argnames=("setting", "kind", "measure"))
def losses(
    params: Params, batch: Any, setting: Setting, kind: str, key: Any, measure: bool = False
) -> tuple[Any, dict[str, Any]]:
    """The training loss, and its parts."""
    x = rms(params["embed"][batch[:, :-1]])
    kl, found = jnp.zeros(()), jnp.zeros(())
    for number, p in enumerate(params["layers"]):
        update, divergent, hit = attention(
            p, rms(x, p["norms"][0]), setting, kind, jax.random.fold_in(key, number), measure
        )
        x = x + update
        x = x + jax.nn.gelu(rms(x, p["norms"][1]) @ p["up"]) @ p["down"]
        kl, found = kl + divergent / setting.layers, found + hit / setting.layers
    logits = rms(x, params["norm"]) @ params["head"]
    entropy = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch[:, 1:, None], -1).mean()
    return entropy + setting.kl_weight * kl, {"loss": entropy, "kl": kl, "recall": found}


@functools.partial(jax.jit, static_argnames=("setting", "kind"))
def update(state: Any, batch: Any, setting: Setting, kind: str) -> tuple[Any, dict[str, Any]]:
    """One step of AdamW (arXiv:1711.05101) with betas 0.9 and 0.95."""
    params, first, second, count = state
    key = jax.random.key(count)
    grads, parts = jax.grad(losses, has_aux=True)(params, batch, setting, kind, key)
    count = count + 1
    rate = setting.rate * jnp.minimum(1, count / 20)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, second, grads)

    def moved(p: Any, m: Any, v: Any) -> Any:
        step = (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.95**count)) + 1e-8)
        return p - rate * (step + 0.01 * p)

    return (jax.tree.map(moved, params, first, second), first, second, count), parts


class Model:
    """Parameters in training, for train_dsa.py."""

    def __init__(self, setting: Setting, device: str, seed: int = 0) -> None:
        self._setting = setting
        self._device = jax.devices("cpu" if device == "cpu" else "gpu")[0]
        with jax.default_device(self._device):
            params = initial(setting, seed)
            zeros = jax.tree.map(jnp.zeros_like, params)
            self._state: Any = jax.device_put((params, zeros, zeros, jnp.zeros((), jnp.int32)), self._device)

    def copy(self) -> Model:
        """A model that goes on from here on its own."""
        other = object.__new__(Model)
        other.__dict__.update(self.__dict__)
        return other

    def step(self, batch: np.ndarray[Any, Any], kind: str) -> dict[str, float]:
        """Learn from a batch with "dense", "indexer" or "random" attention."""
        self._state, parts = update(self._state, jax.device_put(batch, self._device), self._setting, kind)
        return {name: float(parts[name]) for name in ("loss", "kl")}

    def evaluate(self, batch: np.ndarray[Any, Any], kind: str) -> dict[str, float]:
        """Loss on a batch, and the indexer's recall."""
        given = jax.device_put(batch, self._device)
        parts = losses(self._state[0], given, self._setting, kind, jax.random.key(0), True)[1]
        return {name: float(parts[name]) for name in ("loss", "recall")}
