"""glm5_next's selection: keys are pooled by 16, the indexer ranks pools, and keys of no full pool are always selected.

A pool's key is a mean of its index keys, weighted in each channel by a softmax over gates. Pools begin at a sequence's
first token that is no padding. A query sees pools that end at it or before it.

Source: transformers 5.24, models/glm5_next/modeling_glm5_next.py.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import torch as mla


def selection(indexer: Any, hidden: Any, queries: Any, kept: Any, cache: Any) -> tuple[Any, Any]:
    """The keys that each query selects, and how many entries of its row may name one.

    hidden [B, S, hidden_size]; queries [B, S, H, D]; kept [B, S] bool, False where a token is padding, which selects
    nothing. Ids are [B, S, K] int32, -1 where there is none: first the tail of fewer keys than a pool, then pools.
    """
    batch, length, _ = hidden.shape
    states = torch.cat(
        (
            indexer.k_norm(indexer.wk(hidden)),
            torch.nn.functional.linear(hidden, indexer.index_kpool_compress_gate),
            kept.to(hidden.dtype)[..., None],
        ),
        -1,
    )
    current = length
    if cache is not None:
        states = cache.update_indexer(states, indexer.layer_idx)
        current = cache.layers[indexer.layer_idx].get_seq_length()
    valid = states[..., -1].bool()
    first = torch.where(valid.any(-1), valid.int().argmax(-1), valid.shape[1])[:, None]
    places = torch.arange(length, device=hidden.device) + (current - length)
    size = indexer.index_kpool
    keys = _pooled(indexer, states, first)
    weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float()
    many = min(indexer.index_topk // size, keys.shape[1])
    ids, count = hidden.new_empty(batch, length, 0, dtype=torch.int32), kept.new_zeros(batch, length, dtype=torch.int32)
    if many:
        ends = ((places + 1 - first) // size).clamp(min=0).int()
        ids, count = mla.indexer_topk(queries, keys, weights, many, starts=torch.zeros_like(ends), ends=ends)
    inside = torch.arange(size, device=ids.device, dtype=torch.int32)
    selected = ids[..., None] * size + inside + first.int()[:, :, None, None]
    selected = torch.where(ids[..., None] < 0, -1, selected).flatten(-2)
    count = count * size
    if indexer.index_kpool_always_select_tail and size > 1:
        tail = _tails(valid, first, places, size)
        selected, count = torch.cat((tail, selected), -1), count + (size - 1)
    return torch.where(kept[..., None], selected, -1), count


def _pooled(indexer: Any, states: Any, first: Any) -> Any:
    """Keys [B, P, D] of all pools that could be full; NaN, which is never selected, of those that are not."""
    size, length, width = indexer.index_kpool, states.shape[1], indexer.head_dim
    pools = length // size
    places = first + torch.arange(pools * size, device=states.device)
    inside = places < length
    grouped = states.gather(1, places.clamp(max=length - 1)[..., None].expand(-1, -1, states.shape[-1]))
    keys, gates, valid = grouped.unflatten(1, (pools, size)).split((width, width, 1), -1)
    shares = (gates.float() + indexer.index_kpool_compress_ape.float()).softmax(2).to(keys.dtype)
    full = (valid[..., 0].bool() & inside.unflatten(1, (pools, size))).all(-1)
    return torch.where(full[..., None], (shares * keys).sum(2), float("nan"))


def _tails(valid: Any, first: Any, places: Any, size: int) -> Any:
    """[B, S, size - 1] int32: keys that each query sees behind its last full pool, -1 where there is none."""
    batch = len(valid)
    seen = valid.cumsum(-1).gather(1, places.expand(batch, -1))
    behind = torch.arange(size - 1, device=valid.device)
    left = seen % size
    tail = (first + seen - left)[..., None] + behind
    named = (behind < left[..., None]) & (tail <= places[:, None])
    named &= valid.gather(1, tail.clamp(max=valid.shape[1] - 1).flatten(1)).view(tail.shape)
    return torch.where(named, tail, -1).int()
