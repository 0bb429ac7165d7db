"""The door of sparse_mla_fwd: every check a caller can meet, and the problem that is left when they all pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ... import tensor
from ...errors import InputError
from ...tensor import View
from .. import mla

OPERATOR = "sparse_mla_fwd"


@dataclass(slots=True)
class Views:
    """The arguments, seen; None where one was left out."""

    q: View
    kv: View
    indices: View
    topk_length: View | None
    attn_sink: View | None
    out: View | None
    max_logits: View | None
    lse: View | None


def read(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: Any = None,
    topk_length: Any = None,
    attn_sink: Any = None,
    causal: Any = False,
    q_start: Any = 0,
    k_stride: Any = 1,
    lse_base: Any = "e",
    out: Any = None,
    max_logits: Any = None,
    lse: Any = None,
    check_indices: Any = False,
    stream: Any = None,
) -> tuple[Views, mla.MlaProblem]:
    """Check the arguments of the public function. Raises InputError."""
    view = tensor.view
    try:
        views = Views(
            view(q, "q"),
            view(kv, "kv"),
            view(indices, "indices"),
            None if topk_length is None else view(topk_length, "topk_length"),
            None if attn_sink is None else view(attn_sink, "attn_sink"),
            None,
            None,
            None,
        )
        problem = mla.read_problem(
            views.q,
            views.kv,
            views.indices,
            views.topk_length,
            views.attn_sink,
            sm_scale,
            causal,
            q_start,
            k_stride,
            lse_base,
        )
        if out is not None or max_logits is not None or lse is not None:
            _read_outputs(views, problem, out, max_logits, lse)
        if check_indices is not False and mla.flag("check_indices", check_indices):
            mla.check_index_values(views.indices, views.topk_length, problem.s_kv, stream)
    except InputError as error:
        raise mla.attributed(error, OPERATOR) from None
    return views, problem


def _read_outputs(views: Views, problem: mla.MlaProblem, out: Any, max_logits: Any, lse: Any) -> None:
    views.out = mla.check_output(out, "out", problem.out_shape, problem.dtype, views.q, "rows")
    views.max_logits = mla.check_output(max_logits, "max_logits", problem.head_shape, "float32", views.q, "free")
    views.lse = mla.check_output(lse, "lse", problem.head_shape, "float32", views.q, "free")
    mla.check_overlap(
        (("out", views.out), ("max_logits", views.max_logits), ("lse", views.lse)),
        (
            *(("q", views.q), ("kv", views.kv), ("indices", views.indices)),
            *(("topk_length", views.topk_length), ("attn_sink", views.attn_sink)),
        ),
    )
