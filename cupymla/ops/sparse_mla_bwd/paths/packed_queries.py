"""Packed queries: one CTA for four neighbouring queries of up to 16 heads on Hopper, or two of up to 32, which gathers
each row that any of them has once.

It is chosen where that is estimated to take less time than the queries by themselves (`packs_queries`): few heads leave
most of a CTA's 64 rows of the tensor cores idle, but a query group multiplies every query by every row. The lists of
rows that it makes are in the order of tokens, so that sums in a fixed order need no further list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from ...rows_in_order import named_by_any
from ...units import Unit
from .. import units
from ..sizes import GROUP_ENTRIES, all_query_groups
from ..spec import Problem
from . import fixed_order
from .path import Path

GROUP_HEADS = {4: 16, 2: 32}
"""How many queries may be packed, and the heads that each of them has room for."""

GROUP_TOKENS = 1 << 17
"""Tokens of a batch entry that lists of rows can name: as `kMaxTokens` in cuda/sparse_mla_bwd/query_group.cuh."""

# Cycles of an H200's multiprocessor, estimated (cuda/sparse_mla_bwd/sm90/README.md): a block of 64 entries or rows,
# what comes between queries, and what comes between query groups.
_BLOCK, _QUERY, _QUERY_GROUP = 9900, 13500, 40000

_MARGIN = 1.0
"""Queries are packed where that takes less than so much of the time that queries by themselves take."""


@dataclass(frozen=True, slots=True)
class PackedQueries(Path):
    """One CTA a query group."""

    queries: int = 4
    block_heads: int = GROUP_HEADS[4]

    title: ClassVar[str] = "packed queries"
    own_units: ClassVar[Mapping[str, Unit]] = units.PACKED
    packed_units: ClassVar[Mapping[str, Unit]] = units.STORED

    @classmethod
    def every(cls) -> Iterator[Self]:
        """Of each number of queries; stored rows are packed."""
        for rows in ("added", "packed"):
            yield from (cls(rows, queries=queries, block_heads=heads) for queries, heads in GROUP_HEADS.items())

    @classmethod
    def ways(cls, problem: Problem) -> Iterator[Self]:
        """More queries before less. Sums are made of packed rows alone."""
        shared, best = problem.shared, fixed_order.rows(problem)[0]
        if 0 < shared.s_kv <= GROUP_TOKENS:
            for path in cls.every():
                has_room = shared.h_q <= path.block_heads and path.queries * shared.topk <= GROUP_ENTRIES
                if has_room and path.rows == best:
                    yield path

    def pays(self, problem: Problem, multiprocessors: int) -> bool:
        """Whether it takes less time than queries by themselves."""
        return packs_queries(problem, self.queries, multiprocessors)

    @property
    def forms(self) -> tuple[str, ...]:
        """How many are packed."""
        return (str(self.queries),)


def packs_queries(problem: Problem, queries: int, multiprocessors: int) -> bool:
    """Whether that many neighbouring queries had better share a gather of all their rows.

    All of them are multiplied by each row that any of them has, so what is saved is what they have in common. That is
    taken to be what random selections have; real ones have more.
    """
    shared = problem.shared
    rows = shared.s_kv * named_by_any(min(queries, shared.s_q), shared.topk / shared.s_kv)
    packed_cycles = -(-all_query_groups(problem, queries) // multiprocessors) * (_QUERY_GROUP + rows / 64 * _BLOCK)
    single_cycles = -(-all_query_groups(problem, 1) // multiprocessors) * (_QUERY + shared.topk / 64 * _BLOCK)
    return packed_cycles < _MARGIN * single_cycles
