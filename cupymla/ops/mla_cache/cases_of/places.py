"""Arrays that the cases of writers and readers share: values, caches, slots and block tables."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...case import spread
from ..cases import VALUES

OUTSIDE = (-1, -2, -(2**31), 2**31 - 1)
"""Slots that no cache has."""

FEW = 32
"""So many tokens or less have slots anywhere, as the newest token of each request does."""

PAGE = 64
"""Slots of a block in benchmarks."""


def dtype_of(name: str) -> Any:
    """A NumPy dtype, bfloat16 among them."""
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def _powers(rng: Any, xp: Any, shape: tuple[int, ...]) -> Any:
    """Groups whose largest magnitude is 448 times a power of two, or the float16 next to that on either side."""
    exponents = rng.integers(-12, 7, (*shape[:-1], shape[-1] // 64)).astype(np.float32)
    beside = rng.integers(-1, 2, exponents.shape).astype(np.float32) * np.float32(2.0**-8)
    x = rng.integers(-256, 257, shape).astype(np.float32)
    x[..., ::64] = 448 + 448 * beside
    return x * xp.exp2(xp.repeat(exponents, 64, axis=-1))


def _huge(rng: Any, xp: Any, shape: tuple[int, ...]) -> Any:
    """Numbers near the largest of their dtype, which is past float16 and rounds to an infinity in bfloat16."""
    signs = rng.integers(0, 2, shape).astype(np.float32) * 2 - 1
    return signs * np.float32(np.finfo(np.float32).max) * (1 - rng.random(shape, dtype=np.float32) * np.float32(0.5))


KINDS = {**VALUES, "powers": _powers, "huge": _huge}
"""What numbers are like; see there."""


def numbers(rng: Any, xp: Any, rows: int, channels: int, kind: str, dtype: str, padding: int = 0) -> Any:
    """Rows of numbers, behind each of which `padding` channels lie that are not part of it."""
    wide = KINDS[kind](rng, xp, (rows, channels))
    with np.errstate(over="ignore"):
        return padded(wide.astype(dtype_of(dtype)), padding)


def padded(rows: Any, padding: int) -> Any:
    """The same rows with so many elements behind each."""
    return spread(rows, True, padding) if padding else rows


def random_blocks(rng: Any, xp: Any, blocks: int, page: int, token_bytes: int, gap: int, four: bool) -> Any:
    """A cache [blocks, page, bytes] of any bytes, or [blocks, page, 1, bytes]; blocks lie `gap` bytes apart."""
    memory = rng.integers(0, 256, (blocks, page * token_bytes + gap), dtype=np.int32).astype(np.uint8)
    shape = (blocks, page, 1, token_bytes) if four else (blocks, page, token_bytes)
    block = page * token_bytes + gap
    steps = (block, token_bytes, token_bytes, 1) if four else (block, token_bytes, 1)
    return xp.lib.stride_tricks.as_strided(memory, shape, steps)


def blocks_for(tokens: int, page: int = PAGE) -> int:
    """So many blocks hold so many tokens."""
    return max(1, -(-tokens // page))


def slots_of(rng: Any, xp: Any, count: int, blocks: int, page: int, outside: float, dtype: str) -> Any:
    """Different slots of a cache, a share of them replaced by what is none.

    Few are anywhere; more are those of whole blocks in any order, as a prefill's.
    """
    if count > FEW:
        order = xp.argsort(rng.random(blocks, dtype=np.float32))
        slots = (order[:, None] * page + xp.arange(page)).reshape(-1)
    else:
        slots = xp.argsort(rng.random(blocks * page, dtype=np.float32))
    slots = xp.resize(slots, count) if slots.size else xp.zeros(count, np.int64)
    if outside:
        bad = xp.asarray([*OUTSIDE, blocks * page, blocks * page + 7])
        chosen = rng.random(count, dtype=np.float32) < outside
        slots = xp.where(chosen, bad[rng.integers(0, len(bad), count)], slots)
    return slots.astype(dtype)


def tables_of(rng: Any, xp: Any, rows: int, blocks: int, page: int, hostile: bool) -> dict[str, Any]:
    """Block tables and cumulated lengths of three requests, of which one is empty, for so many rows and three more.

    Hostile tables name blocks that there are not, and a request is longer than its table.
    """
    width = blocks_for(rows, page)
    order = xp.resize(xp.argsort(rng.random(blocks, dtype=np.float32)), (3, width)).astype(np.int32)
    if hostile:
        order[:, ::3] = -1
        order[0, 1::3] = blocks
        width = max(1, width // 2)
    first = rows // 3
    lens = xp.asarray([0, first, first, rows], dtype=np.int32)
    return {"block_tables": order[:, :width], "cu_lens": lens, "rows": rows + 3}
