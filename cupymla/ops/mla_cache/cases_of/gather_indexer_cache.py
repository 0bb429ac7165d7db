"""Problems of gather_indexer_cache; see `cupymla.ops.case`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..formats import INDEXER_FP8
from .places import PAGE, GatherCase, blocks_for, places_of, random_blocks, words_of

OUTPUTS = ("k", "k_scale")
"""The output parameters, in the order in which the call returns them."""

EXACT = True

BOUND_BY_COPYING = True


def _case(rows: int, name: str = "", intent: str = "shapes", **traits: Any) -> GatherCase:
    traits = {"blocks": blocks_for(rows, traits.get("page", PAGE)), **traits}
    made = GatherCase(name="", intent=intent, rows=rows, **traits)
    return replace(made, name=words_of(made, f"t{rows}", "" if made.by == "slots" else made.by, name))


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
    cache = random_blocks(rng, xp, case, INDEXER_FP8.token_bytes)
    return {"cache": cache} | places_of(rng, xp, case)


def flops(case: GatherCase) -> float:
    """A copy of every code."""
    return float(case.rows * INDEXER_FP8.channels)


def bytes_moved(case: GatherCase) -> float:
    """Every row and slot read once, every row written."""
    return float(case.rows * (2 * INDEXER_FP8.token_bytes + case.slot_bytes))
