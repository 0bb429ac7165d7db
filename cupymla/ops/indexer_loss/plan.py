"""Which kernel serves a problem. Pure: no array, no driver."""

from __future__ import annotations

from ... import arch as arches
from ...arch import Arch
from ...build.source import KernelSource
from ..indexer_validation import CHANNELS
from ..mla import DTYPES
from ..variants import FLAGS, every, require_choice, require_target
from .spec import OPERATOR, Problem

SOURCE = "indexer_loss/sm90/indexer_loss.cu"
TARGETS = ("sm_90a",)

HEADS = (16, 32, 64, 128)
"""Heads of a query with those that fill it up to a power of two."""

AHEAD = tuple(("bfloat16", 128, heads) for heads in (16, 32, 64))
"""Variants that are compiled ahead of use: dtype, channels, heads."""


def plan(problem: Problem, arch: Arch) -> KernelSource:
    """Choose the kernel. Raises UnsupportedError when the architecture has none."""
    heads = next(heads for heads in HEADS if problem.heads <= heads)
    return variant(arch, dtype=problem.dtype, channels=problem.channels, heads=heads, filled=problem.heads != heads)


def variant(
    arch: Arch, *, dtype: str = "bfloat16", channels: int = 128, heads: int = 64, filled: bool = False
) -> KernelSource:
    """A kernel variant.

    Args:
        arch: the target.
        dtype: of q and k.
        channels: 64 or 128.
        heads: of a query, with those that only fill up: 16, 32, 64 or 128.
        filled: whether there are such.

    Raises InputError, and UnsupportedError when the target has no kernel.
    """
    require_target(OPERATOR, arch)
    choices = {"dtype": (dtype, DTYPES), "channels": (channels, CHANNELS), "heads": (heads, HEADS)}
    require_choice(OPERATOR, **choices, filled=(filled, FLAGS))
    defines = (
        ("CUPYMLA_FP16", int(dtype == "float16")),
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
    return every(variant, TARGETS, dtype=DTYPES, channels=CHANNELS, heads=HEADS, filled=FLAGS[::-1])
