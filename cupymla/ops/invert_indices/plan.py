"""Which kernels serve a problem, and their grids. Pure: no array, no driver."""

from __future__ import annotations

from dataclasses import dataclass

from ...arch import Arch
from ...build.source import KernelSource
from ...errors import UnsupportedError
from ..entry_lists import LIST_CTAS, list_ranges
from ..units import Unit
from ..variants import BOTH, every, require_choice, require_target
from .spec import OPERATOR, Problem

TARGETS = ("sm_90a", "sm_100f")

UNITS = {"list": Unit(OPERATOR, f"{OPERATOR}_list"), "order": Unit(OPERATOR, OPERATOR)}
"""Translation units by stage, in the order of a call's launches."""

STAGES = tuple(UNITS)

MOST_BATCH = 65535
"""The extent of grid.y, on which batch entries lie (CUDA C++ Programming Guide)."""

WARPS = 8
"""Of a CTA of `order`, each of which takes a token of its own where lists are short: `kWarps` in
cuda/invert_indices/sm90/storage.cuh."""

SHORT_LIST = 128
"""Entries of a short list at most, as `kShortList` there."""

_CTAS_PER_SM = 32
"""Of `order`, some five times as many as run at a time: lists are not equally long."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch.

    Attributes:
        source: the kernel.
        grid: CTAs by blockIdx.
        group_tokens: that a CTA of `order` takes at a time.
    """

    source: KernelSource
    grid: tuple[int, int, int]
    group_tokens: int = 0


def workspace_limit(problem: Problem) -> int:
    """Bytes of workspace that a call needs, on every GPU: the entries by token, in chance order."""
    return problem.batch * problem.entries * 4


def launches(problem: Problem, arch: Arch, multiprocessors: int) -> tuple[Launch, ...]:
    """What a call launches, in order; nothing without a batch entry.

    Raises UnsupportedError when the architecture has no kernel, or the grid cannot be that large.
    """
    list_source, order_source = (variant(arch, stage=stage) for stage in STAGES)
    if problem.batch > MOST_BATCH:
        raise UnsupportedError(f"{OPERATOR} on {problem.batch} batch entries", arch.name, f"up to {MOST_BATCH}")
    if not problem.batch:
        return ()
    ranges = max(1, list_ranges(problem.s_kv, problem.batch, multiprocessors))
    first = Launch(list_source, (ranges * LIST_CTAS, problem.batch, 1))
    if not problem.entries:
        return (first,)
    group = 1 if problem.entries > SHORT_LIST * problem.s_kv else WARPS
    ctas = min(max(1, -(-problem.s_kv // group)), max(1, _CTAS_PER_SM * multiprocessors // problem.batch))
    return first, Launch(order_source, (ctas, problem.batch, 1), group)


def variant(arch: Arch, *, stage: str = "order") -> KernelSource:
    """The kernel of a stage, one of `STAGES`. Raises InputError, and UnsupportedError when the target has none."""
    require_target(OPERATOR, arch, TARGETS, BOTH)
    require_choice(OPERATOR, stage=(stage, STAGES))
    return UNITS[stage].source(arch.name, {})


def sources(arch_name: str | None = None) -> tuple[KernelSource, ...]:
    """The kernels that are compiled ahead of use, of one target or of all."""
    return tuple(source for source in variants() if arch_name in (None, source.arch))


def variants() -> tuple[KernelSource, ...]:
    """Every kernel that a call may want."""
    return every(variant, TARGETS, stage=STAGES)
