"""Prepared calls: on the CPU, the NumPy references bound to their arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ... import tensor
from ...tensor import View
from ..operator import CpuCall, Prepared
from . import plan, reference, spec

Array = npt.NDArray[Any]

_BIAS_ARRAYS = ("pos_bias_u", "matrix_bd", "rel_bias", "pos_bias_v", "pos_emb", "alibi_slopes")


def prepare(views: spec.Views, problem: spec.Problem) -> Prepared[Any]:
    """The attention call. Raises UnsupportedError for devices without a kernel."""
    plan.require_cpu(spec.NAME, problem.device)
    query, k_cache, v_cache = map(tensor.to_numpy, (views.query, views.k_cache, views.v_cache))
    tables, lens = tensor.to_numpy(views.block_tables), tensor.to_numpy(views.context_lens)
    bias: dict[str, Any] = {name: to_numpy(getattr(views, name)) for name in _BIAS_ARRAYS}

    def run() -> Any:
        if problem.check_indices:
            spec.check_indices(problem, tables, lens)
        out, lse = reference.xl_paged_attention(
            query,
            k_cache,
            v_cache,
            tables,
            lens,
            **bias,
            scale=problem.scale,
            rel_extend=problem.rel_extend,
            bias_scaled=problem.bias_scaled,
            kv_layout=problem.kv_layout,
            kv_dtype=problem.kv_dtype,
            k_scale=scale_value(views.k_scale),
            v_scale=scale_value(views.v_scale),
            return_lse=True,
            lse_base=problem.lse_base,
        )
        result = deliver(out, views.out, like=views.query)
        if not problem.return_lse:
            return result
        return result, deliver(lse, views.lse, like=views.query, dtype=np.float32)

    return CpuCall(run)


def to_numpy(seen: View | None) -> Array | None:
    """An optional argument's array."""
    return None if seen is None else tensor.to_numpy(seen)


def scale_value(scale: float | View) -> float | Array:
    """A cache scale as a number or an array."""
    return scale if isinstance(scale, float) else tensor.to_numpy(scale)


def deliver(result: Array, target: View | None, like: View, dtype: npt.DTypeLike | None = None) -> Any:
    """A result rounded once to `dtype` (default: like's), in the caller's output or as a new array."""
    with np.errstate(over="ignore"):
        rounded = result.astype(tensor.to_numpy(like).dtype if dtype is None else dtype)
    if target is None:
        return tensor.from_numpy(rounded, like=like)
    tensor.to_numpy(target)[...] = rounded
    return target.owner
