"""The door of sparse_mla_bwd: every check a caller can meet, and the problem that is left when they all pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ... import tensor
from ...errors import InputError
from ...tensor import View
from .. import mla

OPERATOR = "sparse_mla_bwd"

WORKSPACE_ALIGNMENT = 16


@dataclass(slots=True)
class Views:
    """The arguments, seen; None where one was left out."""

    q: View
    kv: View
    out: View
    dout: View
    lse: View
    indices: View
    topk_length: View | None
    attn_sink: View | None
    attn_dist: View | None
    dq: View | None
    dkv: View | None
    d_sink: View | None
    workspace: View | None


@dataclass(frozen=True, slots=True)
class Problem:
    """A backward problem.

    Attributes:
        shared: what it shares with the other MLA operators.
        deterministic: whether every run has to give the same bits.
        has_attn_dist: whether the attention distribution is asked for.
        dkv_dtype: dtype of dkv, q's or "float32".
        dkv_shape: kv's, with its optional axes.
    """

    shared: mla.MlaProblem
    deterministic: bool
    has_attn_dist: bool
    dkv_dtype: str
    dkv_shape: tuple[int, ...]


def read(
    q: Any,
    kv: Any,
    out: Any,
    dout: Any,
    lse: Any,
    indices: Any,
    sm_scale: Any = None,
    topk_length: Any = None,
    attn_sink: Any = None,
    causal: Any = False,
    q_start: Any = 0,
    k_stride: Any = 1,
    lse_base: Any = "e",
    deterministic: Any = False,
    attn_dist: Any = None,
    dq: Any = None,
    dkv: Any = None,
    dkv_dtype: Any = None,
    d_sink: Any = None,
    workspace: Any = None,
    check_indices: Any = False,
    stream: Any = None,
) -> tuple[Views, Problem]:
    """Check the arguments of the public function. Raises InputError."""
    view = tensor.view
    try:
        views = Views(
            *(view(q, "q"), view(kv, "kv"), view(out, "out"), view(dout, "dout"), view(lse, "lse")),
            view(indices, "indices"),
            None if topk_length is None else view(topk_length, "topk_length"),
            None if attn_sink is None else view(attn_sink, "attn_sink"),
            *(None, None, None, None, None),
        )
        shared = mla.read_problem(
            *(views.q, views.kv, views.indices, views.topk_length, views.attn_sink),
            *(sm_scale, causal, q_start, k_stride, lse_base),
        )
        mla.check_array(views.out, "out", shared.out_shape, shared.dtype, views.q, "rows")
        mla.check_array(views.dout, "dout", shared.out_shape, shared.dtype, views.q, "rows")
        mla.check_array(views.lse, "lse", shared.head_shape, "float32", views.q, "free")
        problem = Problem(
            shared,
            mla.flag("deterministic", deterministic),
            attn_dist is not None,
            mla.choice("dkv_dtype", dkv_dtype, (None, "float32")) or shared.dtype,
            views.kv.shape,
        )
        if any(array is not None for array in (attn_dist, dq, dkv, d_sink, workspace)):
            _read_outputs(views, problem, attn_dist, dq, dkv, d_sink, workspace)
        if check_indices is not False and mla.flag("check_indices", check_indices):
            mla.check_index_values(views.indices, views.topk_length, shared.s_kv, stream)
    except InputError as error:
        raise mla.attributed(error, OPERATOR) from None
    return views, problem


def _read_outputs(
    views: Views, problem: Problem, attn_dist: Any, dq: Any, dkv: Any, d_sink: Any, workspace: Any
) -> None:
    shared = problem.shared
    if d_sink is not None and not shared.has_sink:
        raise InputError("d_sink", "None without attn_sink", "an array")
    dist_shape = (*shared.query_shape, shared.topk)
    views.attn_dist = mla.check_output(attn_dist, "attn_dist", dist_shape, "float32", views.q, "lists")
    views.dq = mla.check_output(dq, "dq", views.q.shape, shared.dtype, views.q, "rows")
    views.dkv = mla.check_output(dkv, "dkv", problem.dkv_shape, problem.dkv_dtype, views.q, "rows")
    views.d_sink = mla.check_output(d_sink, "d_sink", (shared.h_q,), "float32", views.q, "free")
    views.workspace = _read_workspace(workspace, views.q)
    mla.check_overlap(
        (
            *(("attn_dist", views.attn_dist), ("dq", views.dq), ("dkv", views.dkv), ("d_sink", views.d_sink)),
            ("workspace", views.workspace),
        ),
        (
            *(("q", views.q), ("kv", views.kv), ("out", views.out), ("dout", views.dout), ("lse", views.lse)),
            *(("indices", views.indices), ("topk_length", views.topk_length), ("attn_sink", views.attn_sink)),
        ),
    )


def _read_workspace(array: Any, like: View) -> View | None:
    if array is None:
        return None
    seen = tensor.view_output(array, "workspace")
    if len(seen.shape) != 1:
        raise InputError("workspace", "one axis", f"shape {list(seen.shape)}")
    mla.check_array(seen, "workspace", seen.shape, "uint8", like, "lists")
    if seen.ptr % WORKSPACE_ALIGNMENT and seen.shape[0]:
        raise InputError("workspace", f"an address that is a multiple of {WORKSPACE_ALIGNMENT} bytes", hex(seen.ptr))
    return seen


def require_workspace(workspace: View, size_bytes: int) -> None:
    """Raise InputError when a workspace is smaller than a call needs."""
    if workspace.shape[0] < size_bytes:
        raise mla.attributed(InputError("workspace", f"at least {size_bytes} bytes", workspace.shape[0]), OPERATOR)
