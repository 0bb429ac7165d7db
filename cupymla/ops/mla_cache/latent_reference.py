"""Caches of latents in NumPy: what their writer and their reader mean. They are exact, so there is one precision."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .formats import E4M3_MAX, LEAST_AMAX, encoded, rounded_up
from .latents import BF16, FORMATS, LatentFormat, block_bytes, dequantized
from .reference import located, slots_of

Array = npt.NDArray[Any]

LEAST_SCALE = np.finfo(np.float32).tiny
"""Of the rule "amax": 2^-126."""


def concat_and_cache_mla(
    kv_c: Array, k_pe: Array | None, cache: Array, slot_mapping: Array, *, cache_format: str, scale_rule: str | None
) -> None:
    """Write rows into the cache's slots, in place; slots out of it are skipped. Arguments as the public function's."""
    layout = FORMATS[cache_format]
    kept, block, place = located(slot_mapping, *cache.shape[:2])
    if not kept.any():
        return
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
    """kv [N, d] in bfloat16; arguments as the public function's. Rows without a slot are 0.

    `precision` changes nothing.
    """
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
    largest = np.float32(float(ml_dtypes.finfo(latents.dtype).max))
    values = np.clip(latents.astype(np.float32), -largest, largest).reshape(len(latents), -1, layout.group)
    amax = np.where(np.isnan(values), np.float32(0), np.abs(values)).max(axis=-1)
    if layout.exponents or scale_rule == "pow2":
        scales = rounded_up(np.maximum(amax, np.float32(LEAST_AMAX)) / np.float32(E4M3_MAX))
    else:
        scales = np.maximum(amax / np.float32(E4M3_MAX), LEAST_SCALE)
    return encoded(values / scales[..., None]).reshape(latents.shape).view(np.uint8), scales


def _wide(array: Array) -> Array:
    """bf16 as bytes: copied, or rounded; a NaN of another dtype becomes 0x7FFF, as PTX's `cvt` has it."""
    if array.dtype == BF16:
        return _bytes(array)
    rounded = array.astype(BF16)
    rounded.view(np.uint16)[np.isnan(array)] = 0x7FFF
    return _bytes(rounded)


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).view(np.uint8)
