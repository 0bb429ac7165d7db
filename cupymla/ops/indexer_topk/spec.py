"""Argument validation of indexer_topk, and the problem that is left when all checks pass."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Any, Literal

from ...tensor import View
from ..arguments import Arguments, Choice, Flag, Integer, option
from ..indexer_logits import spec as scoring
from ..indexer_validation import MAX_EXTENT, Validation, selection_results
from ..mla import MAX_POSITION

OPERATOR = "indexer_topk"


@dataclass(slots=True)
class Views(scoring.ScoredViews):
    """The arrays, seen; None where one was left out."""

    indices: View | None = None
    count: View | None = None
    values: View | None = None
    lse: View | None = None
    workspace: View | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """The options.

    Attributes:
        topk: entries wanted of each query.
        causal, q_start, k_stride, relu: those of the scores (`indexer_logits`).
        return_values, return_lse: whether the selected scores, and their log-sum-exp, are wanted, too.
        lse_base: "e" or "2".
    """

    topk: int = option(MISSING, Integer(1, MAX_EXTENT))
    causal: bool = option(False, Flag())
    q_start: int = option(0, Integer(-MAX_POSITION, MAX_POSITION))
    k_stride: int = option(1, Integer(1, MAX_POSITION))
    relu: bool = option(True, Flag())
    return_values: bool = option(False, Flag())
    return_lse: bool = option(False, Flag())
    lse_base: Literal["e", "2"] = option("e", Choice(("e", "2")))


ARGUMENTS = Arguments(OPERATOR, Views, Options, results=("indices", "count", "values", "lse"), has_workspace=True)


@dataclass(frozen=True, slots=True)
class Problem:
    """All that a plan may depend on.

    Attributes:
        scores: the problem of `indexer_logits`.
        options: the options.
    """

    scores: scoring.Problem
    options: Options

    @property
    def results(self) -> tuple[tuple[tuple[int, ...], str] | None, ...]:
        """Shape and dtype of indices, count, values and lse; None for those that are not wanted."""
        return selection_results(self.options, self.scores.shape[:-1])


def read(
    q: Any,
    k: Any,
    weights: Any,
    topk: Any,
    *,
    q_scale: Any = None,
    k_scale: Any = None,
    starts: Any = None,
    ends: Any = None,
    causal: Any = False,
    q_start: Any = 0,
    k_stride: Any = 1,
    relu: Any = True,
    return_values: Any = False,
    return_lse: Any = False,
    lse_base: Any = "e",
    indices: Any = None,
    count: Any = None,
    values: Any = None,
    lse: Any = None,
    workspace: Any = None,
) -> tuple[Views, Problem]:
    """Check a call. Raises InputError."""
    validation = Validation(OPERATOR)
    scored = scoring.read_scored(validation, q, k, weights, q_scale, k_scale, starts, ends)
    options = validation.chosen(ARGUMENTS, topk, causal, q_start, k_stride, relu, return_values, return_lse, lse_base)
    views = Views(
        **scored.arrays,
        **validation.selection(options, scored.shape[:-1], indices, count, values, lse),
        workspace=validation.workspace(workspace, scored.arrays["q"]),
    )
    validation.separate()
    scoring_options = scoring.Options(options.causal, options.q_start, options.k_stride, options.relu)
    return views, Problem(scored.problem(scoring_options), options)
