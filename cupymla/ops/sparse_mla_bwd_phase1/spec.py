"""The door of sparse_mla_bwd_phase1: every check a caller can meet, and the problem that is left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ... import tensor
from ...errors import InputError
from ...tensor import View
from .. import mla

OPERATOR = "sparse_mla_bwd_phase1"


@dataclass(slots=True)
class Views:
    """The arguments, seen; None where one was left out."""

    q: View
    kv: View
    out: View
    dout: View
    indices: View
    topk_length: View | None
    p: View | None
    delta: View | None


def read(
    q: Any,
    kv: Any,
    out: Any,
    dout: Any,
    indices: Any,
    topk_length: Any = None,
    causal: Any = False,
    q_start: Any = 0,
    k_stride: Any = 1,
    p: Any = None,
    delta: Any = None,
    check_indices: Any = False,
) -> tuple[Views, mla.MlaProblem]:
    """Check the arguments of the public function. Raises InputError."""
    view = tensor.view
    try:
        views = Views(
            *(view(q, "q"), view(kv, "kv"), view(out, "out"), view(dout, "dout"), view(indices, "indices")),
            None if topk_length is None else view(topk_length, "topk_length"),
            *(None, None),
        )
        problem = mla.read_problem(
            *(views.q, views.kv, views.indices, views.topk_length, None), None, causal, q_start, k_stride
        )
        mla.check_array(views.out, "out", problem.out_shape, problem.dtype, views.q, "rows")
        mla.check_array(views.dout, "dout", problem.out_shape, problem.dtype, views.q, "rows")
        if p is not None or delta is not None:
            _read_outputs(views, problem, p, delta)
        if check_indices is not False and mla.flag("check_indices", check_indices):
            mla.check_index_values(views.indices, views.topk_length, problem.s_kv)
    except InputError as error:
        raise mla.attributed(error, OPERATOR) from None
    return views, problem


def _read_outputs(views: Views, problem: mla.MlaProblem, p: Any, delta: Any) -> None:
    p_shape = (*problem.head_shape, problem.topk)
    views.p = mla.check_output(p, "p", p_shape, "float32", views.q, "lists")
    views.delta = mla.check_output(delta, "delta", problem.head_shape, "float32", views.q, "free")
    mla.check_overlap(
        (("p", views.p), ("delta", views.delta)),
        (
            *(("q", views.q), ("kv", views.kv), ("out", views.out), ("dout", views.dout)),
            *(("indices", views.indices), ("topk_length", views.topk_length)),
        ),
    )
