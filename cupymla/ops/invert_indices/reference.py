"""invert_indices in NumPy: what the operator means. It is exact, so there is one precision."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from ..entry_lists import lists_by_token
from .spec import lead_and_queries

Array = npt.NDArray[Any]


def invert_indices(indices: Array, s_kv: int, *, topk_length: Array | None = None, precision: str = "float64") -> Array:
    """lists, int32; arguments and shapes as the public function's. `precision` changes nothing."""
    lead, queries = lead_and_queries(indices.shape, None if topk_length is None else topk_length.ndim)
    return lists_by_token(indices.reshape(*lead, queries, indices.shape[-1]), s_kv, topk_length)
