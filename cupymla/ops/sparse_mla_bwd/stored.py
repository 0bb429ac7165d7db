"""The attention of up to 64 heads with sums in a fixed order: one CTA stores what each entry adds to dKV, packed.

It is chosen where gradients have to be deterministic and dkv has 16 bits (`plan.packs_rows`): rows of float32 take
twice the bytes, and such a call takes longest to write and read them. Neighbouring queries are packed as they are
without (`plan.packs_queries`), which saves stored rows besides; their lists are in the order of tokens, so that the
sums need no further list.
"""

from __future__ import annotations

from collections.abc import Iterator

from ... import arch as arches
from ...arch import Arch
from ...build.source import KernelSource
from ..mla import D_QK, DTYPES
from . import units
from .launches import Stage

ARCHS = ("sm_90a",)
"""Targets that have its kernels."""

PACKS_ROWS = True
"""Whether it is chosen where it can be."""

QUERIES = (1, 2, 4)
"""How many queries may be packed."""


def stages(queries: int) -> tuple[Stage, ...]:
    """What has kernels of its own, for so many packed queries; other stages are as without stored rows."""
    return ("attention", "sum", "merge") if queries > 1 else ("attention", "sum")


def variant(arch: Arch, stage: Stage, d_qk: int, dtype: str, queries: int) -> KernelSource:
    """One kernel, of numbers that a plan has."""
    values = {"D_QK": d_qk, "FP16": DTYPES.index(dtype), "QUERIES": queries, "FIXED_ORDER": 1}
    return units.STORED[stage].source(arch.name, values)


def sources(arch_name: str | None = None) -> tuple[KernelSource, ...]:
    """Every kernel, of one target or of all."""
    return tuple(dict.fromkeys(_sources(arch_name)))


def _sources(arch_name: str | None) -> Iterator[KernelSource]:
    for name in ARCHS:
        if arch_name not in (None, name):
            continue
        for queries in QUERIES:
            for stage in stages(queries):
                for d_qk in D_QK:
                    for dtype in DTYPES:
                        yield variant(arches.named(name), stage, d_qk, dtype, queries)
