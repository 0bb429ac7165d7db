"""Which rows are scored and selected together, and which kernels do it. Pure: no array, no driver."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ... import arch as arches
from ...arch import Arch
from ...build.source import KernelSource
from ..indexer_logits import plan as scoring
from ..indexer_logits.spec import DTYPES
from ..topk import plan as selection
from ..topk import spec as selection_spec
from ..variants import require_target
from .spec import OPERATOR, Problem

SOURCE = "indexer_topk/sm90/indexer_topk.cu"
TARGETS = scoring.TARGETS

CHUNK_BYTES = 192 << 20
"""Of scores that are held at a time. One row is the least, whatever it takes."""

CAPACITY = 8192
"""Entries that a row's list has room for, where scores are filtered."""

FILTERED_KEYS = (32768, 1 << 19)
"""Keys from which on scores are filtered, and up to which a bitmap of them fits shared memory beside a list."""

FILTERED_TOPK = (1024, 2048)
"""Entries that are wanted then. A sample of the keys is to have some 32 of them, and a list room for twice as many as
are expected in it."""

FILTERED_ROWS = 1024
"""Queries from which on it pays."""

_SAMPLED_ENTRIES, _SAMPLES = 32, 1024  # at least: selected keys in a sample, and keys

_ROW_ALIGNMENT = 4  # scores: rows begin at multiples of 16 bytes
_CANDIDATE_THREADS = 512
_TILE = 8  # queries: what the scoring kernel has in a tile of 64 heads


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows that are scored and selected together.

    Attributes:
        first_entry, entries: batch entries.
        first_row, rows: of each of them.
    """

    first_entry: int
    entries: int
    first_row: int
    rows: int


@dataclass(frozen=True, slots=True)
class Filtered:
    """Rows whose scores are filtered: each row lists those that reach a threshold, and is selected from its list.

    Attributes:
        rows: of one batch entry, as a chunk.
        sample_stride: keys from one whose score the threshold is made of to the next.
        samples: how many such keys there are.
        flagged: the same rows in chunks, for those whose list does not do.
    """

    rows: Chunk
    sample_stride: int
    samples: int
    flagged: tuple[Chunk, ...]

    @property
    def sample_row(self) -> int:
        """Scores from one row's sample to the next."""
        return _aligned(self.samples)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a filter's arrays lie in the workspace, in bytes. Scores of flagged rows lie where the lists were."""

    samples: int
    thresholds: int
    counts: int
    starts: int
    ends: int
    flagged: int
    size: int


def row_stride(problem: Problem) -> int:
    """Scores from one row of the workspace to the next."""
    return _aligned(problem.scores.keys)


def _aligned(scores: int) -> int:
    return -(-scores // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


def parts(problem: Problem) -> Iterator[Chunk | Filtered]:
    """All rows in order, filtered where that pays."""
    scores = problem.scores
    first = _first_filtered(problem)
    if not scores.batch * scores.queries or first is None:
        yield from chunks(problem)
        return
    options, keys = problem.options, scores.keys
    stride = min(options.topk // _SAMPLED_ENTRIES, keys // _SAMPLES)
    # Odd: a period of keys is most likely a power of two, as of pages, and a sample in step with it would mislead.
    stride -= 1 - stride % 2
    samples = -(-keys // stride)
    fitting = CHUNK_BYTES // (CAPACITY * 8 + _aligned(samples) * 4)
    for entry in range(scores.batch):
        yield from _rows(problem, entry, 0, first)
        for begin, rows in _parts(scores.queries - first, fitting, _TILE):
            flagged = tuple(_rows(problem, entry, first + begin, rows))
            yield Filtered(Chunk(entry, 1, first + begin, rows), stride, samples, flagged)


def _first_filtered(problem: Problem) -> int | None:
    """The first row whose scores are filtered: one that sees more keys than a list holds. None where there is none."""
    scores, options = problem.scores, problem.options
    fits = (
        scores.heads in scoring.FILTERED_HEADS
        and scores.channels == 128
        and FILTERED_KEYS[0] <= scores.keys <= FILTERED_KEYS[1]
        and FILTERED_TOPK[0] <= options.topk <= FILTERED_TOPK[1]
        and not (options.return_values or options.return_lse)
    )
    first = max(0, (CAPACITY + 1) * options.k_stride - 1 - options.q_start) if options.causal else 0
    first = -(-first // _TILE) * _TILE
    return first if fits and scores.queries - first >= FILTERED_ROWS else None


def listed_share(problem: Problem, part: Filtered) -> float:
    """The share of the first row's scores that its list is expected to have (cuda/indexer_topk/sm90/thresholds.cuh), if
    `starts` and `ends` hide none. Later rows see more, and list as many."""
    mean = problem.options.topk / part.sample_stride
    listed = (mean + 6 * math.sqrt(mean) + 2) * part.sample_stride
    return min(1.0, listed / seen_keys(problem, part.rows.first_row))


def seen_keys(problem: Problem, row: int) -> int:
    """Keys that a causal mask leaves a row, and all before it."""
    options, keys = problem.options, problem.scores.keys
    return max(0, min(keys, (options.q_start + row + 1) // options.k_stride)) if options.causal else keys


def layout(problem: Problem, part: Filtered) -> Layout:
    """Where a filter's arrays lie."""
    rows = part.rows.rows
    samples = rows * CAPACITY * 8
    lists = samples + rows * part.sample_row * 4
    at = max(lists, max(chunk.rows for chunk in part.flagged) * row_stride(problem) * 4)
    row_bytes = _aligned(rows) * 4
    thresholds, counts, starts, ends, flagged = (at + number * row_bytes for number in range(5))
    return Layout(samples, thresholds, counts, starts, ends, flagged, flagged + len(part.flagged) * 4)


def chunks(problem: Problem) -> Iterator[Chunk]:
    """All rows, in parts of about equal size that fit `CHUNK_BYTES`: whole batch entries, or rows of one."""
    scores = problem.scores
    if not scores.batch * scores.queries:
        return
    fitting = _fitting(problem)
    if scores.queries <= fitting:
        for first, entries in _parts(scores.batch, fitting // scores.queries, 1):
            yield Chunk(first, entries, 0, scores.queries)
        return
    for entry in range(scores.batch):
        yield from _rows(problem, entry, 0, scores.queries)


def _fitting(problem: Problem) -> int:
    return max(1, CHUNK_BYTES // max(1, row_stride(problem) * 4))


def _rows(problem: Problem, entry: int, first: int, rows: int) -> Iterator[Chunk]:
    """Rows of a batch entry in parts that fit."""
    if rows:
        for begin, some in _parts(rows, _fitting(problem), _TILE):
            yield Chunk(entry, 1, first + begin, some)


def _parts(whole: int, most: int, unit: int) -> Iterator[tuple[int, int]]:
    """Begins and sizes of equal parts of at most `most`, multiples of `unit` where that fits."""
    size = -(-whole // -(-whole // most))
    rounded = -(-size // unit) * unit
    size = rounded if rounded <= most else size
    for first in range(0, whole, size):
        yield first, min(size, whole - first)


def workspace_limit(problem: Problem) -> int:
    """Bytes of workspace that a call needs, on every GPU."""
    return max((_bytes(problem, part) for part in parts(problem)), default=0)


def _bytes(problem: Problem, part: Chunk | Filtered) -> int:
    if isinstance(part, Filtered):
        return layout(problem, part).size
    return part.entries * part.rows * row_stride(problem) * 4


def selected(problem: Problem, chunk: Chunk) -> selection_spec.Problem:
    """The problem of selecting from a chunk's scores."""
    scores, options = problem.scores, problem.options
    return selection_spec.Problem(
        lead=(chunk.entries,) if scores.lead else (),
        rows=chunk.rows,
        columns=scores.keys,
        topk=options.topk,
        dtype="float32",
        options=selection_spec.Options(options.topk, "index", options.return_values),
        device=scores.device,
    )


def select_flagged(problem: selection_spec.Problem, arch: Arch, multiprocessors: int) -> selection.Plan:
    """The launch that selects in those rows of a chunk that are flagged. Raises UnsupportedError."""
    return replace(selection.long_plan(problem, arch, multiprocessors), source=variant(arch, stage="flagged"))


def thresholds(part: Filtered, arch: Arch) -> selection.Plan:
    """The launch that makes thresholds: a thread has eight scores of the sample."""
    threads = max(32, min(1 << (part.samples // 8).bit_length() - 1, selection.MOST_THREADS))
    return selection.Plan(variant(arch, stage="thresholds"), part.rows.rows, threads, 1, 0, False, 0, 0)


def candidates(problem: Problem, part: Filtered, arch: Arch) -> selection.Plan:
    """The launch that selects from lists. Raises UnsupportedError."""
    words = -(-(problem.scores.keys + 8) // 32)
    source = variant(arch, stage="candidates")
    return selection.Plan(source, part.rows.rows, _CANDIDATE_THREADS, 1, CAPACITY, False, words, 0)


def select(problem: selection_spec.Problem, arch: Arch, multiprocessors: int) -> selection.Plan:
    """The launch that selects from a chunk's scores. Raises UnsupportedError."""
    require_target(OPERATOR, arch)
    chosen = selection.plan(problem, arch, multiprocessors)
    return replace(chosen, source=variant(arch, own=chosen.own, clustered=bool(chosen.own) and chosen.cluster > 1))


Stage = Literal["select", "thresholds", "candidates", "flagged"]
"""By its CUPYMLA_STAGE in cuda/indexer_topk/sm90/indexer_topk.cu."""

STAGES: tuple[Stage, ...] = ("select", "thresholds", "candidates", "flagged")


def variant(arch: Arch, *, own: int = 0, clustered: bool = False, stage: Stage = "select") -> KernelSource:
    """The kernel that selects, or one beside a filter; other arguments as of `topk.plan.variant`.

    Raises UnsupportedError when there is none.
    """
    require_target(OPERATOR, arch)
    stages = (("CUPYMLA_STAGE", STAGES.index(stage)),) if stage != "select" else ()
    return KernelSource(SOURCE, OPERATOR, (*selection.short_defines(own, clustered), *stages), arch.name)


def sources(arch_name: str | None = None) -> tuple[KernelSource, ...]:
    """The kernel variants that are compiled ahead of use, of one target or of all: with those that score."""
    selecting = tuple(
        variant(arches.named(name), own=own, clustered=clustered)
        for name in TARGETS
        if arch_name in (None, name)
        for own, clustered in selection.short_variants(clusters=True)
    )
    filtering = tuple(
        source
        for name in TARGETS
        if arch_name in (None, name)
        for source in (
            *(variant(arches.named(name), stage=stage) for stage in STAGES[1:]),
            *_filters(name, {dtype for dtype, *_ in scoring.AHEAD}),
        )
    )
    return (*selecting, *filtering, *scoring.sources(arch_name))


def variants() -> tuple[KernelSource, ...]:
    """Every kernel variant that a call may want."""
    filters = (source for name in TARGETS for source in _filters(name, DTYPES))
    return tuple(dict.fromkeys((*sources(), *filters, *scoring.variants())))


def _filters(arch_name: str, dtypes: Collection[str]) -> Iterator[KernelSource]:
    """Scoring kernels that filter."""
    for dtype in DTYPES:
        for heads in scoring.FILTERED_HEADS if dtype in dtypes else ():
            for filter in scoring.FILTERS[1:]:
                yield scoring.variant(arches.named(arch_name), dtype=dtype, heads=heads, filter=filter)
