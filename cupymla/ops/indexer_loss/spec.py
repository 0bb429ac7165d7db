"""Argument validation of indexer_loss: every check a caller can meet, and the problem that is left when they all
pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...tensor import Device, View
from ..arguments import Arguments, Flag, option
from ..indexer_validation import NamedKeys, Validation, look_at_named_keys
from ..mla import MaskOptions

OPERATOR = "indexer_loss"


@dataclass(slots=True)
class Views:
    """The arrays, seen; None where one was left out."""

    q: View
    k: View
    weights: View
    indices: View
    target: View
    topk_length: View | None = None
    lse: View | None = None
    loss: View | None = None
    grad_logits: View | None = None


@dataclass(frozen=True, slots=True)
class Options(MaskOptions):
    """The options: those of every operator with a causal mask, and its own.

    Attributes:
        relu: whether products below zero count as zero.
    """

    relu: bool = option(True, Flag())


ARGUMENTS = Arguments(OPERATOR, Views, Options, results=("loss", "grad_logits"))


@dataclass(frozen=True, slots=True)
class Problem(NamedKeys):
    """All that a plan may depend on: sizes, and

    Attributes:
        options: the options.
        device: where every array is.
    """

    options: Options
    device: Device


def read(
    q: Any,
    k: Any,
    weights: Any,
    indices: Any,
    target: Any,
    *,
    topk_length: Any = None,
    lse: Any = None,
    causal: Any = False,
    q_start: Any = 0,
    k_stride: Any = 1,
    relu: Any = True,
    loss: Any = None,
    grad_logits: Any = None,
) -> tuple[Views, Problem]:
    """Check a call. Raises InputError."""
    validation = Validation(OPERATOR)
    arrays, sizes = validation.named_keys(q, k, indices)
    row, topk = arrays["q"].shape[:-2], sizes["topk"]
    views = Views(
        **arrays,
        weights=validation.given(weights, "weights", (*row, sizes["heads"]), ("float32", "bfloat16")),
        target=validation.given(target, "target", (*row, topk), ("float32",), "lists"),
        topk_length=validation.shaped(topk_length, "topk_length", row, ("int32",)),
        lse=validation.shaped(lse, "lse", row, ("float32",)),
        loss=validation.shaped(loss, "loss", row, ("float32",), output=True),
        grad_logits=validation.shaped(grad_logits, "grad_logits", (*row, topk), ("float32",), "lists", output=True),
    )
    options = validation.chosen(ARGUMENTS, causal, q_start, k_stride, relu)
    validation.separate()
    return views, Problem(**sizes, options=options, device=views.q.device)


def look(views: Views, problem: Problem, stream: object) -> None:
    """As `look_at_named_keys`."""
    look_at_named_keys(views.indices, views.topk_length, problem.keys, stream, OPERATOR)
