"""Correctness cases of gather_indexer_cache; see `cupymla.ops.case`."""

from __future__ import annotations

from cupymla.ops.mla_cache.cases_of.gather_indexer_cache import _case
from cupymla.ops.mla_cache.cases_of.places import GatherCase

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
