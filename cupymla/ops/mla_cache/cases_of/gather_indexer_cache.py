"""Problems of gather_indexer_cache; see `cupymla.ops.case`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...case import Case, spread
from ..formats import INDEXER_FP8
from .places import PAGE, blocks_for, random_blocks, slots_of, tables_of

OUTPUTS = ("k", "k_scale")
"""The output parameters, in the order in which the call returns them."""

EXACT = True

BOUND_BY_COPYING = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherCase(Case):
    """One problem.

    Attributes:
        rows: how many slots there are, or rows of requests.
        page, blocks: of the cache.
        by: "slots", "tables", or "hostile": tables that name blocks which the cache does not have.
        outside: share of slots that the cache does not have.
        slots: their dtype.
        gap: bytes between blocks.
        four: whether the cache has an axis of one head.
        apart: whether there are gaps between slots.
    """

    rows: int
    page: int = PAGE
    blocks: int = 1
    by: str = "slots"
    outside: float = 0.0
    slots: str = "int64"
    gap: int = 0
    four: bool = False
    apart: bool = False


def _case(rows: int, name: str = "", intent: str = "shapes", **traits: Any) -> GatherCase:
    traits = {"blocks": blocks_for(rows, traits.get("page", PAGE)), **traits}
    made = GatherCase(name="", intent=intent, rows=rows, **traits)
    words = [f"t{rows}", *([f"page{made.page}"] if made.page != PAGE else [])]
    words += [word for word in (made.by if made.by != "slots" else "", name) if word]
    return GatherCase(name="_".join(words), intent=intent, rows=rows, **traits)


CASES: tuple[GatherCase, ...] = (
    *(_case(70, page=page) for page in (1, 16, 64)),
    _case(0, "no_rows"),
    _case(9, "no_blocks", blocks=0),
    _case(90, "outside", "slots", page=16, blocks=6, outside=0.4, slots="int32"),
    _case(20, "all_outside", "slots", page=16, outside=1.0),
    *(_case(75, "", "tables", page=page, by=by) for page, by in ((1, "tables"), (16, "hostile"), (64, "tables"))),
    _case(30, "gaps", "strides", page=16, gap=64, four=True, apart=True),
    _case(30, "gaps", "strides", page=3, gap=4),
)

DEMO = _case(4096, "demo")
"""A problem that takes the reference a second or less."""

BENCH: tuple[GatherCase, ...] = (
    *(_case(rows, intent="speed") for rows in (32, 4096, 131072, 524288)),
    _case(131072, intent="speed", by="tables"),
)
"""32 slots are anywhere; more are those of whole pages, in any order."""


def inputs(case: GatherCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Fresh arguments of `gather_indexer_cache`, by parameter name; the cache holds any bytes."""
    rng = xp.random.default_rng(seed)
    arguments = {"cache": random_blocks(rng, xp, case.blocks, case.page, INDEXER_FP8.token_bytes, case.gap, case.four)}
    if case.by != "slots":
        return arguments | tables_of(rng, xp, case.rows, case.blocks, case.page, case.by == "hostile")
    slots = slots_of(rng, xp, case.rows, case.blocks, case.page, case.outside, case.slots)
    return arguments | {"slots": spread(slots, False) if case.apart else slots}


def flops(case: GatherCase) -> float:
    """A copy of every code."""
    return float(case.rows * INDEXER_FP8.channels)


def bytes_moved(case: GatherCase) -> float:
    """Every row and slot read once, every row written."""
    slot = np.dtype(case.slots).itemsize if case.by == "slots" else 0
    return float(case.rows * (2 * INDEXER_FP8.token_bytes + slot))
