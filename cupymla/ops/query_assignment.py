"""How the queries of a sparse MLA operator are assigned to the CTAs of its kernel. Pure: no array, no driver."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueryAssignment:
    """How queries are assigned to CTAs, one set of CTAs for each block of heads.

    Attributes:
        groups: CTAs that take `group_tokens` queries each.
        group_tokens: queries of such a CTA; every other CTA takes one.
        ctas: all CTAs of a block of heads.
    """

    groups: int
    group_tokens: int
    ctas: int


def assign_queries(tokens: int, head_blocks: int, multiprocessors: int) -> QueryAssignment:
    """Assign queries: groups first, because a CTA's next query is fetched while its last one ends, then single ones.

    The hardware hands out CTAs in order, so the single ones even out what the groups leave: one group's worth of them
    for each multiprocessor.
    """
    wave = -(-multiprocessors // head_blocks)
    for group_tokens in (4, 2):
        groups = (tokens - group_tokens * wave) // group_tokens
        if groups >= wave:
            return QueryAssignment(groups, group_tokens, groups + tokens - groups * group_tokens)
    return QueryAssignment(0, 1, tokens)
