"""torch's attention beside xl_paged_attention."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

Call = Callable[[], object]


def calls(case: Any, inputs: dict[str, Any]) -> Iterator[tuple[str, Call]]:
    """As `rivals.of`, where torch with CUDA is at hand."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    if torch.cuda.is_available():
        yield from _attention(torch, case, inputs)


def _attention(torch: Any, case: Any, inputs: dict[str, Any]) -> Iterator[tuple[str, Call]]:
    """Scaled dot-product attention with a mask, and FlexAttention with a score_mod, on a cache gathered beforehand.

    Neither reads pages of 16 tokens, so both get every sequence's keys and values contiguous and padded to the longest.
    """
    if case.kv_dtype or case.kv_layout != "vllm":
        return
    query, keys, values, bias = _contiguous(torch, case, inputs)
    scale = case.head_size**-0.5
    lens = torch.from_dlpack(inputs["context_lens"]).long()
    functional = torch.nn.functional
    mask = None if bias is None else bias[:, :, None, :] * scale
    if len(set(case.context_lens)) > 1:
        past = torch.arange(keys.shape[2], device="cuda")[None, :] >= lens[:, None]
        blank = torch.zeros_like(past, dtype=query.dtype).masked_fill(past, float("-inf"))[:, None, None, :]
        mask = blank if mask is None else mask + blank

    def dense() -> object:
        return functional.scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=True)

    yield "torch SDPA, gathered", dense
    from torch.nn.attention.flex_attention import flex_attention

    attention = torch.compile(flex_attention, dynamic=False)

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        found = score if bias is None else score + bias[b, h, j] * scale
        return torch.where(j < lens[b], found, float("-inf"))

    def flexible() -> object:
        return attention(query, keys, values, score_mod=score_mod, scale=scale, enable_gqa=True)

    yield "torch FlexAttention, gathered", flexible


def _contiguous(torch: Any, case: Any, inputs: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Query [seqs, heads, 1, size], keys and values [seqs, kv_heads, longest, size], bias [seqs, heads, longest]."""
    longest = max(case.context_lens)
    k_cache, v_cache = (torch.from_dlpack(inputs[name]) for name in ("k_cache", "v_cache"))
    num_blocks = k_cache.shape[0]
    columns = -(-longest // case.block_size)
    tables = torch.from_dlpack(inputs["block_tables"]).long()[:, :columns].clamp(0, num_blocks - 1)
    by_token = (k_cache.permute(0, 1, 3, 2, 4).flatten(3), v_cache.permute(0, 1, 3, 2))
    gathered = []
    for cache in by_token:
        # [seqs, columns, kv_heads, block_size, size]
        pages = cache[tables].permute(0, 2, 1, 3, 4).flatten(2, 3)[:, :, :longest]
        gathered.append(torch.nan_to_num(pages).contiguous())
    query = torch.from_dlpack(inputs["query"])[:, :, None, :]
    bias = None
    if case.bias == "dense":
        bias = torch.nan_to_num(torch.from_dlpack(inputs["matrix_bd"]))[:, :, :longest]
        bias = bias.contiguous()
    elif case.bias == "relative":
        table = torch.nan_to_num(torch.from_dlpack(inputs["rel_bias"]))
        lens = torch.from_dlpack(inputs["context_lens"]).long()
        distance = lens[:, None] - 1 - torch.arange(longest, device="cuda")[None, :]
        rows = distance.clamp(0, case.extent - 1)[:, None, :].expand(-1, case.num_heads, -1)
        bias = table.gather(2, rows).masked_fill((distance >= case.extent)[:, None, :], 0)
    return query, gathered[0], gathered[1], bias
