"""Which requests are scored and selected together, and which kernels do it. Pure: no array, no driver."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from ... import arch as arches
from ...arch import Arch
from ...build.source import KernelSource
from ..indexer_logits import plan as dense
from ..topk import plan as selection
from ..topk import spec as selection_spec
from ..variants import require_target
from ..work_assignment import WorkAssignment
from .spec import OPERATOR, Problem

SCORING = "paged_indexer_logits"
"""The kernel that scores, of both functions."""

TARGETS = dense.TARGETS

CHUNK_BYTES = 192 << 20
"""Of scores that are held at a time. One request's are the least, whatever they take."""

_ROW_ALIGNMENT = 4  # scores: rows begin at multiples of 16 bytes
_LEAST_THREADS = 512
_ALONE_BYTES = 200 << 10
"""Of shared memory: no second CTA finds room, and its multiprocessor's is divided as for the scoring kernel's CTAs."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Requests that are scored and selected together."""

    first: int
    requests: int


def row_stride(problem: Problem) -> int:
    """Scores from one row of the workspace to the next."""
    return -(-problem.columns // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


def chunks(problem: Problem) -> Iterator[Chunk]:
    """All requests, in parts of about equal size that fit `CHUNK_BYTES`."""
    if not problem.requests:
        return
    fitting = max(1, CHUNK_BYTES // max(1, problem.queries * row_stride(problem) * 4))
    parts = -(-problem.requests // fitting)
    size = -(-problem.requests // parts)
    for first in range(0, problem.requests, size):
        yield Chunk(first, min(size, problem.requests - first))


def workspace_limit(problem: Problem) -> int:
    """Bytes of workspace that a call needs, on every GPU: the first chunk is the largest."""
    first = next(chunks(problem), None)
    return 0 if first is None else first.requests * problem.queries * row_stride(problem) * 4


def work_assignment(
    problem: Problem, requests: int, fills: bool, facts: Mapping[str, int], multiprocessors: int
) -> WorkAssignment:
    """CTAs that score: one for each multiprocessor, and no more than there can be key tiles.

    Which CTA takes which tiles is worked out on the device, from the lengths.

    Args:
        problem: what is scored.
        requests: how many of them, in this launch.
        fills: whether scores of keys that nobody sees are written, too.
        facts: of the kernel.
        multiprocessors: of the GPU.
    """
    query_tiles = -(-problem.queries // facts["pass_queries"])
    tiles = requests * query_tiles * -(-problem.columns // facts["tile_keys"])
    return WorkAssignment(multiprocessors if fills else min(multiprocessors, tiles), {"query_tiles": query_tiles})


def selected(problem: Problem, requests: int) -> selection_spec.Problem:
    """The problem of selecting from the scores of so many requests."""
    options = problem.options
    return selection_spec.Problem(
        lead=(requests,),
        rows=problem.queries,
        columns=problem.columns,
        topk=options.topk,
        dtype="float32",
        options=selection_spec.Options(options.topk, "index", options.return_values),
        device=problem.device,
    )


def select(
    problem: selection_spec.Problem, arch: Arch, multiprocessors: int, without: Collection[int] = ()
) -> selection.Plan:
    """The launch that selects: topk's, with more threads, and shared memory of its own where CTAs keep rows.

    Takes what `topk.plan.plan` takes. Raises UnsupportedError.
    """
    require_target(OPERATOR, arch)
    if (short := selection.short_plan(problem, arch, multiprocessors, without)) is not None:
        # CTAs come while those that score end: the first multiprocessors that are free would get more than one.
        alone = _ALONE_BYTES if short.ctas <= multiprocessors else 0
        source = variant(arch, own=short.own, clustered=short.cluster > 1)
        return replace(short, source=source, least_bytes=alone)
    chosen = replace(selection.long_plan(problem, arch, multiprocessors, without), source=variant(arch))
    if problem.batch * problem.rows <= multiprocessors:
        # Alone on its multiprocessor, a CTA of few threads would wait for memory more often than for barriers.
        chosen = replace(chosen, threads=max(chosen.threads, _LEAST_THREADS))
    return replace(chosen, threads=selection.MOST_THREADS) if chosen.cluster > 1 else chosen


def scoring(problem: Problem, arch: Arch) -> KernelSource:
    """The kernel that scores. Raises UnsupportedError when the architecture has none."""
    heads = next(heads for heads in dense.HEADS if problem.heads <= heads)
    filled = problem.heads != heads and problem.dtype != "float8_e4m3fn"
    return scoring_variant(arch, dtype=problem.dtype, channels=problem.channels, heads=heads, filled=filled)


def scoring_variant(
    arch: Arch, *, dtype: str = "float8_e4m3fn", channels: int = 128, heads: int = 64, filled: bool = False
) -> KernelSource:
    """A variant of the kernel that scores; arguments and errors as those of `indexer_logits`'."""
    require_target(OPERATOR, arch)
    like = dense.variant(arch, dtype=dtype, channels=channels, heads=heads, filled=filled)
    return replace(like, path=f"{OPERATOR}/sm90/{SCORING}.cu", entry=SCORING)


def variant(arch: Arch, *, own: int = 0, clustered: bool = False) -> KernelSource:
    """The kernel that selects; arguments as of `topk.plan.variant`. Raises UnsupportedError when there is none."""
    require_target(OPERATOR, arch)
    defines = selection.short_defines(own, clustered)
    return KernelSource(f"{OPERATOR}/sm90/{OPERATOR}.cu", OPERATOR, defines, arch.name)


def _selections(arch: Arch) -> tuple[KernelSource, ...]:
    return tuple(variant(arch, own=own, clustered=clustered) for own, clustered in selection.short_variants(True))


def sources(arch_name: str | None = None) -> tuple[KernelSource, ...]:
    """The kernel variants that are compiled ahead of use, of one target or of all."""
    targets = [arches.named(name) for name in TARGETS if arch_name in (None, name)]
    return tuple(
        source
        for arch in targets
        for source in (
            *_selections(arch),
            *(scoring_variant(arch, dtype=dtype, channels=d, heads=heads) for dtype, d, heads in dense.AHEAD),
        )
    )


def variants() -> tuple[KernelSource, ...]:
    """Every kernel variant that a call may want."""
    scored = tuple(
        replace(like, path=f"{OPERATOR}/sm90/{SCORING}.cu", entry=SCORING)
        for like in dense.variants()
        if like.arch in TARGETS
    )
    return (*(source for name in TARGETS for source in _selections(arches.named(name))), *scored)
