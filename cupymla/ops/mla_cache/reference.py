"""The caches in NumPy: what quantisers, writers and readers mean. They are exact, so there is one precision."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .formats import E4M3, E4M3_MAX, INDEXER_FP8, LEAST_AMAX, encoded, pages, rounded_up

Array = npt.NDArray[Any]


def quantize_fp8(
    x: Array, *, group: int = 128, scale_rule: str = "amax", precision: str = "float64"
) -> tuple[Array, Array]:
    """codes as E4M3 and scales in float32; arguments and shapes as the public function's.

    `precision` changes nothing.
    """
    *rows, channels = x.shape
    largest = np.float32(float(ml_dtypes.finfo(x.dtype).max))
    values = np.clip(x.astype(np.float32), -largest, largest).reshape(*rows, channels // group, group)
    magnitudes = np.where(np.isnan(values), np.float32(0), np.abs(values))
    amax = magnitudes.max(axis=-1, initial=np.float32(0))
    scales = np.maximum(amax, np.float32(LEAST_AMAX)) / np.float32(E4M3_MAX)
    if scale_rule == "pow2":
        scales = rounded_up(scales)
    with np.errstate(invalid="ignore"):
        return encoded(values / scales[..., None]).reshape(x.shape), scales


def dequantize_fp8(codes: Array, scales: Array, *, group: int = 128) -> Array:
    """codes * scales, one float32 product each, as bfloat16; E4M3 codes may come as bytes."""
    *rows, channels = codes.shape
    values = codes.view(E4M3).astype(np.float32).reshape(*rows, channels // group, group)
    with np.errstate(over="ignore", invalid="ignore"):
        out: Array = (values * scales[..., None]).astype(ml_dtypes.bfloat16).reshape(codes.shape)
    return out


def indexer_k_quant_and_cache(k: Array, cache: Array, slot_mapping: Array, *, scale_rule: str = "amax") -> None:
    """Write k [T, 128] into the cache's slots, in place; slots out of it are skipped."""
    codes, scales = quantize_fp8(k, scale_rule=scale_rule)
    code_pages, scale_pages = pages(cache, INDEXER_FP8)
    kept, block, place = located(slot_mapping, *code_pages.shape[:2])
    code_pages[block, place] = codes.view(np.uint8)[kept]
    scale_pages[block, place] = scales.view(np.uint8)[kept]


def gather_indexer_cache(
    cache: Array,
    slots: Array | None = None,
    *,
    block_tables: Array | None = None,
    cu_lens: Array | None = None,
    rows: int | None = None,
) -> tuple[Array, Array]:
    """k [N, 128] as E4M3 and k_scale [N]; arguments as the public function's. Rows without a slot are 0."""
    code_pages, scale_pages = pages(cache, INDEXER_FP8)
    if slots is None:
        assert block_tables is not None and cu_lens is not None and rows is not None
        slots = slots_of(block_tables, cu_lens, rows, code_pages.shape[1])
    kept, block, place = located(slots, *code_pages.shape[:2])
    k, k_scale = np.zeros((len(slots), INDEXER_FP8.channels), np.uint8), np.zeros((len(slots), 4), np.uint8)
    k[kept], k_scale[kept] = code_pages[block, place], scale_pages[block, place]
    return k.view(E4M3), k_scale.view(np.float32)[:, 0]


def located(slots: Array, num_blocks: int, page: int) -> tuple[Array, Array, Array]:
    """Which slots are in the cache, and their blocks and places there."""
    kept = (slots >= 0) & (slots < num_blocks * page)
    return kept, *np.divmod(slots[kept].astype(np.int64), page)


def requested(cu_lens: Array, rows: int) -> tuple[Array, Array]:
    """For each row the request that it is of, -1 for none, and its position there.

    Request b has rows cu_lens[b] to cu_lens[b + 1] - 1, both clamped to [0, rows]. Where cu_lens falls, which request
    a row is of is not defined.
    """
    lens = np.clip(cu_lens.astype(np.int64), 0, rows)
    row = np.arange(rows)
    request = np.searchsorted(lens[:-1], row, side="right") - 1
    inside = (request >= 0) & (row < lens[request + 1])
    return np.where(inside, request, -1), np.where(inside, row - lens[request], 0)


def slots_of(block_tables: Array, cu_lens: Array, rows: int, page: int) -> Array:
    """The slot of each row, -1 where it has none: past its request's table, or behind a negative block."""
    request, position = requested(cu_lens, rows)
    column = position // page
    known = (request >= 0) & (column < block_tables.shape[1])
    slots = np.full(rows, -1, np.int64)
    blocks = block_tables[request[known], column[known]].astype(np.int64)
    # A negative block stays a negative slot, whatever the offset.
    slots[known] = np.where(blocks < 0, -1, blocks * page + position[known] % page)
    return slots


def hadamard(x: Array) -> Array:
    """x [..., D] times the Hadamard matrix and D^-1/2, in float32, in x's dtype.

    Sums are made in the order of the kernel's: neighbours first, then numbers two apart, and so on.
    """
    *rows, channels = x.shape
    values = x.astype(np.float32)
    distance = 1
    with np.errstate(over="ignore", invalid="ignore"):
        while distance < channels:
            pairs = values.reshape(*rows, channels // (2 * distance), 2, distance)
            low, high = pairs[..., 0, :], pairs[..., 1, :]
            values = np.stack([low + high, low - high], axis=-2).reshape(x.shape)
            distance *= 2
        out: Array = (values * hadamard_factor(channels)).astype(x.dtype)
    return out


def hadamard_factor(channels: int) -> np.float32:
    """channels^-1/2."""
    return np.float32(channels**-0.5)
