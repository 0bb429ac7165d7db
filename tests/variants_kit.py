"""A choice among the variants of kernels, so that tests meet every two definitions together, and not every product."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from cupymla.build import KernelSource


def pairs(source: KernelSource) -> set[tuple[object, ...]]:
    """Every two definitions of a kernel, and each beside its target."""
    return set(itertools.combinations((*source.defines, ("target", source.arch)), 2))


def covering(variants: Iterable[KernelSource], done: Iterable[KernelSource] = ()) -> list[KernelSource]:
    """Variants that have a pair of definitions which no kernel before them has."""
    seen = {(source.entry, pair) for source in done for pair in pairs(source)}
    chosen = []
    for source in variants:
        missing = {(source.entry, pair) for pair in pairs(source)} - seen
        if missing:
            chosen.append(source)
            seen |= missing
    return chosen
