"""Argument validation of attn_dist: every check a caller can meet, and the problem that is left when they all pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ...tensor import View
from .. import mla
from ..arguments import Arguments, Choice, option

OPERATOR = "attn_dist"

L1_EPSILON = 1e-10
"""Least divisor of normalize="l1", so that a row without mass stays zero."""


@dataclass(slots=True)
class Views:
    """The arrays, seen; None where one was left out."""

    q: View
    kv: View
    indices: View
    lse: View
    topk_length: View | None = None
    dist: View | None = None


@dataclass(frozen=True, slots=True)
class Options(mla.SoftmaxOptions):
    """The options: those of every operator with a softmax, and its own.

    Attributes:
        normalize: None, or "l1" for rows that sum to 1.
    """

    normalize: Literal["l1"] | None = option(None, Choice((None, "l1")))


ARGUMENTS = Arguments(OPERATOR, Views, Options, results=("dist",))

Problem = mla.MlaProblem[Options]


def _checked(views: Views, problem: Problem, outputs: tuple[Any, ...]) -> Problem:
    mla.check_array(views.lse, "lse", problem.head_shape, "float32", views.q, "free")
    (dist,) = outputs
    if dist is not None:
        views.dist = mla.check_output(dist, "dist", problem.entry_shape, "float32", views.q, "lists")
        mla.check_overlap(ARGUMENTS, views)
    return problem


VALIDATION = mla.Validation(ARGUMENTS, _checked)
read = VALIDATION.read
