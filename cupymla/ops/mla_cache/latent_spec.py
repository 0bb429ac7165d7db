"""Argument validation of the writer and the reader of caches of latents."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Any, Literal

from ... import tensor
from ...tensor import Device, View
from ..arguments import Arguments, Choice, Integer, option
from ..indexer_validation import FP8, MAX_EXTENT, Pages
from .formats import SCALE_RULES
from .latents import FORMATS, LatentFormat
from .paged_spec import INDICES, CacheChecks, require_places, require_slots
from .spec import FLOATS

ROPE = 64
"""Channels of a rotary part."""


def channels_of(cache_format: str, width: int) -> int:
    """Channels of a row, of a cache whose last axis has `width` elements."""
    layout = FORMATS[cache_format]
    return layout.d_qk[0] if layout.codes else width


class LatentChecks(CacheChecks):
    """The checks of a call with a cache of latents."""

    def latents(
        self, array: Any, layout: LatentFormat, d_qk: tuple[int, ...], output: bool = False
    ) -> tuple[View, Pages, int]:
        """The argument `cache`, its pages, and the channels of its rows, one of `d_qk`."""
        seen = self.view(array, "cache", FP8 if layout.codes else ("bfloat16",), output=output)
        widths = [layout.token_bytes(channels) // seen.itemsize for channels in d_qk]
        last = seen.shape[-1] if seen.ndim else 0
        width = last if last in widths else widths[0]
        return seen, self.pages(seen, "cache", width, layout.alignment), d_qk[widths.index(width)]


# concat_and_cache_mla ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ConcatViews:
    """The arrays of `concat_and_cache_mla`."""

    kv_c: View
    k_pe: View | None
    cache: View
    slot_mapping: View


@dataclass(frozen=True, slots=True)
class ConcatOptions:
    """The options of `concat_and_cache_mla`.

    Attributes:
        cache_format: one of `FORMATS`.
        scale_rule: "amax" or "pow2"; None for the format's own.
    """

    cache_format: Literal["bf16", "v32_fp8", "v4_fp8"] = option(MISSING, Choice(tuple(FORMATS)))
    scale_rule: Literal["amax", "pow2"] | None = option(None, Choice((None, *SCALE_RULES)))


@dataclass(frozen=True, slots=True)
class ConcatProblem:
    """What a call of `concat_and_cache_mla` is.

    Attributes:
        tokens: T.
        channels: of kv_c.
        rope: channels of k_pe, 0 without one.
        dtype: of both.
        pages: of the cache.
        options: the options.
        device: where every array is.
    """

    tokens: int
    channels: int
    rope: int
    dtype: str
    pages: Pages
    options: ConcatOptions
    device: Device

    @property
    def layout(self) -> LatentFormat:
        """Of the cache."""
        return FORMATS[self.options.cache_format]


CONCAT = Arguments(
    "concat_and_cache_mla", ConcatViews, ConcatOptions, results=(), updates=("cache",), nullable=("k_pe",)
)


def read_concat(
    kv_c: Any, k_pe: Any, cache: Any, slot_mapping: Any, *, cache_format: Any, scale_rule: Any = None
) -> tuple[ConcatViews, ConcatProblem]:
    """Check a call of `concat_and_cache_mla`. Raises InputError."""
    checks = LatentChecks(CONCAT.operator)
    latents = checks.view(kv_c, "kv_c", FLOATS)
    options = checks.chosen(CONCAT, cache_format, scale_rule)
    layout = FORMATS[options.cache_format]
    if not layout.codes and options.scale_rule is not None:
        raise checks.error("scale_rule", "None with a cache without scales", repr(options.scale_rule))
    if layout.exponents and options.scale_rule == "amax":
        raise checks.error("scale_rule", f"'pow2' or None with a cache of {layout.name}", repr(options.scale_rule))
    channels = layout.codes or min(layout.d_qk)
    if latents.ndim != 2 or latents.shape[-1] != channels:
        raise checks.error("kv_c", f"shape [T, {channels}] with a cache of {layout.name}", list(latents.shape))
    checks.check_layout(latents, "kv_c", "lists")
    tokens = checks.extent(latents, "kv_c", 0, "tokens")
    if k_pe is None and layout.codes:
        raise checks.error("k_pe", f"an array of shape [{tokens}, {ROPE}]", None)
    rotary = checks.shaped(k_pe, "k_pe", (tokens, ROPE), (latents.dtype,), "lists")
    rope = 0 if rotary is None else ROPE
    seen, pages, _ = checks.latents(cache, layout, (channels + rope,), output=True)
    slots = checks.needed(slot_mapping, "slot_mapping", (tokens,), f"[{tokens}]", INDICES)
    checks.separate()
    problem = ConcatProblem(tokens, channels, rope, latents.dtype, pages, options, latents.device)
    return ConcatViews(latents, rotary, seen, slots), problem


def look_at_slot_mapping(views: ConcatViews, problem: ConcatProblem, stream: object) -> None:
    """Raise InputError for slots that are neither -1 nor in the cache."""
    require_slots(tensor.fetched(views.slot_mapping, stream), "slot_mapping", problem.pages, CONCAT.operator)


# gather_mla_cache ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class GatherViews:
    """The arrays of `gather_mla_cache`."""

    cache: View
    slots: View | None = None
    block_tables: View | None = None
    cu_lens: View | None = None
    kv: View | None = None


@dataclass(frozen=True, slots=True)
class GatherOptions:
    """The options of `gather_mla_cache`.

    Attributes:
        cache_format: one of `FORMATS`.
        rows: N, with block tables.
    """

    cache_format: Literal["bf16", "v32_fp8", "v4_fp8"] = option(MISSING, Choice(tuple(FORMATS)))
    rows: int | None = option(None, Integer(0, MAX_EXTENT, optional=True))


@dataclass(frozen=True, slots=True)
class GatherProblem:
    """What a call of `gather_mla_cache` is.

    Attributes:
        rows: N.
        channels: of a row.
        pages: of the cache.
        options: the options.
        device: where every array is.
    """

    rows: int
    channels: int
    pages: Pages
    options: GatherOptions
    device: Device

    @property
    def layout(self) -> LatentFormat:
        """Of the cache."""
        return FORMATS[self.options.cache_format]


GATHER = Arguments("gather_mla_cache", GatherViews, GatherOptions, results=("kv",))


def read_gather(
    cache: Any,
    slots: Any = None,
    *,
    cache_format: Any,
    block_tables: Any = None,
    cu_lens: Any = None,
    rows: Any = None,
    kv: Any = None,
) -> tuple[GatherViews, GatherProblem]:
    """Check a call of `gather_mla_cache`. Raises InputError."""
    checks = LatentChecks(GATHER.operator)
    options = checks.chosen(GATHER, cache_format, rows)
    layout = FORMATS[options.cache_format]
    seen, pages, channels = checks.latents(cache, layout, layout.d_qk)
    views = GatherViews(seen)
    count = checks.places(views, slots, block_tables, cu_lens, options.rows)
    views.kv = checks.shaped(kv, "kv", (count, channels), ("bfloat16",), "lists", output=True)
    checks.separate()
    return views, GatherProblem(count, channels, pages, options, seen.device)


def look_at_places(views: GatherViews, problem: GatherProblem, stream: object) -> None:
    """Raise InputError for slots, used blocks and lengths that are out of range; -1 is none."""
    require_places(views, problem, stream, GATHER.operator)
