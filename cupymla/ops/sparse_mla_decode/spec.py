"""Argument validation of sparse_mla_decode: every check a caller can meet, and the problem that is left when they all
pass."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Any, Literal

from ... import tensor
from ...errors import kind
from ...tensor import Device, View
from ..arguments import Arguments, Choice, Integer, Number, option
from ..checks import require_entries
from ..indexer_validation import FP8, Pages, Validation
from ..mla import D_V, DTYPES, MAX_POSITION, SCALE_BITS
from ..mla_cache.latents import FORMATS, LatentFormat

OPERATOR = "sparse_mla_decode"
MAX_HEADS = 128
MAX_SPLITS = 16
"""CTAs of a cluster, at most."""


@dataclass(slots=True)
class Views:
    """The arrays, seen; None where one was left out."""

    q: View
    k_cache: View
    indices: View
    topk_length: View | None = None
    attn_sink: View | None = None
    extra_k_cache: View | None = None
    extra_indices: View | None = None
    extra_topk_length: View | None = None
    out: View | None = None
    lse: View | None = None
    workspace: View | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """The options.

    Attributes:
        cache_format: of both caches, one of `FORMATS`.
        sm_scale: factor of q.k in the softmax, None for d_qk ** -0.5.
        lse_base: "e" or "2".
        splits: parts that each row's entries are cut into; None for what suits the GPU and the batch.
    """

    cache_format: Literal["bf16", "v32_fp8", "v4_fp8"] = option(MISSING, Choice(tuple(FORMATS)))
    sm_scale: float | None = option(None, Number(SCALE_BITS, optional=True))
    lse_base: Literal["e", "2"] = option("e", Choice(("e", "2")))
    splits: int | None = option(None, Integer(1, MAX_SPLITS, optional=True))


ARGUMENTS = Arguments(OPERATOR, Views, Options, results=("out", "lse"), has_workspace=True)


@dataclass(frozen=True, slots=True)
class Cache(Pages):
    """A source of keys.

    Attributes:
        topk: entries of a row that select from it.
    """

    topk: int


@dataclass(frozen=True, slots=True)
class Problem:
    """All that a plan may depend on.

    Attributes:
        batch: requests, B.
        s_q: query rows of each, n.
        h_q: query heads.
        d_qk: channels of a key.
        dtype: of q.
        caches: the first one, and the extra one where there is one.
        options: the options.
        device: where every array is.
        has_lengths: whether rows may have fewer entries than others.
    """

    batch: int
    s_q: int
    h_q: int
    d_qk: int
    dtype: str
    caches: tuple[Cache, ...]
    options: Options
    device: Device
    has_lengths: bool = False

    @property
    def rows(self) -> int:
        """Query rows of all requests."""
        return self.batch * self.s_q

    @property
    def scale(self) -> float:
        """The factor of q.k."""
        return float(self.d_qk**-0.5) if self.options.sm_scale is None else self.options.sm_scale

    @property
    def results(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Shape and dtype of out and lse."""
        heads = (self.batch, self.s_q, self.h_q)
        return ((*heads, D_V), self.dtype), (heads, "float32")


def read(
    q: Any,
    k_cache: Any,
    indices: Any,
    *,
    cache_format: Any,
    topk_length: Any = None,
    attn_sink: Any = None,
    extra_k_cache: Any = None,
    extra_indices: Any = None,
    extra_topk_length: Any = None,
    sm_scale: Any = None,
    lse_base: Any = "e",
    splits: Any = None,
    out: Any = None,
    lse: Any = None,
    workspace: Any = None,
) -> tuple[Views, Problem]:
    """Check a call. Raises InputError."""
    validation = Validation(OPERATOR)
    q_seen = validation.view(q, "q", DTYPES)
    options = validation.chosen(ARGUMENTS, cache_format, sm_scale, lse_base, splits)
    layout = FORMATS[options.cache_format]
    batch, s_q, h_q, d_qk = _read_q(validation, q_seen, layout)
    cache, pages = _read_cache(validation, k_cache, "k_cache", layout, d_qk)
    views = Views(q_seen, cache, _read_indices(validation, indices, "indices", batch, s_q))
    caches = [_source(pages, views.indices)]
    views.topk_length = _read_lengths(validation, topk_length, "topk_length", batch, s_q)
    views.attn_sink = validation.shaped(attn_sink, "attn_sink", (h_q,), ("float32",))
    if extra_k_cache is not None:
        views.extra_k_cache, extra_pages = _read_cache(validation, extra_k_cache, "extra_k_cache", layout, d_qk)
        views.extra_indices = _read_indices(validation, extra_indices, "extra_indices", batch, s_q)
        caches.append(_source(extra_pages, views.extra_indices))
        views.extra_topk_length = _read_lengths(validation, extra_topk_length, "extra_topk_length", batch, s_q)
    else:
        for name, array in (("extra_indices", extra_indices), ("extra_topk_length", extra_topk_length)):
            if array is not None:
                raise validation.error(name, "None without extra_k_cache", kind(array))
    has_lengths = views.topk_length is not None or views.extra_topk_length is not None
    problem = Problem(batch, s_q, h_q, d_qk, q_seen.dtype, tuple(caches), options, q_seen.device, has_lengths)
    (out_shape, _), (lse_shape, _) = problem.results
    views.out = validation.shaped(out, "out", out_shape, (q_seen.dtype,), "rows", output=True)
    views.lse = validation.shaped(lse, "lse", lse_shape, ("float32",), output=True)
    views.workspace = validation.workspace(workspace, q_seen)
    validation.separate()
    return views, problem


def _read_q(validation: Validation, q: View, layout: LatentFormat) -> tuple[int, int, int, int]:
    channels = " or ".join(map(str, layout.d_qk))
    if q.ndim != 4 or q.shape[-1] not in layout.d_qk:
        raise validation.error("q", f"shape [B, n, h_q, {channels}] with a cache of {layout.name}", list(q.shape))
    batch, s_q, h_q, d_qk = q.shape
    if not 1 <= h_q <= MAX_HEADS:
        raise validation.error("q", f"1 to {MAX_HEADS} heads, h_q in [B, n, h_q, d_qk]", h_q)
    if batch * s_q > MAX_POSITION:
        raise validation.error("q", f"at most {MAX_POSITION} rows, B * n", batch * s_q)
    validation.check_layout(q, "q", "rows")
    return batch, s_q, h_q, d_qk


def _read_cache(
    validation: Validation, array: Any, argument: str, layout: LatentFormat, d_qk: int
) -> tuple[View, Pages]:
    seen = validation.view(array, argument, FP8 if layout.codes else ("bfloat16",))
    return seen, validation.pages(seen, argument, layout.token_bytes(d_qk) // seen.itemsize, layout.alignment)


def _source(pages: Pages, indices: View) -> Cache:
    return Cache(pages.blocks, pages.page, pages.block_bytes, indices.shape[-1])


def _read_indices(validation: Validation, array: Any, argument: str, batch: int, s_q: int) -> View:
    spelled = f"[{batch}, {s_q}, topk]"
    if array is None:
        raise validation.error(argument, f"an array of shape {spelled}", None)
    seen = validation.view(array, argument, ("int32",))
    if seen.ndim != 3 or seen.shape[:2] != (batch, s_q):
        raise validation.error(argument, f"shape {spelled}", list(seen.shape))
    validation.check_layout(seen, argument, "lists")
    validation.extent(seen, argument, -1, "entries", most=MAX_POSITION)
    return seen


def _read_lengths(validation: Validation, array: Any, argument: str, batch: int, s_q: int) -> View | None:
    if array is None:
        return None
    seen = validation.view(array, argument, ("int32",))
    if seen.shape not in ((batch,), (batch, s_q)):
        raise validation.error(argument, f"shape [{batch}] or [{batch}, {s_q}]", list(seen.shape))
    validation.check_layout(seen, argument, "free")
    return seen


def look(views: Views, problem: Problem, stream: object) -> None:
    """Raise InputError for a slot that is neither -1 nor in its cache, among the entries that count. Waits for
    `stream`, None for the current one, when the arrays are on a GPU."""
    given = [
        ("indices", views.indices, views.topk_length),
        ("extra_indices", views.extra_indices, views.extra_topk_length),
    ]
    for (argument, indices, lengths), cache in zip(given, problem.caches):  # noqa: B905 - the second may be missing
        assert indices is not None
        ends = None if lengths is None else tensor.fetched(lengths, stream)
        if ends is not None and ends.ndim == 1:
            ends = ends[:, None]
        require_entries(tensor.fetched(indices, stream), ends, cache.num_slots, argument, OPERATOR)
