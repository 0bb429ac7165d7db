"""Where an array lives."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Device:
    """One memory that arrays live in.

    Attributes:
        kind: "cpu" (pinned host memory included) or "cuda" (managed memory included).
        index: the CUDA device ordinal as this process sees it; 0 for the CPU.
    """

    kind: Literal["cpu", "cuda"]
    index: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


CPU = Device("cpu")


@functools.lru_cache(maxsize=64)
def cuda(index: int) -> Device:
    """The CUDA device of that ordinal. One object per ordinal, so that a view costs no allocation for it."""
    return Device("cuda", index)
