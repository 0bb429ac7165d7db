"""Which kernel serves a problem, and which CTA takes which key tiles. Pure: no array, no driver."""

from __future__ import annotations

from collections.abc import Mapping

from ... import arch as arches
from ...arch import Arch
from ...build.source import KernelSource
from ..indexer_validation import CHANNELS
from ..variants import FLAGS, require_choice, require_target
from ..work_assignment import WorkAssignment
from .spec import DTYPES, OPERATOR, Problem

SOURCE = "indexer_logits/sm90/indexer_logits.cu"
TARGETS = ("sm_90a",)

HEADS = (8, 16, 32, 64, 128)
"""Heads of a query with those that fill it up to a power of two."""

AHEAD = (
    *(("float8_e4m3fn", 128, heads) for heads in (16, 32, 64)),
    *(("bfloat16", 128, heads) for heads in (16, 32, 64)),
)
"""Variants that are compiled ahead of use: dtype, channels, heads."""


def plan(problem: Problem, arch: Arch) -> KernelSource:
    """Choose the kernel. Raises UnsupportedError when the architecture has none."""
    heads = next(heads for heads in HEADS if problem.heads <= heads)
    return variant(
        arch,
        dtype=problem.dtype,
        channels=problem.channels,
        heads=heads,
        filled=problem.heads != heads and problem.dtype != "float8_e4m3fn",
    )


def work_assignment(problem: Problem, facts: Mapping[str, int], multiprocessors: int) -> WorkAssignment:
    """How many CTAs share all query tiles; each finds its part itself, which depends on what queries see."""
    query_tiles = -(-problem.queries // facts["tile_queries"])
    key_tiles = -(-problem.keys // facts["tile_keys"])
    ctas = min(multiprocessors, problem.batch * query_tiles * key_tiles)
    return WorkAssignment(ctas, {"query_tiles": query_tiles, "key_tiles": key_tiles})


def variant(
    arch: Arch,
    *,
    dtype: str = "float8_e4m3fn",
    channels: int = 128,
    heads: int = 64,
    filled: bool = False,
) -> KernelSource:
    """A kernel variant.

    Args:
        arch: the target.
        dtype: of q and k.
        channels: 64 or 128.
        heads: of a query, with those that only fill up: 8, 16, 32, 64 or 128.
        filled: whether there are such; fp8 has no infinities, and does not care.

    Raises InputError, and UnsupportedError when the target has no kernel.
    """
    require_target(OPERATOR, arch)
    choices = {"dtype": (dtype, DTYPES), "channels": (channels, CHANNELS), "heads": (heads, HEADS)}
    require_choice(OPERATOR, **choices, filled=(filled, FLAGS))
    defines = (
        ("CUPYMLA_TYPE", DTYPES.index(dtype)),
        ("CUPYMLA_D", channels),
        ("CUPYMLA_HEADS", heads),
        ("CUPYMLA_FILLED", int(filled)),
    )
    return KernelSource(SOURCE, OPERATOR, defines, arch.name)


def sources(arch_name: str | None = None) -> tuple[KernelSource, ...]:
    """The kernel variants that are compiled ahead of use, of one target or of all."""
    return tuple(
        variant(arches.named(name), dtype=dtype, channels=channels, heads=heads)
        for name in TARGETS
        if arch_name in (None, name)
        for dtype, channels, heads in AHEAD
    )


def variants() -> tuple[KernelSource, ...]:
    """Every kernel variant that a call may want."""
    return tuple(
        variant(arches.named(name), dtype=dtype, channels=channels, heads=heads, filled=filled)
        for name in TARGETS
        for dtype in DTYPES
        for channels in CHANNELS
        for heads in HEADS
        for filled in ((False,) if dtype == "float8_e4m3fn" else (False, True))
    )
