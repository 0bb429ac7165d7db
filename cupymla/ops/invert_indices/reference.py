"""invert_indices in NumPy: what the operator means. It is exact, so there is one precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .spec import lead_and_queries

Array = npt.NDArray[Any]


def invert_indices(indices: Array, s_kv: int, *, topk_length: Array | None = None, precision: str = "float64") -> Array:
    """lists, int32; arguments and shapes as the public function's. `precision` changes nothing."""
    lead, queries = lead_and_queries(indices.shape, None if topk_length is None else topk_length.ndim)
    topk = indices.shape[-1]
    batch = lead[0] if lead else 1
    rows = indices.reshape(batch, queries, topk)
    valid = (rows >= 0) & (rows < s_kv)
    if topk_length is not None:
        valid &= np.arange(topk) < topk_length.reshape(batch, queries, 1)
    lists = np.full((batch, s_kv + 1 + queries * topk), -1, np.int32)
    lists[:, 0] = 0
    for number in range(batch):
        numbers = np.flatnonzero(valid[number])
        tokens = rows[number].reshape(-1)[numbers]
        lists[number, 1 : s_kv + 1] = np.cumsum(np.bincount(tokens, minlength=s_kv))
        # Stable, so that a token's entries stay in ascending order.
        lists[number, s_kv + 1 : s_kv + 1 + len(numbers)] = numbers[np.argsort(tokens, kind="stable")]
    return lists.reshape(*lead, -1 if lists.size else lists.shape[1])
