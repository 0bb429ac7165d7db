"""The decode indexer in NumPy: scores of paged keys as `indexer_logits` has them, and their selection."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..indexer_logits.reference import Precision, indexer_logits
from ..mla_cache.formats import PagedFormat, pages
from ..topk import reference as selection

Array = npt.NDArray[Any]

_SCALE_BYTES = 4


def lengths(context_lens: Array, queries: int, most: int) -> Array:
    """Keys that each query sees, [B, n] int64, from lengths of requests or of queries."""
    lens = context_lens.astype(np.int64)
    if lens.ndim == 1:
        lens = lens[:, None] - queries + 1 + np.arange(queries)
    return np.clip(lens, 0, most)


def paged_indexer_logits(
    q: Array,
    k_cache: Array,
    weights: Array,
    block_tables: Array,
    context_lens: Array,
    *,
    q_scale: Array | None = None,
    relu: bool = True,
    max_context: int | None = None,
    precision: Precision = "rounded",
) -> Array:
    """logits; arguments and shapes as the public function's, precisions as of `indexer_logits`."""
    requests, queries, _, channels = q.shape
    blocks, page = k_cache.shape[:2]
    room = block_tables.shape[1] * page
    lens = lengths(context_lens, queries, room if max_context is None else min(room, max_context))
    keys, scales = _rows(k_cache, channels)
    logits = np.full((requests, queries, room), -np.inf, np.float64 if precision == "float64" else np.float32)
    for request in range(requests):
        token = np.arange(int(lens[request].max(initial=0)))
        block = block_tables[request, token // page].astype(np.int64)
        there = (block >= 0) & (block < blocks)
        token, block = token[there], block[there]
        if not token.size:
            continue
        logits[request][:, token] = indexer_logits(
            q[request],
            np.ascontiguousarray(keys[block, token % page]),
            weights[request],
            q_scale=None if q_scale is None else q_scale[request],
            k_scale=None if scales is None else scales[block, token % page],
            relu=relu,
            precision=precision,
        )
    logits[np.arange(room) >= lens[..., None]] = -np.inf
    return logits


def _rows(cache: Array, channels: int) -> tuple[Array, Array | None]:
    """Keys [blocks, page, D] of a cache and, with fp8, their scales [blocks, page]."""
    if cache.dtype.itemsize > 1:
        return cache.reshape(*cache.shape[:2], channels), None
    layout = PagedFormat("indexer_fp8", channels, _SCALE_BYTES, _SCALE_BYTES)
    codes, scales = pages(cache, layout)
    return codes, np.ascontiguousarray(scales).view(np.float32)[..., 0]


def paged_indexer_topk(
    q: Array,
    k_cache: Array,
    weights: Array,
    block_tables: Array,
    context_lens: Array,
    topk: int,
    *,
    q_scale: Array | None = None,
    relu: bool = True,
    positions: str = "slot",
    max_context: int | None = None,
    return_values: bool = False,
    return_lse: bool = False,
    lse_base: str = "e",
    precision: Precision = "rounded",
) -> tuple[Array, ...]:
    """indices, count and, where wanted, values and lse; arguments, shapes and precisions as the functions' above."""
    logits = paged_indexer_logits(
        q,
        k_cache,
        weights,
        block_tables,
        context_lens,
        q_scale=q_scale,
        relu=relu,
        max_context=max_context,
        precision=precision,
    )
    # Columns that are not visible hold -inf, which is never selected.
    indices, count, values = selection.topk(logits, topk, return_values=True)
    if positions == "slot" and block_tables.shape[1]:
        page = k_cache.shape[1]
        block = np.take_along_axis(block_tables[:, None], np.maximum(indices, 0) // page, axis=-1)
        indices = np.where(indices >= 0, block * np.int32(page) + indices % page, -1).astype(np.int32)
    results = [indices, count]
    if return_values:
        results.append(values)
    if return_lse:
        results.append(selection.selected_lse(values, lse_base, precision == "float64"))
    return tuple(results)
