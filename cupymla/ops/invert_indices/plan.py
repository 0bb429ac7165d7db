"""Which kernels serve a problem, and their grids. Pure: no array, no driver."""

from __future__ import annotations

from dataclasses import dataclass

from ...arch import Arch
from ...build.source import KernelSource
from ...errors import UnsupportedError
from ..entry_lists import LIST_CTAS, MOST_RANGE_ROWS, list_ranges
from ..units import Unit
from ..variants import BOTH, every, require_choice, require_target
from .spec import OPERATOR, Problem

TARGETS = ("sm_90a", "sm_100f")

UNITS = {"list": Unit(OPERATOR, f"{OPERATOR}_list"), "order": Unit(OPERATOR, OPERATOR)}
"""Translation units by stage, in the order of a call's launches."""

STAGES = tuple(UNITS)

MOST_BATCH = 65535
"""The extent of grid.y, on which batch entries lie (CUDA C++ Programming Guide)."""

MOST_CHUNKS = 16
"""In which the queries are listed: where there is one range of tokens, a cluster each on every GPU."""

LEAST_CHUNK_ENTRIES = 512
"""That a chunk has, where there could be more chunks."""

WARPS = 8
"""Of a CTA of `order`: `kWarps` in cuda/invert_indices/sm90/storage.cuh."""

SHORT_LIST = 128
"""Entries of a list in a chunk that a warp puts in order by comparisons at most, as `kShortList` there."""

MOST_GROUP_TOKENS = 32
"""That a warp of `order` takes at a time: each lane finds the list of one."""

_GROUPS_PER_SM = 96
"""That warps of `order` take, or more, where tokens are many enough: about two for each warp that runs."""

_CTAS_PER_SM = 32
"""Of `order`, some six times as many as run at a time: lists are not equally long."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch.

    Attributes:
        source: the kernel.
        grid: CTAs by blockIdx.
        chunks: of queries, in which entries are listed.
        group_tokens: that a warp of `order` takes at a time.
    """

    source: KernelSource
    grid: tuple[int, int, int]
    chunks: int
    group_tokens: int = 0


def chunks(problem: Problem, clusters: int) -> int:
    """In how many chunks of queries the entries of a batch entry are listed, where it is to have so many clusters.

    A cluster takes a chunk and a range of tokens. So ranges are as few as can be, for each reads the chunk's entries
    again, and where this leaves a quarter of the clusters out, two share multiprocessors. Row ends take no more memory
    than entries, and no chunk is without a query.
    """
    if not problem.s_kv or not problem.entries:
        return 1
    ranges = -(-problem.s_kv // MOST_RANGE_ROWS)
    wanted = clusters // ranges
    if wanted * ranges * 4 <= clusters * 3:
        wanted *= 2
    wanted = max(1, min(wanted, MOST_CHUNKS, problem.s_q, problem.entries // max(problem.s_kv, LEAST_CHUNK_ENTRIES)))
    return -(-problem.s_q // -(-problem.s_q // wanted))


def row_ends(problem: Problem, number: int) -> int:
    """How many row ends so many chunks of each batch entry have in the workspace: those of one chunk are offsets."""
    return problem.batch * number * problem.s_kv if number > 1 else 0


def workspace_limit(problem: Problem) -> int:
    """Bytes of workspace that a call needs, on every GPU: the entries by chunk and token, in chance order, and where
    each token's part of each chunk ends."""
    most = max(chunks(problem, clusters) for clusters in range(1, MOST_CHUNKS + 1))
    return (problem.batch * problem.entries + row_ends(problem, most)) * 4


def launches(problem: Problem, arch: Arch, multiprocessors: int) -> tuple[Launch, ...]:
    """What a call launches, in order; nothing without a batch entry.

    Raises UnsupportedError when the architecture has no kernel, or the grid cannot be that large.
    """
    list_source, order_source = (variant(arch, stage=stage) for stage in STAGES)
    if problem.batch > MOST_BATCH:
        raise UnsupportedError(f"{OPERATOR} on {problem.batch} batch entries", arch.name, f"up to {MOST_BATCH}")
    if not problem.batch:
        return ()
    number = chunks(problem, min(MOST_CHUNKS, max(1, multiprocessors // (LIST_CTAS * problem.batch))))
    lists = problem.batch * number
    ranges = max(1, list_ranges(problem.s_kv, lists, multiprocessors))
    first = Launch(list_source, (ranges * LIST_CTAS, lists, 1), number)
    if not problem.entries:
        return (first,)
    group = MOST_GROUP_TOKENS
    while group > 1 and lists * -(-problem.s_kv // group) < _GROUPS_PER_SM * multiprocessors:
        group //= 2
    ctas = max(1, -(-number * -(-problem.s_kv // group) // WARPS))
    ctas = min(ctas, max(1, _CTAS_PER_SM * multiprocessors // problem.batch))
    return first, Launch(order_source, (ctas, problem.batch, 1), number, group)


def variant(arch: Arch, *, stage: str = "order") -> KernelSource:
    """The kernel of a stage, one of `STAGES`. Raises InputError, and UnsupportedError when the target has none."""
    require_target(OPERATOR, arch, TARGETS, BOTH)
    require_choice(OPERATOR, stage=(stage, STAGES))
    return UNITS[stage].source(arch.name, {})


def sources(arch_name: str | None = None) -> tuple[KernelSource, ...]:
    """The kernels that are compiled ahead of use, of one target or of all."""
    return tuple(source for source in variants() if arch_name in (None, source.arch))


def variants() -> tuple[KernelSource, ...]:
    """Every kernel that a call may want."""
    return every(variant, TARGETS, stage=STAGES)
