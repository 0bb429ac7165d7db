"""Argument validation of indexer_loss_dense: every check a caller can meet, and the problem that is left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ...tensor import Device, View
from ..arguments import Arguments, Choice, Flag, option
from ..indexer_logits import spec as scoring
from ..indexer_validation import Validation
from ..mla import D_QK, DTYPES, SoftmaxOptions

OPERATOR = "indexer_loss_dense"

MAX_MLA_HEADS = 2**16
"""Kernels count heads of all queries of a tile in 32 bits."""


@dataclass(slots=True)
class Views:
    """The arrays, seen; None where one was left out."""

    q: View
    k: View
    weights: View
    mla_q: View
    mla_kv: View
    mla_lse: View | None = None
    starts: View | None = None
    ends: View | None = None
    grad_loss: View | None = None
    loss: View | None = None
    dq: View | None = None
    dk: View | None = None
    dweights: View | None = None
    workspace: View | None = None


@dataclass(frozen=True, slots=True)
class Options(SoftmaxOptions):
    """The options: those of every operator with a softmax, and its own.

    Attributes:
        relu: whether products below zero count as zero.
        dk_dtype: dtype of dk: None for k's, or "float32".
    """

    relu: bool = option(True, Flag())
    dk_dtype: Literal["float32"] | None = option(None, Choice((None, "float32")))


ARGUMENTS = Arguments(OPERATOR, Views, Options, results=("loss", "dq", "dk", "dweights"), has_workspace=True)


@dataclass(frozen=True, slots=True)
class Problem:
    """All that a plan may depend on.

    Attributes:
        scores: the problem of the indexer's scores.
        mla_heads: Hq.
        mla_channels: of an MLA query and of a latent, 576 or 512.
        given_lse: whether the MLA heads' log-sum-exps are given.
        weights_dtype: of weights: "float32" or "bfloat16".
        options: the options.
    """

    scores: scoring.Problem
    mla_heads: int
    mla_channels: int
    given_lse: bool
    weights_dtype: str
    options: Options

    @property
    def device(self) -> Device:
        """Where every array is."""
        return self.scores.device

    @property
    def row(self) -> tuple[int, ...]:
        """Shape of what there is for each query."""
        return self.scores.shape[:-1]

    @property
    def dk_dtype(self) -> str:
        """dtype of dk."""
        return self.options.dk_dtype or self.scores.dtype

    @property
    def results(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Shape and dtype of loss, dq, dk and dweights."""
        scores = self.scores
        heads = (*self.row, scores.heads)
        keys = (*scores.lead, scores.keys, scores.channels)
        dq = (*heads, scores.channels), scores.dtype
        return (self.row, "float32"), dq, (keys, self.dk_dtype), (heads, self.weights_dtype)


def read(
    q: Any,
    k: Any,
    weights: Any,
    mla_q: Any,
    mla_kv: Any,
    *,
    mla_lse: Any = None,
    starts: Any = None,
    ends: Any = None,
    grad_loss: Any = None,
    causal: Any = False,
    q_start: Any = 0,
    k_stride: Any = 1,
    sm_scale: Any = None,
    lse_base: Any = "e",
    relu: Any = True,
    dk_dtype: Any = None,
    loss: Any = None,
    dq: Any = None,
    dk: Any = None,
    dweights: Any = None,
    workspace: Any = None,
) -> tuple[Views, Problem]:
    """Check a call. Raises InputError."""
    validation = Validation(OPERATOR)
    validation.view(q, "q", DTYPES)
    scored = scoring.read_scored(validation, q, k, weights, None, None, starts, ends)
    arrays = {name: scored.arrays[name] for name in ("q", "k", "weights", "starts", "ends")}
    row, dtype = scored.shape[:-1], scored.dtype
    queries = validation.view(mla_q, "mla_q", (dtype,))
    if queries.shape[:-2] != row or queries.shape[-1] not in D_QK:
        raise validation.error("mla_q", f"shape [{', '.join(map(str, row))}, Hq, d], d 576 or 512", list(queries.shape))
    heads = validation.extent(queries, "mla_q", -2, "heads", least=1, most=MAX_MLA_HEADS)
    validation.check_layout(queries, "mla_q", "rows")
    channels = queries.shape[-1]
    latents = validation.given(mla_kv, "mla_kv", (*scored.lead, scored.keys, channels), (dtype,), "rows")
    views = Views(
        **arrays,
        mla_q=queries,
        mla_kv=latents,
        mla_lse=validation.shaped(mla_lse, "mla_lse", (*row, heads), ("float32",)),
        grad_loss=validation.shaped(grad_loss, "grad_loss", row, ("float32",)),
    )
    options = validation.chosen(ARGUMENTS, causal, q_start, k_stride, sm_scale, lse_base, relu, dk_dtype)
    problem = Problem(
        scored.problem(scoring.Options(options.causal, options.q_start, options.k_stride, options.relu)),
        heads,
        channels,
        mla_lse is not None,
        arrays["weights"].dtype,
        options,
    )
    validation.outputs(views, problem.results, loss=loss, dq=dq, dk=dk, dweights=dweights)
    views.workspace = validation.workspace(workspace, views.q)
    validation.separate()
    return views, problem
