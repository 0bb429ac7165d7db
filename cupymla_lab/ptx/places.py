"""Which lines of CUDA sources a PTX text comes from, as its `.file` and `.loc` directives say.

Source: PTX ISA, ".loc": a location holds for the instructions behind it; where a function was inlined, `inlined_at`
names the place of the call, which has a `.loc` of its own.
"""

from __future__ import annotations

import bisect
import os
import re
from pathlib import Path
from typing import TypeAlias

_FILE = re.compile(r'\s*\.file\s+(\d+)\s+"([^"]*)"')
_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:.*\binlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")
_Spot: TypeAlias = tuple[str, str, str]


class Places:
    """The place of each line of a PTX text; of inlined code with all its callers, innermost first."""

    def __init__(self, text: str) -> None:
        self._files: dict[str, str] = {}
        self._starts: list[int] = [0]
        self._places: list[str] = [""]
        known: dict[_Spot, str] = {}
        lines = text.splitlines()
        for line in lines:
            if found := _FILE.match(line):
                self._files[found[1]] = _short(found[2])
        for number, line in enumerate(lines, 1):
            if line.startswith("}"):
                self._note(number, "")
            elif found := _LOC.match(line):
                spot, caller = (found[1], found[2], found[3]), (found[4], found[5], found[6])
                place = self._name(spot)
                if found[4]:
                    place += f", from {known.get(caller) or self._name(caller)}"
                known[spot] = place
                # Line 0 is code that belongs to no line: it keeps the place before it.
                if found[2] != "0":
                    self._note(number, place)

    def _note(self, number: int, place: str) -> None:
        self._starts.append(number)
        self._places.append(place)

    def _name(self, spot: _Spot) -> str:
        return f"{self._files.get(spot[0], '?')}:{spot[1]}"

    def of(self, line: int) -> str:
        """ "file:line, from file:line, ..." of a line of the text, counted from 1; "" where nothing is said of it."""
        return self._places[bisect.bisect_right(self._starts, line) - 1]


def _short(path: str) -> str:
    """A path without its detours, and without what stands before the folder `cuda`, where it lies in one."""
    plain = Path(os.path.normpath(path))
    parts = plain.parts
    return "/".join(parts[parts.index("cuda") :]) if "cuda" in parts else str(plain)
