"""Which kernel serves a call, and how many CTAs share the work. Pure: no array, no driver."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from ...arch import Arch
from ...build.source import KernelSource
from ...errors import InputError, UnsupportedError, shown
from ..work_assignment import WorkAssignment
from .checks import FLOATS, FP8, ITEMSIZE, MAX_COUNT
from .paging import HEAD_SIZES, LAYOUTS, MAX_BLOCK_SIZE
from .spec import NAME, Problem

TARGETS = ("sm_80", "sm_89", "sm_90a", "sm_100f")
"""The targets that kernels are listed for. One source serves all; it uses nothing that sm_80 lacks."""

ENGINES = {"plain": 0, "rows": 1, "pages": 2}
"""How keys and values are worked on: fp32 arithmetic on any cache, or tensor cores on tokens that are rows of
contiguous channels, or on the pages of a "vllm" cache."""

MAX_CONTEXT = MAX_COUNT
"""Keys of a sequence that the kernel counts."""

CLUSTER_TARGETS = ("sm_90a",)
"""The targets that have a cluster split-KV variant."""

CLUSTER_KERNEL = "xl_attention_cluster"
"""That kernel's name."""

CLUSTER_SIZE = 8
"""Its CTAs in a cluster (as `kCluster` in cuda/xl_paged_attention/sm90/config.cuh)."""

PAGE_TOKENS = 16
"""A "vllm" block is walked by the pages engine when this divides its size."""

QUERY_CODE = {"float32": 32, "float16": 16, "bfloat16": 0}
"""How the kernels' definitions name a dtype."""

CACHE_CODE = {"float8_e4m3fn": 43, "float8_e5m2": 52}
"""The same for the cache's; 0 stands for the query's."""

# Shared memory of an SM, in bytes, of GPUs that load a target's code and have less than the target has (CUDA C++
# Programming Guide, "Compute Capabilities").
_SMEM_PER_SM = {("sm_80", (8, 6)): 100 * 1024}

# What the model of `ctas` assumes, in bytes per microsecond. The first is an H200's read bandwidth, measured, rounded;
# the others are estimates: an SM that reads from L2 at 64 bytes per cycle; a CTA with 32 KB on their way, which take
# 0.7 us where nothing queues; then, in bytes, two tiles for each warp of a CTA, with which one CTA on each SM is
# enough; a CTA that merges parts alone; and, in microseconds, what a level of merging takes beside its bytes: leaving
# parts, counting arrivals, reading statistics; and what a CTA needs to go from a unit's end to the next unit's
# beginning.
_DEVICE_RATE = 4.4e6
_SM_RATE = 100e3
_CTA_RATE = 45e3
_CTA_BYTES = 64e3
_MERGE_RATE = 50e3
_MERGE_LEVEL = 1.5
_SEGMENT = 1.0

# SMs do not read equally fast. Where sequences differ in length, and units are more than CTAs, long work is cut
# unevenly: so many small parts for each large one, and so many tiles in the smallest part. Elsewhere parts end where
# units do, if that takes few CTAs away. Measured on an H200 on 2026-11-26 (cuda/xl_paged_attention/README.md): 1024
# units, with small parts and with equal ones, 275 and 294 us, 501 and 515 us with 4 and 8 MB for each resident CTA, 512
# units 159 and 150 us with 2 MB; up to 256 units 0 to 2% slower with small parts; of equal lengths, in step with units
# 116 us instead of 121, with 232 CTAs of 264.
_SMALL_PARTS = 0.75
_SMALL_TILES = 12
_LONG_BYTES = 3 << 20
_IN_STEP = 0.85
_LARGE_PART = 6  # `kLargePart` in cuda/xl_paged_attention/sm80/schedule.cuh

# Few units: clusters of CTAs for each of them, which put their parts together where the kernel for any work needs a
# counter and one or two levels of merging. What that saves, and what clusters cost that wait for others to end, in
# microseconds; and what reading costs more, as SMs do not read equally fast and each has its part. By what an H200 took
# for 29 problems with either kernel (2026-11-26, before two stages): cuda/xl_paged_attention/README.md.
_CLUSTER_GAIN = 5.0
_CLUSTER_WAVE = 6.0
_CLUSTER_READING = 1.05

_MERGE_GROUP = 12  # `kGroup` in cuda/xl_paged_attention/sm80/merge.cuh
_MERGE_LANES = 32  # a lane for each part that is put together at once

# Of the cluster split-KV variant: query heads of a unit and warps of a CTA, tokens of the smallest tile, the largest
# 16-bit head of which two CTAs fit on an SM, clusters that share a unit at most.
_CLUSTER_ROWS = 16
_CLUSTER_WARPS = 4
_CLUSTER_TILE = 16
_CLUSTER_HEAD = 128
_CLUSTER_MOST = 16
_MAX_GRID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Plan:
    """A kernel variant for one problem.

    Attributes:
        source: what to compile.
        clusters: of the cluster split-KV variant, how many share a unit; 0 for the kernel for any work.
    """

    source: KernelSource
    clusters: int = 0


def plan(
    problem: Problem, arch: Arch, capability: tuple[int, int] | None = None, multiprocessors: int | None = None
) -> Plan:
    """Choose the kernel. Raises UnsupportedError when the architecture has none.

    Args:
        problem: what to compute.
        arch: the target.
        capability: the compute capability of the GPU that will run it, by default the target's.
        multiprocessors: of that GPU; without it the kernel for any work is chosen.
    """
    words: dict[str, Any] = {
        "head_size": problem.head_size,
        "dtype": problem.dtype,
        "kv_dtype": problem.kv_dtype,
        "kv_layout": problem.kv_layout,
        "block_size": problem.block_size,
    }
    chosen = variant(arch, **words)
    serves = arch.name in CLUSTER_TARGETS and engine(problem.dtype, problem.kv_layout, problem.block_size) != "plain"
    clusters = useful_clusters(problem, multiprocessors) if serves and multiprocessors else 0
    if clusters:
        return Plan(variant(arch, **words, cluster=True), clusters)
    return Plan(_on_gpu(chosen, capability or arch.capability))


def useful_clusters(problem: Problem, multiprocessors: int) -> int:
    """How many clusters are to share each unit of a problem with few of them; 0 where CTAs had better take parts of the
    whole line.

    The lengths are on the device. A cluster's share of its own sequence can take as long as the longest sequence there
    can be, where CTAs that share a line are done when their number allows it, so with several sequences the line is
    taken to be empty.
    """
    units = problem.num_seqs * problem.num_kv_heads * -(-problem.num_heads // problem.num_kv_heads // _CLUSTER_ROWS)
    if not units or not problem.capacity or units * CLUSTER_SIZE > _MAX_GRID:
        return 0
    clusters = max(1, min(multiprocessors // (units * CLUSTER_SIZE), _useful(problem.capacity)))
    unit_bytes = 2 * problem.capacity * problem.head_size * ITEMSIZE[problem.kv_dtype]
    # Of its variants those of large 16-bit heads have room for one CTA on an SM (`kCtasPerSm` in sm90/config.cuh).
    resident = 1 if problem.head_size > _CLUSTER_HEAD and ITEMSIZE[problem.kv_dtype] > 1 else 2
    ctas_of_sm = -(-units * clusters * CLUSTER_SIZE // multiprocessors)
    share = ctas_of_sm * unit_bytes / (clusters * CLUSTER_SIZE)
    rate = min(min(ctas_of_sm, resident) * _CTA_RATE, _SM_RATE)
    reading = max(units * unit_bytes / _DEVICE_RATE, share / rate)
    waves = -(-ctas_of_sm // resident) - 1
    together = min(_DEVICE_RATE, multiprocessors * min(2 * _CTA_RATE, _SM_RATE))
    line = units * unit_bytes / together if problem.num_seqs == 1 else 0.0
    return clusters if _CLUSTER_READING * reading + _CLUSTER_WAVE * waves - line < _CLUSTER_GAIN else 0


def _on_gpu(source: KernelSource, capability: tuple[int, int]) -> KernelSource:
    """A variant for a GPU of this compute capability, which may have less shared memory than the target."""
    smem_per_sm = _SMEM_PER_SM.get((source.arch, capability))
    if smem_per_sm is None:
        return source
    return replace(source, defines=(*source.defines, ("CUPYMLA_SMEM_PER_SM", smem_per_sm)))


def engine(dtype: str, kv_layout: str, block_size: int) -> str:
    """Which engine serves a cache. A "vllm" cache with one token in a block has rows of contiguous channels."""
    if dtype == "float32":
        return "plain"
    if kv_layout != "vllm" or block_size == 1:
        return "rows"
    return "pages" if block_size % PAGE_TOKENS == 0 else "plain"


def variant(
    arch: Arch,
    *,
    head_size: int = 128,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    kv_layout: str = "vllm",
    block_size: int = 16,
    cluster: bool = False,
) -> KernelSource:
    """One kernel variant.

    Args:
        arch: the target.
        head_size: channels of a head.
        dtype: the query's, "float32", "float16" or "bfloat16".
        kv_dtype: the cache's, `dtype` (or None) or an fp8 dtype.
        kv_layout: "vllm", "NHD" or "HND".
        block_size: tokens of a block.
        cluster: the cluster split-KV variant; not for fp32 queries, nor for a "vllm" cache of other than 1 or multiples
            of 16 tokens in a block.

    Raises InputError, and UnsupportedError when the target has no kernel.
    """
    if arch.capability < (8, 0):
        raise UnsupportedError(NAME, f"a GPU of architecture {arch.name}", "sm_80 and later, or the CPU")
    for word, value, known in (
        ("head_size", head_size, HEAD_SIZES),
        ("dtype", dtype, FLOATS),
        ("kv_dtype", dtype if kv_dtype is None else kv_dtype, (dtype, *FP8)),
        ("kv_layout", kv_layout, LAYOUTS),
        ("block_size", block_size, range(1, MAX_BLOCK_SIZE + 1)),
    ):
        if type(value) not in (int, str) or value not in known:
            raise InputError(word, f"one of {', '.join(map(str, known))}", shown(value), NAME)
    chosen = engine(dtype, kv_layout, block_size)
    if cluster and (arch.name not in CLUSTER_TARGETS or chosen == "plain"):
        wanted = f"one of {', '.join(CLUSTER_TARGETS)}, 16-bit queries, and blocks of 1 or a multiple of 16 tokens"
        raise UnsupportedError(CLUSTER_KERNEL, f"{arch.name}, {dtype}, {kv_layout} blocks of {block_size}", wanted)
    return _source(arch.name, head_size, dtype, kv_dtype or dtype, chosen, cluster)


def _source(
    arch_name: str, head_size: int, dtype: str, kv_dtype: str, engine_name: str, cluster: bool = False
) -> KernelSource:
    defines = (
        ("CUPYMLA_HEAD_SIZE", head_size),
        ("CUPYMLA_QUERY", QUERY_CODE[dtype]),
        ("CUPYMLA_CACHE", CACHE_CODE.get(kv_dtype, 0)),
        ("CUPYMLA_ENGINE", ENGINES[engine_name]),
    )
    if cluster:
        return KernelSource(f"xl_paged_attention/sm90/{CLUSTER_KERNEL}.cu", CLUSTER_KERNEL, defines, arch_name)
    return KernelSource("xl_paged_attention/sm80/xl_paged_attention.cu", NAME, defines, arch_name)


def auxiliary(name: str, arch_name: str, **defines: int) -> KernelSource:
    """A kernel of a related function; `defines` by their lower-case names, such as query=16."""
    macros = tuple((f"CUPYMLA_{word.upper()}", value) for word, value in defines.items())
    return KernelSource(f"xl_paged_attention/sm80/{name}.cu", name, macros, arch_name)


AHEAD = (
    (64, "bfloat16", "bfloat16", "pages"),
    (128, "bfloat16", "bfloat16", "pages"),
    (128, "bfloat16", "float8_e4m3fn", "pages"),
    (128, "bfloat16", "bfloat16", "rows"),
    (256, "float16", "float16", "rows"),
    (128, "float32", "float32", "plain"),
)
"""Head size, dtype, kv_dtype and engine of the variants that are compiled ahead of use: each engine, each way of
reading a cache, the common sizes. The others (`variants`) are compiled when a call wants them, in one to four seconds
each."""


def sources(arch_name: str | None = None) -> tuple[KernelSource, ...]:
    """The kernel variants that are compiled ahead of use, of one target or of all."""
    targets = [name for name in TARGETS if arch_name in (None, name)]
    return tuple(source for target in targets for source in (*_attention(target), *_auxiliary(target)))


def _attention(target: str) -> Iterator[KernelSource]:
    for head_size, dtype, kv_dtype, engine_name in AHEAD:
        yield _source(target, head_size, dtype, kv_dtype, engine_name)
    for head_size, dtype, kv_dtype, engine_name in AHEAD if target in CLUSTER_TARGETS else ():
        if engine_name != "plain":
            yield _source(target, head_size, dtype, kv_dtype, engine_name, cluster=True)


def _auxiliary(target: str) -> Iterator[KernelSource]:
    yield auxiliary("relative_scores", target, head_size=128, query=QUERY_CODE["bfloat16"])
    yield auxiliary("spread_bias", target, query=QUERY_CODE["float32"])
    yield auxiliary("reshape_and_cache", target, query=QUERY_CODE["bfloat16"], cache=0)
    yield auxiliary("rel_shift", target, unit=2)
    yield auxiliary("copy_blocks", target, unit=16)


def variants(arch_name: str | None = None) -> tuple[KernelSource, ...]:
    """Every kernel variant that a call may want, of one target or of all: 240 to 420 for each."""
    targets = [name for name in TARGETS if arch_name in (None, name)]
    return tuple(source for target in targets for source in (*_every_attention(target), *_every_auxiliary(target)))


def _every_attention(target: str) -> Iterator[KernelSource]:
    lesser = [capability for name, capability in _SMEM_PER_SM if name == target]
    for head_size, dtype in product(HEAD_SIZES, FLOATS):
        engines = ("plain",) if dtype == "float32" else tuple(ENGINES)
        for kv_dtype, engine_name in product((dtype, *FP8), engines):
            source = _source(target, head_size, dtype, kv_dtype, engine_name)
            yield source
            if target in CLUSTER_TARGETS and engine_name != "plain":
                yield _source(target, head_size, dtype, kv_dtype, engine_name, cluster=True)
            yield from (_on_gpu(source, capability) for capability in lesser)


def _every_auxiliary(target: str) -> Iterator[KernelSource]:
    for code in QUERY_CODE.values():
        yield from (auxiliary("relative_scores", target, head_size=size, query=code) for size in HEAD_SIZES)
        yield auxiliary("spread_bias", target, query=code)
        yield from (
            auxiliary("reshape_and_cache", target, query=code, cache=cache) for cache in (0, *CACHE_CODE.values())
        )
    yield from (auxiliary("rel_shift", target, unit=size) for size in (2, 4))
    yield from (auxiliary("copy_blocks", target, unit=size) for size in (1, 2, 4, 8, 16))


@dataclass(frozen=True, slots=True)
class Units:
    """The units of work of a problem, as far as the host knows them.

    Attributes:
        count: sequences x KV heads x blocks of query heads.
        row_blocks: blocks of query heads that share a KV head.
        rows: query heads in a block, at most.
        tiles: tiles of keys of the longest sequence there can be.
        tile_bytes: keys and values of one tile.
        part_bytes: what a CTA leaves behind of a unit that it shares with others.
        at_once: the most parts of a unit that are put together in one step.
    """

    count: int
    row_blocks: int
    rows: int
    tiles: int
    tile_bytes: int
    part_bytes: int
    at_once: int

    def merging(self, parts: float) -> float:
        """Microseconds that putting `parts` parts of a unit together takes, in one step or in groups."""
        if parts <= self.at_once:
            return _MERGE_LEVEL + parts * self.part_bytes / _MERGE_RATE
        group = max(_MERGE_GROUP, math.ceil(math.sqrt(parts)))
        return 2 * _MERGE_LEVEL + (group + math.ceil(parts / group)) * self.part_bytes / _MERGE_RATE


def units(problem: Problem, facts: Mapping[str, int]) -> Units:
    """The units of a problem for a kernel of those launch facts."""
    heads = problem.num_heads // problem.num_kv_heads
    head_bytes = problem.head_size * ITEMSIZE[problem.kv_dtype]
    return _units(problem.num_seqs, problem.num_kv_heads, heads, problem.capacity, problem.head_size, head_bytes, facts)


def _units(
    seqs: int, kv_heads: int, group: int, capacity: int, head_size: int, head_bytes: int, facts: Mapping[str, int]
) -> Units:
    """The same; `group` query heads read a KV head, `head_bytes` are those of one key in the cache."""
    rows, tile = facts["rows"], facts["tile"]
    row_blocks = -(-group // rows)
    used = min(rows, group)
    one_vector_each = used * head_size // 4 <= facts["threads"]
    at_once = 3 * facts.get("merge_batch", 0)  # the cluster split-KV variant merges otherwise
    return Units(
        count=seqs * kv_heads * row_blocks,
        row_blocks=row_blocks,
        rows=used,
        tiles=-(-capacity // tile),
        tile_bytes=2 * tile * head_bytes,
        part_bytes=4 * used * (head_size + 2),
        at_once=min(max(_MERGE_GROUP, at_once), _MERGE_LANES) if one_vector_each else _MERGE_GROUP,
    )


def raw_work_assignment(
    source: KernelSource,
    facts: Mapping[str, int],
    multiprocessors: int,
    *,
    num_seqs: int,
    num_heads: int,
    num_kv_heads: int,
    capacity: int,
) -> WorkAssignment:
    """The work assignment for a launch on its own, whose `partials` have room for twice as many times
    `facts["buffer_bytes"]` as there are CTAs, and whose `arrivals` are `facts["arrivals_bytes"]` of zeros before the
    first launch that uses them.

    Args:
        source: the variant.
        facts: its launch facts.
        multiprocessors: of the device.
        num_seqs: sequences.
        num_heads: query heads.
        num_kv_heads: heads of the cache, of which num_heads is a multiple.
        capacity: the most keys that a sequence can have.

    Raises InputError.
    """
    if not num_kv_heads or not num_heads or num_heads % num_kv_heads:
        raise InputError("num_heads", f"a multiple of num_kv_heads {num_kv_heads}", shown(num_heads), NAME)
    if capacity > MAX_CONTEXT:
        raise InputError("capacity", f"up to {MAX_CONTEXT}", shown(capacity), NAME)
    defines = dict(source.defines)
    head_size, query = int(defines["CUPYMLA_HEAD_SIZE"]), defines["CUPYMLA_QUERY"]
    item = 1 if defines["CUPYMLA_CACHE"] else 4 if query == QUERY_CODE["float32"] else 2
    group = num_heads // num_kv_heads
    if source.entry == CLUSTER_KERNEL:
        row_blocks = -(-group // facts["rows"])
        units = max(1, num_seqs * num_kv_heads * row_blocks)
        given = assign_clusters(units, _useful(capacity), multiprocessors // CLUSTER_SIZE, facts)
        fields = {"group": group, "row_blocks": row_blocks, "capacity": capacity, **given.fields}
        return WorkAssignment(given.ctas if num_seqs else 0, fields)
    work = _units(num_seqs, num_kv_heads, group, capacity, head_size, head_size * item, facts)
    given = assign_work(work, multiprocessors, facts)
    return WorkAssignment(
        given.ctas, {"group": group, "row_blocks": work.row_blocks, "capacity": capacity, **given.fields}
    )


def _useful(capacity: int) -> int:
    """Clusters of a unit that find a tile for each of their warps, or as many as may share one."""
    return min(max(1, -(-capacity // (CLUSTER_SIZE * _CLUSTER_WARPS * _CLUSTER_TILE))), _CLUSTER_MOST)


class Assignment(NamedTuple):
    """The launch of one problem.

    Attributes:
        ctas: of the grid.
        fields: what the parameter record has of it. `large_parts`: CTAs with a large part, or those of a unit where
            units are few. `even_parts`: CTAs that take part where all sequences have as many tiles. `long_tiles`: tiles
            that make work long enough for CTAs with small parts.
        slots: how many parts CTAs may leave behind.
    """

    ctas: int
    fields: dict[str, int]
    slots: int


def assign_work(work: Units, multiprocessors: int, facts: Mapping[str, int]) -> Assignment:
    """The launch of the kernel for any work.

    The first CTAs take large parts, as many of them as `ctas` says. Where they fill the GPU, units are more than they,
    and the work may be long, others follow, which take small parts on SMs that are done early. Elsewhere there are as
    many as let parts end where units do, if that takes few away: of equal lengths, which only the device knows.
    """
    large = min(ctas(work, multiprocessors, facts["ctas_per_sm"]), facts["max_ctas"])
    small = min(int(_SMALL_PARTS * large), facts["max_ctas"] - large)
    is_full = large == multiprocessors * facts["ctas_per_sm"]
    shares = _LARGE_PART * large + small
    long_tiles = max(_SMALL_TILES * shares, shares, -(-_LONG_BYTES * large // max(work.tile_bytes, 1)))
    even = _in_step(large, work.count) if is_full else large
    if is_full and work.count > large and work.count * work.tiles >= long_tiles:
        number = large + small
    else:
        # Fewer CTAs, rather than some that leave at once: the others lie on SMs more evenly.
        number = large = even
    return Assignment(number, {"large_parts": large, "even_parts": even, "long_tiles": long_tiles}, 2 * number)


def assign_clusters(units: int, clusters: int, running: int, facts: Mapping[str, int]) -> Assignment:
    """The launch of the cluster split-KV variant.

    Args:
        units: how many there are.
        clusters: that would share a unit.
        running: clusters that run at once, as the driver has it: there is nothing in more of them.
        facts: the kernel's.
    """
    shared = max(1, min(clusters, running // units, facts["most_clusters"]))
    if units * CLUSTER_SIZE > facts["shared_ctas"]:
        shared = 1
    ctas = units * shared * CLUSTER_SIZE
    return Assignment(ctas, {"large_parts": shared * CLUSTER_SIZE}, ctas if shared > 1 else 0)


def _in_step(ctas: int, units: int) -> int:
    """That many CTAs, or a few less, so that each has as many units, or each unit as many CTAs."""
    least = math.ceil(_IN_STEP * ctas)
    if units < ctas:
        fitting = ctas - ctas % max(units, 1)
        return fitting if fitting >= least else ctas
    return next((number for number in range(ctas, least - 1, -1) if units % number == 0), ctas)


def ctas(work: Units, multiprocessors: int, ctas_per_sm: int) -> int:
    """How many CTAs with large parts to launch.

    As many as are resident at once, or fewer where merging their parts would take longer than reading keys and values
    with fewer of them.

    The lengths are on the device; this takes every sequence to be as long as its block table.
    """
    resident = multiprocessors * ctas_per_sm
    tiles = work.count * work.tiles
    if tiles == 0:
        return min(resident, max(work.count, 1))

    # Where one CTA on each SM has two tiles for each warp at most, a second one leaves more parts to be merged and
    # brings hardly any of them sooner. Nor does anything then hide merging, or the way from unit to unit of CTAs whose
    # parts do not end where units do.
    is_short = work.count <= multiprocessors and tiles * work.tile_bytes <= multiprocessors * _CTA_BYTES

    def microseconds(number: int) -> float:
        rate = min(_CTA_RATE, _SM_RATE / -(-number // multiprocessors))
        reading = max(tiles * work.tile_bytes / _DEVICE_RATE, -(-tiles // number) * work.tile_bytes / rate)
        parts = min(number, tiles) / work.count
        crossing = _SEGMENT if is_short and parts > 1 and number % work.count else 0.0
        return reading + crossing + (work.merging(parts) if parts > (1 if is_short else 2) else 0.0)

    most = 1 if is_short else ctas_per_sm
    part_of_sms = {max(1, multiprocessors * eighths // 8) for eighths in range(1, 8)}
    candidates = part_of_sms | {multiprocessors * per_sm for per_sm in range(1, most + 1)}
    candidates |= {number - number % work.count for number in candidates if number > work.count}
    times = {number: microseconds(number) for number in candidates}
    # Where the model sees no difference, more copies in flight are what evens out its errors.
    return max(number for number, time in times.items() if time <= 1.01 * min(times.values()))
