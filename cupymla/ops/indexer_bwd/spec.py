"""Argument validation of indexer_bwd: every check a caller can meet, and the problem that is left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ... import tensor
from ...tensor import Device, View
from ..arguments import Arguments, Choice, Flag, option
from ..checks import require_entries
from ..indexer_validation import Validation
from ..mla import MaskOptions

OPERATOR = "indexer_bwd"
DTYPES = ("bfloat16", "float16")
MAX_TOPK = 2**31 - 1024
"""Kernels count entries in 32 bits, a few tiles beyond the last one."""


@dataclass(slots=True)
class Views:
    """The arrays, seen; None where one was left out."""

    q: View
    k: View
    weights: View
    grad_logits: View
    indices: View
    topk_length: View | None = None
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
class Problem:
    """All that a plan may depend on.

    Attributes:
        lead: the batch axis, as a tuple of one extent or of none.
        queries: T, of each batch entry.
        keys: L, of each batch entry.
        heads: H.
        channels: D.
        topk: entries of a row.
        dtype: of q and k: "bfloat16" or "float16".
        weights_dtype: of weights: "float32" or "bfloat16".
        options: the options.
        device: where every array is.
    """

    lead: tuple[int, ...]
    queries: int
    keys: int
    heads: int
    channels: int
    topk: int
    dtype: str
    weights_dtype: str
    options: Options
    device: Device

    @property
    def row(self) -> tuple[int, ...]:
        """Shape of what there is for each query."""
        return (*self.lead, self.queries)

    @property
    def batch(self) -> int:
        """Batch entries; 1 without a batch axis."""
        return self.lead[0] if self.lead else 1

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
    dk_dtype: Any = None,
    dq: Any = None,
    dk: Any = None,
    dweights: Any = None,
    workspace: Any = None,
) -> tuple[Views, Problem]:
    """Check a call. Raises InputError."""
    validation = Validation(OPERATOR)
    q_seen = validation.view(q, "q", DTYPES)
    lead = validation.rank(q_seen, "q", "[T, H, D]", 3)
    heads, channels = validation.index_heads(q_seen, "[T, H, D]")
    validation.check_layout(q_seen, "q", "rows")
    queries = validation.extent(q_seen, "q", -3, "queries")
    k_seen, keys = validation.index_keys(k, lead, channels, (q_seen.dtype,))
    row = (*lead, queries)
    weights_seen = validation.given(weights, "weights", (*row, heads), ("float32", "bfloat16"))
    indices_seen = validation.view(indices, "indices", ("int32",))
    if indices_seen.shape[:-1] != row or indices_seen.ndim != len(row) + 1:
        raise validation.error("indices", f"shape {[*row, 'topk']}", list(indices_seen.shape))
    validation.check_layout(indices_seen, "indices", "lists")
    topk = validation.extent(indices_seen, "indices", -1, "entries of a row", most=MAX_TOPK)
    views = Views(
        q=q_seen,
        k=k_seen,
        weights=weights_seen,
        grad_logits=validation.given(grad_logits, "grad_logits", (*row, topk), ("float32",), "lists"),
        indices=indices_seen,
        topk_length=validation.shaped(topk_length, "topk_length", row, ("int32",)),
    )
    options = validation.chosen(ARGUMENTS, causal, q_start, k_stride, relu, deterministic, dk_dtype)
    problem = Problem(
        lead, queries, keys, heads, channels, topk, q_seen.dtype, weights_seen.dtype, options, q_seen.device
    )
    (dq_shape, dq_type), (dk_shape, dk_type), (dweights_shape, dweights_type) = problem.results
    views.dq = validation.shaped(dq, "dq", dq_shape, (dq_type,), "rows", output=True)
    views.dk = validation.shaped(dk, "dk", dk_shape, (dk_type,), "rows", output=True)
    views.dweights = validation.shaped(dweights, "dweights", dweights_shape, (dweights_type,), output=True)
    views.workspace = validation.workspace(workspace, q_seen)
    validation.separate()
    return views, problem


def look(views: Views, problem: Problem, stream: object) -> None:
    """Raise InputError for an entry that is neither -1 nor a key, among those that count. Waits for `stream`, None for
    the current one, when the arrays are on a GPU."""
    lengths = None if views.topk_length is None else tensor.fetched(views.topk_length, stream)
    require_entries(tensor.fetched(views.indices, stream), lengths, problem.keys, "indices", OPERATOR)
