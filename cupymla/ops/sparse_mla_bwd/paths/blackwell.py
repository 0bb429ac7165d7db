"""A pair of CTAs for each query on Blackwell: they share the channels of 64 or 128 heads.

It is the only path there, whatever the problem.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from .. import units
from ..spec import Problem
from .path import BLOCK_HEADS, Path


@dataclass(frozen=True, slots=True)
class Blackwell(Path):
    """A pair of CTAs a query.

    Attributes:
        channels_of: query heads that they take at a time.
    """

    channels_of: int = BLOCK_HEADS[1]

    title: ClassVar[str] = "2-CTA pair"
    arch_name: ClassVar[str] = "sm_100f"
    cluster: ClassVar[int] = 2
    gathers: ClassVar[bool] = True
    own_units: ClassVar[Mapping[str, units.Unit]] = units.BLACKWELL

    @property
    def block_heads(self) -> int:
        return self.channels_of

    @classmethod
    def every(cls) -> Iterator[Self]:
        for heads in BLOCK_HEADS:
            yield from (cls(channels_of=heads), cls("float32", channels_of=heads))

    @classmethod
    def ways(cls, problem: Problem) -> Iterator[Self]:
        heads = next((heads for heads in BLOCK_HEADS if problem.shared.h_q <= heads), BLOCK_HEADS[-1])
        yield cls("float32" if problem.shared.options.deterministic else "added", channels_of=heads)

    def pays_somewhere(self, problem: Problem) -> bool:
        return True
