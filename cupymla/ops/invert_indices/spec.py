"""Argument validation of invert_indices: every check a caller can meet, and the problem that is left when they all
pass."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Any

from ...tensor import Device, View
from ..arguments import Arguments, Integer, option
from ..entry_lists import MOST_LISTED
from ..indexer_validation import MAX_EXTENT, Validation

OPERATOR = "invert_indices"


@dataclass(slots=True)
class Views:
    """The arrays, seen; None where one was left out."""

    indices: View
    topk_length: View | None = None
    lists: View | None = None
    workspace: View | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """The options.

    Attributes:
        s_kv: tokens that may be named, of each batch entry.
    """

    s_kv: int = option(MISSING, Integer(0, MAX_EXTENT))


ARGUMENTS = Arguments(OPERATOR, Views, Options, results=("lists",), has_workspace=True)


@dataclass(frozen=True, slots=True)
class Problem:
    """All that a plan may depend on.

    Attributes:
        lead: the batch axis, as a tuple of one extent or of none.
        s_q: queries, of each batch entry.
        topk: entries of a query.
        options: the options.
        device: where every array is.
    """

    lead: tuple[int, ...]
    s_q: int
    topk: int
    options: Options
    device: Device

    @property
    def s_kv(self) -> int:
        """Tokens that may be named, of each batch entry."""
        return self.options.s_kv

    @property
    def batch(self) -> int:
        """Batch entries; 1 without a batch axis."""
        return self.lead[0] if self.lead else 1

    @property
    def entries(self) -> int:
        """Entries of a batch entry, valid or not."""
        return self.s_q * self.topk

    @property
    def results(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Shape and dtype of lists."""
        return (((*self.lead, self.s_kv + 1 + self.entries), "int32"),)


def lead_and_queries(shape: tuple[Any, ...], lengths_rank: int | None) -> tuple[tuple[Any, ...], Any]:
    """The batch axis, as a tuple of one extent or of none, and the queries of indices of that shape.

    [n, 1, topk] is n queries, unless lengths of rank 2, None where there are none, say that it is n batch entries.
    """
    if len(shape) == 2:
        return (), shape[0]
    if len(shape) == 3 and shape[1] == 1 and lengths_rank != 2:
        return (), shape[0]
    return (shape[0],), shape[1]


def read(
    indices: Any,
    s_kv: Any,
    *,
    topk_length: Any = None,
    lists: Any = None,
    workspace: Any = None,
) -> tuple[Views, Problem]:
    """Check a call. Raises InputError."""
    validation = Validation(OPERATOR)
    seen = validation.view(indices, "indices", ("int32",))
    if seen.ndim not in (2, 3, 4) or (seen.ndim == 4 and seen.shape[2] != 1):
        expected = "shape [s_q, topk] or [s_q, 1, topk], with or without a leading batch axis"
        raise validation.error("indices", expected, list(seen.shape))
    validation.check_layout(seen, "indices", "lists")
    options = validation.chosen(ARGUMENTS, s_kv)
    lengths = None if topk_length is None else validation.view(topk_length, "topk_length", ("int32",))
    lead, queries = lead_and_queries(seen.shape, None if lengths is None else lengths.ndim)
    topk = validation.extent(seen, "indices", -1, "entries of a query, topk", least=1, most=MOST_LISTED)
    if queries * topk > MOST_LISTED:
        raise validation.error("indices", f"at most {MOST_LISTED} entries, s_q * topk", queries * topk)
    if options.s_kv + 1 > MOST_LISTED - queries * topk:
        raise validation.error("s_kv", f"with {queries * topk} entries fewer than {MOST_LISTED} in all", options.s_kv)
    if lengths is not None:
        if lengths.shape != (*lead, queries):
            raise validation.error("topk_length", f"shape {[*lead, queries]}", list(lengths.shape))
        validation.check_layout(lengths, "topk_length", "free")
    problem = Problem(lead, queries, topk, options, seen.device)
    ((shape, _),) = problem.results
    views = Views(
        indices=seen,
        topk_length=lengths,
        lists=validation.shaped(lists, "lists", shape, ("int32",), "lists", output=True),
        workspace=validation.workspace(workspace, seen),
    )
    validation.separate()
    return views, problem
