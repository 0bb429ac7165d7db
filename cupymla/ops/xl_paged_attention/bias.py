"""The relative position terms as blocks of scores, in NumPy.

Each form is a function of (sequences, key counts, positions) that gives the bias of those sequences' heads at those
positions: float [n, num_heads, t] for `sequences` int [n], `counts` int [n] and consecutive `positions` int [t].
Values at positions at or past a sequence's count are arbitrary (NaN included); the caller masks them.

The distance of position j is `count - 1 - j`: 0 for the newest key. Sources: Dai et al. 2019, "Transformer-XL",
arXiv:1901.02860, section 3.3 (terms b and d of the attention score); Press et al. 2022, "ALiBi", arXiv:2108.12409.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
BiasBlock = Callable[[Array, Array, Array], Array]


def distances(counts: Array, positions: Array) -> Array:
    """`count - 1 - j`, int [n, t]; negative for positions that do not exist."""
    return counts[:, None] - 1 - positions[None, :]


def rows_at(distance: Array, extent: int) -> Array:
    """The row of a table of `extent` distances to read for each distance, clamped into the table."""
    return np.clip(distance, 0, extent - 1)


def extend(block: Array, distance: Array, extent: int, rel_extend: str) -> Array:
    """Zero the part of `block` [n, num_heads, t] that lies past the table, or keep the clamped rows there."""
    if rel_extend == "clamp":
        return block
    kept: Array = np.where(distance[:, None, :] < extent, block, 0)
    return kept


def dense(matrix_bd: Array, work: npt.DTypeLike) -> BiasBlock:
    """Columns of `matrix_bd` [num_seqs, num_heads, max_context] by position."""

    def block(sequences: Array, counts: Array, positions: Array) -> Array:
        return matrix_bd[sequences, :, positions[0] : positions[-1] + 1].astype(work)

    return block


def relative(rel_bias: Array, rel_extend: str, work: npt.DTypeLike) -> BiasBlock:
    """Entries of `rel_bias` [num_seqs, num_heads, extent] by distance."""
    extent = rel_bias.shape[2]

    def block(sequences: Array, counts: Array, positions: Array) -> Array:
        distance = distances(counts, positions)
        rows = rows_at(distance, extent)
        values = np.take_along_axis(rel_bias[sequences], rows[:, None, :], axis=2)
        return extend(values.astype(work), distance, extent, rel_extend)

    return block


def fused(shifted_query: Array, pos_emb: Array, rel_extend: str, work: npt.DTypeLike) -> BiasBlock:
    """(q + v) . p[distance] from q + v [num_seqs, num_heads, head_size] and pos_emb [extent, num_heads, head_size]."""
    extent = pos_emb.shape[0]

    def block(sequences: Array, counts: Array, positions: Array) -> Array:
        distance = distances(counts, positions)
        rows = pos_emb[rows_at(distance, extent)].astype(work)
        values = (rows.transpose(0, 2, 1, 3) @ shifted_query[sequences][..., None])[..., 0]
        return extend(values, distance, extent, rel_extend)

    return block


def alibi(slopes: Array, work: npt.DTypeLike) -> BiasBlock:
    """slope * (j - (count - 1)) from slopes [num_heads]: zero at the newest key, negative before it."""

    def block(sequences: Array, counts: Array, positions: Array) -> Array:
        ages = distances(counts, positions)[:, None, :].astype(work)
        values: Array = -ages * slopes.astype(work)[None, :, None]
        return values

    return block
