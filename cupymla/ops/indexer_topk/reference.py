"""indexer_topk in NumPy: the selection of `topk` from the scores of `indexer_logits`."""

from __future__ import annotations

from typing import Any

import numpy as np
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
        results.append(_lse(values, lse_base, precision))
    return tuple(results)


def _lse(values: Array, base: str, precision: Precision) -> Array:
    """Of each row's selected scores; +inf where there are none. As the kernel: in fp32, with logarithms to base 2."""
    wide = values.astype(np.float64 if precision == "float64" else np.float32)
    log2e, ln2 = wide.dtype.type(np.log2(np.e)), wide.dtype.type(np.log(2))
    most = wide.max(axis=-1, initial=-np.inf)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        total = np.exp2((wide - most[..., None]) * log2e).sum(axis=-1)
        lse: Array = most * log2e + np.log2(total) if base == "2" else most + np.log2(total) * ln2
    lse[np.isinf(most)] = np.inf
    return lse
