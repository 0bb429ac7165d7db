"""Byte layouts of the caches of latents, and their rows as numbers, in NumPy.

Sources: "v32_fp8" is FlashMLA's and vLLM's cache of DeepSeek-V3.2, "v4_fp8" theirs of DeepSeek-V4; e4m3 is that of the
OCP 8-bit Floating Point Specification v1.0, the exponents are E8M0 of the OCP Microscaling Formats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .formats import E4M3

Array = npt.NDArray[Any]

BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, slots=True)
class LatentFormat:
    """A cache of latents.

    Attributes:
        name: what callers name it by.
        code: the kernel's number for it.
        d_qk: channels of a key that it can have.
        codes: channels that are e4m3; the others are bf16.
        group: channels that share a scale.
        scale_bytes: of a token; behind the codes, or behind all rows of a block.
        alignment: bytes, of which a block's distance to the next is a multiple, and the cache's address.
        exponents: whether scales are bytes of E8M0 behind all rows of a block; else fp32 behind a row's codes.
    """

    name: str
    code: int
    d_qk: tuple[int, ...]
    codes: int = 0
    group: int = 0
    scale_bytes: int = 0
    alignment: int = 16
    exponents: bool = False

    @property
    def wide_begin(self) -> int:
        """Bytes of a row before its bf16 channels."""
        return self.codes + (0 if self.exponents else self.scale_bytes)

    def row_bytes(self, d_qk: int) -> int:
        """From a row of a block to the next."""
        return self.wide_begin + 2 * (d_qk - self.codes)

    def token_bytes(self, d_qk: int) -> int:
        """Of a token, with its scales."""
        return self.codes + 2 * (d_qk - self.codes) + self.scale_bytes


FORMATS = {
    made.name: made
    for made in (
        LatentFormat("bf16", 0, (576, 512)),
        LatentFormat("v32_fp8", 1, (576,), codes=512, group=128, scale_bytes=16),
        LatentFormat("v4_fp8", 2, (512,), codes=448, group=64, scale_bytes=8, alignment=8, exponents=True),
    )
}


def block_bytes(cache: Array) -> Array:
    """A cache [blocks, page, ..., n] as bytes [blocks, page * row bytes], whatever lies between its blocks."""
    blocks, page = cache.shape[:2]
    row = cache.shape[-1] * cache.dtype.itemsize
    raw = cache.reshape(blocks, page, -1) if 0 in cache.shape else cache[..., 0, :] if cache.ndim == 4 else cache
    flat: Array = np.lib.stride_tricks.as_strided(
        raw.view(np.uint8), (blocks, page * row), (raw.strides[0], 1), writeable=raw.flags.writeable
    )
    return flat


def exponent_scales(exponents: Array) -> npt.NDArray[np.float32]:
    """Bytes of E8M0 as float32, exact: 2^(e - 127); 255 is NaN."""
    bits = exponents.astype(np.uint32) << 23
    bits[exponents == 0] = 0x00400000
    bits[exponents == 255] = 0x7FC00000
    scales: npt.NDArray[np.float32] = bits.view(np.float32)
    return scales


def rows(cache: Array, slots: Array, layout: LatentFormat) -> tuple[Array, Array, Array]:
    """Codes [n, codes] e4m3, scales [n, groups] float32 and the rest [n, d_qk - codes] bf16 of slots, all of which are
    in the cache."""
    page = cache.shape[1]
    block, place = np.divmod(slots.astype(np.int64), page)
    flat = block_bytes(cache)
    row_bytes = cache.shape[-1] * cache.dtype.itemsize
    inner = row_bytes - (layout.scale_bytes if layout.name == "v4_fp8" else 0)
    data = flat[block[:, None], place[:, None] * inner + np.arange(inner)]
    codes = data[:, : layout.codes].view(E4M3)
    groups = layout.codes // layout.group if layout.codes else 0
    scales: Array = np.zeros((len(slots), 0), np.float32)
    if layout.name == "v32_fp8":
        scales = data[:, 512:528].copy().view(np.float32)
        data = data[:, 528:]
    elif layout.name == "v4_fp8":
        columns = page * inner + place[:, None] * layout.scale_bytes + np.arange(groups)
        scales = exponent_scales(flat[block[:, None], columns])
        data = data[:, layout.codes :]
    return codes, scales, np.ascontiguousarray(data).view(BF16)


def dequantized(cache: Array, slots: Array, layout: LatentFormat, real: Any) -> Array:
    """Rows [n, d_qk] of slots, all of which are in the cache, as numbers of dtype `real`: code times scale."""
    codes, scales, rest = rows(cache, slots, layout)
    wide = codes.astype(np.float32).astype(real)
    with np.errstate(over="ignore", invalid="ignore"):
        values = wide * np.repeat(scales.astype(real), max(layout.group, 1), axis=-1) if layout.codes else wide
    return np.concatenate([values, rest.astype(np.float32).astype(real)], axis=-1)


def encode(latents: Array, rest: Array, layout: LatentFormat, scales: Array) -> tuple[Array, Array]:
    """Bytes of rows and of their scales, for a cache that is made for a test or a benchmark.

    Args:
        latents: [n, codes] float32, divided by its scale and rounded to e4m3, saturated.
        rest: [n, d_qk - codes] float32, rounded to bf16.
        layout: of the cache.
        scales: [n, groups] float32; powers of two for "v4_fp8".
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        codes = (
            np.clip(latents / np.repeat(scales, max(layout.group, 1), axis=-1), -448, 448) if layout.codes else latents
        )
    data = [codes.astype(E4M3).view(np.uint8)] if layout.codes else []
    raw = np.ascontiguousarray(scales, dtype=np.float32).view(np.uint8).reshape(len(rest), -1)
    if layout.name == "v32_fp8":
        data.append(raw)
    if layout.name == "v4_fp8":
        exponents = (np.ascontiguousarray(scales).view(np.uint32) >> 23).astype(np.uint8)
        raw = np.concatenate([exponents, np.zeros((len(rest), 1), np.uint8)], axis=-1)
    data.append(rest.astype(BF16).view(np.uint8).reshape(len(rest), -1))
    return np.concatenate(data, axis=-1), raw
