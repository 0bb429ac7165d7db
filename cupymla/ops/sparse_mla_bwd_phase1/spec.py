"""Argument validation of sparse_mla_bwd_phase1: every check a caller can meet, and the problem that is left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...tensor import View
from .. import mla
from ..arguments import Arguments

OPERATOR = "sparse_mla_bwd_phase1"


@dataclass(slots=True)
class Views:
    """The arrays, seen; None where one was left out."""

    q: View
    kv: View
    out: View
    dout: View
    indices: View
    topk_length: View | None = None
    p: View | None = None
    delta: View | None = None


@dataclass(frozen=True, slots=True)
class Options(mla.MaskOptions):
    """The options: those of every MLA operator."""


ARGUMENTS = Arguments(OPERATOR, Views, Options, results=("p", "delta"))

Problem = mla.MlaProblem[Options]


def _checked(views: Views, problem: Problem, outputs: tuple[Any, ...]) -> Problem:
    mla.check_array(views.out, "out", problem.out_shape, problem.dtype, views.q, "rows")
    mla.check_array(views.dout, "dout", problem.out_shape, problem.dtype, views.q, "rows")
    p, delta = outputs
    if p is not None or delta is not None:
        _read_outputs(views, problem, p, delta)
    return problem


def _read_outputs(views: Views, problem: Problem, p: Any, delta: Any) -> None:
    p_shape = (*problem.head_shape, problem.topk)
    views.p = mla.check_output(p, "p", p_shape, "float32", views.q, "lists")
    views.delta = mla.check_output(delta, "delta", problem.head_shape, "float32", views.q, "free")
    mla.check_overlap(ARGUMENTS, views)


VALIDATION = mla.Validation(ARGUMENTS, _checked)
read = VALIDATION.read
