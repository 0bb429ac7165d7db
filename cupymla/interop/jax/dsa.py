"""A layer of DeepSeek sparse attention as one pure function: multi-head latent attention with the lightning indexer.

    conventions = dsa.conventions("deepseek_v32", topk=2048, scale=192**-0.5)
    out, indices, _ = dsa.layer(params, hidden, rotary, conventions)                        # training, prefill
    out, slots, cache = dsa.layer(params, hidden, rotary, conventions, cache=cache, ...)    # decode

Parameters are a mapping with the names and the layouts of the attention module's `state_dict` in transformers. The
selection has no gradient; everything else has. Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1, for the absorbed
form; DeepSeek-V3.2 for the indexer; transformers 5.24, models/<family>/modeling_<family>.py, for the conventions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...errors import InputError, UnsupportedError
from ..table import declared
from ..transformers.families import FAMILIES
from . import parallel
from .functions import public

__all__ = ["Cache", "Conventions", "conventions", "empty_cache", "layer", "rotary"]

LATENT, INDEX = 512, 128
"""Channels of a latent row, which are its value too; of an index key, which share a scale in fp8."""

_TESTED = ("deepseek_v32", "glm_moe_dsa", "hy_v4")
Index = tuple[Any, Any, Any]
"""Index queries [B, S, H, 128], keys [B, S, 128] and weights [B, S, H] of the tokens."""


@dataclass(frozen=True)
class Conventions:
    """What parameters alone do not tell. Hashable: a static argument of `jax.jit`."""

    topk: int
    """Keys that a query attends to, at most."""
    scale: float
    """Factor of the attention's scores."""
    interleaved: bool = True
    """Queries and keys are rotated in neighbouring pairs, otherwise in halves."""
    index_interleaved: bool = False
    """The same of the indexer's heads and keys."""
    index_rope_last: bool = False
    """The last channels of an index head are rotated, not the first."""
    index_fp8: bool = False
    """Index queries and keys are scored in fp8, as an fp8 cache holds them."""
    epsilon: float = 1e-6
    """Of the RMS norms of the latents."""
    index_epsilon: float = 1e-6
    """Of the layer norm of index keys."""


class Cache(NamedTuple):
    """One layer's paged cache."""

    latents: Any
    """[blocks, page, 512 + rotated] bfloat16."""
    keys: Any
    """[blocks, page, 132] uint8 for fp8, or [blocks, page, 128] bfloat16; None where selections are shared."""


def conventions(family: str, *, topk: int, scale: float, **others: Any) -> Conventions:
    """Those of a family of transformers, by the table of `cupymla.interop.transformers`.

    Args:
        family: "deepseek_v32", "glm_moe_dsa" or "hy_v4".
        topk: `index_topk` of the model's configuration.
        scale: `scaling` of its attention modules, with what YaRN adds.
        **others: further fields of `Conventions`; `hy_v4` has index_epsilon=rms_norm_eps.

    Returns:
        What `layer` takes as its conventions.

    Raises:
        UnsupportedError: no test has compared the family's layer with this one.
    """
    row = next((row for row in FAMILIES if row.name == family and family in _TESTED), None)
    if row is None:
        raise UnsupportedError(f"the family {family!r}", "interop.jax.dsa", ", ".join(_TESTED))
    return Conventions(
        topk=topk,
        scale=scale,
        interleaved=row.attention_interleaved,
        index_interleaved=row.interleaved,
        index_rope_last=row.rope_last,
        **others,
    )


def rotary(positions: Any, frequencies: Any, factor: float = 1.0) -> tuple[Any, Any]:
    """Cosines and sines of positions times frequencies, for `layer`.

    Args:
        positions: [B, S], of any integer dtype.
        frequencies: [rotated / 2], `inv_freq` of the model's rotary embedding.
        factor: of both, its `attention_scaling`.

    Returns:
        (cosines, sines), [B, S, rotated / 2] float32 each.
    """
    angles = jnp.asarray(positions)[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def empty_cache(blocks: int, page: int, *, rotated: int = 64, index: str | None = "bfloat16") -> Cache:
    """A paged cache of zeros.

    Args:
        blocks: how many.
        page: tokens of a block.
        rotated: rotary channels of a latent row, which has 512 others.
        index: dtype of the index keys, "bfloat16" or "fp8"; None for a layer that shares another one's selection.

    Returns:
        Latent rows [blocks, page, 512 + rotated] bfloat16, and index keys: [blocks, page, 128] bfloat16,
        [blocks, page, 132] uint8 or None.

    Raises:
        InputError: `index` is something else.
    """
    kinds = {"bfloat16": (INDEX, jnp.bfloat16), "fp8": (INDEX + 4, jnp.uint8), None: None}
    if index not in kinds:
        raise InputError("index", '"bfloat16", "fp8" or None', repr(index), operator="dsa.empty_cache")
    keys = None if (kind := kinds[index]) is None else jnp.zeros((blocks, page, kind[0]), kind[1])
    return Cache(jnp.zeros((blocks, page, LATENT + rotated), jnp.bfloat16), keys)


def layer(
    params: Mapping[str, Any],
    hidden: Any,
    rotary: tuple[Any, Any],
    conventions: Conventions,
    *,
    indices: Any = None,
    cache: Cache | None = None,
    block_tables: Any = None,
    context_lens: Any = None,
    context_axis: str | None = None,
    heads_axis: str | None = None,
) -> tuple[Any, Any, Cache | None]:
    """Attention of one layer, without its norm and its residual.

    Without a cache it is causal over `hidden` and differentiable. With one, the S tokens are the last of each request:
    they are written, and attend to the request's tokens up to themselves. There is no gradient then.

    Args:
        params: the attention module's `state_dict`: "q_a_proj.weight", "indexer.wk.weight" and so on, [out, in] each.
            "sinks" and "gate_proj.weight" are used where they are given, biases too.
        hidden: [B, S, hidden], bfloat16 or float16; bfloat16 with a cache. It is the dtype of products, whatever that
            of the parameters; "indexer.weights_proj" works in its own, norms in float32.
        rotary: cosines and sines of the tokens, as `rotary` makes them.
        conventions: of the model.
        indices: the selection of an earlier layer that this one shares, as it was returned.
        cache: pages that hold the requests' earlier tokens. Donate it, and no copy is made.
        block_tables: [B, width] int32, as of `paged_indexer_topk`; with a cache.
        context_lens: [B] int32, tokens of each request with these S; with a cache. A request of 0 writes nothing.
        context_axis: mesh axis inside `shard_map` along which the tokens of all sequences are sharded, in order;
            without a cache.
        heads_axis: mesh axis along which attention heads are: shards of "q_b_proj", "kv_b_proj", "gate_proj" and
            "sinks" along their first axis, of "o_proj.weight" along its last. The indexer is replicated.

    Returns:
        (out [B, S, hidden], indices [B, S, topk] int32 with -1 for none, new cache or None). Indices are tokens of the
        sequence, and slots with a cache.

    Raises:
        InputError: arguments that do not belong together, or what an operator finds.
    """
    _require_together(cache, block_tables, context_lens, context_axis)
    batch, length, _ = hidden.shape
    nope, wide = _widths(params)
    latent_q = _rms(params["q_a_layernorm.weight"], _linear(params, "q_a_proj", hidden), conventions.epsilon)
    row = _linear(params, "kv_a_proj_with_mqa", hidden)
    latents = _rms(params["kv_a_layernorm.weight"], row[..., :LATENT], conventions.epsilon)
    rotated = row.shape[-1] - LATENT
    queries = _linear(params, "q_b_proj", latent_q).reshape(batch, length, -1, nope + rotated)
    turned = [_rotate(x, rotary, conventions.interleaved) for x in (queries[..., nope:], row[..., None, LATENT:])]
    rows = jnp.concatenate((latents, turned[1][..., 0, :]), -1)
    expand = params["kv_b_proj.weight"].astype(hidden.dtype).reshape(-1, nope + wide, LATENT)
    absorbed = jnp.einsum("bshn,hnc->bshc", queries[..., :nope], expand[:, :nope])
    absorbed = jnp.concatenate((absorbed, turned[0]), -1)
    slots, keys = (None, None) if cache is None else (_slots(cache, block_tables, context_lens, length), cache.keys)
    if indices is None:
        # Gradients end before the operator: the selection is integers.
        fixed, states, latent = jax.lax.stop_gradient((params, hidden, latent_q))
        index = _index(fixed, states, latent, rotary, conventions)
        if cache is None:
            indices = _select(index, conventions, context_axis)
        else:
            indices, keys = _select_paged(index, conventions, keys, slots, block_tables, context_lens)
    sink = params["sinks"].astype(jnp.float32) if "sinks" in params else None
    count = (indices >= 0).sum(-1, dtype=jnp.int32)
    options = {"sm_scale": conventions.scale, "topk_length": count, "attn_sink": sink}
    if cache is not None:
        cache = Cache(_write(cache.latents, rows, slots), keys)
        attended = _run("sparse_mla_decode", absorbed, cache.latents, indices, cache_format="bf16", **options)[0]
    elif context_axis is not None:
        attended = parallel.sparse_mla_fwd(absorbed, rows, indices, axis_name=context_axis, **options)[0]
    else:
        attended = _run("sparse_mla_fwd", absorbed, rows, indices, **options)[0]
    values = jnp.einsum("bshc,hvc->bshv", attended, expand[:, nope:]).reshape(batch, length, -1)
    if "gate_proj.weight" in params:
        values = values * jax.nn.sigmoid(_linear(params, "gate_proj", hidden))
    out = values @ params["o_proj.weight"].astype(hidden.dtype).T
    out = out if heads_axis is None else jax.lax.psum(out, heads_axis)
    bias = params.get("o_proj.bias")
    return out if bias is None else out + bias.astype(out.dtype), indices, cache


def _run(name: str, *arrays: Any, **options: Any) -> Any:
    return public(declared(name))(*arrays, **options)


def _require_together(cache: Any, block_tables: Any, context_lens: Any, context_axis: Any) -> None:
    for name, value in (("block_tables", block_tables), ("context_lens", context_lens)):
        if (value is None) != (cache is None):
            expected, got = ("None without a cache", "an array") if cache is None else ("an array with a cache", "None")
            raise InputError(name, expected, got, operator="dsa")
    if cache is not None and context_axis is not None:
        raise InputError("context_axis", "None with a cache", repr(context_axis), operator="dsa")


def _widths(params: Mapping[str, Any]) -> tuple[int, int]:
    """Channels of a head's key without rotation, and of its value; shapes of parameters have these times heads."""
    rotated = params["kv_a_proj_with_mqa.weight"].shape[0] - LATENT
    values = params["o_proj.weight"].shape[1]
    keys = params["kv_b_proj.weight"].shape[0] - values
    turned = params["q_b_proj.weight"].shape[0] - keys
    if rotated <= 0 or turned <= 0 or turned % rotated:
        raise InputError("params", "projections with rotated channels, of the same heads", "others", operator="dsa")
    heads = turned // rotated
    return keys // heads, values // heads


def _linear(params: Mapping[str, Any], name: str, x: Any) -> Any:
    out, bias = x @ params[f"{name}.weight"].astype(x.dtype).T, params.get(f"{name}.bias")
    return out if bias is None else out + bias.astype(x.dtype)


def _rms(weight: Any, x: Any, epsilon: float) -> Any:
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + epsilon)
    return weight.astype(x.dtype) * normed.astype(x.dtype)


def _rotate(x: Any, rotary: tuple[Any, Any], interleaved: bool) -> Any:
    """x [B, S, heads, rotated]; pairs are neighbours or of two halves. Results always lie in halves."""
    cos, sin = (part[..., None, :] for part in rotary)
    wide, half = x.astype(jnp.float32), x.shape[-1] // 2
    a, b = (wide[..., ::2], wide[..., 1::2]) if interleaved else (wide[..., :half], wide[..., half:])
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), -1).astype(x.dtype)


def _index(params: Any, hidden: Any, latent_q: Any, rotary: Any, conventions: Conventions) -> Index:
    rotated = params["kv_a_proj_with_mqa.weight"].shape[0] - LATENT
    project, scale, shift = (params[f"indexer.{n}"] for n in ("weights_proj.weight", "k_norm.weight", "k_norm.bias"))
    width = scale.shape[0]
    query = _linear(params, "indexer.wq_b", latent_q).reshape(*hidden.shape[:2], -1, width)
    wide = _linear(params, "indexer.wk", hidden).astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + conventions.index_epsilon)
    key = (wide * scale.astype(jnp.float32) + shift.astype(jnp.float32)).astype(hidden.dtype)[:, :, None]
    at = width - rotated if conventions.index_rope_last else 0

    def turned(x: Any) -> Any:
        middle = _rotate(x[..., at : at + rotated], rotary, conventions.index_interleaved)
        return jnp.concatenate((x[..., :at], middle, x[..., at + rotated :]), -1)

    weights = (hidden.astype(project.dtype) @ project.T).astype(jnp.float32)
    return turned(query), turned(key)[:, :, 0], weights * (project.shape[0] * width) ** -0.5


def _select(index: Index, conventions: Conventions, axis: str | None) -> Any:
    (query, key, weights), start, scales = index, 0, {}
    if axis is not None:
        start, key = jax.lax.axis_index(axis) * query.shape[1], jax.lax.all_gather(key, axis, axis=1, tiled=True)
    if conventions.index_fp8:
        query, q_scale = _run("quantize_fp8", query, group=INDEX)
        key, k_scale = _run("quantize_fp8", key, group=INDEX)
        scales = {"q_scale": q_scale[..., 0], "k_scale": k_scale[..., 0]}
    topk = min(conventions.topk, key.shape[1])
    return _run("indexer_topk", query, key, weights, topk, causal=True, q_start=start, **scales)[0]


def _select_paged(
    index: Index, conventions: Conventions, keys: Any, slots: Any, block_tables: Any, context_lens: Any
) -> tuple[Any, Any]:
    if keys is None or conventions.index_fp8 != (keys.dtype == jnp.uint8):
        expected = "uint8 with index_fp8" if conventions.index_fp8 else "bfloat16 without index_fp8"
        raise InputError("cache.keys", expected, str(getattr(keys, "dtype", None)), operator="dsa")
    (query, key, weights), scales = index, {}
    if conventions.index_fp8:
        keys = _run("indexer_k_quant_and_cache", key.reshape(-1, key.shape[-1]), keys, slots)
        query, q_scale = _run("quantize_fp8", query, group=INDEX)
        scales["q_scale"] = q_scale[..., 0]
    else:
        keys = _write(keys, key, slots)
    topk = min(conventions.topk, block_tables.shape[1] * keys.shape[1])
    return _run("paged_indexer_topk", query, keys, weights, block_tables, context_lens, topk, **scales)[0], keys


def _slots(cache: Cache, block_tables: Any, context_lens: Any, length: int) -> Any:
    """[B * S] int32, where the last S tokens of each request are written; -1 for none."""
    page = cache.latents.shape[1]
    at = context_lens[:, None] - length + jnp.arange(length, dtype=jnp.int32)
    blocks = jnp.take_along_axis(block_tables, jnp.clip(at // page, 0, block_tables.shape[1] - 1), 1)
    inside = (at >= 0) & (at < block_tables.shape[1] * page) & (blocks >= 0)
    return jnp.where(inside, blocks * page + at % page, -1).astype(jnp.int32).reshape(-1)


def _write(pages: Any, rows: Any, slots: Any) -> Any:
    flat = pages.reshape(-1, pages.shape[-1])
    # JAX counts negative indices from the end, so what is not written gets one behind it.
    at = jnp.where(slots < 0, flat.shape[0], slots)
    return flat.at[at].set(rows.reshape(-1, rows.shape[-1]).astype(flat.dtype), mode="drop").reshape(pages.shape)
