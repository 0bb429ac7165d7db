"""Byte layouts of caches, E4M3 codes and scales, in NumPy. References and plans alike read them here.

Sources: E4M3 is that of the OCP 8-bit Floating Point Specification v1.0. The cache of indexer keys and its scale rule
are DeepGEMM's (`kv_cache_cast_to_fp8` of its tests), as FlashMLA, vLLM and SGLang read and write it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E4M3_MAX = 448.0
E4M3_NAN = 0x7F

SCALE_RULES = ("amax", "pow2")

LEAST_AMAX = 1e-4
"""As float32: what a group's largest magnitude counts as, where it is less."""


@dataclass(frozen=True, slots=True)
class PagedFormat:
    """A cache whose blocks hold the codes of all their tokens, then the scales of all of them.

    Attributes:
        name: what callers name it by.
        channels: codes of a token, a byte each.
        scale_bytes: of a token.
        alignment: bytes, of which a block's distance to the next is a multiple, and the cache's address.
    """

    name: str
    channels: int
    scale_bytes: int
    alignment: int

    @property
    def token_bytes(self) -> int:
        """Of a token, codes and scales."""
        return self.channels + self.scale_bytes


INDEXER_FP8 = PagedFormat("indexer_fp8", channels=128, scale_bytes=4, alignment=4)
"""Keys of the lightning indexer: 128 codes and one fp32 scale a token."""


def pages(cache: Array, layout: PagedFormat) -> tuple[Array, Array]:
    """A cache [blocks, page, ..., token bytes] as codes [blocks, page, channels] and scale bytes [blocks, page, n].

    Views of the cache's memory, whatever lies between its blocks.
    """
    blocks, page = cache.shape[:2]
    flat = cache.view(np.uint8)
    flat = np.lib.stride_tricks.as_strided(flat, (blocks, page * layout.token_bytes), (flat.strides[0], 1))
    split = page * layout.channels
    codes = np.lib.stride_tricks.as_strided(
        flat[:, :split], (blocks, page, layout.channels), (flat.strides[0], layout.channels, 1)
    )
    scales = np.lib.stride_tricks.as_strided(
        flat[:, split:], (blocks, page, layout.scale_bytes), (flat.strides[0], layout.scale_bytes, 1)
    )
    return codes, scales


def encoded(values: npt.NDArray[np.float32]) -> Array:
    """float32 as E4M3: to nearest even, saturated to 448; every NaN becomes code 0x7F."""
    with np.errstate(invalid="ignore"):
        codes: Array = np.clip(values, -np.float32(E4M3_MAX), np.float32(E4M3_MAX)).astype(E4M3)
    codes.view(np.uint8)[np.isnan(values)] = E4M3_NAN
    return codes


def rounded_up(scale: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The least powers of two that are not below these positive normal numbers, from their bits."""
    bits = scale.view(np.int32)
    return ((bits + 0x7FFFFF) & ~0x7FFFFF).astype(np.int32).view(np.float32)
