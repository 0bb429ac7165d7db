"""Argument validation of sparse_mla_fwd: every check a caller can meet, and the problem that is left when they all
pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...tensor import View
from .. import mla
from .. import workspace as workspaces
from ..arguments import Arguments

OPERATOR = "sparse_mla_fwd"


@dataclass(slots=True)
class Views:
    """The arrays, seen; None where one was left out."""

    q: View
    kv: View
    indices: View
    topk_length: View | None = None
    attn_sink: View | None = None
    out: View | None = None
    max_logits: View | None = None
    lse: View | None = None
    workspace: View | None = None


@dataclass(frozen=True, slots=True)
class Options(mla.SoftmaxOptions):
    """The options: those of every operator with a softmax."""


ARGUMENTS = Arguments(OPERATOR, Views, Options, results=("out", "max_logits", "lse"), has_workspace=True)

Problem = mla.MlaProblem[Options]


def _checked(views: Views, problem: Problem, outputs: tuple[Any, ...]) -> Problem:
    out, max_logits, lse, workspace = outputs
    if any(array is not None for array in outputs):
        _read_outputs(views, problem, out, max_logits, lse, workspace)
    return problem


def _read_outputs(views: Views, problem: Problem, out: Any, max_logits: Any, lse: Any, workspace: Any) -> None:
    views.out = mla.check_output(out, "out", problem.out_shape, problem.dtype, views.q, "rows")
    views.max_logits = mla.check_output(max_logits, "max_logits", problem.head_shape, "float32", views.q, "free")
    views.lse = mla.check_output(lse, "lse", problem.head_shape, "float32", views.q, "free")
    views.workspace = workspaces.read(workspace, views.q)
    mla.check_overlap(ARGUMENTS, views)


VALIDATION = mla.Validation(ARGUMENTS, _checked)
read = VALIDATION.read
