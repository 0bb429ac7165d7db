"""Argument validation of indexer_bwd: every check a caller can meet, and the problem that is left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ...tensor import Device, View
from ..arguments import Arguments, Choice, Flag, option
from ..checks import look_at_lists
from ..indexer_validation import NamedKeys, Validation, look_at_named_keys
from ..mla import MaskOptions

OPERATOR = "indexer_bwd"


@dataclass(slots=True)
class Views:
    """The arrays, seen; None where one was left out."""

    q: View
    k: View
    weights: View
    grad_logits: View
    indices: View
    topk_length: View | None = None
    lists: View | None = None
    dq: View | None = None
    dk: View | None = None
    dweights: View | None = None
    workspace: View | None = None


@dataclass(frozen=True, slots=True)
class Options(MaskOptions):
    """The options: those of every operator with a causal mask, and its own.

    Attributes:
        relu: whether products below zero count as zero.
        deterministic: whether every run has to give the same bits.
        dk_dtype: dtype of dk: None for k's, or "float32".
    """

    relu: bool = option(True, Flag())
    deterministic: bool = option(False, Flag())
    dk_dtype: Literal["float32"] | None = option(None, Choice((None, "float32")))


ARGUMENTS = Arguments(OPERATOR, Views, Options, results=("dq", "dk", "dweights"), has_workspace=True)


@dataclass(frozen=True, slots=True)
class Problem(NamedKeys):
    """All that a plan may depend on: sizes, and

    Attributes:
        weights_dtype: of weights: "float32" or "bfloat16".
        options: the options.
        device: where every array is.
    """

    weights_dtype: str
    options: Options
    device: Device

    @property
    def dk_dtype(self) -> str:
        """dtype of dk."""
        return self.options.dk_dtype or self.dtype

    @property
    def results(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Shape and dtype of dq, dk and dweights."""
        heads = (*self.row, self.heads)
        keys = (*self.lead, self.keys, self.channels)
        return ((*heads, self.channels), self.dtype), (keys, self.dk_dtype), (heads, self.weights_dtype)


def read(
    q: Any,
    k: Any,
    weights: Any,
    grad_logits: Any,
    indices: Any,
    *,
    topk_length: Any = None,
    causal: Any = False,
    q_start: Any = 0,
    k_stride: Any = 1,
    relu: Any = True,
    deterministic: Any = False,
    lists: Any = None,
    dk_dtype: Any = None,
    dq: Any = None,
    dk: Any = None,
    dweights: Any = None,
    workspace: Any = None,
) -> tuple[Views, Problem]:
    """Check a call. Raises InputError."""
    validation = Validation(OPERATOR)
    arrays, sizes = validation.named_keys(q, k, indices)
    row, topk = arrays["q"].shape[:-2], sizes["topk"]
    views = Views(
        **arrays,
        weights=validation.given(weights, "weights", (*row, sizes["heads"]), ("float32", "bfloat16")),
        grad_logits=validation.given(grad_logits, "grad_logits", (*row, topk), ("float32",), "lists"),
        topk_length=validation.shaped(topk_length, "topk_length", row, ("int32",)),
        lists=validation.shaped(lists, "lists", (*row[:-1], sizes["keys"] + 1 + row[-1] * topk), ("int32",), "lists"),
    )
    options = validation.chosen(ARGUMENTS, causal, q_start, k_stride, relu, deterministic, dk_dtype)
    problem = Problem(**sizes, weights_dtype=views.weights.dtype, options=options, device=views.q.device)
    validation.outputs(views, problem.results, dq=dq, dk=dk, dweights=dweights)
    views.workspace = validation.workspace(workspace, views.q)
    validation.separate()
    return views, problem


def look(views: Views, problem: Problem, stream: object) -> None:
    """As `look_at_named_keys`, and at lists whether they are those of indices."""
    look_at_named_keys(views.indices, views.topk_length, problem.keys, stream, OPERATOR)
    look_at_lists(views.lists, views.indices, views.topk_length, problem.keys, stream, OPERATOR)
