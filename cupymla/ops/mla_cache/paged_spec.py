"""Argument validation of the writer and the reader of caches of indexer keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from ... import tensor
from ...errors import InputError, kind
from ...tensor import Device, View
from ..arguments import Arguments, Choice, Integer, option
from ..indexer_validation import FP8, MAX_EXTENT, Pages
from .formats import INDEXER_FP8, SCALE_RULES, PagedFormat
from .reference import requested
from .spec import FLOATS, CodesChecks

INDICES = ("int32", "int64")


class PlacesViews(Protocol):
    """The arrays of a gather: the cache, and what names the places in it."""

    cache: View
    slots: View | None
    block_tables: View | None
    cu_lens: View | None


class PlacesProblem(Protocol):
    """A gather: how many rows of which pages."""

    @property
    def rows(self) -> int:
        """N."""

    @property
    def pages(self) -> Pages:
        """Of the cache."""


class CacheChecks(CodesChecks):
    """The checks of a call with a paged cache."""

    def cache(self, array: Any, layout: PagedFormat, output: bool = False) -> tuple[View, Pages]:
        """The argument `cache`: [blocks, page, bytes] or [blocks, page, 1, bytes], each block contiguous."""
        seen = self.view(array, "cache", FP8, output=output)
        return seen, self.pages(seen, "cache", layout.token_bytes, layout.alignment)

    def places(self, views: PlacesViews, slots: Any, block_tables: Any, cu_lens: Any, rows: int | None) -> int:
        """What names a gather's places, written into `views`: how many there are."""
        if slots is not None:
            for argument, given in (("block_tables", block_tables), ("cu_lens", cu_lens), ("rows", rows)):
                if given is not None:
                    raise self.error(argument, "None with slots", kind(given))
            views.slots = self.needed(slots, "slots", (None,), "[N]", INDICES)
            return self.extent(views.slots, "slots", 0, "slots")
        if block_tables is None:
            raise self.error("slots", "an array of shape [N], or block_tables, cu_lens and rows", None)
        views.block_tables = self.needed(block_tables, "block_tables", (None, None), "[B, width]", ("int32",))
        requests = self.extent(views.block_tables, "block_tables", 0, "requests")
        self.extent(views.block_tables, "block_tables", 1, "blocks of a request")
        views.cu_lens = self.needed(cu_lens, "cu_lens", (requests + 1,), f"[{requests + 1}]", ("int32",))
        if rows is None:
            raise self.error("rows", "how many rows there are, with block_tables", None)
        return rows

    def needed(
        self, array: Any, argument: str, shape: tuple[int | None, ...], spelled: str, dtypes: tuple[str, ...]
    ) -> View:
        """An array of integers of any strides; None for an extent that is free."""
        if array is None:
            raise self.error(argument, f"an array of shape {spelled}", None)
        seen = self.view(array, argument, dtypes)
        fits = seen.ndim == len(shape) and all(
            want in (None, have) for want, have in zip(shape, seen.shape, strict=True)
        )
        if not fits:
            raise self.error(argument, f"shape {spelled}", list(seen.shape))
        self.check_layout(seen, argument, "free")
        return seen


# indexer_k_quant_and_cache -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class WriteViews:
    """The arrays of `indexer_k_quant_and_cache`."""

    k: View
    cache: View
    slot_mapping: View


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """The options of `indexer_k_quant_and_cache`.

    Attributes:
        scale_rule: "amax" or "pow2".
    """

    scale_rule: Literal["amax", "pow2"] = option("amax", Choice(SCALE_RULES))


@dataclass(frozen=True, slots=True)
class WriteProblem:
    """What a call of `indexer_k_quant_and_cache` is.

    Attributes:
        tokens: T.
        dtype: of the keys.
        pages: of the cache.
        options: the options.
        device: where every array is.
    """

    tokens: int
    dtype: str
    pages: Pages
    options: WriteOptions
    device: Device


WRITE = Arguments("indexer_k_quant_and_cache", WriteViews, WriteOptions, results=(), updates=("cache",))


def read_write(k: Any, cache: Any, slot_mapping: Any, *, scale_rule: Any = "amax") -> tuple[WriteViews, WriteProblem]:
    """Check a call of `indexer_k_quant_and_cache`. Raises InputError."""
    checks = CacheChecks(WRITE.operator)
    keys = checks.view(k, "k", FLOATS)
    if keys.ndim != 2 or keys.shape[-1] != INDEXER_FP8.channels:
        raise checks.error("k", f"shape [T, {INDEXER_FP8.channels}]", list(keys.shape))
    checks.check_layout(keys, "k", "lists")
    tokens = checks.extent(keys, "k", 0, "tokens")
    seen, pages = checks.cache(cache, INDEXER_FP8, output=True)
    slots = checks.needed(slot_mapping, "slot_mapping", (tokens,), f"[{tokens}]", INDICES)
    options = checks.chosen(WRITE, scale_rule)
    checks.separate()
    problem = WriteProblem(tokens, keys.dtype, pages, options, keys.device)
    return WriteViews(keys, seen, slots), problem


def look_at_slot_mapping(views: WriteViews, problem: WriteProblem, stream: object) -> None:
    """Raise InputError for slots that are neither -1 nor in the cache."""
    require_slots(tensor.fetched(views.slot_mapping, stream), "slot_mapping", problem.pages, WRITE.operator)


def require_slots(slots: Any, argument: str, pages: Pages, operator: str) -> None:
    """Raise InputError for slots that are neither -1 nor in the cache."""
    wrong = np.flatnonzero((slots < -1) | (slots >= pages.num_slots))
    if wrong.size:
        place = int(wrong[0])
        raise InputError(argument, f"-1 to {pages.num_slots - 1}", f"{slots[place]} at [{place}]", operator)


# gather_indexer_cache ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class GatherViews:
    """The arrays of `gather_indexer_cache`."""

    cache: View
    slots: View | None = None
    block_tables: View | None = None
    cu_lens: View | None = None
    k: View | None = None
    k_scale: View | None = None


@dataclass(frozen=True, slots=True)
class GatherOptions:
    """The options of `gather_indexer_cache`.

    Attributes:
        rows: N, with block tables.
    """

    rows: int | None = option(None, Integer(0, MAX_EXTENT, optional=True))


@dataclass(frozen=True, slots=True)
class GatherProblem:
    """What a call of `gather_indexer_cache` is.

    Attributes:
        rows: N.
        pages: of the cache.
        options: the options.
        device: where every array is.
    """

    rows: int
    pages: Pages
    options: GatherOptions
    device: Device


GATHER = Arguments("gather_indexer_cache", GatherViews, GatherOptions, results=("k", "k_scale"))


def read_gather(
    cache: Any,
    slots: Any = None,
    *,
    block_tables: Any = None,
    cu_lens: Any = None,
    rows: Any = None,
    k: Any = None,
    k_scale: Any = None,
) -> tuple[GatherViews, GatherProblem]:
    """Check a call of `gather_indexer_cache`. Raises InputError."""
    checks = CacheChecks(GATHER.operator)
    seen, pages = checks.cache(cache, INDEXER_FP8)
    options = checks.chosen(GATHER, rows)
    views = GatherViews(seen)
    count = checks.places(views, slots, block_tables, cu_lens, options.rows)
    views.k = checks.codes(k, "k", (count, INDEXER_FP8.channels))
    views.k_scale = checks.shaped(k_scale, "k_scale", (count,), ("float32",), output=True)
    checks.separate()
    return views, GatherProblem(count, pages, options, seen.device)


def look_at_places(views: GatherViews, problem: GatherProblem, stream: object) -> None:
    """Raise InputError for slots, used blocks and lengths that are out of range; -1 is none."""
    require_places(views, problem, stream, GATHER.operator)


def require_places(views: PlacesViews, problem: PlacesProblem, stream: object, operator: str) -> None:
    """Raise InputError for slots, used blocks and lengths that are out of range; -1 is none."""
    pages = problem.pages
    if views.slots is not None:
        require_slots(tensor.fetched(views.slots, stream), "slots", pages, operator)
        return
    assert views.block_tables is not None and views.cu_lens is not None
    tables, lens = tensor.fetched(views.block_tables, stream), tensor.fetched(views.cu_lens, stream)
    wrong = np.flatnonzero((np.diff(lens, prepend=0) < 0) | (lens > problem.rows))
    if wrong.size:
        place = int(wrong[0])
        expected = f"numbers from 0 to rows {problem.rows} that do not fall"
        raise InputError("cu_lens", expected, f"{lens[place]} at [{place}]", operator)
    request, position = requested(lens, problem.rows)
    column = position // pages.page
    used = (request >= 0) & (column < tables.shape[1])
    places = np.stack([request[used], column[used]], axis=-1)
    bad = [(a, b) for a, b in np.unique(places, axis=0) if not -1 <= tables[a, b] < pages.blocks]
    if bad:
        a, b = map(int, bad[0])
        raise InputError("block_tables", f"-1 to {pages.blocks - 1}", f"{tables[a, b]} at [{a}, {b}]", operator)
