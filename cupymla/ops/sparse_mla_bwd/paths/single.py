"""One CTA for each query of up to 64 heads on Hopper: it has all channels, and adds the rows of all its entries.

It is chosen where queries had better not be packed, and is the path of up to 64 heads that needs nothing but its
queries' own entries. Deterministic, it has an attention of its own that packs the rows which it stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...units import Unit
from .. import units
from .path import CTA_HEADS, Path


@dataclass(frozen=True, slots=True)
class Single(Path):
    """One CTA a query."""

    title: ClassVar[str] = "single query"
    heads: ClassVar[range] = range(1, CTA_HEADS + 1)
    packed_units: ClassVar[Mapping[str, Unit]] = units.STORED
