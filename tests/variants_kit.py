"""A choice among the variants of kernels, so that tests meet every two definitions together, and not every product."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from cupymla.build import KernelSource
from cupymla.ops import registry

FEW_REGISTERS = 192
"""Elements of a head from which on kernels are short of registers."""
PLANNED = [entry for entry in registry.OPERATORS if entry.kernels]


def shown_by(source: KernelSource, most: int = 2) -> set[tuple[object, ...]]:
    """What a variant shows: its kernel for its target; each of its definitions, and every `most` of these and the
    target together."""
    facts = (*source.defines, ("target", source.arch))
    return {(source.path, *each) for count in range(1, most + 1) for each in itertools.combinations(facts, count)}


def covering(variants: Iterable[KernelSource], done: Iterable[KernelSource] = ()) -> list[KernelSource]:
    """Variants that together show all that any of them does, beside those that are done, kernel by kernel. After the
    first, each time the one with most that is new, of equals the first; but the second is any with which they are
    fewest in the end, for one that differs from the first in everything often takes one more."""
    seen: set[tuple[object, ...]] = set().union(*map(shown_by, done))
    kernels: dict[str, dict[KernelSource, set[tuple[object, ...]]]] = {}
    for source in variants:
        kernels.setdefault(source.path, {})[source] = shown_by(source) - seen
    chosen = []
    for missing in kernels.values():
        few = _greedily(missing, [])
        for second in missing if len(few) > MANY else ():
            other = _greedily(missing, [few[0], second])
            few = other if len(other) < len(few) else few
        chosen += few
    return chosen


MANY = 4
"""Variants of one kernel from which on fewer are looked for: what two definitions with two values each need."""


def _greedily(missing: Mapping[KernelSource, set[tuple[object, ...]]], first: list[KernelSource]) -> list[KernelSource]:
    """Variants by what each shows, `first` ahead of all others, until nothing is missing."""
    chosen = list(first)
    seen: set[tuple[object, ...]] = set().union(*(missing[source] for source in first))
    while missing := {source: new for source, shown in missing.items() if (new := shown - seen)}:
        best = max(missing, key=lambda source: len(missing[source]))
        chosen.append(best)
        seen |= missing[best]
    return chosen


def large(source: KernelSource) -> bool:
    """Whether a kernel is short of registers."""
    return any(name == "CUPYMLA_HEAD_SIZE" and int(value) >= FEW_REGISTERS for name, value in source.defines)


@functools.cache
def sources(module: str) -> tuple[KernelSource, ...]:
    """What an operator's plan may choose and is compiled ahead of use."""
    found: tuple[KernelSource, ...] = importlib.import_module(f"{module}.plan").sources()
    return found


@functools.cache
def on_first_use(module: str) -> tuple[KernelSource, ...]:
    """What else it may choose."""
    plan: Any = importlib.import_module(f"{module}.plan")
    ahead = set(sources(module))
    return tuple(source for source in getattr(plan, "variants", plan.sources)() if source not in ahead)


@functools.cache
def compiled(module: str) -> tuple[KernelSource, ...]:
    """The variants of an operator's kernels that tests compile: those ahead of use by pairs, and by pairs those with
    large heads that are compiled on first use, as these are short of registers. Tests of machine code choose from
    them, so that each is compiled once."""
    ahead = covering(sources(module))
    return (*ahead, *covering(filter(large, on_first_use(module)), ahead))


def compiled_with(module: str, target: str, entry: str | None = None, **definitions: int) -> KernelSource:
    """The first of these, or of a kernel's, with some definitions, named without their "CUPYMLA_"."""
    wanted = {(f"CUPYMLA_{name}", value) for name, value in definitions.items()}
    every = (source for source in compiled(module) if entry in (None, source.entry))
    return next(s for s in every if s.arch == target and wanted <= set(s.defines))
