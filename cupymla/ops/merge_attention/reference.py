"""merge_attention in NumPy: float64, or in fp32 as the kernel computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def merge_attention(
    outs: Array,
    lses: Array,
    *,
    attn_sink: Array | None = None,
    lse_base: str = "e",
    precision: str = "float64",
) -> tuple[Array, Array]:
    """out and lse before they are rounded to their dtypes; arguments and shapes as the public function's.

    precision "same": fp32, parts added in their order, out in the dtype of outs.
    """
    is_same = precision == "same"
    real: Any = np.float32 if is_same else np.float64
    log2e = real(np.log2(np.e))
    factor = log2e if lse_base == "e" else real(1)
    logs = lses.astype(real)
    filled = ~np.isinf(logs)
    with np.errstate(all="ignore"):
        most = np.where(filled, logs, -np.inf).max(axis=0)
        nothing = np.isneginf(most)
        top = most
        if attn_sink is not None:
            sink = attn_sink.astype(real) * (real(1) if lse_base == "e" else log2e)
            top = np.maximum(most, np.broadcast_to(sink, most.shape))
        total, below = np.zeros_like(most), np.zeros_like(most)
        summed = np.zeros(outs.shape[1:], real)
        for part, log, there in zip(outs, logs, filled, strict=True):
            total += np.where(there, np.exp2((log - most) * factor), 0).astype(real)
            weight = np.where(there, np.exp2((log - top) * factor), 0).astype(real)
            below += weight
            summed += np.where(there[..., None], weight[..., None] * part.astype(real), 0).astype(real)
        if attn_sink is not None:
            below += np.where(np.isneginf(sink), 0, np.exp2((sink - top) * factor)).astype(real)
        out = summed * (real(1) / below)[..., None]
        if attn_sink is not None:
            out = np.where(np.isposinf(sink)[..., None], 0, out)
        out = np.where(nothing[..., None], 0, out)
        logarithm = np.log2(total)
        logarithm = logarithm * real(np.log(2)) if lse_base == "e" else logarithm
        lse = np.where(nothing, np.inf, most + logarithm)
    return (out.astype(outs.dtype), lse.astype(np.float32)) if is_same else (out, lse)
