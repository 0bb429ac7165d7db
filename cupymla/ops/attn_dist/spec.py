"""The door of attn_dist: every check a caller can meet, and the problem that is left when they all pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ... import tensor
from ...errors import InputError
from ...tensor import View
from .. import mla

OPERATOR = "attn_dist"

L1_EPSILON = 1e-10
"""Least divisor of normalize="l1", so that a row without mass stays zero."""


@dataclass(slots=True)
class Views:
    """The arguments, seen; None where one was left out."""

    q: View
    kv: View
    indices: View
    lse: View
    topk_length: View | None
    dist: View | None


@dataclass(frozen=True, slots=True)
class Problem:
    """A distribution problem.

    Attributes:
        shared: what it shares with the other MLA operators.
        normalize: None, or "l1" for rows that sum to 1.
    """

    shared: mla.MlaProblem
    normalize: str | None

    @property
    def dist_shape(self) -> tuple[int, ...]:
        """[batch,] s_q, topk."""
        return (*self.shared.query_shape, self.shared.topk)


def read(
    q: Any,
    kv: Any,
    indices: Any,
    lse: Any,
    sm_scale: Any = None,
    topk_length: Any = None,
    causal: Any = False,
    q_start: Any = 0,
    k_stride: Any = 1,
    lse_base: Any = "e",
    normalize: Any = None,
    dist: Any = None,
    check_indices: Any = False,
    stream: Any = None,
) -> tuple[Views, Problem]:
    """Check the arguments of the public function. Raises InputError."""
    view = tensor.view
    try:
        views = Views(
            *(view(q, "q"), view(kv, "kv"), view(indices, "indices"), view(lse, "lse")),
            None if topk_length is None else view(topk_length, "topk_length"),
            None,
        )
        shared = mla.read_problem(
            *(views.q, views.kv, views.indices, views.topk_length, None),
            *(sm_scale, causal, q_start, k_stride, lse_base),
        )
        mla.check_array(views.lse, "lse", shared.head_shape, "float32", views.q, "free")
        problem = Problem(shared, mla.choice("normalize", normalize, (None, "l1")))
        if dist is not None:
            views.dist = mla.check_output(dist, "dist", problem.dist_shape, "float32", views.q, "lists")
            mla.check_overlap(
                (("dist", views.dist),),
                (
                    *(("q", views.q), ("kv", views.kv), ("indices", views.indices)),
                    *(("lse", views.lse), ("topk_length", views.topk_length)),
                ),
            )
        if check_indices is not False and mla.flag("check_indices", check_indices):
            mla.check_index_values(views.indices, views.topk_length, shared.s_kv, stream)
    except InputError as error:
        raise mla.attributed(error, OPERATOR) from None
    return views, problem
