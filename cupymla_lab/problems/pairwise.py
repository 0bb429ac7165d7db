"""Few combinations of many choices, such that every two values that can meet do: most defects take no more than two
(Cohen, Dalal, Fredman, Patton 1997, "The AETG System: An Approach to Testing Based on Combinatorial Design")."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

Row = tuple[Any, ...]


def pairwise(choices: Sequence[Sequence[Any]], allowed: Callable[[Row], bool]) -> list[Row]:
    """Rows of one value of each choice, in which all pairs of values meet that do so in any allowed row.

    Args:
        choices: the values of each. Of a single choice there are no pairs, so no rows.
        allowed: whether a row of all choices is one. Values that it leaves without any row do not appear.

    The same every time: each row begins with the first pair that is missing, and takes of every other choice the value
    that makes up for most of what is missing then, the first one of equals.
    """
    missing = dict.fromkeys(sorted(_possible(choices, allowed)))
    rows = []
    while missing:
        (i, x), (j, y) = next(iter(missing))
        row = _filled(choices, allowed, {i: x, j: y}, missing)
        for pair in _pairs(row):
            missing.pop(pair, None)
        rows.append(_values(choices, row))
    return rows


_Place = tuple[int, int]  # a choice, and the number of one of its values


def _values(choices: Sequence[Sequence[Any]], numbers: Sequence[int]) -> Row:
    return tuple(values[number] for values, number in zip(choices, numbers, strict=True))


def _pairs(row: Sequence[int]) -> list[tuple[_Place, _Place]]:
    return list(itertools.combinations(enumerate(row), 2))


def _possible(choices: Sequence[Sequence[Any]], allowed: Callable[[Row], bool]) -> set[tuple[_Place, _Place]]:
    """Pairs that meet in any allowed row. One row shows many, so that few of all rows are looked at."""
    found: set[tuple[_Place, _Place]] = set()
    places = [[(k, number) for number in range(len(values))] for k, values in enumerate(choices)]
    for one, other in itertools.combinations(places, 2):
        for pair in itertools.product(one, other):
            if pair not in found:
                fixed = dict(pair)
                rows = itertools.product(*([fixed[k]] if k in fixed else range(len(c)) for k, c in enumerate(choices)))
                row = next((row for row in rows if allowed(_values(choices, row))), None)
                found.update(_pairs(row) if row is not None else ())
    return found


def _filled(
    choices: Sequence[Sequence[Any]],
    allowed: Callable[[Row], bool],
    given: dict[int, int],
    missing: dict[tuple[_Place, _Place], None],
) -> tuple[int, ...]:
    """An allowed row with the given values, whose others make up for what is missing."""

    def has_completion(fixed: dict[int, int]) -> bool:
        rows = itertools.product(*([fixed[k]] if k in fixed else range(len(c)) for k, c in enumerate(choices)))
        return any(allowed(_values(choices, row)) for row in rows)

    fixed = dict(given)
    for k, values in enumerate(choices):
        if k in fixed:
            continue

        def gain(number: int, k: int = k) -> int:
            pairs = (tuple(sorted([(k, number), place])) for place in fixed.items())
            return sum(pair in missing for pair in pairs)

        numbers = sorted(range(len(values)), key=lambda number: -gain(number))
        fixed[k] = next(number for number in numbers if has_completion({**fixed, k: number}))
    return tuple(fixed[k] for k in range(len(choices)))
