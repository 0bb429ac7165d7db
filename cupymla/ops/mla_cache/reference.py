"""The caches in NumPy: what quantisers, writers and readers mean.

They are exact, so there is one precision: the argument `precision` changes nothing. Writers return the cache.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .formats import E4M3, E4M3_MAX, INDEXER_FP8, LEAST_AMAX, encoded, pages, rounded_up
from .latents import BF16, FORMATS, LatentFormat, block_bytes, dequantized

Array = npt.NDArray[Any]

LEAST_SCALE = np.finfo(np.float32).tiny
"""Of the rule "amax": 2^-126."""


def quantize_fp8(
    x: Array, *, group: int = 128, scale_rule: str = "amax", precision: str = "float64"
) -> tuple[Array, Array]:
    """codes as E4M3 and scales in float32; arguments and shapes as the public function's."""
    values, amax = _grouped(x, group)
    scales = np.maximum(amax, np.float32(LEAST_AMAX)) / np.float32(E4M3_MAX)
    if scale_rule == "pow2":
        scales = rounded_up(scales)
    return _codes(values, scales).reshape(x.shape), scales


def _grouped(x: Array, group: int) -> tuple[Any, Any]:
    """Values in float32, infinities cut to the largest of the dtype, [..., groups, group], and the largest magnitude of
    each group, NaN left out."""
    largest = np.float32(float(ml_dtypes.finfo(x.dtype).max))
    values = np.clip(x.astype(np.float32), -largest, largest).reshape(*x.shape[:-1], x.shape[-1] // group, group)
    return values, np.where(np.isnan(values), np.float32(0), np.abs(values)).max(axis=-1, initial=np.float32(0))


def _codes(values: Any, scales: Any) -> Array:
    with np.errstate(invalid="ignore"):
        return encoded(values / scales[..., None])


def dequantize_fp8(codes: Array, scales: Array, *, group: int = 128, precision: str = "float64") -> Array:
    """codes * scales, one float32 product each, as bfloat16; E4M3 codes may come as bytes."""
    *rows, channels = codes.shape
    values = codes.view(E4M3).astype(np.float32).reshape(*rows, channels // group, group)
    with np.errstate(over="ignore", invalid="ignore"):
        out: Array = (values * scales[..., None]).astype(ml_dtypes.bfloat16).reshape(codes.shape)
    return out


def indexer_k_quant_and_cache(
    k: Array, cache: Array, slot_mapping: Array, *, scale_rule: str = "amax", precision: str = "float64"
) -> Array:
    """Write k [T, 128] into the cache's slots, in place; slots out of it are skipped."""
    codes, scales = quantize_fp8(k, scale_rule=scale_rule)
    code_pages, scale_pages = pages(cache, INDEXER_FP8)
    kept, block, place = located(slot_mapping, *code_pages.shape[:2])
    code_pages[block, place] = codes.view(np.uint8)[kept]
    scale_pages[block, place] = scales.view(np.uint8)[kept]
    return cache


def gather_indexer_cache(
    cache: Array,
    slots: Array | None = None,
    *,
    block_tables: Array | None = None,
    cu_lens: Array | None = None,
    rows: int | None = None,
    precision: str = "float64",
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


def hadamard(x: Array, *, precision: str = "float64") -> Array:
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


# Caches of latents --------------------------------------------------------------------------------------------------


def concat_and_cache_mla(
    kv_c: Array,
    k_pe: Array | None,
    cache: Array,
    slot_mapping: Array,
    *,
    cache_format: str,
    scale_rule: str | None = None,
    precision: str = "float64",
) -> Array:
    """Write rows into the cache's slots, in place; slots out of it are skipped. Arguments as the public function's."""
    layout = FORMATS[cache_format]
    kept, block, place = located(slot_mapping, *cache.shape[:2])
    if not kept.any():
        return cache
    latents, parts, exponents = kv_c[kept], [], None
    with np.errstate(over="ignore", invalid="ignore"):
        if layout.codes:
            codes, scales = _quantized(latents, layout, scale_rule)
            parts.append(codes)
            if layout.exponents:
                exponents = np.zeros((len(latents), layout.scale_bytes), np.uint8)
                exponents[:, : scales.shape[-1]] = scales.view(np.uint32) >> 23
            else:
                parts.append(_bytes(scales))
        else:
            parts.append(_wide(latents))
        if k_pe is not None:
            parts.append(_wide(k_pe[kept]))
    rows = np.concatenate(parts, axis=-1)
    flat, page = block_bytes(cache), cache.shape[1]
    size = rows.shape[-1]
    flat[block[:, None], place[:, None] * size + np.arange(size)] = rows
    if exponents is not None:
        columns = page * size + place[:, None] * layout.scale_bytes + np.arange(layout.scale_bytes)
        flat[block[:, None], columns] = exponents
    return cache


def gather_mla_cache(
    cache: Array,
    slots: Array | None = None,
    *,
    cache_format: str,
    block_tables: Array | None = None,
    cu_lens: Array | None = None,
    rows: int | None = None,
    precision: str = "float64",
) -> Array:
    """kv [N, d] in bfloat16; arguments as the public function's. Rows without a slot are 0."""
    layout = FORMATS[cache_format]
    if slots is None:
        assert block_tables is not None and cu_lens is not None and rows is not None
        slots = slots_of(block_tables, cu_lens, rows, cache.shape[1])
    kept = located(slots, *cache.shape[:2])[0]
    kv = np.zeros((len(slots), layout.d_qk[0] if layout.codes else cache.shape[-1]), BF16)
    if kept.any():
        with np.errstate(over="ignore", invalid="ignore"):
            kv[kept] = dequantized(cache, slots[kept], layout, np.float32).astype(BF16)
    return kv


def _quantized(latents: Array, layout: LatentFormat, scale_rule: str | None) -> tuple[Array, Array]:
    """Codes as bytes, and scales in float32."""
    if layout.exponents or scale_rule == "pow2":
        codes, scales = quantize_fp8(latents, group=layout.group, scale_rule="pow2")
    else:
        values, amax = _grouped(latents, layout.group)
        scales = np.maximum(amax / np.float32(E4M3_MAX), LEAST_SCALE)
        codes = _codes(values, scales).reshape(latents.shape)
    return codes.view(np.uint8), scales


def _wide(array: Array) -> Array:
    """bf16 as bytes: copied, or rounded; a NaN of another dtype becomes 0x7FFF, as PTX's `cvt` has it."""
    if array.dtype == BF16:
        return _bytes(array)
    rounded = array.astype(BF16)
    rounded.view(np.uint16)[np.isnan(array)] = 0x7FFF
    return _bytes(rounded)


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).view(np.uint8)
