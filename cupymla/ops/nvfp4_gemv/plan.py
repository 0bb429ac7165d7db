"""Which kernels serve a problem, and how rows are assigned to CTAs. Pure: no array, no driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ... import arch as arches
from ...arch import Arch
from ...build.source import KernelSource
from ...errors import InputError, UnsupportedError, shown
from ..work_assignment import WorkAssignment
from . import model
from .formats import FORMATS, BlockFormat
from .spec import ACTIVATION_DTYPES, MAX_N, OPERATOR, Problem

TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100f")
"""What the kernels are compiled for. sm_100f has conversions of E2M1, and the tcgen05 kernel."""

MAX_ITEMS = 2**31 - 1
"""Items of work of one launch, which the kernel counts in 32 bits."""

TENSOR_TARGETS = ("sm_100f",)
"""Targets that have the tcgen05 kernel as well."""

WHOLE_TARGETS = ("sm_90",)
"""Targets that have variants of the streaming kernel for whole calls only: where they were measured to be faster."""

CHUNK, PASS_ROWS = 256, 256
"""Launch facts of all variants for these targets; a test compares them."""

WHOLE = ("no", "rows", "words")
"""Which calls a variant serves: any, or whole ones whose scales of a may be copied by rows, or by words."""

MAX_TILED = 2**31 - 256
"""Rows of a that TMA's 32-bit coordinates reach."""

_FOLDER = "nvfp4_gemv/sm80"
_TENSOR_KERNEL = "nvfp4_gemv_tcgen05"
_WITH_FORMAT = ("quantize", "dequantize")
_FORMATLESS = ("amax", "swizzle")
_B_DTYPES = ("e2m1", *ACTIVATION_DTYPES)
_TILE_ROWS = 16
_MOST_COLUMNS = (1, 8, 16)
_TENSOR_COLUMNS = (8, 16)

# Bytes that a column of a group's part of b takes beside its elements and factors.
_COLUMN_PADDING = 80

# In rows: what a part costs beside its rows (its vectors, its sums), and what a tile row costs to multiply where a row
# that is read costs 1.
_PART_ROWS = 8.0
_MULTIPLIED_ROW = 0.6


@dataclass(frozen=True, slots=True)
class Work:
    """How a problem is divided.

    Attributes:
        parts: ranges of rows that a batch is divided into; each is an item of work.
        part_rows: rows of a part.
        long_parts: the first so many parts have one row more.
        items: of all batches.
        ctas: how many CTAs take the items in turn.
        phase_chunks: chunks of k whose part of b is in shared memory at a time.
    """

    parts: int
    part_rows: int
    long_parts: int
    items: int
    ctas: int
    phase_chunks: int

    @property
    def fields(self) -> dict[str, int]:
        """What the parameter record has of it."""
        return {
            "part_rows": self.part_rows,
            "parts": self.parts,
            "long_parts": self.long_parts,
            "items": self.items,
            "phase_chunks": self.phase_chunks,
        }


def target(arch: Arch) -> str:
    """The compile target for a GPU's architecture. Raises UnsupportedError."""
    plain = arch.name.removesuffix("a") if arch.name == "sm_90a" else arch.name
    if plain not in TARGETS:
        raise UnsupportedError(OPERATOR, f"a GPU of architecture {arch.name}", ", ".join(TARGETS) + ", or the CPU")
    return plain


def plan(problem: Problem, arch: Arch, whole: str = "no") -> KernelSource:
    """Choose the streaming kernel's variant. Raises UnsupportedError when the architecture has none.

    Args:
        problem: what is asked for.
        arch: the target.
        whole: as for `variant`; what a target does not have is any.
    """
    if target(arch) not in WHOLE_TARGETS:
        whole = "no"
    return variant(arch, format=problem.format.name, b_dtype=problem.b_dtype, n=problem.n, whole=whole)


def plan_tiles(problem: Problem, arch: Arch, multiprocessors: int) -> tuple[KernelSource, model.Tiling] | None:
    """The tcgen05 kernel's variant and how it deals the problem out, or None where the streaming kernel is to run.

    It is chosen for E2M1 times E2M1 with scales in the 128x4 layout where it is predicted to be faster (`model`).
    Whether TMA can read the arrays is not for the plan to say.
    """
    sizes = problem.m and problem.k and problem.batches
    if arch.name not in TENSOR_TARGETS or problem.weight_only or problem.scale_layout == "linear" or not sizes:
        return None
    made = model.tiling(problem, multiprocessors)
    if made.ctas > MAX_ITEMS or problem.m > MAX_TILED or not model.tensor_core_is_faster(problem, multiprocessors):
        return None
    return tensor_variant(arch, problem.format, problem.n), made


def tensor_variant(arch: Arch, fmt: BlockFormat, n: int) -> KernelSource:
    """One variant of the tcgen05 kernel, for n up to 8 or up to 16."""
    columns = next(most for most in _TENSOR_COLUMNS if n <= most)
    defines = (("CUPYMLA_MXFP4", FORMATS.index(fmt)), ("CUPYMLA_COLUMNS", columns))
    return KernelSource(f"nvfp4_gemv/sm100/{_TENSOR_KERNEL}.cu", _TENSOR_KERNEL, defines, arch.name)


def variant(arch: Arch, *, format: str = "nvfp4", b_dtype: str = "e2m1", n: int = 1, whole: str = "no") -> KernelSource:
    """One kernel variant.

    Args:
        arch: the target.
        format: "nvfp4" or "mxfp4".
        b_dtype: "e2m1", "bfloat16" or "float16".
        n: columns, 1 to 16; one variant serves 1, one up to 8, one up to 16.
        whole: "no" for a variant that serves any call; "rows" or "words" for whole ones (`is_whole`) in which rows of a
            and b begin at multiples of 16 bytes, and linear scales of a at multiples of a chunk's (16, with MXFP4 8),
            or scales in either layout at multiples of 4, launched as `raw_work_assignment` says. In any other call
            these would read out of bounds.

    Raises InputError, and UnsupportedError when the target has no kernel.
    """
    names = tuple(known.name for known in FORMATS)
    if type(format) is not str or format not in names:
        raise InputError("format", " or ".join(map(repr, names)), shown(format), OPERATOR)
    if type(b_dtype) is not str or b_dtype not in _B_DTYPES:
        raise InputError("b_dtype", " or ".join(map(repr, _B_DTYPES)), shown(b_dtype), OPERATOR)
    if type(n) is not int or not 1 <= n <= MAX_N:
        raise InputError("n", f"an int from 1 to {MAX_N}", shown(n), OPERATOR)
    served = _whole(arch)
    if type(whole) is not str or whole not in served:
        raise InputError("whole", f"{' or '.join(map(repr, served))} on {arch.name}", shown(whole), OPERATOR)
    defines = (
        ("CUPYMLA_MXFP4", names.index(format)),
        ("CUPYMLA_VECTORS", _B_DTYPES.index(b_dtype)),
        ("CUPYMLA_MOST_COLUMNS", next(most for most in _MOST_COLUMNS if n <= most)),
        ("CUPYMLA_WHOLE", WHOLE.index(whole)),
    )
    return KernelSource(f"{_FOLDER}/{OPERATOR}.cu", OPERATOR, defines, target(arch))


def auxiliary(name: str, arch: Arch, fmt: BlockFormat | None = None) -> KernelSource:
    """The kernel of a related function: "amax" or "swizzle", or "quantize" or "dequantize" of a format.

    Raises UnsupportedError when the target has no kernel.
    """
    defines = () if fmt is None else (("CUPYMLA_MXFP4", FORMATS.index(fmt)),)
    return KernelSource(f"{_FOLDER}/{name}.cu", f"nvfp4_{name}", defines, target(arch))


def _whole(arch: Arch) -> tuple[str, ...]:
    """Of WHOLE, what a target has variants for."""
    return WHOLE if target(arch) in WHOLE_TARGETS else WHOLE[:1]


def sources(arch_name: str | None = None) -> tuple[KernelSource, ...]:
    """Every kernel variant and every kernel of a related function, of one target or of all."""
    return tuple(source for name in TARGETS if arch_name in (None, name) for source in _sources_of(arches.named(name)))


def _sources_of(arch: Arch) -> tuple[KernelSource, ...]:
    products = (
        variant(arch, format=fmt.name, b_dtype=b_dtype, n=n, whole=whole)
        for fmt in FORMATS
        for b_dtype in _B_DTYPES
        for n in _MOST_COLUMNS
        for whole in _whole(arch)
    )
    blocks = (auxiliary(name, arch, fmt) for name in _WITH_FORMAT for fmt in FORMATS)
    tensor = (tensor_variant(arch, fmt, n) for fmt in FORMATS for n in _TENSOR_COLUMNS if arch.name in TENSOR_TARGETS)
    return (*products, *tensor, *blocks, *(auxiliary(name, arch) for name in _FORMATLESS))


def assign_work(m: int, n: int, k: int, batches: int, multiprocessors: int, facts: Mapping[str, int]) -> Work:
    """Assign a problem's rows, so that every CTA gets the same share as nearly as can be.

    Args:
        m: rows of a batch.
        n: columns.
        k: elements of a row.
        batches: how many there are.
        multiprocessors: of the device; each runs one CTA.
        facts: the kernel's launch facts. Of them "vector_bytes", shared memory for b of a phase; "factor_bytes", of
            these beside a chunk of a column, for factors of its blocks; "phase_elements", of all columns of b that a
            phase may have; "chunk", elements of k that a warp takes at a time; "pass_rows", rows that a CTA holds the
            sums of; "groups" of warps, the most among which chunks are assigned.

    Raises UnsupportedError for more parts than can be counted.
    """
    parts = _parts(m, batches, multiprocessors, facts["pass_rows"])
    items = parts * batches
    if items > MAX_ITEMS:
        raise UnsupportedError(f"{OPERATOR} on {batches} batches", "a GPU", f"up to {MAX_ITEMS}")
    part_rows, long_parts = divmod(m, max(parts, 1))
    return Work(parts, part_rows, long_parts, items, min(items, multiprocessors), _phase_chunks(n, k, facts))


def may_be_whole(problem: Problem, arch: Arch, multiprocessors: int) -> bool:
    """Whether a call is whole (`is_whole`), before there is a kernel for whose facts it can be assigned."""
    if target(arch) not in WHOLE_TARGETS or not _has_no_tail(problem.k):
        return False
    parts = _parts(problem.m, problem.batches, multiprocessors, PASS_ROWS)
    return parts * problem.batches <= multiprocessors and -(-problem.m // max(parts, 1)) <= PASS_ROWS


def is_whole(work: Work, k: int) -> bool:
    """Whether a call with rows of k elements is whole as far as its sizes and work assignment say: no CTA has a second
    pass."""
    rows = work.part_rows + (work.long_parts > 0)
    return _has_no_tail(k) and work.items <= work.ctas and rows <= PASS_ROWS


def _has_no_tail(k: int) -> bool:
    return k % CHUNK == 0 and k < 2**31


def raw_work_assignment(
    source: KernelSource,
    facts: Mapping[str, int],
    multiprocessors: int,
    *,
    m: int,
    n: int,
    k: int,
    batches: int = 1,
) -> WorkAssignment:
    """The work assignment of the streaming kernel for a launch on its own.

    Args:
        source: the variant. One for whole calls is to be launched as assigned: it has no look at how many CTAs there
            are.
        facts: its launch facts.
        multiprocessors: of the device.
        m: rows of a batch.
        n: columns, as many as the variant serves.
        k: elements of a row, an even number.
        batches: how many there are.

    Raises InputError, and UnsupportedError for more batches than can be counted.
    """
    most = dict(source.defines)["CUPYMLA_MOST_COLUMNS"]
    if not 1 <= n <= int(most):
        raise InputError("n", f"1 to {most}, which this variant serves", shown(n), OPERATOR)
    if k % 2:
        raise InputError("k", "an even number", shown(k), OPERATOR)
    work = assign_work(m, n, k, batches, multiprocessors, facts)
    if dict(source.defines)["CUPYMLA_WHOLE"] and not is_whole(work, k):
        given = f"m={m}, k={k}, batches={batches} on {multiprocessors} multiprocessors"
        raise InputError("sizes", "those of a whole call, as this variant is for them alone", given, OPERATOR)
    return WorkAssignment(work.ctas, work.fields)


def _parts(rows: int, batches: int, multiprocessors: int, pass_rows: int) -> int:
    """Parts of a batch for which the CTA with the most work has the least."""
    if rows == 0 or batches == 0:
        return 0
    best, least = 1, float("inf")
    for waves in range(1, 17):
        parts = min(max(waves * multiprocessors // batches, 1), rows)
        turns = -(-parts * batches // multiprocessors)
        cost = turns * (_cost(-(-rows // parts), pass_rows) + _PART_ROWS)
        if cost < least:
            best, least = parts, cost
    return best


def _cost(rows: int, pass_rows: int) -> float:
    """Time for a part of that many rows, in rows read."""
    passes, rest = divmod(rows, pass_rows)
    tiles = 0
    if rest:
        tiles = 1
        while tiles * _TILE_ROWS < rest:
            tiles *= 2
    return max(float(rows), _MULTIPLIED_ROW * (passes * pass_rows + tiles * _TILE_ROWS))


def _phase_chunks(n: int, k: int, facts: Mapping[str, int]) -> int:
    """Chunks of b that a phase may have, evenly assigned to phases and to groups of warps."""
    chunk, groups = facts["chunk"], facts["groups"]
    fitting = (facts["vector_bytes"] // n - groups * _COLUMN_PADDING) // (2 * chunk + facts["factor_bytes"])
    fitting = min(fitting, facts["phase_elements"] // (n * chunk))
    fitting = max(fitting // groups, 1) * groups
    chunks = max(-(-k // chunk), 1)
    phases = -(-chunks // fitting)
    even = -(-chunks // phases)
    # Up to four warps take turns at the chunks of a tile: a multiple of four keeps them even.
    return min(-(-even // 4) * 4, fitting)
