"""torch's attention beside xl_paged_attention."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

Call = Callable[[], Any]
KINDS = ("SDPA, gathered", "FlexAttention, gathered", "FlexAttention, pages of 128")


def _maker(kind: str) -> Callable[[Any, dict[str, Any]], Any]:
    def make(case: Any, inputs: dict[str, Any]) -> Any:
        import torch
        from torch.nn.attention.flex_attention import flex_attention

        # Cases are timed in one process, and of one function torch compiles eight graphs and then no more.
        torch.compiler.reset()
        flex = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        call = attention(torch, case, inputs, flex).get(kind)
        return call and (call, str(torch.__version__), _read)

    return make


def makers() -> dict[str, Callable[[Any, dict[str, Any]], Any]]:
    """The makers, by name, where torch is installed."""
    return {f"torch {kind}": _maker(kind) for kind in KINDS} if importlib.util.find_spec("torch") else {}


def _read(out: Any) -> Mapping[str, Any]:
    return {"out": out[:, :, 0]}


def attention(torch: Any, case: Any, inputs: dict[str, Any], flex: Any) -> dict[str, Call]:
    """Scaled dot-product attention with a mask and FlexAttention with a score_mod, on a cache gathered beforehand, and
    FlexAttention on a cache of pages, by the names in `KINDS`; none where torch has no such cache.

    None reads pages of 16 tokens: the first two get every sequence's keys and values contiguous and padded to the
    longest, the third gets them in pages of 128 tokens, which lie in no order.

    Args:
        torch: the module.
        case: the case.
        inputs: its arguments, of an array library that torch exchanges arrays with.
        flex: torch's flex_attention, compiled or not.
    """
    if case.kv_dtype or case.kv_layout != "vllm":
        return {}
    query, keys, values, bias = _contiguous(torch, case, inputs)
    scale = case.head_size**-0.5
    lens = torch.from_dlpack(inputs["context_lens"]).long()
    functional = torch.nn.functional
    mask = None if bias is None else bias[:, :, None, :] * scale
    if len(set(case.context_lens)) > 1:
        past = torch.arange(keys.shape[2], device=lens.device)[None, :] >= lens[:, None]
        blank = torch.zeros_like(past, dtype=query.dtype).masked_fill(past, float("-inf"))[:, None, None, :]
        mask = blank if mask is None else mask + blank

    def dense() -> Any:
        return functional.scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=True)

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        found = score if bias is None else score + bias[b, h, j] * scale
        return torch.where(j < lens[b], found, float("-inf"))

    def flexible() -> Any:
        return flex(query, keys, values, score_mod=score_mod, scale=scale, enable_gqa=True)

    k_pages, v_pages, numbers, mask_of_pages = _paged(torch, keys, values, lens)

    def paged_score(score: Any, b: Any, h: Any, i: Any, place: Any) -> Any:
        if bias is None:
            return score
        j = numbers[b, place // PAGE] * PAGE + place % PAGE
        return score + bias[b, h, j.clamp(0, bias.shape[2] - 1)] * scale

    def paged() -> Any:
        return flex(
            query, k_pages, v_pages, score_mod=paged_score, block_mask=mask_of_pages, scale=scale, enable_gqa=True
        )

    return dict(zip(KINDS, (dense, flexible, paged), strict=True))


PAGE = 128
"""Tokens of a page that FlexAttention reads: a block of its masks."""


def _paged(torch: Any, keys: Any, values: Any, lens: Any) -> tuple[Any, Any, Any, Any]:
    """Keys and values [1, kv_heads, pages * PAGE, size] with all sequences' pages in no order; which page of each
    sequence a page is [seqs, pages], -1 where it is another's; and the mask that says whose it is.

    Source: PyTorch's documentation of `torch.nn.attention.flex_attention.BlockMask.from_kv_blocks`.
    """
    from torch.nn.attention.flex_attention import BlockMask

    seqs, kv_heads, longest, size = keys.shape
    each = -(-longest // PAGE)
    place = torch.randperm(seqs * each, generator=torch.Generator().manual_seed(0)).to(keys.device).view(seqs, each)
    laid = []
    for given in (keys, values):
        padded = torch.nn.functional.pad(given, (0, 0, 0, each * PAGE - longest))
        pages = padded.view(seqs, kv_heads, each, PAGE, size).permute(0, 2, 1, 3, 4).flatten(0, 1)
        out = torch.empty_like(pages)
        out[place.flatten()] = pages
        laid.append(out.permute(1, 0, 2, 3).reshape(1, kv_heads, -1, size).contiguous())
    own = torch.arange(seqs, device=keys.device)[:, None]
    numbers = torch.full((seqs, seqs * each), -1, device=keys.device)
    numbers[own, place] = torch.arange(each, device=keys.device).expand(seqs, each)

    def is_own(b: Any, h: Any, i: Any, place: Any) -> Any:
        page = numbers[b, place // PAGE]
        return (page >= 0) & (page * PAGE + place % PAGE < lens[b])

    # Whole pages come first, then the one that a length ends in.
    rest = torch.zeros((seqs, seqs * each - each), dtype=torch.int32, device=keys.device)
    listed = torch.cat([place.int(), rest], 1)
    whole = (lens // PAGE).int()
    ends = torch.gather(listed, 1, whole.long()[:, None].clamp(max=each - 1))
    partial = torch.cat([ends, torch.zeros_like(listed[:, 1:])], 1)
    mask = BlockMask.from_kv_blocks(
        (lens % PAGE != 0).int()[:, None, None], partial[:, None, None], whole[:, None, None], listed[:, None, None],
        BLOCK_SIZE=PAGE, mask_mod=is_own, seq_lengths=(1, seqs * each * PAGE),
    )  # fmt: skip
    return laid[0], laid[1], numbers, mask


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
        distance = lens[:, None] - 1 - torch.arange(longest, device=lens.device)[None, :]
        rows = distance.clamp(0, case.extent - 1)[:, None, :].expand(-1, case.num_heads, -1)
        bias = table.gather(2, rows).masked_fill((distance >= case.extent)[:, None, :], 0)
    return query, gathered[0], gathered[1], bias
