"""indexer_topk in NumPy: the selection of `topk` from the scores of `indexer_logits`."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from ..indexer_logits.reference import Precision, indexer_logits
from ..topk import reference as selection

Array = npt.NDArray[Any]


def indexer_topk(
    q: Array,
    k: Array,
    weights: Array,
    topk: int,
    *,
    q_scale: Array | None = None,
    k_scale: Array | None = None,
    starts: Array | None = None,
    ends: Array | None = None,
    causal: bool = False,
    q_start: int = 0,
    k_stride: int = 1,
    relu: bool = True,
    return_values: bool = False,
    return_lse: bool = False,
    lse_base: str = "e",
    precision: Precision = "rounded",
) -> tuple[Array, ...]:
    """indices, count and, where wanted, values and lse; arguments, shapes and precisions as the functions' above."""
    scores = indexer_logits(
        q,
        k,
        weights,
        q_scale=q_scale,
        k_scale=k_scale,
        starts=starts,
        ends=ends,
        causal=causal,
        q_start=q_start,
        k_stride=k_stride,
        relu=relu,
        precision=precision,
    )
    # Columns that are not visible hold -inf, which is never selected.
    indices, count, values = selection.topk(scores, topk, return_values=True)
    results = [indices, count]
    if return_values:
        results.append(values)
    if return_lse:
        results.append(selection.selected_lse(values, lse_base, precision == "float64"))
    return tuple(results)
