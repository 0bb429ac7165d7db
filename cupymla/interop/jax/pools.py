"""glm5_next's selection: keys are pooled by 16, the indexer ranks pools, and keys of no full pool are always selected.

A pool's key is a mean of its index keys, weighted in each channel by a softmax over gates. A query sees pools that end
at it or before it. A token's state is its index key and its gate.

Source: transformers 5.24, models/glm5_next/modeling_glm5_next.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..table import declared
from .functions import public

BIAS, GATE = "indexer.index_kpool_compress_ape", "indexer.index_kpool_compress_gate"
"""Parameters of an indexer that ranks pools: of the gates, [keys of a pool, D]; their projection, [D, hidden]."""


def states(params: Mapping[str, Any], hidden: Any, keys: Any) -> Any:
    """[B, S, 2 * D], of hidden [B, S, hidden] and index keys [B, S, D]."""
    return jnp.concatenate((keys, hidden @ params[GATE].astype(hidden.dtype).T), -1)


def selection(query: Any, states: Any, weights: Any, bias: Any, first: Any, *, topk: int, tail: bool) -> Any:
    """The tokens that each query selects, [B, S, K] int32, -1 where there is none: first the tail, then pools.

    query [B, S, H, D]; states [B, L, 2 * D] of tokens 0 to L - 1; weights [B, S, H]; bias as of `BIAS`; first [B] or
    [1] int32, the positions of query 0. A query before position 0 selects nothing.
    """
    batch, length, *_ = query.shape
    size, pools = bias.shape[0], states.shape[1] // bias.shape[0]
    seen = jnp.clip(first[:, None] + jnp.arange(1, length + 1, dtype=jnp.int32), 0)
    inside = jnp.arange(size, dtype=jnp.int32)
    chosen = []
    if tail and size > 1:
        left = (seen % size)[..., None]
        tokens = jnp.where(inside[:-1] < left, seen[..., None] - left + inside[:-1], -1)
        chosen.append(jnp.broadcast_to(tokens, (batch, length, size - 1)))
    if many := min(topk // size, pools):
        ends = jnp.broadcast_to(jnp.minimum(seen // size, pools), (batch, length))
        arrays = {"q": query, "k": _pooled(states[:, : pools * size], bias), "weights": weights}
        ids = public(declared("indexer_topk"))(**arrays, topk=many, starts=jnp.zeros_like(ends), ends=ends)[0]
        tokens = jnp.where(ids[..., None] < 0, -1, ids[..., None] * size + inside)
        chosen.append(tokens.reshape(batch, length, many * size))
    return jnp.concatenate(chosen, -1) if chosen else jnp.full((batch, length, 1), -1, jnp.int32)


def _pooled(states: Any, bias: Any) -> Any:
    """Keys [B, P, D] of states [B, P * size, 2 * D]."""
    size, width = bias.shape
    keys, gates = jnp.split(states.reshape(states.shape[0], -1, size, 2 * width), 2, -1)
    shares = jax.nn.softmax(gates.astype(jnp.float32) + bias.astype(jnp.float32), axis=2).astype(keys.dtype)
    return (shares * keys).sum(2)
