"""Argument validation of sparse_mla_bwd: every check a caller can meet, and the problem that is left when they all
pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ...errors import InputError, kind
from ...tensor import View
from .. import mla
from .. import workspace as workspaces
from ..arguments import Arguments, Choice, Flag, option
from ..entry_lists import MOST_LISTED

OPERATOR = "sparse_mla_bwd"


@dataclass(slots=True)
class Views:
    """The arrays, seen; None where one was left out."""

    q: View
    kv: View
    out: View
    dout: View
    lse: View
    indices: View
    topk_length: View | None = None
    attn_sink: View | None = None
    lists: View | None = None
    attn_dist: View | None = None
    dq: View | None = None
    dkv: View | None = None
    d_sink: View | None = None
    workspace: View | None = None


@dataclass(frozen=True, slots=True)
class Options(mla.SoftmaxOptions):
    """The options: those of every operator with a softmax, and its own.

    Attributes:
        deterministic: whether every run has to give the same bits.
        dkv_dtype: dtype of dkv: None for kv's, or "float32".
        attn_dist_sink: whether the sink has its part in the attention distribution.
    """

    deterministic: bool = option(False, Flag())
    dkv_dtype: Literal["float32"] | None = option(None, Choice((None, "float32")))
    attn_dist_sink: bool = option(False, Flag())


ARGUMENTS = Arguments(
    OPERATOR, Views, Options, results=("dq", "dkv", "d_sink"), written=("attn_dist",), has_workspace=True
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A backward problem.

    Attributes:
        shared: what every MLA operator has, and the options.
        has_attn_dist: whether the attention distribution is asked for.
        dkv_dtype: dtype of dkv, q's or "float32".
        dkv_shape: kv's, with its optional axes.
        has_lists: whether there are lists of entries by token, and the call is deterministic.
    """

    shared: mla.MlaProblem[Options]
    has_attn_dist: bool
    dkv_dtype: str
    dkv_shape: tuple[int, ...]
    has_lists: bool = False

    @property
    def options(self) -> Options:
        """The options."""
        return self.shared.options

    @property
    def counts_sink(self) -> bool:
        """Whether there is a distribution in which the sink has its part."""
        return self.has_attn_dist and self.options.attn_dist_sink


def _checked(views: Views, shared: mla.MlaProblem[Options], outputs: tuple[Any, ...]) -> Problem:
    mla.check_array(views.out, "out", shared.out_shape, shared.dtype, views.q, "rows")
    mla.check_array(views.dout, "dout", shared.out_shape, shared.dtype, views.q, "rows")
    mla.check_array(views.lse, "lse", shared.head_shape, "float32", views.q, "free")
    if shared.options.attn_dist_sink and not shared.has_sink:
        raise InputError("attn_dist_sink", "False without attn_sink", "True")
    _check_lists(views.lists, views.q, shared)
    attn_dist, dq, dkv, d_sink, workspace = outputs
    dkv_dtype = shared.options.dkv_dtype or shared.dtype
    has_lists = views.lists is not None and shared.options.deterministic
    problem = Problem(shared, attn_dist is not None, dkv_dtype, views.kv.shape, has_lists)
    if any(array is not None for array in outputs):
        _read_outputs(views, problem, attn_dist, dq, dkv, d_sink, workspace)
    return problem


def _check_lists(lists: View | None, q: View, shared: mla.MlaProblem[Options]) -> None:
    if lists is not None:
        lead = () if shared.batch is None else (shared.batch,)
        count = shared.s_kv + 1 + shared.s_q * shared.topk
        if count > MOST_LISTED:
            raise InputError("lists", f"None with more than {MOST_LISTED} numbers, s_kv + 1 + s_q * topk", count)
        shape = (*lead, count)
        mla.check_array(lists, "lists", shape, "int32", q, "lists")


def _read_outputs(
    views: Views, problem: Problem, attn_dist: Any, dq: Any, dkv: Any, d_sink: Any, workspace: Any
) -> None:
    shared = problem.shared
    if d_sink is not None and not shared.has_sink:
        raise InputError("d_sink", "None without attn_sink", kind(d_sink))
    views.attn_dist = mla.check_output(attn_dist, "attn_dist", shared.entry_shape, "float32", views.q, "lists")
    views.dq = mla.check_output(dq, "dq", views.q.shape, shared.dtype, views.q, "rows")
    views.dkv = mla.check_output(dkv, "dkv", problem.dkv_shape, problem.dkv_dtype, views.q, "rows")
    views.d_sink = mla.check_output(d_sink, "d_sink", (shared.h_q,), "float32", views.q, "free")
    views.workspace = workspaces.read(workspace, views.q)
    mla.check_overlap(ARGUMENTS, views)


VALIDATION = mla.Validation(ARGUMENTS, _checked)
read = VALIDATION.read
