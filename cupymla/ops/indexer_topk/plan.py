"""Which rows are scored and selected together, and which kernels do it. Pure: no array, no driver."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from ... import arch as arches
from ...arch import Arch
from ...build.source import KernelSource
from ..indexer_logits import plan as scoring
from ..topk import plan as selection
from ..topk import spec as selection_spec
from ..variants import require_target
from .spec import OPERATOR, Problem

SOURCE = "indexer_topk/sm90/indexer_topk.cu"
TARGETS = scoring.TARGETS

CLUSTER_COLUMNS = 32
"""Of a thread, where the CTAs of a cluster keep a row: with 48, as topk has, the kernel spills with NVRTC 12.9."""

CHUNK_BYTES = 192 << 20
"""Of scores that are held at a time. One row is the least, whatever it takes."""

_WAVE = 264
"""Rows that 132 multiprocessors select from at a time. What a chunk has beyond whole waves takes another one."""

_ROW_ALIGNMENT = 4  # scores: rows begin at multiples of 16 bytes
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


def row_stride(problem: Problem) -> int:
    """Scores from one row of the workspace to the next."""
    return -(-problem.scores.keys // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


def chunks(problem: Problem) -> Iterator[Chunk]:
    """All rows, in parts of about equal size that fit `CHUNK_BYTES`: whole batch entries, or rows of one. Parts of
    several waves of rows are whole waves at most."""
    scores = problem.scores
    if not scores.batch * scores.queries:
        return
    fitting = max(1, CHUNK_BYTES // max(1, row_stride(problem) * 4))
    if scores.queries <= fitting:
        for first, entries in _parts(scores.batch, fitting // scores.queries, 1):
            yield Chunk(first, entries, 0, scores.queries)
        return
    if fitting > _WAVE:
        fitting -= fitting % _WAVE
    for entry in range(scores.batch):
        for first, rows in _parts(scores.queries, fitting, _TILE):
            yield Chunk(entry, 1, first, rows)


def _parts(whole: int, most: int, unit: int) -> Iterator[tuple[int, int]]:
    """Begins and sizes of equal parts of at most `most`, multiples of `unit` where that fits."""
    size = -(-whole // -(-whole // most))
    rounded = -(-size // unit) * unit
    size = rounded if rounded <= most else size
    for first in range(0, whole, size):
        yield first, min(size, whole - first)


def workspace_limit(problem: Problem) -> int:
    """Bytes of workspace that a call needs, on every GPU: the first chunk is the largest."""
    first = next(chunks(problem), None)
    return 0 if first is None else first.entries * first.rows * row_stride(problem) * 4


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


def select(
    problem: selection_spec.Problem, arch: Arch, multiprocessors: int, without: Collection[int] = ()
) -> selection.Plan:
    """The launch that selects from a chunk's scores; arguments as of `topk.plan.plan`. Raises UnsupportedError."""
    require_target(OPERATOR, arch)
    chosen = selection.plan(problem, arch, multiprocessors, without, CLUSTER_COLUMNS)
    return replace(chosen, source=variant(arch, own=chosen.own, clustered=bool(chosen.own) and chosen.cluster > 1))


def variant(arch: Arch, *, own: int = 0, clustered: bool = False) -> KernelSource:
    """The kernel that selects; arguments as of `topk.plan.variant`. Raises UnsupportedError when there is none."""
    require_target(OPERATOR, arch)
    return KernelSource(SOURCE, OPERATOR, selection.short_defines(own, clustered), arch.name)


def sources(arch_name: str | None = None) -> tuple[KernelSource, ...]:
    """The kernel variants that are compiled ahead of use, of one target or of all: with those that score."""
    selecting = tuple(
        variant(arches.named(name), own=own, clustered=clustered)
        for name in TARGETS
        if arch_name in (None, name)
        for own, clustered in selection.short_variants(True, CLUSTER_COLUMNS)
    )
    return (*selecting, *scoring.sources(arch_name))
