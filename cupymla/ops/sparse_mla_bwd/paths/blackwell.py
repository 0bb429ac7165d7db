"""A 2-CTA cluster for each query on Blackwell: its CTAs share the channels of 64 or 128 heads.

It is the only path there, whatever the problem.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from ...units import Unit
from .. import units
from ..spec import Problem
from .path import BLOCK_HEADS, Path


@dataclass(frozen=True, slots=True)
class Blackwell(Path):
    """A 2-CTA cluster a query, on Blackwell."""

    block_heads: int = BLOCK_HEADS[1]

    title: ClassVar[str] = "2-CTA cluster of Blackwell"
    arch_name: ClassVar[str] = "sm_100f"
    cluster: ClassVar[int] = 2
    gathers: ClassVar[bool] = True
    sums_in_runs: ClassVar[bool] = False
    own_units: ClassVar[Mapping[str, Unit]] = units.BLACKWELL

    @classmethod
    def every(cls) -> Iterator[Self]:
        """Rows are added or stored whole."""
        for heads in BLOCK_HEADS:
            yield from (cls(block_heads=heads), cls("float32", block_heads=heads))

    @classmethod
    def ways(cls, problem: Problem) -> Iterator[Self]:
        """One."""
        heads = next((heads for heads in BLOCK_HEADS if problem.shared.h_q <= heads), BLOCK_HEADS[-1])
        yield cls("float32" if problem.shared.options.deterministic else "added", block_heads=heads)

    def pays_somewhere(self, problem: Problem) -> bool:
        """Everywhere."""
        return True
