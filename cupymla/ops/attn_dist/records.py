"""The parameter records of attn_dist's kernels."""

from __future__ import annotations

import ctypes
from typing import Any

from ...build.source import KernelSource
from ...tensor import View
from ..kv_rows import KvRows
from ..log2_scales import log2_scales
from ..mla import lead_strides, record_fields
from . import plan
from .spec import Problem

_SHARED = (
    *((name, ctypes.c_int64) for name in ("indices_batch", "indices_query")),
    *((name, ctypes.c_int64) for name in ("topk_length_batch", "topk_length_query")),
    *((name, ctypes.c_int64) for name in ("lse_batch", "lse_query", "lse_head")),
    *((name, ctypes.c_int64) for name in ("dist_batch", "dist_query")),
    *((name, ctypes.c_int64) for name in ("q_start", "k_stride")),
    *((name, ctypes.c_int32) for name in ("s_q", "s_kv", "h_q", "topk")),
)


class Hopper(ctypes.Structure):
    """Mirrors `Parameters` in cuda/attn_dist/sm90/params.cuh; its size is compared with the kernel's own."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("kv", "indices", "topk_length", "lse", "dist")),
        *((name, ctypes.c_int64) for name in ("kv_batch_bytes", "kv_token_bytes")),
        *_SHARED,
        *((name, ctypes.c_uint32) for name in ("groups", "group_tokens")),
        *((name, ctypes.c_int32) for name in ("slices", "slice_blocks", "causal", "normalize")),
        *((name, ctypes.c_float) for name in ("scale_log2", "unit", "unit_rest")),
    )


class Blackwell(ctypes.Structure):
    """Mirrors `Parameters` in cuda/attn_dist/sm100/params.cuh; its size is compared with the kernel's own."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("indices", "topk_length", "lse", "dist")),
        *_SHARED,
        *((name, ctypes.c_int32) for name in ("token_rows", "batch_rows")),
        ("queries", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in ("slices", "slice_blocks", "causal", "normalize")),
        *((name, ctypes.c_float) for name in ("scale_log2", "unit", "unit_rest")),
    )


def record(source: KernelSource) -> type[Hopper] | type[Blackwell]:
    """The record of a kernel variant."""
    return Hopper if source.arch == "sm_90a" else Blackwell


def hopper(problem: Problem, assigned: plan.Assignment, lse: View, dist: View) -> Hopper:
    """The record without addresses."""
    kv_batch, kv_token = problem.kv_strides
    return Hopper(
        kv_batch_bytes=kv_batch * 2,
        kv_token_bytes=kv_token * 2,
        **assigned.sharing,
        **_shared(problem, assigned, lse, dist),
    )


def blackwell(
    problem: Problem, rows: KvRows, tokens: int, assigned: plan.Assignment, lse: View, dist: View
) -> Blackwell:
    """The record without addresses; `tokens` are the queries of all batch entries together."""
    return Blackwell(
        token_rows=rows.token_rows,
        batch_rows=rows.batch_rows,
        queries=tokens,
        **_shared(problem, assigned, lse, dist),
    )


def _shared(problem: Problem, assigned: plan.Assignment, lse: View, dist: View) -> dict[str, Any]:
    options = problem.options
    lse_batch, lse_query, lse_head = lead_strides(lse, problem)
    dist_batch, dist_query, _ = lead_strides(dist, problem)
    scales = log2_scales(options.scale(problem.d_qk), options.lse_base)
    return {
        **record_fields(problem),
        "lse_batch": lse_batch,
        "lse_query": lse_query,
        "lse_head": lse_head,
        "dist_batch": dist_batch,
        "dist_query": dist_query,
        **assigned.slicing,
        "normalize": int(options.normalize == "l1"),
        "scale_log2": scales.score,
        "unit": scales.unit,
        "unit_rest": scales.unit_rest,
    }
