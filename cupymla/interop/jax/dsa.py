"""A layer of DeepSeek sparse attention as one pure function: multi-head latent attention with the lightning indexer.

    conventions = dsa.conventions("deepseek_v32", topk=2048, scale=192**-0.5)
    out, indices, *_ = dsa.layer(params, hidden, rotary, conventions)                          # training, prefill
    out, slots, cache, *_ = dsa.layer(params, hidden, rotary, conventions, cache=cache, ...)    # decode

Parameters are a mapping with the names and the layouts of the attention module's `state_dict` in transformers. The
selection has no gradient; everything else has, the indexer by the KL loss that `loss_weight` asks for. Source:
DeepSeek-V2 (arXiv:2405.04434), section 2.1, for the absorbed form; DeepSeek-V3.2 for the indexer; transformers 5.24,
models/<family>/modeling_<family>.py, for the conventions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...errors import InputError, UnsupportedError, kind
from ..table import declared
from ..transformers.families import FAMILIES
from . import parallel, pools
from .functions import public
from .training import dsa_attention

__all__ = ["Cache", "Conventions", "Output", "conventions", "empty_cache", "layer", "rotary"]

LATENT, INDEX = 512, 128
"""Channels of a latent row, which are its value too; of an index key, which share a scale in fp8."""

Index = tuple[Any, Any, Any]
"""Index queries [B, S, H, 128], keys [B, S, 128] (of `pools` states [B, S, 256]) and weights [B, S, H] of tokens."""


@dataclass(frozen=True)
class Conventions:
    """What parameters alone do not tell. Hashable: a static argument of `jax.jit`."""

    topk: int
    """Keys that a query attends to, at most; those of a pool's tail come on top."""
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
    """Of the layer norms of the indexer."""
    scaled_latents: bool = False
    """Latents count by the square root of the hidden size over their own."""
    head_dim: int | None = None
    """Channels of a head's query, where none is rotated; shapes tell it otherwise."""
    pool_tail: bool = True
    """Where the indexer ranks pools: keys of no full pool are always selected."""


class Cache(NamedTuple):
    """One layer's paged cache."""

    latents: Any
    """[blocks, page, 512 + rotated] bfloat16. A layer that shares another one's keys has that layer's."""
    keys: Any
    """[blocks, page, 132] uint8 for fp8, [blocks, page, 128] bfloat16, or 256 of them where the indexer ranks pools;
    None where selections are shared."""


class Output(NamedTuple):
    """What `layer` returns."""

    out: Any
    """[B, S, hidden], hidden's dtype."""
    indices: Any
    """[B, S, K] int32, the selection: tokens of the sequence, slots with a cache; -1 for none. K is topk at most, with
    a pool's tail before it."""
    cache: Cache | None
    """The new cache; None without one."""
    latents: Any
    """[B, S, 512 + rotated], the keys of this call's tokens, which later layers may share; None with a cache."""
    aux: Any
    """[B, S] float32 of zeros, as of `dsa_attention`: add its sum to what is differentiated. None without a weight."""


def conventions(family: str, *, topk: int, scale: float, **others: Any) -> Conventions:
    """Those of a family of transformers, by the table of `cupymla.interop.transformers`.

    Args:
        family: "deepseek_v32", "glm_moe_dsa", "hy_v4", "mistral_large4", "dots3_note" or "glm5_next".
        topk: `index_topk` of the model's configuration.
        scale: `scaling` of its attention modules, with what YaRN adds.
        **others: further fields of `Conventions`; `hy_v4` has index_epsilon=rms_norm_eps, `glm5_next` and layers of
            `mistral_large4` without RoPE have head_dim=qk_head_dim.

    Returns:
        What `layer` takes as its conventions.

    Raises:
        UnsupportedError: the table has no such family.
    """
    row = next((row for row in FAMILIES if row.name == family), None)
    if row is None:
        names = ", ".join(row.name for row in FAMILIES)
        raise UnsupportedError(f"the family {family!r}", "interop.jax.dsa", names)
    return Conventions(
        topk=topk,
        scale=scale,
        interleaved=row.attention_interleaved,
        index_interleaved=row.interleaved,
        index_rope_last=row.rope_last,
        scaled_latents=row.scaled_latents,
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
        rotated: rotary channels of a latent row, which has 512 others; 0 without RoPE.
        index: how index keys are held, "bfloat16" or "fp8"; "pools" where the indexer ranks pools; None for a layer
            that shares another one's selection.

    Returns:
        Latent rows [blocks, page, 512 + rotated] bfloat16, and index keys: [blocks, page, 128] bfloat16,
        [blocks, page, 132] uint8, [blocks, page, 256] bfloat16 or None.

    Raises:
        InputError: `index` is something else.
    """
    kinds = {"bfloat16": (INDEX, jnp.bfloat16), "fp8": (INDEX + 4, jnp.uint8), "pools": (2 * INDEX, jnp.bfloat16)}
    if index is not None and index not in kinds:
        raise InputError("index", '"bfloat16", "fp8", "pools" or None', repr(index), operator="dsa.empty_cache")
    keys = None if index is None else jnp.zeros((blocks, page, kinds[index][0]), kinds[index][1])
    return Cache(jnp.zeros((blocks, page, LATENT + rotated), jnp.bfloat16), keys)


def layer(
    params: Mapping[str, Any],
    hidden: Any,
    rotary: tuple[Any, Any] | None,
    conventions: Conventions,
    *,
    positions: Any = None,
    indices: Any = None,
    latents: Any = None,
    loss_weight: Any = None,
    cache: Cache | None = None,
    block_tables: Any = None,
    context_lens: Any = None,
    context_axis: str | None = None,
    heads_axis: str | None = None,
) -> Output:
    """Attention of one layer, without its norm and its residual.

    Without a cache it is causal over `hidden` and differentiable. With one, the S tokens are the last of each request:
    they are written, and attend to the request's tokens up to themselves. There is no gradient then.

    With `loss_weight` the step trains the indexer, too, by `dsa_attention`: towards the attention's distribution over
    the selection. Its gradients end at the layer's input, and the model's gradients do not see its loss.

    Args:
        params: the attention module's `state_dict`: "q_a_proj.weight", "indexer.wk.weight" and so on, [out, in] each.
            What a family has beside them is used where it is given: "sinks", gates, biases, "q_proj" in the place of
            the two projections of queries, "softmax_scaling", "k_rope_only_layernorm", pools of the indexer. Without
            "kv_a_proj_with_mqa" the layer shares the keys of an earlier one.
        hidden: [B, S, hidden], bfloat16 or float16; bfloat16 with a cache. It is the dtype of products, whatever that
            of the parameters; "indexer.weights_proj" works in its own, norms in float32.
        rotary: cosines and sines of the tokens, as `rotary` makes them. None without RoPE.
        conventions: of the model.
        positions: [B, S] of any integer dtype, the tokens' positions; where "softmax_scaling" is among the parameters.
        indices: the selection of an earlier layer that this one shares, as it was returned.
        latents: the keys of an earlier layer that this one shares, as they were returned; with a cache, the cache has
            them.
        loss_weight: a number, or float32 that broadcasts to [B, S]: how much the KL loss of each query counts. The
            gradient with respect to it is the KL loss. None: the indexer learns nothing.
        cache: pages that hold the requests' earlier tokens. Donate it, and no copy is made.
        block_tables: [B, width] int32, as of `paged_indexer_topk`; with a cache.
        context_lens: [B] int32, tokens of each request with these S; with a cache. A request of 0 writes nothing.
        context_axis: mesh axis inside `shard_map` along which the tokens of all sequences are sharded, in order;
            without a cache.
        heads_axis: mesh axis along which attention heads are: shards of "q_b_proj", "q_proj", "kv_b_proj",
            "gate_proj", "g_proj", "softmax_scaling" and "sinks" along their first axis, of "o_proj.weight" along its
            last. The indexer is replicated.

    Returns:
        An `Output`: (out, indices, cache, latents, aux).

    Raises:
        InputError: arguments that do not belong together, or what an operator finds.
        UnsupportedError: a layer without an indexer, such as one with a sliding window; latents of another size than
            512; pools of keys in fp8; training of an indexer that ranks pools.
    """
    given = {"cache": cache, "block_tables": block_tables, "context_lens": context_lens, "latents": latents}
    given |= {"positions": positions, "context_axis": context_axis, "loss_weight": loss_weight}
    hidden = jnp.asarray(hidden)  # products of NumPy's bfloat16 are of float32
    _require_params(params, hidden, indexed=loss_weight is not None or indices is None)
    _require_supported(params, conventions, indices, loss_weight)
    _require_together(params, **given)
    own = "kv_a_proj_with_mqa.weight" in params
    if cache is not None:
        _require_pages(cache, hidden, block_tables, context_lens)
    shared: Any = latents if cache is None else cache.latents
    rows = _rows(params, hidden, rotary, conventions) if own else shared
    rotated = rows.shape[-1] - LATENT
    nope, wide = _widths(params, rotated, conventions.head_dim)
    states, queries = _queries(params, hidden, rotary, positions, conventions, nope, rotated)
    index: Any = None
    if indices is None or loss_weight is not None:
        # The indexer's gradients end here, and those of the model before the selection, which is integers.
        inputs = jax.lax.stop_gradient((hidden, states, rotary))
        index = _index(params, inputs, positions, conventions, rotated)
    slots, keys = None, None
    if cache is not None:
        fits = cache.latents.shape[-1] == rows.shape[-1]
        _require("cache.latents", fits, f"rows of {rows.shape[-1]} channels", cache.latents)
        slots, keys = _last_slots(cache, block_tables, context_lens, hidden.shape[1]), cache.keys
    if indices is None:
        ranked, pool_bias = jax.lax.stop_gradient((index, params.get(pools.BIAS)))
        if cache is None:
            indices = _select(ranked, pool_bias, conventions, context_axis)
        else:
            indices, keys = _select_paged(ranked, pool_bias, conventions, keys, slots, block_tables, context_lens)
    expand = params["kv_b_proj.weight"].astype(hidden.dtype).reshape(-1, nope + wide, LATENT)
    absorbed = jnp.einsum("bshn,hnc->bshc", queries[..., :nope], expand[:, :nope])
    absorbed = jnp.concatenate((absorbed, queries[..., nope:]), -1)
    sink, aux = params["sinks"].astype(jnp.float32) if "sinks" in params else None, None
    options: dict[str, Any] = {"sm_scale": conventions.scale, "topk_length": _count(indices), "attn_sink": sink}
    if cache is not None:
        pages = _write(cache.latents, rows, slots) if own else rows
        cache, rows = Cache(pages, keys), None
        attended = _run("sparse_mla_decode", absorbed, pages, indices, cache_format="bf16", **options)[0]
    elif loss_weight is not None:
        options |= {"loss_weight": loss_weight, "axis_name": heads_axis, "context_axis": context_axis}
        options |= dict(zip(("iq", "ik", "iw"), index, strict=True))
        attended, _, aux = dsa_attention(absorbed, rows, indices=indices, **options)
    elif context_axis is not None:
        attended = parallel.sparse_mla_fwd(absorbed, rows, indices, axis_name=context_axis, **options)[0]
    else:
        attended = _run("sparse_mla_fwd", absorbed, rows, indices, **options)[0]
    values = jnp.einsum("bshc,hvc->bshv", attended, expand[:, nope:])
    out = _gated(params, values, hidden) @ params["o_proj.weight"].astype(hidden.dtype).T
    out = out if heads_axis is None else jax.lax.psum(out, heads_axis)
    bias = params.get("o_proj.bias")
    return Output(out if bias is None else out + bias.astype(out.dtype), indices, cache, rows, aux)


def _run(name: str, *arrays: Any, **options: Any) -> Any:
    return public(declared(name))(*arrays, **options)


def _require_supported(params: Mapping[str, Any], conventions: Conventions, indices: Any, loss_weight: Any) -> None:
    """Raise UnsupportedError for a layer of another kind."""
    pooled, rank = pools.BIAS in params, params["kv_b_proj.weight"].shape[1]
    if indices is None and "indexer.wk.weight" not in params:
        wanted, supported = (
            "a layer without an indexer, such as one with a sliding window",
            "indices= of an earlier layer",
        )
    elif rank != LATENT:
        wanted, supported = f"kv_lora_rank={rank}", str(LATENT)
    elif pooled and conventions.index_fp8:
        wanted, supported = "pools of index keys in fp8 (glm5_next)", "index_fp8=False"
    elif pooled and loss_weight is not None:
        wanted, supported = "the training of an indexer that ranks pools (glm5_next)", "loss_weight=None"
    else:
        return
    raise UnsupportedError(wanted, "interop.jax.dsa", supported)


def _require_together(params: Mapping[str, Any], **given: Any) -> None:
    """Raise InputError for arguments that need each other, or exclude each other."""
    own = "kv_a_proj_with_mqa.weight" in params
    needed: dict[str, str] = {}
    refused: dict[str, str] = {}
    if given["cache"] is None:
        refused |= dict.fromkeys(("block_tables", "context_lens"), "without a cache")
        if not own:
            needed["latents"] = "for a layer that shares another one's"
    else:
        needed |= dict.fromkeys(("block_tables", "context_lens"), "with a cache")
        refused |= dict.fromkeys(("context_axis", "loss_weight", "latents"), "with a cache")
    if own:
        refused["latents"] = "for a layer with its own"
    if "indexer.wk.weight" not in params:
        refused["loss_weight"] = "for a layer without an indexer of its own"
    if "softmax_scaling.scale" in params:
        needed["positions"] = "for queries that are scaled by them"
    for name, value in given.items():
        if value is None and name in needed:
            raise InputError(name, f"an array {needed[name]}", "None", operator="dsa")
        if value is not None and name in refused:
            raise InputError(name, f"None {refused[name]}", kind(value), operator="dsa")


def _require(name: str, holds: bool, expected: str, array: Any) -> None:
    if not holds:
        got = "None" if array is None else f"{[*jnp.shape(array)]} {getattr(array, 'dtype', type(array).__name__)}"
        raise InputError(name, expected, got, operator="dsa")


def _require_params(params: Mapping[str, Any], hidden: Any, *, indexed: bool) -> None:
    """Raise InputError for parameters that are missing, or for other hidden states than theirs."""
    wide = ["q_proj"] if "q_proj.weight" in params else ["q_a_proj"]
    names = [*wide, *(() if "q_proj" in wide else ("q_a_layernorm", "q_b_proj")), "kv_b_proj", "o_proj"]
    if "kv_a_proj_with_mqa.weight" in params:
        wide.append("kv_a_proj_with_mqa")
        names += ["kv_a_proj_with_mqa", "kv_a_layernorm"]
    if indexed and "indexer.wk.weight" in params:
        wide += ["indexer.wk", "indexer.weights_proj"]
        names += ["indexer.wk", "indexer.weights_proj", "indexer.wq_b", "indexer.k_norm"]
    for name in names:
        what = "this parameter of the attention module's state_dict, without a prefix"
        _require(f"params[{name + '.weight'!r}]", f"{name}.weight" in params, what, None)
    _require("hidden", hidden.ndim == 3, "shape [B, S, hidden]", hidden)
    _require("hidden", hidden.dtype in (jnp.bfloat16, jnp.float16), "bfloat16 or float16", hidden)
    for name in wide:
        weight, channels = params[f"{name}.weight"], hidden.shape[-1]
        fits = weight.ndim == 2 and weight.shape[1] == channels
        _require(f"params[{name + '.weight'!r}]", fits, f"shape [out, {channels}], as hidden is", weight)


def _require_pages(cache: Cache, hidden: Any, block_tables: Any, context_lens: Any) -> None:
    """Raise InputError for a cache, tables or lengths of another kind."""
    _require("hidden", hidden.dtype == jnp.bfloat16, "bfloat16, with a cache", hidden)
    batch, (latents, keys) = len(hidden), cache
    fits = latents.ndim == 3 and latents.dtype == jnp.bfloat16
    _require("cache.latents", fits, "[blocks, page, 512 + rotated] bfloat16", latents)
    blocks, page, _ = latents.shape
    fits = keys is None or keys.shape[:-1] == (blocks, page)
    _require("cache.keys", fits, f"shape [{blocks}, {page}, channels], as the latents' pages", keys)
    for name, array, shape in (("block_tables", block_tables, "width"), ("context_lens", context_lens, "")):
        extents, wanted = jnp.shape(array), f"[{batch}{', ' * bool(shape)}{shape}] int32"
        fits = len(extents) == 1 + bool(shape) and extents[0] == batch and getattr(array, "dtype", None) == jnp.int32
        _require(name, fits, wanted, array)


def _widths(params: Mapping[str, Any], rotated: int, head_dim: int | None) -> tuple[int, int]:
    """Channels of a head's key without rotation, and of its value; shapes of parameters have these times heads."""
    values = params["o_proj.weight"].shape[1]
    keys = params["kv_b_proj.weight"].shape[0] - values
    queries = params["q_proj.weight" if "q_proj.weight" in params else "q_b_proj.weight"].shape[0]
    if not rotated and head_dim is None:
        raise InputError("conventions", "head_dim, where nothing is rotated", "None", operator="dsa")
    heads = queries // head_dim if head_dim else (queries - keys) // rotated
    if heads <= 0 or keys % heads or values % heads or queries != keys + heads * rotated:
        raise InputError("params", "projections of the same heads, with rotated channels", "others", operator="dsa")
    return keys // heads, values // heads


def _linear(params: Mapping[str, Any], name: str, x: Any) -> Any:
    out, bias = x @ params[f"{name}.weight"].astype(x.dtype).T, params.get(f"{name}.bias")
    return out if bias is None else out + bias.astype(x.dtype)


def _rms(weight: Any, x: Any, epsilon: float) -> Any:
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + epsilon)
    return (weight.astype(jnp.float32) * normed).astype(x.dtype)


def _latent(params: Mapping[str, Any], name: str, x: Any, hidden: Any, conventions: Conventions) -> Any:
    """A latent's norm, scaled by the hidden size where the family does so."""
    normed = _rms(params[f"{name}.weight"], x, conventions.epsilon)
    return normed * (hidden.shape[-1] / x.shape[-1]) ** 0.5 if conventions.scaled_latents else normed


def _layer_norm(params: Mapping[str, Any], name: str, x: Any, epsilon: float) -> Any:
    scale, shift = (params[f"{name}.{part}"].astype(jnp.float32) for part in ("weight", "bias"))
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + epsilon)
    return (wide * scale + shift).astype(x.dtype)


def _scaled(params: Mapping[str, Any], prefix: str, queries: Any, positions: Any) -> Any:
    """Queries [B, S, heads, channels] times scale * log(position + 1) + bias of their head, where there are these."""
    if f"{prefix}softmax_scaling.scale" not in params:
        return queries
    scale, bias = (params[f"{prefix}softmax_scaling.{part}"].astype(jnp.float32) for part in ("scale", "bias"))
    logs = jnp.log1p(jnp.asarray(positions).astype(jnp.float32))[..., None, None]
    return (queries.astype(jnp.float32) * (logs * scale[:, None] + bias[:, None])).astype(queries.dtype)


def _rotate(x: Any, rotary: tuple[Any, Any] | None, interleaved: bool) -> Any:
    """x [B, S, heads, rotated]; pairs are neighbours or of two halves. Results always lie in halves."""
    wide, half = x.astype(jnp.float32), x.shape[-1] // 2
    expected = f"cosines and sines for channels that are rotated, [{x.shape[0]}, {x.shape[1]}, {half}] each"
    for table in (None,) if rotary is None else rotary:
        shape = getattr(table, "shape", ())
        rows = zip(shape[-2::-1], x.shape[1::-1], strict=False)
        fits = shape[-1:] == (half,) and all(have in (1, want) for have, want in rows)
        _require("rotary", fits, expected, table)
    cos, sin = (part[..., None, :] for part in rotary or ())
    a, b = (wide[..., ::2], wide[..., 1::2]) if interleaved else (wide[..., :half], wide[..., half:])
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), -1).astype(x.dtype)


def _queries(
    params: Any, hidden: Any, rotary: Any, positions: Any, conventions: Conventions, nope: int, rotated: int
) -> tuple[Any, Any]:
    """The queries' latents, or hidden states where there are none; queries [B, S, heads, nope + rotated] of them."""
    states, last = hidden, "q_proj"
    if "q_proj.weight" not in params:
        states, last = _linear(params, "q_a_proj", hidden), "q_b_proj"
        states = _latent(params, "q_a_layernorm", states, hidden, conventions)
    queries = _linear(params, last, states).reshape(*hidden.shape[:2], -1, nope + rotated)
    if rotated:
        turned = _rotate(queries[..., nope:], rotary, conventions.interleaved)
        queries = jnp.concatenate((queries[..., :nope], turned), -1)
    return states, _scaled(params, "", queries, positions)


def _rows(params: Mapping[str, Any], hidden: Any, rotary: Any, conventions: Conventions) -> Any:
    """Keys of the tokens [B, S, 512 + rotated]: latents, and channels with rotation, which all heads share."""
    row = _linear(params, "kv_a_proj_with_mqa", hidden)
    latents = _latent(params, "kv_a_layernorm", row[..., :LATENT], hidden, conventions)
    turned = row[..., LATENT:]
    if not turned.shape[-1]:
        return latents
    if "k_rope_only_layernorm.weight" in params:
        turned = _rms(params["k_rope_only_layernorm.weight"], turned, conventions.epsilon)
    return jnp.concatenate((latents, _rotate(turned[:, :, None], rotary, conventions.interleaved)[:, :, 0]), -1)


def _gated(params: Mapping[str, Any], values: Any, hidden: Any) -> Any:
    """Values [B, S, heads, channels] as [B, S, heads * channels], times the gates of heads or of channels."""
    for name, shape in (("g_proj", (*values.shape[:3], 1)), ("gate_proj", values.shape)):
        if f"{name}.weight" in params:
            gate = jax.nn.sigmoid(_linear(params, name, hidden).astype(jnp.float32)).reshape(shape)
            values = (values.astype(jnp.float32) * gate).astype(values.dtype)
    return values.reshape(*hidden.shape[:2], -1)


def _index(params: Any, inputs: Any, positions: Any, conventions: Conventions, rotated: int) -> Index:
    """Of inputs: hidden states, what index queries are made of, and the rotary tables."""
    hidden, states, rotary = inputs
    project, width = params["indexer.weights_proj.weight"], params["indexer.k_norm.weight"].shape[0]
    if "indexer.q_input_norm.weight" in params:
        states = _layer_norm(params, "indexer.q_input_norm", states, conventions.index_epsilon)
    query = _linear(params, "indexer.wq_b", states).reshape(*hidden.shape[:2], -1, width)
    query = _scaled(params, "indexer.", query, positions)
    key = _layer_norm(params, "indexer.k_norm", _linear(params, "indexer.wk", hidden), conventions.index_epsilon)
    if rotated:
        at = width - rotated if conventions.index_rope_last else 0
        both = jnp.concatenate((query, key[:, :, None]), 2)
        middle = _rotate(both[..., at : at + rotated], rotary, conventions.index_interleaved)
        both = jnp.concatenate((both[..., :at], middle, both[..., at + rotated :]), -1)
        query, key = both[:, :, :-1], both[:, :, -1]
    if pools.BIAS in params:
        key = pools.states(params, hidden, key)
    weights = (hidden.astype(project.dtype) @ project.T).astype(jnp.float32)
    return query, key, weights * (project.shape[0] * width) ** -0.5


def _select(index: Index, bias: Any, conventions: Conventions, axis: str | None) -> Any:
    (query, key, weights), start, scales = index, 0, {}
    if axis is not None:
        start, key = jax.lax.axis_index(axis) * query.shape[1], parallel.gathered(key, axis)
    if bias is not None:
        return _select_pools(query, key, weights, bias, jnp.reshape(start, 1), conventions)
    if conventions.index_fp8:
        query, q_scale = _run("quantize_fp8", query, group=INDEX)
        key, k_scale = _run("quantize_fp8", key, group=INDEX)
        scales = {"q_scale": q_scale[..., 0], "k_scale": k_scale[..., 0]}
    topk = min(conventions.topk, key.shape[1])
    return _run("indexer_topk", query, key, weights, topk, causal=True, q_start=start, **scales)[0]


def _select_pools(query: Any, states: Any, weights: Any, bias: Any, first: Any, conventions: Conventions) -> Any:
    return pools.selection(query, states, weights, bias, first, topk=conventions.topk, tail=conventions.pool_tail)


def _select_paged(
    index: Index, bias: Any, conventions: Conventions, keys: Any, slots: Any, block_tables: Any, context_lens: Any
) -> tuple[Any, Any]:
    (query, key, weights), scales, fp8 = index, {}, conventions.index_fp8
    wanted = (key.shape[-1] + 4, jnp.uint8) if fp8 else (key.shape[-1], jnp.bfloat16)
    if keys is None or (keys.shape[-1], keys.dtype) != wanted:
        expected = f"[blocks, page, {wanted[0]}] {jnp.dtype(wanted[1]).name}, with index_fp8={fp8}"
        got = "None" if keys is None else f"{list(keys.shape)} {keys.dtype.name}"
        raise InputError("cache.keys", expected, got, operator="dsa")
    if fp8:
        keys = _run("indexer_k_quant_and_cache", key.reshape(-1, key.shape[-1]), keys, slots)
        query, q_scale = _run("quantize_fp8", query, group=INDEX)
        scales["q_scale"] = q_scale[..., 0]
    else:
        keys = _write(keys, key, slots)
    if bias is not None:
        states = keys[jnp.maximum(block_tables, 0)].reshape(len(query), -1, keys.shape[-1])
        tokens = _select_pools(query, states, weights, bias, context_lens - query.shape[1], conventions)
        return _slots(tokens.reshape(len(query), -1), block_tables, keys.shape[1]).reshape(tokens.shape), keys
    topk = min(conventions.topk, block_tables.shape[1] * keys.shape[1])
    return _run("paged_indexer_topk", query, keys, weights, block_tables, context_lens, topk, **scales)[0], keys


def _count(indices: Any) -> Any:
    """How many entries of each row may count: up to the last one that names a key. Pools' have -1 before it, too."""
    places = jnp.arange(1, indices.shape[-1] + 1, dtype=jnp.int32)
    return jnp.where(indices >= 0, places, 0).max(-1)


def _last_slots(cache: Cache, block_tables: Any, context_lens: Any, length: int) -> Any:
    """[B * S] int32, where the last S tokens of each request are written; -1 for none."""
    tokens = context_lens[:, None] - length + jnp.arange(length, dtype=jnp.int32)
    return _slots(tokens, block_tables, cache.latents.shape[1]).reshape(-1)


def _slots(tokens: Any, block_tables: Any, page: int) -> Any:
    """Where tokens [B, N] of requests lie, int32; -1 for none."""
    blocks = jnp.take_along_axis(block_tables, jnp.clip(tokens // page, 0, block_tables.shape[1] - 1), 1)
    inside = (tokens >= 0) & (tokens < block_tables.shape[1] * page) & (blocks >= 0)
    return jnp.where(inside, blocks * page + tokens % page, -1).astype(jnp.int32)


def _write(pages: Any, rows: Any, slots: Any) -> Any:
    flat = pages.reshape(-1, pages.shape[-1])
    # JAX counts negative indices from the end, so what is not written gets one behind it.
    at = jnp.where(slots < 0, flat.shape[0], slots)
    return flat.at[at].set(rows.reshape(-1, rows.shape[-1]).astype(flat.dtype), mode="drop").reshape(pages.shape)
