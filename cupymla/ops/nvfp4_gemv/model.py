"""Predicted times of the two kernels that a Blackwell GPU has, from published rates: which one a problem gets.

No number here was measured. `cuda/nvfp4_gemv/README.md` derives them and shows what follows.

Sources: NVIDIA, "DGX B200" datasheet (8 GPUs: 64 TB/s of HBM3e, 72 PFLOPS of dense FP4; so 8 TB/s and 9 PFLOPS each,
which 148 multiprocessors of 16384 multiplications per clock give at 1.85 GHz); CUDA C++ Programming Guide, "Arithmetic
Instructions" (4 warp instructions per clock and multiprocessor). Instruction counts are those of nvcc 13.0's sm_100f
code. What is assumed is called so.
"""

from __future__ import annotations

from dataclasses import dataclass

from .spec import Problem

CLOCKS_PER_US = 1850.0
HBM_BYTES_PER_US = 8e6

L2_BYTES_PER_CLOCK = 64.0
"""What one multiprocessor takes in at most. Assumed: it is what earlier generations were measured to have."""

LATENCY_US = 1.0
"""From asking for memory to having it, under load. Assumed."""

START_US = 2.0
"""Of a launch: what happens before the first and after the last byte. Assumed, alike for both kernels."""

MERGE_US = 0.5
"""What sharing a tile among CTAs adds: two barriers of the cluster. Assumed."""

MARGIN = 0.05
"""Predictions that are closer than this say nothing; the streaming kernel, which more has been seen of, is taken."""

TILE_ROWS, CHUNK, RING_BYTES = 128, 256, 92_160.0
"""Of the tcgen05 kernel: rows of a tile, elements of k per stage, bytes of a that a CTA has on their way."""

SPLITS = (1, 2, 4, 8)
"""CTAs that may share a tile: what every GPU lets a cluster have."""

CTAS_PER_SM = 2

_STREAM_ROWS = 16
_BUSY = 0.85  # share of the issue slots that a kernel can use; assumed
_VECTOR_SLOTS = 80.0 / 32.0  # of a warp, for decoding 32 elements of b in a thread
# Issue slots of a warp for a stage of 16 rows and 256 elements of k: multiplying, by columns, and copying and looping.
_STREAM_SLOTS = {
    "nvfp4": {1: 142.0, 8: 187.0, 16: 213.0},
    "mxfp4": {1: 131.0, 8: 251.0, 16: 397.0},
}
_COPY_SLOTS = 50.0


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the tcgen05 kernel deals a problem out.

    Attributes:
        tiles: of 128 rows, per batch.
        splits: CTAs of a cluster, which share the k of a tile.
        ctas: of all tiles, batches and splits.
        us: predicted time.
    """

    tiles: int
    splits: int
    ctas: int
    us: float


def row_bytes(problem: Problem) -> float:
    """Of a row of a and its scales."""
    return problem.k / 2 + problem.k / problem.format.block


def tiling(problem: Problem, multiprocessors: int) -> Tiling:
    """The split of k with the least predicted time. The problem has rows, batches and k."""
    tiles = -(-problem.m // TILE_ROWS)
    chunks = -(-problem.k // CHUNK)

    def timed(splits: int) -> Tiling:
        ctas = tiles * problem.batches * splits
        return Tiling(tiles, splits, ctas, _tiles_us(problem, ctas, splits, multiprocessors))

    return min(
        (timed(splits) for splits in SPLITS if splits <= chunks), key=lambda made: (round(made.us, 2), made.splits)
    )


def _tiles_us(problem: Problem, ctas: int, splits: int, multiprocessors: int) -> float:
    """Waves of CTAs, each as long as its bytes take; CTAs hold 128 rows even where a has fewer."""
    cta_bytes = min(problem.m, TILE_ROWS) * row_bytes(problem) / splits
    # b comes from L2, in the same stages.
    columns = 8 if problem.n <= 8 else 16
    swollen = 1 + columns / min(problem.m, TILE_ROWS)
    waves, rest = divmod(ctas, CTAS_PER_SM * multiprocessors)

    def wave_us(count: int) -> float:
        shared = CTAS_PER_SM if count > multiprocessors else 1
        own = min(L2_BYTES_PER_CLOCK * CLOCKS_PER_US / shared / swollen, RING_BYTES / LATENCY_US)
        return cta_bytes / min(own, HBM_BYTES_PER_US / count)

    total = waves * wave_us(CTAS_PER_SM * multiprocessors) + (wave_us(rest) if rest else 0.0)
    return START_US + (MERGE_US if splits > 1 else 0.0) + total


def stream_us(problem: Problem, multiprocessors: int) -> float:
    """Of the streaming kernel with native conversion, E2M1 times E2M1: memory or issue slots, with those for b."""
    rows = -(-problem.m * problem.batches // multiprocessors)
    active = min(problem.m * problem.batches, multiprocessors)
    per_us = min(HBM_BYTES_PER_US / active, L2_BYTES_PER_CLOCK * CLOCKS_PER_US)
    memory = rows * row_bytes(problem) / per_us
    most = next(most for most in (1, 8, 16) if problem.n <= most)
    slots = _STREAM_SLOTS[problem.format.name][most] + _COPY_SLOTS
    stages = _tiles_of(rows) * -(-problem.k // CHUNK)
    issue = stages * slots / (4 * _BUSY * CLOCKS_PER_US)
    vectors = problem.n * problem.k / 32 * _VECTOR_SLOTS / (4 * _BUSY * CLOCKS_PER_US)
    return START_US + max(memory, issue + vectors)


def _tiles_of(rows: int) -> int:
    """Tiles of 16 rows that a CTA multiplies: its 16 warps divide evenly into tiles, so there are 1, 2, 4, 8 or 16."""
    passes, rest = divmod(rows, 16 * _STREAM_ROWS)
    tiles = 1
    while tiles * _STREAM_ROWS < rest:
        tiles *= 2
    return passes * 16 + (tiles if rest else 0)


def tensor_core_is_faster(problem: Problem, multiprocessors: int) -> bool:
    """Whether the tcgen05 kernel is predicted to be faster than the streaming one by more than predictions can tell."""
    return tiling(problem, multiprocessors).us < (1 - MARGIN) * stream_us(problem, multiprocessors)
