"""topk in NumPy: what the operator means. It is exact, so there is one precision."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def topk(
    scores: Array,
    topk: int,
    *,
    starts: Array | None = None,
    ends: Array | None = None,
    order: str = "index",
    return_values: bool = False,
    precision: str = "float64",
) -> tuple[Array, ...]:
    """indices, count and, where wanted, values in the scores' dtype; arguments and shapes as the public function's.

    `precision` changes nothing.
    """
    *lead, rows, columns = scores.shape
    flat = scores.reshape(math.prod((*lead, rows)), columns)
    first = _limits(starts, 0, len(flat), columns)
    end = _limits(ends, columns, len(flat), columns)
    indices = np.full((len(flat), topk), -1, np.int32)
    count = np.zeros(len(flat), np.int32)
    values = np.full((len(flat), topk), -np.inf, scores.dtype)
    for row, line in enumerate(flat):
        visible = line[first[row] : end[row]].astype(np.float32)
        with np.errstate(invalid="ignore"):
            selectable = np.flatnonzero(visible > -np.inf)
        # Stable, so that equals, of which -0.0 and +0.0 are two, stay in the order of their ids.
        found = selectable[np.argsort(-visible[selectable], kind="stable")[:topk]] + first[row]
        if order == "index":
            found = np.sort(found)
        count[row] = len(found)
        indices[row, : len(found)] = found
        values[row, : len(found)] = line[found]
    shape = (*lead, rows)
    results = (indices.reshape(*shape, topk), count.reshape(shape))
    return (*results, values.reshape(*shape, topk)) if return_values else results


def _limits(given: Array | None, default: int, rows: int, columns: int) -> Array:
    if given is None:
        return np.full(rows, default, np.int64)
    return np.clip(given.reshape(-1).astype(np.int64), 0, columns)


def selected_lse(values: Array, base: str, wide: bool) -> Array:
    """The log-sum-exp of each row's selected scores; +inf where there are none. For what selects index scores.

    As a kernel: in fp32, with logarithms to base 2; in float64 where it is to be `wide`.
    """
    wanted = values.astype(np.float64 if wide else np.float32)
    log2e, ln2 = wanted.dtype.type(np.log2(np.e)), wanted.dtype.type(np.log(2))
    most = wanted.max(axis=-1, initial=-np.inf)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        total = np.exp2((wanted - most[..., None]) * log2e).sum(axis=-1)
        lse: Array = most * log2e + np.log2(total) if base == "2" else most + np.log2(total) * ln2
    lse[np.isinf(most)] = np.inf
    return lse
