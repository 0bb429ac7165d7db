"""Sums in a fixed order: the rows that entries add to dkv are stored, and each token's summed by one CTA.

A call that has to be deterministic takes this, on every path: without it rows are added in the order in which CTAs
come to them. On Hopper rows have 16 bits a column where dkv has (`packs_rows`): those of float32 take twice the bytes,
and such a call takes longest to write and read them.
"""

from __future__ import annotations

from typing import Literal

from .. import sizes
from ..sizes import all_kv_rows, all_query_groups, group_word_bytes, list_bytes
from ..spec import Problem

Rows = Literal["added", "float32", "packed"]
"""What becomes of the rows that entries add: added at once, or stored for sums in a fixed order, by 32 bits a column or
by 16."""

PACKS_ROWS = True
"""Whether rows are packed where they can be: on sm_90a, of a 16-bit dkv, where heads are one head block."""

PACKS_ROWS_OF_SINGLE = True
"""Whether so are those of up to 64 heads, which have kernels of their own for it."""

PACKED_HEADS = (64, 128)
"""Up to how many heads one CTA packs rows, and the CTAs of a query together."""

PACKED_TOPK = 1 << 24
"""Entries of a query up to which rows are packed: sixteen bytes of rows are counted in 32 bits."""

PARTIAL_BYTES = 5 << 28
"""What the rows that entries add may take at a time; one query's at least. A wave of 132 groups of four queries with a
topk of 2048 has room, packed."""

MAX_LISTS = 65535
"""The extent of grid.y, on which chunks lie whose entries are listed at once (CUDA C++ Programming Guide)."""

MANY_LISTS_ARCHS = ("sm_90a",)
"""Targets whose kernels list the entries of several chunks at once."""

_SPARE_BYTES = 1024  # of lists, each of which begins at a multiple of 256 bytes


def packs_rows(problem: Problem) -> bool:
    """Whether Hopper's kernels store rows by 16 bits a column.

    They are off by 2^-14 of the largest of eight columns at most, which is little where dkv itself is rounded to 16
    bits. A second head block would have to add to what the first has packed.
    """
    shared = problem.shared
    single, most = PACKED_HEADS
    return (
        PACKS_ROWS
        and shared.options.deterministic
        and problem.dkv_dtype != "float32"
        and shared.h_q <= most
        and shared.topk <= PACKED_TOPK
        and (PACKS_ROWS_OF_SINGLE or shared.h_q > single)
    )


def rows(problem: Problem) -> tuple[Rows, ...]:
    """What can become of a problem's rows on Hopper, the faster one first."""
    if not problem.shared.options.deterministic:
        return ("added",)
    return ("packed", "float32") if packs_rows(problem) else ("float32",)


def list_bytes_of_group(problem: Problem, queries: int) -> int:
    """Of the lists of one query group whose rows are stored."""
    return list_bytes(problem, queries) + group_word_bytes(problem)


def _lists_many(problem: Problem, queries: int, arch_name: str) -> bool:
    """Whether a call lists entries, or query groups' rows, and its kernels those of several chunks at once."""
    has_none = not problem.shared.options.deterministic or (queries == 1 and problem.has_lists)
    return arch_name in MANY_LISTS_ARCHS and not has_none


def lists(problem: Problem, chunk: int, queries: int, arch_name: str) -> int:
    """Of how many chunks entries, or query groups' rows, are listed at a time: as many as there are, or as have
    room."""
    if not _lists_many(problem, queries, arch_name):
        return 1
    if queries > 1:
        each = chunk * list_bytes_of_group(problem, queries)
    else:
        each = 4 * (chunk * problem.shared.topk + all_kv_rows(problem))
    chunks = -(-all_query_groups(problem, queries) // chunk)
    return max(1, min(chunks, MAX_LISTS, sizes.LIST_BYTES // max(each, 1)))


def further_lists_limit(problem: Problem, smallest_chunk: int, queries: int, arch_name: str) -> int:
    """What lists take at most beside one chunk's, where those of several chunks, none smaller, are made at once."""
    if not _lists_many(problem, queries, arch_name):
        return 0
    groups = all_query_groups(problem, queries)
    if queries > 1:
        every = groups * list_bytes_of_group(problem, queries)
    else:
        every = 4 * (2 * groups * problem.shared.topk + -(-groups // smallest_chunk) * all_kv_rows(problem))
    return min(sizes.LIST_BYTES, every) + _SPARE_BYTES
