"""Which kernel serves a problem, and the shared memory and threads that it gets. Pure: no array, no driver."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from ... import arch as arches
from ...arch import Arch
from ...build.source import KernelSource
from ...errors import InputError, UnsupportedError, shown
from .spec import DTYPES, OPERATOR, Problem

SOURCE = "topk/sm80/topk.cu"
TARGETS = ("sm_80", "sm_90", "sm_100f")

MAX_CTAS = 2**31 - 1
"""The extent of grid.x, on which rows lie (CUDA C++ Programming Guide)."""

# Bytes of an entry's place, and entries that shared memory has room for at least: the threshold from a sample lets
# about half as many again through as are wanted, with a deviation of a tenth of that, and more of long rows.
_PLACE_BYTES = 8
_LEAST_CAPACITY = 4096
_SAMPLED = 8  # columns of a thread, in the sample
_DEVIATIONS = 6.0  # `kDeviations` in cuda/topk/sm80/stream.cuh
_ROOM_DEVIATIONS = 3.0
"""Of the number that the threshold lets through, as which there is room for more than that: where it overflows, the row
is read again."""
_MOST_STREAMED = 4096  # topk
_SMALL_THREADS, _THREADS, MOST_THREADS = 256, 512, 1024

_SMALL_ROW = 32768
"""Columns up to which a CTA of few threads has its row's time in barriers, not in loads. On an H200, 4096 rows of
32768 columns take 374 us instead of 425 (2026-11-29), and of 131072 columns 1245 instead of 1003."""

_CLUSTERS = (8, 4, 2)
CLUSTER_ROW = 32768
"""Columns from which on a cluster shares a row that no CTAs keep, where clusters are for all rows at once."""

_RESERVED_BYTES = 1024
"""Of shared memory, that the system takes for each CTA (CUDA C++ Programming Guide)."""

_MOST_SORTED = 8192

OWN_COLUMNS = (8, 48)
"""Columns of a thread where one CTA keeps a row, in registers or in shared memory (cuda/topk/sm80/short_row.cuh)."""

_USUAL_COLUMNS = 32
"""Of a thread that keeps them in shared memory, where threads are enough for that."""

_KEEPING_CLUSTERS = (8, 4, 3, 2)
"""CTAs that keep a row together, in shared memory, where rows are too few for all multiprocessors."""

_ALONE_COLUMNS = OWN_COLUMNS[0] * MOST_THREADS
"""Up to so many columns a CTA keeps its row in registers."""

_KEPT_COLUMNS = (8, 16)
"""Columns of a thread of such a cluster. Sixteen: each warp takes its time to run through the code, whatever it keeps.
Eight, where else threads would be fewer than entries are wanted, and there would be no bound
(cuda/topk/sm80/short_row.cuh)."""

_LEAST_SHARE = 4096
"""Columns of a CTA of such a cluster, at least: with fewer, histograms would have too few bins."""

_MANY_OWN_COLUMNS = 24576
"""And up to how many columns where rows are more than multiprocessors: a CTA that is alone there loads while nobody
selects. On an H100, 4096 rows of 16384 and 32768 columns: 295 and 578 us, 403 and 551 for rows of any length."""

_OWN_BINS_BYTES = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch of one kernel.

    Attributes:
        source: what to compile.
        ctas: all of them, clusters included.
        threads: of a CTA.
        cluster: CTAs that share a row.
        capacity: candidates that shared memory holds.
        streamed: whether rows may be read once with a threshold from a sample.
        bitmap_words: of 32 columns.
        sorted: entries that are sorted in one piece; 0 where none are.
        own: columns of a thread, at most, where a CTA or a cluster keeps its row; then the four above are 0.
        kept: how many of them shared memory has room for.
        least_bytes: of shared memory behind what the kernel itself has.
    """

    source: KernelSource
    ctas: int
    threads: int
    cluster: int
    capacity: int
    streamed: bool
    bitmap_words: int
    sorted: int
    own: int = 0
    kept: int = 0
    least_bytes: int = 0

    @property
    def array_bytes(self) -> int:
        """Shared memory behind what the kernel itself has."""
        if self.own:
            return max(self.least_bytes, self.threads * (_OWN_BINS_BYTES + self.kept * 4))
        return (self.capacity + self.sorted) * _PLACE_BYTES + (self.bitmap_words + 1) * 4


def plan(
    problem: Problem, arch: Arch, multiprocessors: int, without: Collection[int] = (), most: int = OWN_COLUMNS[1]
) -> Plan:
    """Choose.

    Args:
        problem: what to select.
        arch: of the GPU.
        multiprocessors: of it.
        without: sizes of clusters that are not to be, as not all of them would run at once.
        most: columns of a thread in a cluster.

    Raises UnsupportedError when the architecture has no kernel, or the grid cannot be that large.
    """
    short = short_plan(problem, arch, multiprocessors, without, most)
    return short or long_plan(problem, arch, multiprocessors, without)


def short_plan(
    problem: Problem, arch: Arch, multiprocessors: int, without: Collection[int] = (), most: int = OWN_COLUMNS[1]
) -> Plan | None:
    """The launch where a CTA or a cluster can keep a row; None for longer ones, and where ids are sorted by score.

    Takes what `plan` takes. Raises UnsupportedError when the grid cannot be that large.
    """
    if problem.options.order != "index":
        return None
    rows = _rows(problem, arch)
    if has_clusters(arch) and problem.columns > _ALONE_COLUMNS:
        for cluster in _KEEPING_CLUSTERS:
            share = -(-problem.columns // cluster)
            fits = rows * cluster <= multiprocessors and cluster not in without
            if fits and _LEAST_SHARE <= share <= most * MOST_THREADS:
                return _keeping_cluster(problem, arch, cluster, most)
    own = next((own for own in OWN_COLUMNS if problem.columns <= own * MOST_THREADS), 0)
    if not own or (rows > multiprocessors and problem.columns > _MANY_OWN_COLUMNS):
        return None
    kept = 0 if own == OWN_COLUMNS[0] else _kept(problem.columns, MOST_THREADS)
    threads = min(MOST_THREADS, max(1, -(-problem.columns // (32 * min(own, _USUAL_COLUMNS)))) * 32)
    chosen = Plan(variant(arch, scores=problem.dtype, own=own), rows, threads, 1, 0, False, 0, 0, own, kept)
    return chosen if chosen.array_bytes <= arch.smem_bytes - STORAGE_BYTES - _RESERVED_BYTES else None


def _keeping_cluster(problem: Problem, arch: Arch, cluster: int, own: int) -> Plan:
    columns = -(-problem.columns // cluster)
    most, least = (-(-columns // (32 * kept)) * 32 for kept in _KEPT_COLUMNS)
    bounded = -(-problem.topk // (32 * cluster)) * 32
    threads = min(_THREADS, max(least, min(most, bounded)))
    if columns > threads * _USUAL_COLUMNS:
        threads = MOST_THREADS
    source = variant(arch, scores=problem.dtype, own=own, clustered=True)
    rows = problem.batch * problem.rows
    return Plan(source, rows * cluster, threads, cluster, 0, False, 0, 0, own, _kept(columns, threads))


def _kept(columns: int, threads: int) -> int:
    """Columns that a thread keeps in shared memory, of so many of a CTA."""
    return _USUAL_COLUMNS if columns <= threads * _USUAL_COLUMNS else OWN_COLUMNS[1]


def _rows(problem: Problem, arch: Arch) -> int:
    rows = problem.batch * problem.rows
    if rows * _CLUSTERS[0] > MAX_CTAS:
        raise UnsupportedError(f"{OPERATOR} on {rows} rows", arch.name, f"up to {MAX_CTAS // _CLUSTERS[0]}")
    return rows


def long_plan(problem: Problem, arch: Arch, multiprocessors: int, without: Collection[int] = ()) -> Plan:
    """The launch for rows of any length. Takes what `plan` takes, and raises what it raises."""
    source = variant(arch, scores=problem.dtype)
    rows = _rows(problem, arch)
    columns, topk = problem.columns, min(problem.topk, max(problem.columns, 1))
    fitting = (size for size in _CLUSTERS if rows * size <= multiprocessors and size not in without)
    cluster = next(fitting, 1) if has_clusters(arch) and columns >= CLUSTER_ROW else 1
    # 16-byte groups may begin before the first column.
    words = -(-(columns + 2 * 8) // 32)
    piece = 0
    if problem.options.order == "score":
        piece = 1 << max(5, (min(topk, _MOST_SORTED) - 1).bit_length())
    own_bytes = STORAGE_BYTES + _RESERVED_BYTES
    room = arch.smem_bytes - own_bytes

    def streamed(threads: int) -> Plan:
        least = max(_LEAST_CAPACITY, -(-topk * 5 // 2 // 128) * 128)
        chosen = Plan(source, rows, threads, 1, least, True, words, piece)
        more = min(_let_through(columns, topk, threads), least + (room - chosen.array_bytes) // _PLACE_BYTES)
        return replace(chosen, capacity=max(least, more // 128 * 128))

    chosen = streamed(_SMALL_THREADS if columns <= _SMALL_ROW else _THREADS)
    one_at_a_time = rows <= multiprocessors or 2 * (chosen.array_bytes + own_bytes) > arch.smem_bytes
    if columns > _SMALL_ROW and one_at_a_time:
        chosen = streamed(MOST_THREADS)
    if topk > _MOST_STREAMED or (piece and piece < topk) or chosen.array_bytes > room:
        while piece and (_LEAST_CAPACITY + piece) * _PLACE_BYTES + 4 > room:
            piece //= 2
        return Plan(source, rows, chosen.threads, 1, _LEAST_CAPACITY, False, 0, piece)
    return replace(chosen, ctas=rows * cluster, cluster=cluster)


def _let_through(columns: int, topk: int, threads: int) -> int:
    """Entries that the threshold from a sample of independent scores lets through, but for rare rows: its rank is that
    of cuda/topk/sm80/stream.cuh, `first_rank`."""
    sample, share = min(columns, threads * _SAMPLED), topk / columns if columns else 0.0
    mean = share * sample
    rank = mean + _DEVIATIONS * math.sqrt(mean * (1 - min(share, 1.0))) + 2
    return math.ceil((rank + _ROOM_DEVIATIONS * math.sqrt(rank)) * columns / max(sample, 1) / 128) * 128


STORAGE_BYTES = 10240
"""Bound of `sizeof(Storage)` in cuda/topk/sm80/storage.cuh."""


def has_clusters(arch: Arch) -> bool:
    """Whether CTAs of a target can share memory."""
    return arch.capability >= (9, 0)


def variant(arch: Arch, *, scores: str = "float32", own: int = 0, clustered: bool = False) -> KernelSource:
    """A kernel variant.

    Args:
        arch: the target; sm_90 stands for sm_90a, too.
        scores: their dtype.
        own: columns of a thread that keeps them, of `OWN_COLUMNS`, or `most` of `plan`; 0 for rows of any length.
        clustered: whether the CTAs of a cluster keep a row together.

    Raises InputError, and UnsupportedError when the target has no kernel.
    """
    name = next((name for name in TARGETS if arches.named(name).runs_on(arch.capability)), None)
    if name is None:
        raise UnsupportedError(OPERATOR, f"a GPU of architecture {arch.name}", ", ".join(TARGETS) + ", or the CPU")
    if type(scores) is not str or scores not in DTYPES:
        raise InputError("scores", " or ".join(map(repr, DTYPES)), shown(scores), OPERATOR)
    defines = (("CUPYMLA_SCORES", DTYPES.index(scores)), *short_defines(own, clustered))
    return KernelSource(SOURCE, OPERATOR, defines, name)


def short_defines(own: int, clustered: bool) -> tuple[tuple[str, int], ...]:
    """What a variant's source takes of `own` and `clustered`; also of the operators that select from their scores."""
    return (("CUPYMLA_SHORT", own), ("CUPYMLA_CLUSTER", int(clustered)))


def short_variants(clusters: bool, most: int = OWN_COLUMNS[1]) -> tuple[tuple[int, bool], ...]:
    """All `own` and `clustered` that plans choose, with clusters or without; `most` as of `plan`."""
    alone = tuple((own, False) for own in (0, *OWN_COLUMNS))
    return (*alone, (most, True)) if clusters else alone


def sources(arch_name: str | None = None) -> tuple[KernelSource, ...]:
    """Every kernel variant, of one target or of all."""
    return tuple(
        variant(arches.named(name), scores=dtype, own=own, clustered=clustered)
        for name in TARGETS
        if arch_name in (None, name)
        for dtype in DTYPES
        for own, clustered in short_variants(has_clusters(arches.named(name)))
    )
