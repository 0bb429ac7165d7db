"""The decode loop in JAX: one program whose `lax.scan` makes the steps, with caches that are donated to it."""

from __future__ import annotations

import functools
import time
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cupymla.interop import jax as mla

from .setting import (
    D_INDEX,
    PAGE,
    Array,
    Keys,
    Prompts,
    Shape,
    Weights,
    keys_of,
    queries_of,
    slots_at,
    window_positions,
)

jax.tree_util.register_dataclass(Weights, data_fields=[field.name for field in fields(Weights)], meta_fields=[])

Caches = tuple[Any, ...]
"""Of latents, one or two, then of the indexer's keys."""


def written(shape: Shape, caches: Caches, keys: Keys, slots: Any) -> Caches:
    """The caches with further tokens. Nothing is copied where the old ones are not used again."""
    latent, rope, index_k = (part.astype(jnp.bfloat16) for part in keys)
    *latents, index_cache = caches
    made = [mla.concat_and_cache_mla(latent, rope, cache, slots, cache_format=shape.cache_format) for cache in latents]
    return (*made, mla.indexer_k_quant_and_cache(index_k, index_cache, slots))


@functools.partial(jax.jit, static_argnames="shape", donate_argnames="caches")
def prefilled(
    shape: Shape, caches: Caches, weights: Weights, token: Any, before: Any, positions: Any, slots: Any
) -> Caches:
    """The caches with a prompt's keys; slots of -1, of its padding, are skipped."""
    return written(shape, caches, keys_of(jnp, shape, weights, jnp.matmul, token, before, positions), slots)


def attended(shape: Shape, weights: Weights, caches: Caches, q: Any, index_q: Any, tables: Any, lengths: Any) -> Any:
    """Attention [B, heads, 512] of queries [B, heads, d_qk] to the tokens that the indexer selects."""
    *latents, index_cache = caches
    codes, scales = mla.quantize_fp8(index_q[:, None].astype(jnp.bfloat16))
    index_weights = jnp.broadcast_to(weights.index_weights, codes.shape[:-1])
    indices, count = mla.paged_indexer_topk(
        codes, index_cache, index_weights, tables, lengths, shape.topk, q_scale=scales[..., 0]
    )
    q = q[:, None].astype(jnp.bfloat16)
    if shape.window:
        newest = slots_at(jnp, tables, window_positions(jnp, shape, lengths))
        out, _ = mla.sparse_mla_decode(
            q, latents[0], newest[:, None], extra_k_cache=latents[1],
            extra_indices=indices, extra_topk_length=count, attn_sink=weights.sink, cache_format=shape.cache_format,
        )  # fmt: skip
    else:
        out, _ = mla.sparse_mla_decode(q, latents[0], indices, topk_length=count, cache_format=shape.cache_format)
    return out[:, 0]


@functools.partial(jax.jit, static_argnames=("shape", "steps"), donate_argnames="caches")
def scanned(
    shape: Shape, steps: int, caches: Caches, weights: Weights, tables: Any, token: Any, before: Any, lengths: Any
) -> tuple[Caches, Any, Any]:
    """The caches, the tokens [steps, B] and the logits [steps, B, vocabulary] of so many steps.

    `lengths` counts the tokens of each request, `token` being the last of them.
    """

    def step(state: Any, _: None) -> tuple[Any, Any]:
        caches, token, before, lengths = state
        positions = lengths - 1
        keys = keys_of(jnp, shape, weights, jnp.matmul, token, before, positions)
        caches = written(shape, caches, keys, slots_at(jnp, tables, positions))
        q, index_q = queries_of(jnp, shape, weights, jnp.matmul, token, positions)
        out = attended(shape, weights, caches, q, index_q, tables, lengths)
        logits = out.astype(jnp.float32).mean(1) @ weights.head
        following = logits.argmax(-1).astype(jnp.int32)
        return (caches, following, token, lengths + 1), (following, logits)

    (caches, *_), (tokens, logits) = jax.lax.scan(step, (caches, token, before, lengths), None, length=steps)
    return caches, tokens, logits


def decode(
    shape: Shape, weights: Weights, prompts: Prompts, steps: int, on_gpu: bool
) -> tuple[Array, Array, dict[str, float]]:
    """Tokens [steps, B], the first step's logits [B, vocabulary], and microseconds of a step, none without a GPU."""
    with jax.default_device(jax.devices("gpu" if on_gpu else "cpu")[0]):
        given = weights.on(jnp.asarray)
        # 0xFF is NaN: what nobody wrote would show.
        sizes = (*[shape.token_bytes] * (2 if shape.window else 1), D_INDEX + 4)
        caches: Caches = tuple(jnp.full((prompts.blocks, PAGE, size), 0xFF, jnp.uint8) for size in sizes)
        for request in range(prompts.batch):
            caches = prefilled(shape, caches, given, *map(jnp.asarray, prompts.prompt(request)))
        state = tuple(map(jnp.asarray, (prompts.tables, *prompts.newest(), prompts.lengths)))
        caches, tokens, logits = scanned(shape, steps, caches, given, *state)
        found = np.asarray(tokens), np.asarray(logits[0])
        if not on_gpu:
            return (*found, {})
        # Once more from the ends of the prompts: it writes the same into the same slots.
        begun = time.perf_counter()
        jax.block_until_ready(scanned(shape, steps, caches, given, *state))
        return (*found, {"step": (time.perf_counter() - begun) / steps * 1e6})
