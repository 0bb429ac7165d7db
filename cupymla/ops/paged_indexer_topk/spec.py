"""Argument validation of the decode indexer's functions, and the problem that is left when all checks pass."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Any, Literal

import numpy as np

from ... import tensor
from ...errors import InputError, kind
from ...tensor import Device, View
from ..arguments import Arguments, Choice, Flag, Integer, option
from ..indexer_logits.spec import DTYPES, MAX_KEYS
from ..indexer_validation import FP8, MAX_EXTENT, Validation, selection_results
from ..mla_cache.formats import INDEXER_FP8
from . import reference

OPERATOR = "paged_indexer_topk"
POSITIONS = ("slot", "token")


@dataclass(slots=True)
class ScoredViews:
    """The arrays that are scored, seen; None where one was left out."""

    q: View
    k_cache: View
    weights: View
    block_tables: View
    context_lens: View
    q_scale: View | None = None


@dataclass(slots=True)
class LogitsViews(ScoredViews):
    """The arrays of `paged_indexer_logits`, seen."""

    logits: View | None = None


@dataclass(slots=True)
class Views(ScoredViews):
    """The arrays of `paged_indexer_topk`, seen."""

    indices: View | None = None
    count: View | None = None
    values: View | None = None
    lse: View | None = None
    workspace: View | None = None


@dataclass(frozen=True, slots=True)
class LogitsOptions:
    """The options of `paged_indexer_logits`.

    Attributes:
        relu: whether products below zero count as zero.
        max_context: what no length exceeds; None for what the tables have room for.
    """

    relu: bool = option(True, Flag())
    max_context: int | None = option(None, Integer(0, MAX_EXTENT, optional=True))


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `paged_indexer_topk`.

    Attributes:
        topk: entries wanted of each query.
        relu, max_context: as of `LogitsOptions`.
        positions: what ids are: "slot" in the cache, or "token" of the request.
        return_values, return_lse: whether the selected scores, and their log-sum-exp, are wanted, too.
        lse_base: "e" or "2".
    """

    topk: int = option(MISSING, Integer(1, MAX_EXTENT))
    relu: bool = option(True, Flag())
    positions: Literal["slot", "token"] = option("slot", Choice(POSITIONS))
    max_context: int | None = option(None, Integer(0, MAX_EXTENT, optional=True))
    return_values: bool = option(False, Flag())
    return_lse: bool = option(False, Flag())
    lse_base: Literal["e", "2"] = option("e", Choice(("e", "2")))


LOGITS = Arguments("paged_indexer_logits", LogitsViews, LogitsOptions, results=("logits",))
ARGUMENTS = Arguments(OPERATOR, Views, Options, results=("indices", "count", "values", "lse"), has_workspace=True)


@dataclass(frozen=True, slots=True)
class Problem:
    """All that a plan may depend on.

    Attributes:
        requests, queries: B and n, queries of each request.
        heads, channels: H and D.
        dtype: of q and the keys: "float8_e4m3fn", also of bytes, "bfloat16" or "float16".
        blocks, page: of the cache, and keys of a block.
        block_bytes, row_bytes: from a block to the next, and from a key to the next in its block.
        width: blocks of a request's table.
        lens_by_query: whether each query has a length of its own.
        options: the function's.
        device: where every array is.
    """

    requests: int
    queries: int
    heads: int
    channels: int
    dtype: str
    blocks: int
    page: int
    block_bytes: int
    row_bytes: int
    width: int
    lens_by_query: bool
    options: Any
    device: Device

    @property
    def room(self) -> int:
        """Keys that a request's table has room for: what a row of all scores has."""
        return self.width * self.page

    @property
    def columns(self) -> int:
        """Keys that a request has at most."""
        most = self.options.max_context
        return self.room if most is None else min(self.room, most)

    @property
    def results(self) -> tuple[tuple[tuple[int, ...], str] | None, ...]:
        """Of `paged_indexer_topk`: shape and dtype of indices, count, values and lse; None for what is not wanted."""
        return selection_results(self.options, (self.requests, self.queries))


def read_logits(
    q: Any,
    k_cache: Any,
    weights: Any,
    block_tables: Any,
    context_lens: Any,
    *,
    q_scale: Any = None,
    relu: Any = True,
    max_context: Any = None,
    logits: Any = None,
) -> tuple[LogitsViews, Problem]:
    """Check a call of `paged_indexer_logits`. Raises InputError."""
    validation = Validation(LOGITS.operator)
    arrays, sizes = _read_scored(validation, q, k_cache, weights, block_tables, context_lens, q_scale)
    problem = Problem(**sizes, options=validation.chosen(LOGITS, relu, max_context), device=arrays["q"].device)
    shape = (problem.requests, problem.queries, problem.room)
    views = LogitsViews(**arrays, logits=validation.shaped(logits, "logits", shape, ("float32",), "lists", output=True))
    validation.separate()
    return views, problem


def read(
    q: Any,
    k_cache: Any,
    weights: Any,
    block_tables: Any,
    context_lens: Any,
    topk: Any,
    *,
    q_scale: Any = None,
    relu: Any = True,
    positions: Any = "slot",
    max_context: Any = None,
    return_values: Any = False,
    return_lse: Any = False,
    lse_base: Any = "e",
    indices: Any = None,
    count: Any = None,
    values: Any = None,
    lse: Any = None,
    workspace: Any = None,
) -> tuple[Views, Problem]:
    """Check a call of `paged_indexer_topk`. Raises InputError."""
    validation = Validation(OPERATOR)
    arrays, sizes = _read_scored(validation, q, k_cache, weights, block_tables, context_lens, q_scale)
    options = validation.chosen(ARGUMENTS, topk, relu, positions, max_context, return_values, return_lse, lse_base)
    views = Views(
        **arrays,
        **validation.selection(options, (sizes["requests"], sizes["queries"]), indices, count, values, lse),
        workspace=validation.workspace(workspace, arrays["q"]),
    )
    validation.separate()
    return views, Problem(**sizes, options=options, device=arrays["q"].device)


def _read_scored(
    validation: Validation, q: Any, k_cache: Any, weights: Any, block_tables: Any, context_lens: Any, q_scale: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays that both functions take, and the sizes of their problem."""
    q_seen = validation.view(q, "q", (*DTYPES, "uint8"))
    if q_seen.ndim != 4:
        raise validation.error("q", "shape [B, n, H, D]", list(q_seen.shape))
    requests, queries = q_seen.shape[:2]
    heads, channels = validation.index_heads(q_seen, "[B, n, H, D]")
    validation.extent(q_seen, "q", 0, "requests")
    validation.extent(q_seen, "q", 1, "queries, n in [B, n, H, D]", least=1)
    validation.check_layout(q_seen, "q", "rows")
    narrow = q_seen.dtype in FP8
    cache, pages = _read_cache(validation, k_cache, q_seen)
    if not narrow and q_scale is not None:
        raise validation.error("q_scale", f"None with {q_seen.dtype} q and keys", kind(q_scale))
    headed = (requests, queries, heads)
    arrays: dict[str, Any] = {
        "q": q_seen,
        "k_cache": cache,
        "weights": validation.given(weights, "weights", headed, ("float32", "bfloat16")),
        "block_tables": _integers(validation, block_tables, "block_tables", requests, "[B, width]"),
        "context_lens": _integers(validation, context_lens, "context_lens", requests, "[B] or [B, n]"),
        "q_scale": validation.shaped(q_scale, "q_scale", headed, ("float32",)),
    }
    tables, lens = arrays["block_tables"], arrays["context_lens"]
    if tables.ndim != 2:
        raise validation.error("block_tables", f"shape [{requests}, width]", list(tables.shape))
    if lens.shape not in ((requests,), (requests, queries)):
        raise validation.error("context_lens", f"shape [{requests}] or [{requests}, {queries}]", list(lens.shape))
    room = tables.shape[1] * pages["page"]
    if room > MAX_KEYS:
        raise validation.error("block_tables", f"room for up to {MAX_KEYS} keys, width * page", room)
    sizes = {
        "requests": requests,
        "queries": queries,
        "heads": heads,
        "channels": channels,
        "dtype": FP8[0] if narrow else q_seen.dtype,
        "width": tables.shape[1],
        "lens_by_query": lens.ndim == 2,
        **pages,
    }
    return arrays, sizes


def _integers(validation: Validation, array: Any, argument: str, requests: int, spelled: str) -> View:
    seen = validation.view(array, argument, ("int32",))
    if not seen.ndim or seen.shape[0] != requests:
        raise validation.error(argument, f"shape {spelled}, B = {requests}", list(seen.shape))
    validation.check_layout(seen, argument, "free")
    return seen


def _read_cache(validation: Validation, array: Any, q: View) -> tuple[View, dict[str, int]]:
    """Pages of `indexer_fp8`, or of rows in q's dtype; [blocks, page, n] or [blocks, page, 1, n]."""
    narrow = q.dtype in FP8
    seen = validation.view(array, "k_cache", FP8 if narrow else (q.dtype,))
    channels = q.shape[-1]
    if narrow:
        pages = validation.pages(
            seen, "k_cache", channels + INDEXER_FP8.scale_bytes, INDEXER_FP8.alignment, what="keys"
        )
        blocks, page, row_bytes = pages.blocks, pages.page, channels
    else:
        blocks, page = validation.paged_shape(seen, "k_cache", channels, what="keys")
        validation.check_layout(seen, "k_cache", "rows")
        row_bytes = seen.strides_bytes[1] if page > 1 else channels * seen.itemsize
    block_bytes = seen.strides_bytes[0] if blocks > 1 else 0
    return seen, {"blocks": blocks, "page": page, "block_bytes": block_bytes, "row_bytes": row_bytes}


def look_at_tables(views: ScoredViews, problem: Problem, stream: object) -> None:
    """Raise InputError for blocks of keys within the lengths that are neither -1 nor in the cache."""
    tables = tensor.fetched(views.block_tables, stream)
    lens = reference.lengths(tensor.fetched(views.context_lens, stream), problem.queries, problem.columns)
    used = np.arange(problem.width) * problem.page < lens.max(axis=-1, initial=0)[:, None]
    wrong = np.argwhere(used & ((tables < -1) | (tables >= problem.blocks)))
    if len(wrong):
        a, b = map(int, wrong[0])
        operator = OPERATOR if isinstance(problem.options, Options) else LOGITS.operator
        raise InputError("block_tables", f"-1 to {problem.blocks - 1}", f"{tables[a, b]} at [{a}, {b}]", operator)
