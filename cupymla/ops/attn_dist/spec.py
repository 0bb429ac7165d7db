"""The door of attn_dist: every check a caller can meet, and the problem that is left when they all pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import InputError
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

    normalize: str | None = option(None, Choice((None, "l1")))


ARGUMENTS = Arguments(OPERATOR, Views, Options, results=("dist",))

Problem = mla.MlaProblem[Options]


def read(*, check_indices: Any = False, stream: Any = None, **arguments: Any) -> tuple[Views, Problem]:
    """Check the arguments of the public function, by name. Raises InputError."""
    return checked(*ARGUMENTS.placed(arguments), check_indices, stream)


def checked(
    inputs: tuple[Any, ...], options: tuple[Any, ...], outputs: tuple[Any, ...], check_indices: Any, stream: Any
) -> tuple[Views, Problem]:
    """The same for arguments in the order of `ARGUMENTS`. Raises InputError."""
    try:
        views = ARGUMENTS.seen(inputs)
        problem = mla.read_problem(ARGUMENTS, views, None, options)
        mla.check_array(views.lse, "lse", problem.head_shape, "float32", views.q, "free")
        (dist,) = outputs
        if dist is not None:
            views.dist = mla.check_output(dist, "dist", problem.slot_shape, "float32", views.q, "lists")
            mla.check_overlap(ARGUMENTS, views)
        if check_indices is not False:
            mla.check_index_values(check_indices, views, problem.s_kv, stream)
    except InputError as error:
        raise mla.attributed(error, OPERATOR) from None
    return views, problem
