"""Argument validation of indexer_loss: every check a caller can meet, and the problem that is left when they all
pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ... import tensor
from ...tensor import Device, View
from ..arguments import Arguments, Flag, option
from ..checks import require_entries
from ..indexer_validation import Validation
from ..mla import MaskOptions

OPERATOR = "indexer_loss"
DTYPES = ("bfloat16", "float16")
MAX_TOPK = 2**31 - 1024
"""Kernels count entries in 32 bits, a few tiles beyond the last one."""


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
    q_seen = validation.view(q, "q", DTYPES)
    lead = validation.rank(q_seen, "q", "[T, H, D]", 3)
    heads, channels = validation.index_heads(q_seen, "[T, H, D]")
    validation.check_layout(q_seen, "q", "rows")
    queries = validation.extent(q_seen, "q", -3, "queries")
    k_seen, keys = validation.index_keys(k, lead, channels, (q_seen.dtype,))
    row = (*lead, queries)
    indices_seen = validation.view(indices, "indices", ("int32",))
    if indices_seen.shape[:-1] != row or indices_seen.ndim != len(row) + 1:
        raise validation.error("indices", f"shape {[*row, 'topk']}", list(indices_seen.shape))
    validation.check_layout(indices_seen, "indices", "lists")
    topk = validation.extent(indices_seen, "indices", -1, "entries of a row", most=MAX_TOPK)
    views = Views(
        q=q_seen,
        k=k_seen,
        weights=validation.given(weights, "weights", (*row, heads), ("float32", "bfloat16")),
        indices=indices_seen,
        target=validation.given(target, "target", (*row, topk), ("float32",), "lists"),
        topk_length=validation.shaped(topk_length, "topk_length", row, ("int32",)),
        lse=validation.shaped(lse, "lse", row, ("float32",)),
        loss=validation.shaped(loss, "loss", row, ("float32",), output=True),
        grad_logits=validation.shaped(grad_logits, "grad_logits", (*row, topk), ("float32",), "lists", output=True),
    )
    options = validation.chosen(ARGUMENTS, causal, q_start, k_stride, relu)
    validation.separate()
    return views, Problem(lead, queries, keys, heads, channels, topk, q_seen.dtype, options, q_seen.device)


def look(views: Views, problem: Problem, stream: object) -> None:
    """Raise InputError for an entry that is neither -1 nor a key, among those that count. Waits for `stream`, None for
    the current one, when the arrays are on a GPU."""
    lengths = None if views.topk_length is None else tensor.fetched(views.topk_length, stream)
    require_entries(tensor.fetched(views.indices, stream), lengths, problem.keys, "indices", OPERATOR)
