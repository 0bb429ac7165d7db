"""Absorbed sparse attention in the place of a family's dense attention, and its indexer with our selection.

Classes made here derive from a family's own and keep all parameters. They override the indexer's `forward` and the
attention's `expand_kv`, which then leaves the latent rows as they are. The attention itself is a function that is
registered with transformers; `enable` names it in the model's configuration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...errors import UnsupportedError
from .. import torch as mla
from . import fp8, pools
from .cache import MARK, fits, joined, roomy_class, static_class, whole
from .families import FP8, Family
from .masks import dense_mask, visible_keys
from .products import by_heads

DECODE_QUERIES = 8
"""Up to so many queries of a sequence, attention without gradients runs as decode."""


PLAIN = "a torch.nn.Linear without bias, hooks or a forward of its own, for it is absorbed into the queries"


def is_plain(projection: Any) -> bool:
    """Whether a projection is no more than its weight: adapters and hooks would be passed over."""
    return (
        type(projection) is torch.nn.Linear
        and projection.bias is None
        and "forward" not in projection.__dict__
        and not projection._forward_hooks
        and not projection._forward_pre_hooks
    )


_COUNT = "_cupymla_count"
"""Attribute of a selection: how many of each row's ids count. Layers that share the selection find it there."""


def _count(indices: Any) -> Any:
    """How many entries of each row count; worked out anew of a selection that came through checkpointing."""
    known = getattr(indices, _COUNT, None)
    if known is not None:
        return known
    places = torch.arange(1, indices.shape[-1] + 1, device=indices.device, dtype=torch.int32)
    return torch.where(indices >= 0, places, 0).amax(-1)


def give_room(cache: Any, layer_idx: int, in_fp8: bool = False) -> None:
    """Let a dynamic layer of a cache grow in place, a static one hold whole rows, and both fp8, if they hold nothing.

    Raises UnsupportedError for fp8 in a layer of another kind, and for a layer that holds no latent rows.
    """
    layers = getattr(cache, "layers", ())
    if layer_idx >= len(layers):
        return
    layer = layers[layer_idx]
    kind: type = type(layer)
    if hasattr(kind, MARK):
        return
    classes = {"DynamicIndexedLayer": roomy_class, "StaticIndexedLayer": static_class}
    class_for: Any = classes.get(kind.__name__)
    if in_fp8 and kind.__name__ != "DummyLayer":  # a layer that reads another one's keys holds none
        if class_for is None:
            raise UnsupportedError(f"an fp8 cache in a {kind.__name__}", "any device", "DynamicCache, StaticCache")
        class_for = fp8.fp8_class
        layer._shared = cache.__dict__.setdefault("_cupymla_shared", {})
    if class_for is not None:
        if layer.is_initialized and layer.keys.shape[1] != 1:  # of transformers before 5.24, when it is not enabled
            held = f"a cache of {layer.keys.shape[1]} heads' keys, not of latent rows"
            raise UnsupportedError(held, str(layer.keys.device), "a cache that an enabled model began")
        layer.__class__ = class_for(kind)
        if layer.is_initialized and layer.is_indexer_initialized:  # by a family whose own code keeps them in float32
            layer.indexer_keys = layer.indexer_keys.to(layer.keys.dtype)


class _Latents:
    """An attention module whose keys stay the latent rows that its cache holds."""

    layer_idx: int

    def expand_kv(self, kv_nope: Any, k_rot: Any) -> tuple[Any, Any]:
        """[B, 1, L, 512] and [B, 1, L, 64 or 0] as one row a key, and no values: they are the row's first 512.

        Rows that are whole already stay as they are: of static caches, of fp8 [B, 1, L, 656], without RoPE.
        """
        if not k_rot.shape[-1]:
            return kv_nope, k_rot
        rows = joined(kv_nope, k_rot)
        return rows, rows[..., :0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The family's own, with room in its layer of the cache."""
        cache = kwargs.get("cache")
        cache = kwargs.get("past_key_values") if cache is None else cache
        give_room(cache, self.layer_idx, bool(self.__dict__.get(FP8)))
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def build_attention_mask_from_topk(self, topk_indices: Any, **sizes: Any) -> Any:
        """glm5_next's: the ids themselves. Families that hand them on have no such method."""
        return topk_indices


@functools.cache
def attention_class(base: type) -> type:
    """The class that takes an attention module's place."""
    return type(base.__name__, (_Latents, base), {"__module__": __name__, "__doc__": base.__doc__})


@functools.cache
def norm_class(base: type) -> type:
    """The class that takes the place of an RMS norm of latents: one launch for the eight of the family's own."""

    def forward(self: Any, hidden_states: Any) -> Any:
        return torch.nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)

    return type(base.__name__, (base,), {"forward": forward, "__module__": __name__, "__doc__": base.__doc__})


@functools.cache
def indexer_class(base: type, family: Family) -> type:
    """The class that takes an indexer's place, with the arguments of the family's own `forward`."""

    def of_latents(
        self: Any,
        hidden_states: Any,
        q_resid: Any,
        position_embeddings: Any,
        attention_mask: Any,
        position_ids: Any = None,
        cache: Any = None,
        past_key_values: Any = None,
    ) -> Any:
        return _selection(
            self,
            family,
            hidden_states,
            lambda: _heads(self, q_resid),
            position_embeddings,
            attention_mask,
            past_key_values if cache is None else cache,
        )

    def of_hidden_states(
        self: Any,
        hidden_states: Any,
        position_embeddings: Any,
        attention_mask: Any,
        position_ids: Any = None,
        cache: Any = None,
    ) -> Any:
        def queries() -> Any:
            heads = _heads(self, self.q_input_norm(hidden_states))
            return self.softmax_scaling(heads, position_ids, head_dim_first=False)

        return _selection(self, family, hidden_states, queries, position_embeddings, attention_mask, cache)

    def of_pools(
        self: Any, hidden_states: Any, q_resid: Any, attention_mask: Any, cache: Any = None, past_key_values: Any = None
    ) -> Any:
        cache = past_key_values if cache is None else cache
        indices, count = pools.selection(self, hidden_states, lambda: _heads(self, q_resid), attention_mask, cache)
        setattr(indices, _COUNT, count)
        return indices

    of_others = of_latents if family.latent_query else of_hidden_states
    forward = torch.no_grad()(of_pools if family.pools else of_others)
    body = {"forward": forward, "__module__": __name__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), body)


def _heads(indexer: Any, states: Any) -> Any:
    """Index queries [B, S, H, D] of what they are made of."""
    return indexer.wq_b(states).view(*states.shape[:-1], indexer.n_heads, indexer.head_dim)


def _rotated(x: Any, count: int, tables: Any, family: Family) -> Any:
    """[B, S, heads, D] with `count` channels rotated, rounded as the family's own function does it.

    `tables`: cosines and sines, [B, S, count].

    Of interleaved pairs the first ones come out in front, the second ones behind them.
    """
    at = x.shape[-1] - count if family.rope_last else 0
    rest, part = (x[..., :at], x[..., at:]) if at else (x[..., count:], x[..., :count])
    half = count // 2
    pairs = part.unflatten(-1, (half, 2)).transpose(-1, -2) if family.interleaved else part.unflatten(-1, (2, half))
    a, b = (pairs * table[..., None, None, :half] for table in tables)
    turned = a[..., 0, :] - b[..., 1, :], a[..., 1, :] + b[..., 0, :]
    return torch.cat((rest, *turned) if at else (*turned, rest), -1)


def _selection(
    indexer: Any,
    family: Family,
    hidden: Any,
    make_queries: Callable[[], Any],
    position_embeddings: Any,
    ranges: Any,
    cache: Any,
) -> Any:
    """The ids [B, S, topk] int32 of the keys that each query selects, ascending, -1 behind them.

    [B, S, 0] where each selects all that it sees, which no score has to tell.
    """
    if ranges is None or ranges.dtype != torch.int32:
        raise UnsupportedError(
            "a mask of one's own",
            str(hidden.device),
            "causal attention with a padding mask [batch, length]",
        )
    every = fits(indexer.index_topk, cache, indexer.layer_idx, hidden.shape[1])
    if every and cache is None:
        return ranges[..., :0]
    norm = indexer.k_norm
    keys = norm(indexer.wk(hidden).to(norm.weight.dtype)).to(hidden.dtype)[:, :, None]
    queries: Any = None if every else make_queries()
    if getattr(indexer, "use_rope", True):
        # Queries and keys at once: a step of decoding costs what its launches cost the host.
        both = keys if queries is None else torch.cat((queries, keys), 2)
        both = _rotated(both, indexer.qk_rope_head_dim, position_embeddings, family)
        queries, keys = both[:, :, :-1], both[:, :, -1:]
    keys = keys.to(hidden.dtype).squeeze(2)
    if cache is not None:
        keys = whole(cache.update_indexer(keys, indexer.layer_idx))
    if every:  # keys are written all the same: the context may grow
        return ranges[..., :0]
    queries = queries.to(hidden.dtype)
    scales: dict[str, Any] = {}
    if keys.dtype == torch.uint8:
        keys, scales["k_scale"] = fp8.index_parts(keys)
        queries, q_scale = mla.quantize_fp8(queries)
        scales["q_scale"] = q_scale[..., 0]
    project = indexer.weights_proj
    # Not scaled: factors above zero change no order.
    weights = project(hidden.to(project.weight.dtype))
    weights = weights if weights.dtype == torch.bfloat16 else weights.float()
    indices, count = mla.indexer_topk(
        queries,
        keys,
        weights,
        min(indexer.index_topk, keys.shape[1]),
        starts=ranges[..., 0],
        ends=ranges[..., 1],
        **scales,
    )
    setattr(indices, _COUNT, count)
    return indices


def attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *,
    scaling: float,
    dropout: float = 0.0,
    indices: Any = None,
    **options: Any,
) -> tuple[Any, None]:
    """Sparse attention over latent rows: what `ALL_ATTENTION_FUNCTIONS["cupymla"]` is.

    Args:
        module: the attention module; `kv_b_proj` expands latents to keys and values.
        query: [B, H, S, qk_nope_head_dim + qk_rope_head_dim], bf16 or fp16.
        key: [B, 1, L, 512 or 576], the latent rows, as `expand_kv` leaves them; [B, 1, L, 656] uint8 of an fp8 cache.
        value: not read.
        attention_mask: ranges of keys, read where no `indices` name them.
        scaling: of the scores.
        dropout: 0; a model that drops attention weights in training is refused.
        indices: [B, S, topk] int32, -1 behind the last one; [B, S, 0] for all keys that are visible; None for a layer
            without a selection, which then runs as transformers' SDPA.
        **options: of transformers, not read here.

    Returns:
        ([B, S, H, v_head_dim], None). There are no attention weights to return.

    Raises:
        UnsupportedError: attention weights are dropped or asked for; `kv_b_proj` is no longer a plain projection; the
            model was not enabled.
    """
    pooled = indices is None and hasattr(type(module).__bases__[-1], "build_attention_mask_from_topk")
    if pooled:
        indices = attention_mask
    if indices is None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if attention_mask is not None and attention_mask.dtype == torch.int32:
            attention_mask = dense_mask(attention_mask, key.shape[2])
        found: tuple[Any, None] = ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return found
    if dropout:
        raise UnsupportedError(f"attention_dropout={dropout} in training", str(query.device), "attention_dropout=0")
    if options.get("output_attentions"):
        raise UnsupportedError("output_attentions=True", str(query.device), "outputs without attention weights")
    if _Latents not in type(module).__mro__:
        raise UnsupportedError(
            "a model with another one's configuration", str(query.device), "a model that `enable` was called with"
        )
    if not is_plain(module.kv_b_proj):
        raise UnsupportedError(
            f"kv_b_proj changed to {type(module.kv_b_proj).__name__}, or hooked", str(query.device), PLAIN
        )
    batch, heads, queries, _ = query.shape
    nope, wide = module.qk_nope_head_dim, module.v_head_dim
    expand_k, expand_v = module.kv_b_proj.weight.view(heads, nope + wide, -1).split((nope, wide), 1)
    # Of the queries of all sequences: a product with a batch axis would copy the weights for each.
    absorbed = by_heads(query.transpose(1, 2).reshape(batch * queries, heads, -1), expand_k)
    absorbed = absorbed.view(batch, queries, heads, -1)
    rows, sink = whole(key[:, 0]), getattr(module, "sinks", None)
    differentiated = torch.is_grad_enabled() and any(
        array is not None and array.requires_grad for array in (absorbed, rows, sink)
    )
    cache_format: Any = {torch.bfloat16: "bf16", torch.uint8: fp8.FORMAT}.get(rows.dtype)
    decodes = queries <= DECODE_QUERIES and not differentiated and cache_format is not None
    # Then the rows of all sequences are one cache of blocks of one key.
    room = rows.shape[1]
    apart = room if decodes and batch > 1 else 0
    if indices.shape[-1]:
        count = _count(indices)
        if apart:
            first = torch.arange(0, batch * room, room, device=rows.device, dtype=torch.int32)
            slots = indices + first[:, None, None]
            # What names no key must not count, else may name anything.
            indices = torch.where(indices < 0, -1, slots) if pooled else slots
    else:
        indices, count = visible_keys(attention_mask, min(module.config.index_topk, room), apart)
    given = {
        "sm_scale": scaling,
        "topk_length": count,
        "attn_sink": None if sink is None else sink.float(),
    }
    if decodes:
        cache = rows.reshape(-1, 1, rows.shape[-1])
        out, _ = mla.sparse_mla_decode(absorbed, cache, indices, cache_format=cache_format, **given)
    else:
        if rows.dtype == torch.uint8:
            rows = fp8.latents(rows, key.shape[2]).to(query.dtype)
        out, _, _ = mla.sparse_mla_fwd(absorbed, rows, indices, **given)
    values = by_heads(out.reshape(batch * queries, heads, -1), expand_v.transpose(1, 2))
    return values.view(batch, queries, heads, wide), None
