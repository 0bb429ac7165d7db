"""sparse_mla_decode in NumPy: rows of the caches as numbers, then the forward's attention over them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..mla import D_V
from ..mla_cache.latents import FORMATS, LatentFormat, dequantized
from ..mla_reference import Precision
from ..sparse_mla_fwd.reference import sparse_mla_fwd

Array = npt.NDArray[Any]


def sparse_mla_decode(
    q: Array,
    k_cache: Array,
    indices: Array,
    *,
    cache_format: str,
    topk_length: Array | None = None,
    attn_sink: Array | None = None,
    extra_k_cache: Array | None = None,
    extra_indices: Array | None = None,
    extra_topk_length: Array | None = None,
    sm_scale: float | None = None,
    lse_base: str = "e",
    splits: int | None = None,
    precision: Precision = "float64",
) -> tuple[Array, Array]:
    """(out, lse); arguments and shapes as the public function's. `splits` changes nothing here.

    precision="float64": codes times scales, and all else, in float64 and returned in float64, nothing rounded.

    precision="same": keys are rounded once to q's dtype, as a cache of that dtype would hold them; then the roundings
    of `sparse_mla_fwd`.
    """
    layout = FORMATS[cache_format]
    sources = [(k_cache, indices, topk_length)]
    if extra_k_cache is not None and extra_indices is not None:
        sources.append((extra_k_cache, extra_indices, extra_topk_length))
    real: Any = np.float64 if precision == "float64" else q.dtype
    shape = q.shape[:3]
    out = np.zeros((*shape, D_V), real)
    lse = np.zeros(shape, np.float64 if precision == "float64" else np.float32)
    for b, j in np.ndindex(shape[:2]):
        keys = np.concatenate([_selected(source, b, j, layout, real) for source in sources])
        entries = np.arange(max(len(keys), 1), dtype=np.int32)[None]
        out[b, j], _, lse[b, j] = (
            result[0]
            for result in sparse_mla_fwd(
                q[b, j : j + 1],
                keys,
                entries,
                sm_scale=sm_scale,
                attn_sink=attn_sink,
                lse_base=lse_base,
                precision=precision,
            )
        )
    return out, lse


def _selected(source: tuple[Array, Array, Array | None], b: int, j: int, layout: LatentFormat, real: Any) -> Array:
    """Keys of the valid entries of one row, [n, d_qk], in their order."""
    cache, indices, lengths = source
    slots = indices[b, j]
    if lengths is not None:
        length = lengths[b] if lengths.ndim == 1 else lengths[b, j]
        slots = slots[: max(0, int(length))]
    slots = slots[(slots >= 0) & (slots < cache.shape[0] * cache.shape[1])]
    if not slots.size:
        d_qk = layout.d_qk[0] if layout.codes else cache.shape[-1]
        return np.zeros((0, d_qk), real)
    # One fp32 product, then the dtype; float64 holds the product as it is.
    wide = dequantized(cache, slots, layout, np.float64 if real is np.float64 else np.float32)
    with np.errstate(over="ignore"):
        keys: Array = wide.astype(real)
    return keys
