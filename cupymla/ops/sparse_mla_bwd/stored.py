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
from .launches import STAGES, Stage

KERNEL = "sparse_mla_bwd_stored"
"""The kernel's name."""

SOURCES = {"sm_90a": "sparse_mla_bwd/sm90/sparse_mla_bwd_stored.cu"}
"""Its source for each target that has it."""

PACKS_ROWS = True
"""Whether it is chosen where it can be."""

QUERIES = (1, 2, 4)
"""How many queries may be packed."""


def stages(queries: int) -> tuple[Stage, ...]:
    """What is compiled from that source, for so many packed queries; other stages are as without stored rows."""
    return ("attention", "sum", "merge") if queries > 1 else ("attention", "sum")


def variant(arch: Arch, stage: Stage, d_qk: int, dtype: str, queries: int) -> KernelSource:
    """One kernel, of numbers that a plan has. Definitions that a stage does not depend on are the same in all of its
    variants."""
    defines = (
        ("CUPYMLA_STAGE", STAGES.index(stage)),
        ("CUPYMLA_D_QK", 576 if stage == "merge" else d_qk),
        ("CUPYMLA_FP16", int(dtype == "float16" and stage == "attention")),
        ("CUPYMLA_QUERIES", queries),
    )
    return KernelSource(SOURCES[arch.name], KERNEL, defines, arch.name)


def sources(arch_name: str | None = None) -> tuple[KernelSource, ...]:
    """Every kernel, of one target or of all."""
    return tuple(dict.fromkeys(_sources(arch_name)))


def _sources(arch_name: str | None) -> Iterator[KernelSource]:
    for name in SOURCES:
        if arch_name not in (None, name):
            continue
        for queries in QUERIES:
            for stage in stages(queries):
                for d_qk in D_QK:
                    for dtype in DTYPES:
                        yield variant(arches.named(name), stage, d_qk, dtype, queries)
