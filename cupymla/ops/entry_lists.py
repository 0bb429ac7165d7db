"""Top-k entries listed by the token that they name: how kernels divide the work, and the lists in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

LIST_CTAS = 8
"""CTAs of a cluster, which lists a chunk's entries of a range of kv's rows: as `kListCtas` in
cuda/common/entry_lists.cuh."""

MOST_RANGE_ROWS = 24576
"""Rows of a range at most, as `kMostRangeRows` there."""

MOST_LISTED = 2**31 - 1024
"""Numbers that lists of a batch entry have at most."""

LEAST_RANGE_ROWS = 64
"""Rows that a range has for each of them, where there could be more ranges."""


def list_ranges(kv_rows: int, chunks: int, multiprocessors: int) -> int:
    """In how many ranges of rows the entries of so many chunks are listed: about a CTA to each multiprocessor, since
    the more ranges there are the fewer entries each CTA places, and the more often they are all read."""
    ranges = multiprocessors // (LIST_CTAS * chunks)
    return max(min(ranges, -(-kv_rows // LEAST_RANGE_ROWS)), -(-kv_rows // MOST_RANGE_ROWS))


def lists_by_token(indices: Array, s_kv: int, lengths: Array | None) -> Array:
    """What `invert_indices` returns, for indices [(batch,) s_q, topk] and lengths [(batch,) s_q]."""
    *lead, queries, topk = indices.shape
    valid = (indices >= 0) & (indices < s_kv)
    if lengths is not None:
        valid &= np.arange(topk) < lengths[..., None]
    lists = np.full((*lead, s_kv + 1 + queries * topk), -1, np.int32)
    for entry in np.ndindex(*lead):
        offsets, entries = lists[entry][: s_kv + 1], lists[entry][s_kv + 1 :]
        numbers = np.flatnonzero(valid[entry])
        tokens = indices[entry].reshape(-1)[numbers]
        offsets[0] = 0
        offsets[1:] = np.cumsum(np.bincount(tokens, minlength=s_kv))
        # Stable, so that a token's entries stay in ascending order.
        entries[: len(numbers)] = numbers[np.argsort(tokens, kind="stable")]
    return lists
