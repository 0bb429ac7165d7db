"""How strictly accesses to memory that nothing orders are looked for, by the engine."""

from __future__ import annotations

from typing import Literal

Races = Literal["unchecked", "hardware", "specified"]
"""Not at all, as hardware and CUTLASS go beyond the ISA, or as it specifies: docs/emulation.md."""

RACES: tuple[Races, ...] = ("unchecked", "hardware", "specified")
