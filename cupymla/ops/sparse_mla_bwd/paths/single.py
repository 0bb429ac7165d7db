"""One CTA for each query of up to 64 heads on Hopper: it has all channels, and adds the rows of all its entries.

It is chosen where queries had better not be packed, and is the path of up to 64 heads that needs nothing but its
queries' own entries. Deterministic, it has an attention of its own that packs the rows which it stores.
"""

from __future__ import annotations

from .. import units
from .path import CTA_HEADS, Path


class Single(Path):
    """One CTA a query."""

    __slots__ = ()
    title = "single query"
    heads = range(1, CTA_HEADS + 1)
    packed_units = units.STORED
