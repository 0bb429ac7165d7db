"""Which kernel serves a problem, and how rows, heads and entries are divided among CTAs. Pure: no array, no driver.

Only sizes count here. How many entries of a row there are to divide, a kernel reads on the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ... import arch as arches
from ...arch import Arch
from ...build.source import KernelSource
from ...errors import UnsupportedError
from ..mla import DTYPES
from ..mla_cache.latents import FORMATS
from ..query_assignment import QueryAssignment, assign_queries
from ..variants import require_choice, require_target
from .spec import OPERATOR, Problem

SOURCE = "sparse_mla_decode/sm90/sparse_mla_decode.cu"
MERGE, MERGE_SOURCE = "sparse_mla_decode_merge", "sparse_mla_decode/sm90/sparse_mla_decode_merge.cu"
"""The kernel that merges shares of rows."""
TARGETS = ("sm_90a",)

MAX_CTAS = 2**31 - 1
"""The extent of grid.x (CUDA C++ Programming Guide)."""

CTA_HEADS = (16, 32, 64)
"""Query heads that one CTA can work on; a kernel says of itself which, and that is compared when a call is bound."""

SHARERS = (1, 2)
"""CTAs that convert rows of the cache for each other."""

SHARE_CHANNELS, SHARE_STATISTICS = 512, 4
"""What a share has of a head, in fp32."""

MAX_SHARES = 32
"""Clusters that share the entries of a row: a lane of the merging kernel has the statistics of each."""

SHARES_BYTES = 64 << 20
"""Of workspace for shares, at most."""

MOST_ROWS = 4
"""Rows of a CTA of many heads, one after the other: what kernels that take several have room for."""

MAX_CLUSTER, PORTABLE_CLUSTER = 16, 8
"""CTAs of a cluster at most, and on every GPU that has clusters (CUDA C++ Programming Guide)."""

_TILE = 64  # entries of a block

# Microseconds of a call with cold L2 and instruction caches, as a model's step finds them, by CTAs of so many heads: of
# a CTA beside its blocks, and of a block of rows that are converted or copied. What all divisions have in common is
# left out. Of divisions timed on an H200 with other code between calls (docs/log/sparse_mla_decode.md, 2026-11-30),
# what these numbers choose is at most 3.2% slower than the best.
_START_US = {16: 3.0, 32: 3.5, 64: 5.5}
_BLOCK_US = {
    True: {16: 2.3, 32: 1.5, 64: 1.8},
    False: {16: 2.9, 32: 2.95, 64: 3.4},
}

# The same of two CTAs that share rows, each of which converts half of them.
_SHARED_START_US, _SHARED_BLOCK_US = 5.5, 2.8

# The launch that puts shares together, each of them, and a head of a row in each.
_JOIN_US, _JOIN_SHARE_US, _JOIN_HEAD_US = 4.0, 0.13, 0.00077


@dataclass(frozen=True, slots=True)
class Division:
    """How CTAs divide the work for a row.

    Attributes:
        heads: of a CTA.
        parts: of the row's entries, where the caller says how many; the CTAs of a cluster have them, and merge among
            themselves.
        sharers: CTAs of neighbouring heads that convert rows of the cache for each other, 1 or 2.
        shares: of the row's entries, one for a cluster without parts, merged by another kernel; 1 where a cluster has
            all entries.
    """

    heads: int
    parts: int
    sharers: int = 1
    shares: int = 1

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.parts * self.sharers


@dataclass(frozen=True, slots=True)
class Plan:
    """A kernel variant for one problem.

    Attributes:
        source: what to compile.
        merge: the kernel that merges shares, where there are several.
        division: of a row.
        head_blocks: clusters of a row, or of a share.
        rows: how many rows which clusters of a block of heads take.
        clusters: of each share in the grid.
        workspace_bytes: for the shares.
    """

    source: KernelSource
    merge: KernelSource | None
    division: Division
    head_blocks: int
    rows: QueryAssignment
    clusters: int
    workspace_bytes: int

    @property
    def ctas(self) -> int:
        """The grid's extent in x; in y it has the shares."""
        return self.clusters * self.division.cluster


def cta_heads(h_q: int) -> int:
    """Query heads of a CTA where rows are many: the fewest that hold all of a row's, else the most there are."""
    return next((heads for heads in CTA_HEADS if heads >= h_q), CTA_HEADS[-1])


def division(
    rows: int,
    h_q: int,
    blocks: int,
    multiprocessors: int,
    pairs: bool = True,
    *,
    cache_format: str,
    dtype: str,
    even: bool = True,
) -> Division:
    """What takes the least time as the numbers above have it.

    Args:
        rows: query rows.
        h_q: heads of each.
        blocks: of entries, that a row has at most.
        multiprocessors: of the GPU.
        pairs: whether the driver can run CTAs that convert rows for each other.
        cache_format, dtype: of the rows, and of the products.
        even: whether all rows have as many entries, as far as the host knows.
    """
    copied = cache_format == "bf16" and dtype == "bfloat16"

    def ctas(choice: Division) -> int:
        return rows * -(-h_q // (choice.heads * choice.sharers)) * choice.cluster * choice.shares

    def us(choice: Division) -> float:
        waves = -(-ctas(choice) // multiprocessors)
        own = -(-blocks // choice.shares)
        if choice.sharers == 1:
            start, block = _START_US[choice.heads], _BLOCK_US[copied][choice.heads]
        else:
            start, block = _SHARED_START_US, _SHARED_BLOCK_US
        each = _JOIN_SHARE_US + _JOIN_HEAD_US * rows * h_q
        join = _JOIN_US + each * choice.shares if choice.shares > 1 else 0
        starts = 1 if even and waves <= MOST_ROWS and most_rows(choice, cache_format, dtype) > 1 else waves
        return starts * start + waves * own * block + join

    whole = [Division(heads, 1) for heads in reversed(CTA_HEADS) if heads <= cta_heads(h_q)]
    pair = shared(h_q, cache_format, dtype, 1)
    if pair is not None and pairs:
        whole.append(pair)
    counts = range(2, most_shares(rows, h_q, blocks) + 1)
    return min((*whole, *(replace(choice, shares=shares) for choice in whole for shares in counts)), key=us)


def most_rows(choice: Division, cache_format: str, dtype: str) -> int:
    """Rows that a CTA can take, one after the other: 1, or those of a kernel that has room for more."""
    consumers_convert = _folds(cache_format, dtype) and choice.sharers == 1
    several = choice.heads == CTA_HEADS[-1] and not consumers_convert and choice.shares == choice.parts == 1
    return MOST_ROWS if several else 1


def assigned(rows: int, head_blocks: int, choice: Division, multiprocessors: int, most: int) -> QueryAssignment:
    """How many rows each cluster takes, of rows that take as long: up to `most`, 1 or 4.

    The producer brings in a cluster's next row while its last one ends, and no CTA begins anew. If all clusters can run
    at once, they do; of more rows single ones even out what is left.
    """
    at_once = max(1, multiprocessors // choice.cluster // max(head_blocks, 1))
    each = -(-rows // at_once)
    if most == 1 or each <= 1:
        return QueryAssignment(0, 1, rows)
    if each > most:
        return assign_queries(rows, head_blocks * choice.cluster, multiprocessors)
    groups = min(rows // each, -(-(rows - at_once) // (each - 1)))
    return QueryAssignment(groups, each, rows - groups * (each - 1))


def most_shares(rows: int, h_q: int, blocks: int) -> int:
    """Of a row, as far as there are blocks, and memory for them; 1 where there is not."""
    most = min(MAX_SHARES, blocks)
    return next((shares for shares in range(most, 1, -1) if share_bytes(rows, h_q, shares) <= SHARES_BYTES), 1)


def workspace_limit(problem: Problem) -> int:
    """Bytes of workspace that a call needs at most, on every GPU."""
    if problem.options.splits is not None:
        return 0
    return share_bytes(problem.rows, problem.h_q, most_shares(problem.rows, problem.h_q, _blocks(problem)))


def _blocks(problem: Problem) -> int:
    """Of entries, that a row has at most."""
    return sum(-(-cache.topk // _TILE) for cache in problem.caches)


def share_bytes(rows: int, h_q: int, shares: int) -> int:
    """What shares of rows take in the workspace."""
    return shares * rows * h_q * (SHARE_CHANNELS + SHARE_STATISTICS) * 4 if shares > 1 else 0


def shared(h_q: int, cache_format: str, dtype: str, parts: int) -> Division | None:
    """The division with CTAs that share rows, where there is a kernel, and heads are more than those of a CTA."""
    made = Division(CTA_HEADS[-1], parts, SHARERS[-1])
    fits = h_q > made.heads and made.cluster <= MAX_CLUSTER
    return made if fits and made.sharers in _sharers(cache_format, made.heads, dtype) else None


def plan(
    problem: Problem,
    arch: Arch,
    multiprocessors: int,
    pairs: bool = True,
) -> Plan:
    """Choose the kernel and its grid. Raises UnsupportedError when the architecture has no kernel, or the grid cannot
    be that large.

    With `splits` given nothing depends on other rows of the batch. `pairs`: as `division` takes it.
    """
    parts = problem.options.splits
    even = not problem.has_lengths
    cache_format, dtype = problem.options.cache_format, problem.dtype
    if parts is None:
        sizes = max(problem.rows, 1), problem.h_q, _blocks(problem), multiprocessors
        chosen = division(*sizes, pairs, cache_format=cache_format, dtype=dtype, even=even)
    else:
        # No GPU is asked whether it can run so large a cluster: pairs make none that was portable too large for it.
        chosen = Division(cta_heads(problem.h_q), parts)
        pair = shared(problem.h_q, cache_format, dtype, parts)
        if pair is not None and pair.cluster <= PORTABLE_CLUSTER:
            chosen = pair
    source = variant(
        arch,
        cache_format=cache_format,
        d_qk=problem.d_qk,
        heads=chosen.heads,
        dtype=dtype,
        sharers=chosen.sharers,
    )
    head_blocks = -(-problem.h_q // (chosen.heads * chosen.sharers))
    merge = merge_variant(arch, dtype=dtype, heads=chosen.heads) if chosen.shares > 1 else None
    workspace = share_bytes(problem.rows, problem.h_q, chosen.shares)
    rows = QueryAssignment(0, 1, problem.rows)
    if even and parts is None:
        most = most_rows(chosen, cache_format, dtype)
        rows = assigned(problem.rows, head_blocks, chosen, multiprocessors, most)
    made = Plan(source, merge, chosen, head_blocks, rows, rows.ctas * head_blocks, workspace)
    if made.ctas > MAX_CTAS:
        raise UnsupportedError(f"{OPERATOR} on {problem.rows} rows", arch.name, f"up to {MAX_CTAS} CTAs")
    return made


def variant(
    arch: Arch,
    *,
    cache_format: str = "v32_fp8",
    d_qk: int | None = None,
    heads: int = 64,
    dtype: str = "bfloat16",
    sharers: int = 1,
) -> KernelSource:
    """One kernel variant.

    Args:
        arch: the target.
        cache_format: "bf16", "v32_fp8" or "v4_fp8".
        d_qk: channels of a key that the format has; the first of them by default.
        heads: query heads of a CTA, 16, 32 or 64; any of them serves any h_q.
        dtype: of q, "bfloat16" or "float16".
        sharers: CTAs that convert rows for each other, 1, or with 64 heads, a cache of fp8 and q of bf16 2.

    Raises InputError, and UnsupportedError when the target has no kernel.
    """
    require_target(OPERATOR, arch)
    require_choice(OPERATOR, cache_format=(cache_format, tuple(FORMATS)))
    layout = FORMATS[cache_format]
    channels = layout.d_qk[0] if d_qk is None else d_qk
    require_choice(OPERATOR, d_qk=(channels, layout.d_qk), heads=(heads, CTA_HEADS), dtype=(dtype, DTYPES))
    require_choice(OPERATOR, sharers=(sharers, _sharers(cache_format, heads, dtype)))
    defines = (
        ("CUPYMLA_FORMAT", layout.code),
        ("CUPYMLA_D_QK", channels),
        ("CUPYMLA_HEADS", heads),
        ("CUPYMLA_FP16", int(dtype == "float16")),
        ("CUPYMLA_SHARERS", sharers),
    )
    return KernelSource(SOURCE, OPERATOR, defines, arch.name)


def merge_variant(arch: Arch, *, dtype: str = "bfloat16", heads: int = 64) -> KernelSource:
    """The kernel that merges shares of rows, for results of that dtype, which CTAs of so many heads left.

    Errors as `variant`'s.
    """
    require_target(OPERATOR, arch)
    require_choice(OPERATOR, dtype=(dtype, DTYPES), heads=(heads, CTA_HEADS))
    defines = (("CUPYMLA_FP16", int(dtype == "float16")), ("CUPYMLA_MANY_HEADS", int(heads == CTA_HEADS[-1])))
    return KernelSource(MERGE_SOURCE, MERGE, defines, arch.name)


def sources(arch_name: str | None = None) -> tuple[KernelSource, ...]:
    """Every kernel variant, of one target or of all."""
    return tuple(source for name in TARGETS if arch_name in (None, name) for source in _sources(name))


def _sources(name: str) -> Iterator[KernelSource]:
    target = arches.named(name)
    for layout, heads, dtype in itertools.product(FORMATS.values(), CTA_HEADS, DTYPES):
        for d_qk, sharers in itertools.product(layout.d_qk, _sharers(layout.name, heads, dtype)):
            yield variant(target, cache_format=layout.name, d_qk=d_qk, heads=heads, dtype=dtype, sharers=sharers)
    for dtype, heads in itertools.product(DTYPES, CTA_HEADS[1:]):
        yield merge_variant(target, dtype=dtype, heads=heads)


def _folds(cache_format: str, dtype: str) -> bool:
    """Whether codes become elements by moved bits and a folded scale."""
    return cache_format != "bf16" and dtype == "bfloat16"


def _sharers(cache_format: str, heads: int, dtype: str) -> tuple[int, ...]:
    # Other rows do not fit in the producer's registers.
    return SHARERS if heads == CTA_HEADS[-1] and _folds(cache_format, dtype) else SHARERS[:1]
