"""Argument validation of topk: every check a caller can meet, and the problem that is left when they all pass."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Any, Literal

from ...errors import kind
from ...tensor import Device, View
from ..arguments import Arguments, Choice, Flag, Integer, option
from ..indexer_validation import MAX_EXTENT, Validation

OPERATOR = "topk"
DTYPES = ("float32", "bfloat16", "float16")
ORDERS = ("index", "score")


@dataclass(slots=True)
class Views:
    """The arrays, seen; None where one was left out."""

    scores: View
    starts: View | None = None
    ends: View | None = None
    indices: View | None = None
    count: View | None = None
    values: View | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """The options.

    Attributes:
        topk: entries wanted of each row.
        order: "index" or "score".
        return_values: whether the selected scores are wanted, too.
    """

    topk: int = option(MISSING, Integer(1, MAX_EXTENT))
    order: Literal["index", "score"] = option("index", Choice(ORDERS))
    return_values: bool = option(False, Flag())


ARGUMENTS = Arguments(OPERATOR, Views, Options, results=("indices", "count", "values"))


@dataclass(frozen=True, slots=True)
class Problem:
    """All that a plan may depend on.

    Attributes:
        lead: the batch axis, as a tuple of one extent or of none.
        rows: T, of each batch entry.
        columns: L.
        topk: entries wanted of each row.
        dtype: of the scores.
        options: the options.
        device: where every array is.
    """

    lead: tuple[int, ...]
    rows: int
    columns: int
    topk: int
    dtype: str
    options: Options
    device: Device

    @property
    def batch(self) -> int:
        """Batch entries; 1 without a batch axis."""
        return self.lead[0] if self.lead else 1

    @property
    def results(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Shape and dtype of indices, count and, where wanted, values."""
        row = (*self.lead, self.rows)
        indices, count = ((*row, self.topk), "int32"), (row, "int32")
        return (indices, count, ((*row, self.topk), self.dtype)) if self.options.return_values else (indices, count)


def read(
    scores: Any,
    topk: Any,
    *,
    starts: Any = None,
    ends: Any = None,
    order: Any = "index",
    return_values: Any = False,
    indices: Any = None,
    count: Any = None,
    values: Any = None,
) -> tuple[Views, Problem]:
    """Check a call. Raises InputError."""
    validation = Validation(OPERATOR)
    seen = validation.view(scores, "scores", DTYPES)
    lead = validation.rank(seen, "scores", "[T, L]", 2)
    validation.check_layout(seen, "scores", "lists")
    rows = validation.extent(seen, "scores", -2, "rows")
    columns = validation.extent(seen, "scores", -1, "columns")
    options = validation.chosen(ARGUMENTS, topk, order, return_values)
    if values is not None and not options.return_values:
        raise validation.error("values", "None without return_values", kind(values))
    row = (*lead, rows)
    views = Views(
        scores=seen,
        starts=validation.shaped(starts, "starts", row, ("int32",)),
        ends=validation.shaped(ends, "ends", row, ("int32",)),
        indices=validation.shaped(indices, "indices", (*row, options.topk), ("int32",), "lists", output=True),
        count=validation.shaped(count, "count", row, ("int32",), output=True),
        values=validation.shaped(values, "values", (*row, options.topk), (seen.dtype,), "lists", output=True),
    )
    validation.separate()
    return views, Problem(lead, rows, columns, options.topk, seen.dtype, options, seen.device)
