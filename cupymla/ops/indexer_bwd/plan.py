"""Which kernels serve a problem, and where they work. Pure: no array, no driver."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from ... import arch as arches
from ...arch import Arch
from ...build.source import KernelSource
from ...errors import UnsupportedError
from ..indexer_validation import CHANNELS
from ..mla import DTYPES
from ..units import Unit
from ..variants import FLAGS, every, require_choice, require_target
from .spec import OPERATOR, Problem

TARGETS = ("sm_90a",)

UNITS = {
    "zero": Unit(OPERATOR, f"{OPERATOR}_zero"),
    "bound": Unit(OPERATOR, f"{OPERATOR}_bound", ("FP16", "D")),
    "total": Unit(OPERATOR, f"{OPERATOR}_total"),
    "gradients": Unit(OPERATOR, OPERATOR, ("FP16", "D", "HEADS", "DETERMINISTIC")),
    "round": Unit(OPERATOR, f"{OPERATOR}_round", ("D", "DETERMINISTIC")),
}
"""Translation units by stage, in the order of a call's launches. `bound` and `total` are for deterministic sums."""

STAGES = tuple(UNITS)

HEADS = (16, 32, 64)
"""Heads of a block with those that fill it up; more heads come in several blocks."""

AHEAD = tuple((128, heads, deterministic) for heads in HEADS for deterministic in (False, True))
"""Variants of bf16 that are compiled ahead of use: channels, heads, deterministic."""

_CHUNK_BYTES = 16
_ROW_THREADS = 256
_MOST_ROW_CTAS = 1056
"""Of the stages that go through rows: eight for each multiprocessor of a Hopper GPU."""


_MOST_RANGE_KEYS = 28672
"""Keys whose totals a CTA of `total` has room for in shared memory; as in total.cuh."""

_MOST_RANGES = 8
"""Ranges of keys, each of which has all entries read once more; with more of them, an addition in L2 for each entry
takes less time."""

_TOTAL_CTAS = 132
"""Of `total`, whose CTAs have a multiprocessor each: as many as a Hopper GPU has."""

_MOST_ADDS_LOG2 = 29
"""Integer sums have room for the rounding of as many terms."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where parts of the workspace begin, in bytes; None for those that there are not.

    Attributes:
        sums: of dk.
        totals: of the bounds of each key's entries.
        non_finite: bits of what was added that is not finite.
        query_bounds: of what an entry adds, by query.
        channel_parts: of these bounds, by channel.
        largest: bounds of each batch entry.
        bytes: of it all, a multiple of 16.
    """

    sums: int
    totals: int | None
    non_finite: int | None
    query_bounds: int | None
    channel_parts: int | None
    largest: int | None
    bytes: int


def workspace(problem: Problem) -> Workspace:
    """The workspace of a problem."""
    keys = problem.batch * problem.keys
    elements = keys * problem.channels
    if not problem.options.deterministic:
        return Workspace(0, None, None, None, None, None, elements * 4)
    parts = (elements * 4, keys * 8, elements // 32 * 2 * 4, problem.batch * problem.queries * 4)
    sizes = (*parts, problem.batch * problem.channels * 4, problem.batch * 4)
    starts = accumulate((-(-size // _CHUNK_BYTES) * _CHUNK_BYTES for size in sizes), initial=0)
    return Workspace(*starts)


def workspace_limit(problem: Problem) -> int:
    """Bytes of workspace that a call needs, on every GPU."""
    return workspace(problem).bytes


def adds_log2(problem: Problem) -> int:
    """The least n such that no key is named more than 2**n times."""
    return (max(1, problem.queries * problem.topk) - 1).bit_length()


def range_keys(problem: Problem) -> int:
    """Keys whose totals a CTA of `total` adds up in shared memory, ranges being about as large; 0 where it has none."""
    ranges = -(-problem.keys // _MOST_RANGE_KEYS)
    return -(-problem.keys // ranges) if 0 < ranges <= _MOST_RANGES else 0


def _total_ctas(problem: Problem) -> int:
    """Of `total`: for each batch entry groups that share its queries, each of a CTA for each range of keys."""
    batch = max(1, problem.batch)
    size = range_keys(problem)
    ranges = -(-problem.keys // size) if size else 1
    groups = max(1, min(problem.queries, _TOTAL_CTAS // (batch * ranges)))
    return problem.batch * groups * ranges


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch.

    Attributes:
        source: the kernel.
        ctas: how many.
    """

    source: KernelSource
    ctas: int


def launches(problem: Problem, arch: Arch) -> tuple[Launch, ...]:
    """What a call launches, in order. Raises UnsupportedError when the architecture has no kernel for it."""
    rows = problem.batch * problem.queries
    exact = problem.options.deterministic and bool(problem.keys and problem.topk)
    if exact and adds_log2(problem) > _MOST_ADDS_LOG2:
        entries = f"{problem.queries} queries of {problem.topk} entries, 'deterministic'"
        raise UnsupportedError(f"{OPERATOR} on {entries}", arch.name, "up to 2**29 entries together")
    ctas = {
        "zero": _row_ctas(workspace(problem).bytes // _CHUNK_BYTES),
        "bound": rows if exact else 0,
        "total": _total_ctas(problem) if exact else 0,
        "gradients": rows,
        "round": _row_ctas(problem.batch * problem.keys * problem.channels // 4),
    }
    heads = next((heads for heads in HEADS if problem.heads <= heads), HEADS[-1])
    return tuple(
        Launch(
            variant(
                arch,
                stage=stage,
                dtype=problem.dtype,
                channels=problem.channels,
                heads=heads,
                deterministic=problem.options.deterministic,
            ),
            ctas[stage],
        )
        for stage in STAGES
        if ctas[stage]
    )


def _row_ctas(chunks: int) -> int:
    return min(-(-chunks // _ROW_THREADS), _MOST_ROW_CTAS)


def variant(
    arch: Arch,
    *,
    stage: str = "gradients",
    dtype: str = "bfloat16",
    channels: int = 128,
    heads: int = 64,
    deterministic: bool = False,
) -> KernelSource:
    """A kernel variant.

    Args:
        arch: the target.
        stage: one of `STAGES`.
        dtype: of q and k. `UNITS` has the stages that depend on it, and on the rest.
        channels: 64 or 128.
        heads: of a block, with those that only fill up: 16, 32 or 64.
        deterministic: whether sums are of integers.

    Raises InputError, and UnsupportedError when the target has no kernel.
    """
    require_target(OPERATOR, arch)
    choices = {"stage": (stage, STAGES), "dtype": (dtype, DTYPES), "channels": (channels, CHANNELS)}
    require_choice(OPERATOR, **choices, heads=(heads, HEADS), deterministic=(deterministic, FLAGS))
    values = {
        "FP16": int(dtype == "float16"),
        "D": channels,
        "HEADS": heads,
        "DETERMINISTIC": int(deterministic),
    }
    return UNITS[stage].source(arch.name, values)


def sources(arch_name: str | None = None) -> tuple[KernelSource, ...]:
    """The kernel variants that are compiled ahead of use, of one target or of all."""
    made = (
        variant(arches.named(name), stage=stage, channels=channels, heads=heads, deterministic=deterministic)
        for name in TARGETS
        if arch_name in (None, name)
        for stage in STAGES
        for channels, heads, deterministic in AHEAD
    )
    return tuple(dict.fromkeys(made))


def variants() -> tuple[KernelSource, ...]:
    """Every kernel variant that a call may want."""
    numbers = {"stage": STAGES, "dtype": DTYPES, "channels": CHANNELS, "heads": HEADS}
    return every(variant, TARGETS, **numbers, deterministic=FLAGS[::-1])
