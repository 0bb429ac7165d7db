"""glm5_next's selection: keys are pooled by 16, the indexer ranks pools, and keys of no full pool are always selected.

A pool's key is a mean of its index keys, weighted in each channel by a softmax over gates. Pools begin at a sequence's
first token that is no padding. A query sees pools that end at it or before it.

Source: transformers 5.24, models/glm5_next/modeling_glm5_next.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import torch as mla


def selection(indexer: Any, hidden: Any, make_queries: Callable[[], Any], kept: Any, cache: Any) -> tuple[Any, Any]:
    """The keys that each query selects, and how many entries of its row may name one.

    hidden [B, S, hidden_size]; make_queries gives [B, S, H, D]; kept [B, S] bool, False where a token is padding, which
    selects nothing. Ids are [B, S, K] int32, -1 where there is none: first the tail of fewer keys than a pool, then
    pools.
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
    ends = ((places + 1 - first) // size).clamp(min=0).int()
    at, full = _pools(valid, first, size)
    pools = full.shape[1]
    many = min(indexer.index_topk // size, pools)
    if selects_all(indexer, pools):
        ids, count = torch.arange(pools, device=hidden.device, dtype=torch.int32), ends
        ids = torch.where(full[:, None] & (ids < ends[..., None]), ids, -1)
    elif many:
        keys = torch.where(full[..., None], _pooled(indexer, states, at), float("nan"))
        weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float()
        ids, count = mla.indexer_topk(make_queries(), keys, weights, many, starts=torch.zeros_like(ends), ends=ends)
    else:
        ids, count = ends.new_empty(batch, length, 0), torch.zeros_like(ends)
    inside = torch.arange(size, device=ids.device, dtype=torch.int32)
    selected = ids[..., None] * size + inside + first.int()[:, :, None, None]
    selected = torch.where(ids[..., None] < 0, -1, selected).flatten(-2)
    count = count * size
    if indexer.index_kpool_always_select_tail and size > 1:
        tail = _tails(valid, first, places, ids, size)
        selected, count = torch.cat((tail, selected), -1), count + (size - 1)
    return torch.where(kept[..., None], selected, -1), count


def selects_all(indexer: Any, pools: int) -> bool:
    """Whether no score has to tell which pools are selected."""
    return bool(pools <= indexer.index_topk // indexer.index_kpool)


def _pools(valid: Any, first: Any, size: int) -> tuple[Any, Any]:
    """Of pools that could be full: where their keys are, [B, P * size], and which are full, [B, P]."""
    length = valid.shape[1]
    pools = length // size
    places = first + torch.arange(pools * size, device=valid.device)
    at = places.clamp(max=length - 1)
    return at, (valid.gather(1, at) & (places < length)).unflatten(1, (pools, size)).all(-1)


def _pooled(indexer: Any, states: Any, at: Any) -> Any:
    """The keys [B, P, D] of pools."""
    width = indexer.head_dim
    grouped = states.gather(1, at[..., None].expand(-1, -1, states.shape[-1])).unflatten(1, (-1, indexer.index_kpool))
    keys, gates, _ = grouped.split((width, width, 1), -1)
    shares = (gates.float() + indexer.index_kpool_compress_ape.float()).softmax(2).to(keys.dtype)
    return (shares * keys).sum(2)


def _tails(valid: Any, first: Any, places: Any, ids: Any, size: int) -> Any:
    """[B, S, size - 1] int32: keys that each query sees behind its last full pool, -1 where there is none.

    ids [B, S, K]: the pools that it selects, -1 for none.
    """
    batch = len(valid)
    seen = valid.cumsum(-1).gather(1, places.expand(batch, -1))
    behind = torch.arange(size - 1, device=valid.device)
    left = seen % size
    tail = (first + seen - left)[..., None] + behind
    named = (behind < left[..., None]) & (tail <= places[:, None])
    # Padding between tokens leaves fewer to see than there are places: what is selected already is named once.
    named &= (ids != (seen // size)[..., None]).all(-1, keepdim=True)
    named &= valid.gather(1, tail.clamp(max=valid.shape[1] - 1).flatten(1)).view(tail.shape)
    return torch.where(named, tail, -1).int()
