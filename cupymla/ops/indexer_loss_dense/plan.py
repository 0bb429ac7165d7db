"""Which kernels serve a problem, for which rows at a time, and where they work. Pure: no array, no driver."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ... import arch as arches
from ...arch import Arch
from ...build.source import KernelSource
from ..indexer_logits import plan as scoring
from ..indexer_validation import CHANNELS
from ..mla import D_QK, DTYPES
from ..units import Unit
from ..variants import every, require_choice, require_target
from .spec import OPERATOR, Problem

TARGETS = ("sm_90a",)

UNITS = {
    "mask": Unit(OPERATOR, f"{OPERATOR}_mask", ("FP16", "D")),
    "lse": Unit(OPERATOR, f"{OPERATOR}_lse", ("FP16", "D_QK", "HEADS")),
    "target": Unit(OPERATOR, OPERATOR, ("FP16", "D_QK", "HEADS")),
    "row_loss": Unit(OPERATOR, f"{OPERATOR}_row_loss", ("FP16", "D")),
    "dq": Unit(OPERATOR, f"{OPERATOR}_dq", ("FP16", "D", "HEADS")),
    "dk": Unit(OPERATOR, f"{OPERATOR}_dk", ("FP16", "D", "HEADS")),
    "round": Unit(OPERATOR, f"{OPERATOR}_round", ("D",)),
}
"""Translation units by stage."""

_BEGIN, _EACH, _END = ("mask", "lse"), ("target", "row_loss", "dq", "dk"), ("round",)

STAGES = (*_BEGIN, *_EACH, *_END)
"""Launches of a call. The first two begin a batch entry and the last one ends it, others come once for each block of
its rows, with the scores of `indexer_logits` behind `target`."""

HEADS = (16, 32, 64)
"""Heads of a row in a column tile, with those that fill it up; more heads come in several tiles."""

BLOCK_BYTES = 128 << 20
"""Of targets and gradients that are held at a time. A few rows are the least, whatever they take."""

SUM_BYTES = 32 << 20
"""Of dk's sums over slices of the rows. One slice is the least, whatever it takes."""

COLUMNS = 64
BLOCK_KEYS = 128
ROW_UNIT = 4
"""Rows of the column tile with the fewest heads."""

_MULTIPROCESSORS = 132
"""Of the GPUs that the work is cut for."""
_CHUNK_TILES, _SLICE_TILES = 2.5, 6.0
"""What a CTA of stages `target` and `dk` takes for its keys, at the beginning and at the end, in column tiles."""
_MOST_PARTS = 64
_WAVES, _MASKED_WAVES = 3, 8
"""CTAs of these stages for each multiprocessor, at least where so many can be; masks make some of them short."""
_ROW_THREADS = 256
_MOST_ROW_CTAS = 1056
_ALIGNMENT = 128

OF_TEACHER = ("lse", "target")
"""Stages that work on MLA heads; others work on those of the indexer."""

AHEAD = tuple((stage, heads) for stage in STAGES for heads in (HEADS if stage in ("dq", "dk") else HEADS[-1:]))
"""Variants of bf16, 128 and 576 channels that are compiled ahead of use: stage, heads."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that are worked on together.

    Attributes:
        entry: batch entry.
        first, rows: of it.
    """

    entry: int
    first: int
    rows: int


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where parts of the workspace begin, in bytes, by the names that the parameter record has for them.

    Attributes:
        offsets: those.
        bytes: of it all.
    """

    offsets: dict[str, int]
    bytes: int


def _whole(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def row_stride(problem: Problem) -> int:
    """Keys from one row of the workspace to the next."""
    return _whole(max(1, problem.scores.keys), BLOCK_KEYS)


def block_rows(problem: Problem) -> int:
    """Rows of a block, but perhaps of the last one, in blocks of about equal size."""
    queries = problem.scores.queries
    fitting = max(ROW_UNIT, BLOCK_BYTES // (8 * row_stride(problem)) // ROW_UNIT * ROW_UNIT)
    return _whole(-(-queries // max(1, -(-queries // fitting))), ROW_UNIT)


def blocks(problem: Problem) -> Iterator[Block]:
    """All rows; without any still an empty block for each batch entry that has keys, whose dk is to be zero."""
    scores, step = problem.scores, block_rows(problem)
    for entry in range(scores.batch if scores.queries or scores.keys else 0):
        for first in range(0, max(1, scores.queries), max(1, step)):
            yield Block(entry, first, min(step, scores.queries - first))


def _part_rows(problem: Problem, heads: int, own_tiles: float, most: int) -> int:
    """Rows of each part when a block's rows are cut into up to `most` parts, a CTA for each part and block of keys: the
    last CTAs should not be alone for long, and few should be begun.

    Args:
        problem: the problem.
        heads: of a row.
        own_tiles: what a CTA takes beside its column tiles, in such tiles.
        most: parts.
    """
    rows, key_blocks = max(ROW_UNIT, block_rows(problem)), row_stride(problem) // BLOCK_KEYS
    own = tile_heads(heads)
    tiles = _whole(heads, own) / COLUMNS  # of a row

    def time(part: int) -> float:
        waves = -(-key_blocks * -(-rows // part) // _MULTIPROCESSORS)
        return waves * (part * tiles + own_tiles)

    most = min(most, _MOST_PARTS, rows // ROW_UNIT)
    least_waves = _MASKED_WAVES if problem.scores.masked else _WAVES
    parts = range(min(most, -(-least_waves * _MULTIPROCESSORS // key_blocks)), most + 1)
    return min((_whole(-(-rows // count), ROW_UNIT) for count in parts), key=time)


def steps(problem: Problem) -> Iterator[tuple[Block, tuple[str, ...]]]:
    """What a call does, in order: stages, and the rows that they work on."""
    queries = problem.scores.queries
    for block in blocks(problem):
        whole = Block(block.entry, 0, queries)
        if not block.first:
            yield whole, _BEGIN
        yield block, _EACH
        if block.first + block.rows == queries:
            yield whole, _END


def slice_rows(problem: Problem) -> int:
    """Rows of a slice, which has sums of dk of its own."""
    most = SUM_BYTES // (row_stride(problem) * problem.scores.channels * 4)
    return _part_rows(problem, problem.scores.heads, _SLICE_TILES, max(1, most))


def slices(problem: Problem) -> int:
    """Slices of a block's rows."""
    return max(1, -(-block_rows(problem) // slice_rows(problem)))


def chunk_rows(problem: Problem) -> int:
    """Rows that a CTA of stage `target` takes."""
    return _part_rows(problem, problem.mla_heads, _CHUNK_TILES, _MOST_PARTS)


def workspace(problem: Problem) -> Workspace:
    """The workspace of a problem."""
    stride, rows = row_stride(problem), block_rows(problem)
    sizes = {
        "sums": slices(problem) * stride * problem.scores.channels * 4,
        "target": rows * stride * 4,
        "gradients": rows * stride * 4,
        "lse": 0 if problem.given_lse else problem.scores.queries * problem.mla_heads * 8,
        "states": rows * 4,
        "bounds": rows * 8,
        "largest": rows * 4,
        "largest_term": 4,
        "bad_keys": stride // 8,
    }
    offsets, place = {}, 0
    for name, size in sizes.items():
        offsets[name] = place
        place += _whole(size, _ALIGNMENT)
    return Workspace(offsets, place)


def workspace_limit(problem: Problem) -> int:
    """Bytes of workspace that a call needs, on every GPU."""
    return workspace(problem).bytes if problem.scores.queries or problem.scores.keys else 0


def tile_heads(heads: int) -> int:
    """Heads of a row in a column tile."""
    return next((fitting for fitting in HEADS if heads <= fitting), HEADS[-1])


def _column_tiles(rows: int, heads: int) -> int:
    own = tile_heads(heads)
    return -(-rows // (COLUMNS // own)) * -(-heads // own)


def splits_keys(problem: Problem, rows: int) -> bool:
    """Whether a CTA of stage `dq` has one column tile, whose keys its two consumers share, and not two: where two would
    leave multiprocessors without a CTA."""
    tiles = _column_tiles(rows, problem.scores.heads)
    return -(-tiles // _MULTIPROCESSORS) < 2 * -(-tiles // (2 * _MULTIPROCESSORS))


def ctas(problem: Problem, stage: str, rows: int) -> int:
    """CTAs of a stage for so many rows; 0 where it has nothing to do."""
    scores, key_blocks = problem.scores, row_stride(problem) // BLOCK_KEYS
    if stage == "mask":
        return min(-(-row_stride(problem) // _ROW_THREADS), _MOST_ROW_CTAS)
    if stage == "round":
        return min(-(-scores.keys * scores.channels // 4 // _ROW_THREADS), _MOST_ROW_CTAS)
    if stage == "dk":
        return key_blocks * slices(problem) if scores.keys else 0
    if stage == "row_loss":
        return _whole(rows, ROW_UNIT)
    if stage == "dq":
        tiles = _column_tiles(rows, scores.heads)
        return tiles if splits_keys(problem, rows) else -(-tiles // 2)
    if not scores.keys or (stage == "lse" and problem.given_lse):
        return 0
    if stage == "lse":
        return -(-_column_tiles(rows, problem.mla_heads) // 2)
    return key_blocks * -(-rows // chunk_rows(problem))


def source(problem: Problem, arch: Arch, stage: str) -> KernelSource:
    """The kernel of a stage. Raises UnsupportedError when the architecture has none."""
    return variant(
        arch,
        stage=stage,
        dtype=problem.scores.dtype,
        channels=problem.scores.channels,
        mla_channels=problem.mla_channels,
        heads=tile_heads(problem.mla_heads if stage in OF_TEACHER else problem.scores.heads),
    )


def wanted_sources(problem: Problem, arch: Arch) -> tuple[KernelSource, ...]:
    """The kernels of a call. Raises UnsupportedError."""
    ran = {stage for block, stages in steps(problem) for stage in stages if ctas(problem, stage, block.rows)}
    own = [source(problem, arch, stage) for stage in STAGES if stage in ran]
    shared = [scoring.plan(problem.scores, arch)] if 0 not in problem.scores.shape else []
    return (*own, *shared)


def variant(
    arch: Arch,
    *,
    stage: str = "target",
    dtype: str = "bfloat16",
    channels: int = 128,
    mla_channels: int = 576,
    heads: int = 64,
) -> KernelSource:
    """A kernel variant.

    Args:
        arch: the target.
        stage: one of `STAGES`.
        dtype: of q and k. `UNITS` has the stages that depend on it, and on the rest.
        channels: of an index head, 64 or 128.
        mla_channels: of an MLA head, 576 or 512.
        heads: of a row in a column tile, 16, 32 or 64: of MLA in `lse` and `target`, of the indexer in `dq` and `dk`.

    Raises InputError, and UnsupportedError when the target has no kernel.
    """
    require_target(OPERATOR, arch)
    choices = {"stage": (stage, STAGES), "dtype": (dtype, DTYPES), "channels": (channels, CHANNELS)}
    require_choice(OPERATOR, **choices, mla_channels=(mla_channels, D_QK), heads=(heads, HEADS))
    values = {"FP16": int(dtype == "float16"), "D": channels, "D_QK": mla_channels, "HEADS": heads}
    return UNITS[stage].source(arch.name, values)


def sources(arch_name: str | None = None) -> tuple[KernelSource, ...]:
    """The kernel variants that are compiled ahead of use, of one target or of all: with those that score."""
    own = tuple(
        variant(arches.named(name), stage=stage, heads=heads)
        for name in TARGETS
        if arch_name in (None, name)
        for stage, heads in AHEAD
    )
    shared = tuple(each for each in scoring.sources(arch_name) if ("CUPYMLA_TYPE", 1) in each.defines)
    return (*own, *shared)


def variants() -> tuple[KernelSource, ...]:
    """Every kernel variant that a call may want."""
    numbers = {"stage": STAGES, "dtype": DTYPES, "channels": CHANNELS, "mla_channels": D_QK, "heads": HEADS}
    return every(variant, TARGETS, **numbers)
