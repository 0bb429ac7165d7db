"""What the host tells the paged attention kernels: parameter records, variants, grids; and how CTAs share the work."""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_kit import CUDA, require_mirrored
from xl_kit import MULTIPROCESSORS, PROBLEM

from cupymla import InputError, UnsupportedError, arch, raw_module
from cupymla.errors import shown
from cupymla.ops import registry
from cupymla.ops.xl_paged_attention import cuda, launches, plan
from cupymla.ops.xl_paged_attention.checks import FLOATS, FP8
from cupymla.ops.xl_paged_attention.paging import HEAD_SIZES, LAYOUTS
from cupymla.ops.xl_paged_attention.spec import NAME

FACTS = {"rows": 16, "tile": 16, "threads": 128, "merge_batch": 12}

RECORDS: list[tuple[str, str, type[ctypes.Structure]]] = [
    ("params.cuh", "Parameters", cuda.Parameters),
    ("relative_scores.cu", "RelativeParameters", launches.RelativeParameters),
    ("spread_bias.cu", "SpreadParameters", launches.SpreadParameters),
    ("rel_shift.cu", "ShiftParameters", launches.ShiftParameters),
    ("copy_blocks.cu", "CopyParameters", launches.CopyParameters),
    ("reshape_and_cache.cu", "ReshapeParameters", launches.ReshapeParameters),
]


@pytest.mark.parametrize(("file", "record", "mirrored"), RECORDS, ids=[row[1] for row in RECORDS])
def test_parameter_records_are_the_ones_that_kernels_read(
    file: str, record: str, mirrored: type[ctypes.Structure]
) -> None:
    require_mirrored(mirrored, f"xl_paged_attention/sm80/{file}", record)


# How CTAs small_part the work: as schedule.cuh and of the buffers in merge.cuh --------------------------------------


class Line:
    """Mirrors `Line` and `SegmentIterator`."""

    def __init__(self, tiles: list[int], units: int, ctas: int, large: int, more: int = 0) -> None:
        """`more`: tiles beside the fewest, one for each small_part, that make work long."""
        self.tiles, self.units = tiles, units
        self.total = sum(tiles) * units
        self.ctas, self.large = ctas, large
        self.small_parts = self.small_parts_before(ctas)
        if len(set(tiles)) <= 1 or large == ctas or self.total < self.small_parts + more:
            self.small_parts = self.ctas = min(large, self.total)
            self.large = 0

    def small_parts_before(self, cta: int) -> int:
        return cta + (plan._LARGE_PART - 1) * min(cta, self.large)

    def part(self, cta: int) -> int:
        if cta >= self.ctas:
            return self.total
        before = self.small_parts_before(cta)
        if self.total * self.small_parts <= 0xFFFFFFFF:
            return self.total * before // self.small_parts
        return self.total // self.small_parts * before + self.total % self.small_parts * before // self.small_parts

    def owner(self, place: int) -> int:
        small_part = int(place / self.total * self.small_parts)
        large = plan._LARGE_PART * self.large
        cta = small_part // plan._LARGE_PART if small_part < large else small_part - (plan._LARGE_PART - 1) * self.large
        cta = min(cta, self.ctas - 1)
        while self.part(cta) > place:
            cta -= 1
        while cta + 1 < self.ctas and self.part(cta + 1) <= place:
            cta += 1
        return cta

    def segments(self, cta: int) -> list[tuple[int, int, int, int, int]]:
        """(sequence, unit, first tile, end tile, tiles) of one CTA's part."""
        begin, end, place, found = self.part(cta), self.part(cta + 1), 0, []
        for seq, tiles in enumerate(self.tiles):
            for unit in range(self.units):
                low, high = max(begin, place), min(end, place + tiles)
                if low < high:
                    found.append((seq, unit, low - place, high - place, tiles))
                place += tiles
        return found


@given(
    tiles=st.lists(st.integers(0, 40), max_size=12), units=st.integers(1, 6),
    large=st.integers(1, 30), small=st.integers(0, 40), more=st.sampled_from([0, 100]),
)  # fmt: skip
def test_every_tile_is_worked_on_once_and_no_slot_is_written_twice(
    tiles: list[int], units: int, large: int, small: int, more: int
) -> None:
    ctas = large + small
    line = Line(tiles, units, ctas, large, more)
    taken: Counter[tuple[int, int, int]] = Counter()
    parts: dict[tuple[int, int], list[int]] = {}
    for cta in range(ctas):
        segments = line.segments(cta)
        slots = []
        for number, (seq, unit, first, end, whole) in enumerate(segments):
            taken.update((seq, unit, tile) for tile in range(first, end))
            if (first, end) != (0, whole):
                slots.append(0 if number == 0 else 1)
                assert number in (0, len(segments) - 1), "only the ends of a part are shared with other CTAs"
                parts.setdefault((seq, unit), []).append(cta)
        assert len(set(slots)) == len(slots)
    assert set(taken.values()) <= {1}
    assert sum(taken.values()) == line.total
    owners = [line.owner(place) for place in range(line.total)]
    assert all(line.part(cta) <= place < line.part(cta + 1) for place, cta in enumerate(owners))
    # The counter of a unit is that of its first CTA, so no CTA may begin two units that others end.
    firsts = [ctas_of[0] for ctas_of in parts.values()]
    assert len(set(firsts)) == len(firsts)
    # Every CTA from a unit's first to its last has a part of it: that is how many arrivals are waited for.
    assert all(ctas_of == list(range(ctas_of[0], ctas_of[-1] + 1)) for ctas_of in parts.values())


@given(
    num_seqs=st.integers(0, 300), group=st.integers(1, 40), kv_heads=st.integers(1, 16),
    max_blocks=st.integers(0, 70_000), multiprocessors=st.integers(1, 200), ctas_per_sm=st.integers(1, 4),
)  # fmt: skip
def test_grids_are_resident_at_once(
    num_seqs: int, group: int, kv_heads: int, max_blocks: int, multiprocessors: int, ctas_per_sm: int
) -> None:
    """More CTAs than fit would wait for each other's SMs; fewer than one could not write empty results."""
    problem = replace(
        PROBLEM, num_seqs=num_seqs, num_heads=group * kv_heads, num_kv_heads=kv_heads, max_blocks=max_blocks
    )
    work = plan.units(problem, FACTS)
    assert work.row_blocks * 16 >= group > (work.row_blocks - 1) * 16
    resident = multiprocessors * ctas_per_sm
    assert 1 <= plan.ctas(work, multiprocessors, ctas_per_sm) <= resident
    assigned = plan.assign_work(work, multiprocessors, {"ctas_per_sm": ctas_per_sm, "max_ctas": 682})
    number, large = assigned.ctas, assigned.fields["large_parts"]
    most = min(plan.ctas(work, multiprocessors, ctas_per_sm), 682)
    even = assigned.fields["even_parts"]
    assert large in (most, even)
    if even != most:
        # Fewer only of those that fill the GPU, and only to end parts where units end.
        assert most == resident and plan._IN_STEP * most <= even < most
        assert work.count % even == 0 or even % work.count == 0
    # No part of several small parts is empty.
    assert assigned.slots == 2 * number and assigned.fields["long_tiles"] >= plan._LARGE_PART * large + number - large
    # More than are resident only of long work, and not more than have counters.
    assert number == large or (large == resident and large < number <= 682)


def test_long_work_is_cut_unevenly() -> None:
    facts = {**FACTS, "ctas_per_sm": 2, "max_ctas": 682}
    long = plan.units(replace(PROBLEM, num_seqs=64, max_blocks=256), facts)
    far = replace(long, tiles=-(-plan._LONG_BYTES * 264 // (long.count * long.tile_bytes)))
    assigned = plan.assign_work(far, 132, facts)
    # Where the device finds lengths to be equal, 256 CTAs have two of the 512 units each.
    assert (assigned.ctas, assigned.fields["large_parts"], assigned.fields["even_parts"]) == (462, 264, 256)
    assert far.count * (far.tiles - 1) < assigned.fields["long_tiles"] <= far.count * far.tiles
    # With fewer units, or less for each CTA, merging the small parts costs more than waiting for slow SMs.
    assert plan.assign_work(replace(far, count=264, tiles=2 * far.tiles), 132, facts).ctas == 264
    assert plan.assign_work(replace(far, tiles=far.tiles // 2), 132, facts).ctas == 256
    alone = plan.units(replace(PROBLEM, num_seqs=1, num_heads=4, num_kv_heads=1, max_blocks=4096), facts)
    assigned = plan.assign_work(alone, 132, facts)
    assert assigned.ctas == assigned.fields["large_parts"]


@pytest.mark.parametrize(
    ("num_seqs", "parts"),
    [(32, 256), (33, 264), (30, 240), (29, 232), (24, 264), (37, 264)],
)
def test_parts_end_where_units_do_if_that_takes_few_ctas_away(num_seqs: int, parts: int) -> None:
    """With eight KV heads a sequence has eight units."""
    facts = {**FACTS, "ctas_per_sm": 2, "max_ctas": 682}
    work = plan.units(replace(PROBLEM, num_seqs=num_seqs, max_blocks=256), facts)
    assert work.count == 8 * num_seqs
    assigned = plan.assign_work(work, 132, facts)
    assert (assigned.ctas, assigned.fields["large_parts"]) == (parts, parts)


def test_large_work_takes_every_sm_and_small_work_is_not_cut_to_pieces() -> None:
    long = plan.units(replace(PROBLEM, num_seqs=32, max_blocks=256), FACTS)
    assert plan.ctas(long, 132, 2) == 264
    alone = plan.units(replace(PROBLEM, num_seqs=1, num_heads=4, num_kv_heads=1, max_blocks=32), FACTS)
    assert 8 <= plan.ctas(alone, 132, 2) <= 36
    # Two tiles for each SM: one CTA has both on their way.
    short = plan.units(replace(PROBLEM, num_seqs=1, num_heads=16, num_kv_heads=16, max_blocks=17), FACTS)
    assert short.count * short.tiles == 272 and plan.ctas(short, 132, 2) <= 132


@pytest.mark.parametrize(
    ("num_seqs", "num_heads", "num_kv_heads", "length"),
    [(1, 4, 1, 65536), (1, 4, 1, 8192), (1, 32, 8, 8192), (4, 16, 1, 32768), (1, 4, 1, 1 << 20), (4, 32, 8, 2048)],
)
def test_few_units_with_much_to_read_take_most_sms(
    num_seqs: int, num_heads: int, num_kv_heads: int, length: int
) -> None:
    """A CTA is taken to draw 45 to 50 KB/us: 4.4 TB/s take 88 CTAs, however few the units."""
    problem = replace(
        PROBLEM, num_seqs=num_seqs, num_heads=num_heads, num_kv_heads=num_kv_heads, max_blocks=length // 16
    )
    assert plan.ctas(plan.units(problem, FACTS), 132, 2) >= 88


@pytest.mark.parametrize(
    ("num_heads", "threads", "batch", "at_once"),
    [(32, 128, 12, 32), (32, 128, 6, 18), (32, 128, 4, 12), (32, 64, 12, 12), (40, 128, 12, 12)],
)
def test_few_vectors_are_put_together_in_one_step(num_heads: int, threads: int, batch: int, at_once: int) -> None:
    """Four rows of 128 channels are one vector for each of 128 threads; the rule is that of merge.cuh."""
    problem = replace(PROBLEM, num_heads=num_heads)
    work = plan.units(problem, {**FACTS, "threads": threads, "merge_batch": batch})
    assert work.at_once == at_once
    assert work.merging(at_once) < work.merging(at_once + 1)
    assert f"kGroup = {plan._MERGE_GROUP};" in (CUDA / "xl_paged_attention" / "sm80" / "merge.cuh").read_text()


# Variants -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "kv_layout", "block_size", "expected"),
    [
        ("float32", "vllm", 16, "plain"),
        ("float32", "NHD", 16, "plain"),
        ("bfloat16", "vllm", 16, "pages"),
        ("float16", "vllm", 48, "pages"),
        ("bfloat16", "vllm", 8, "plain"),
        ("bfloat16", "vllm", 100, "plain"),
        ("bfloat16", "vllm", 1, "rows"),
        ("bfloat16", "NHD", 3, "rows"),
        ("float16", "HND", 256, "rows"),
    ],
)
def test_engine_follows_the_cache(dtype: str, kv_layout: str, block_size: int, expected: str) -> None:
    assert plan.engine(dtype, kv_layout, block_size) == expected
    chosen = plan.variant(arch.named("sm_90a"), dtype=dtype, kv_layout=kv_layout, block_size=block_size)
    assert dict(chosen.defines)["CUPYMLA_ENGINE"] == plan.ENGINES[expected]


def test_variants_compiled_ahead_are_ones_that_a_plan_picks() -> None:
    """Each engine is among them, and none is a variant that no call would ask for."""
    layouts = {"pages": "vllm", "rows": "NHD", "plain": "vllm"}
    assert {row[3] for row in plan.AHEAD} == set(plan.ENGINES)
    for target in plan.TARGETS:
        offered = plan.sources(target)
        for (head_size, dtype, kv_dtype, name), source in zip(plan.AHEAD, offered, strict=False):
            problem = replace(PROBLEM, dtype=dtype, kv_dtype=kv_dtype, kv_layout=layouts[name], head_size=head_size)
            assert plan.plan(problem, arch.named(target)).source == source
        few = {source.defines for source in offered if source.entry == plan.CLUSTER_KERNEL}
        tensor_cores = {source.defines for source, row in zip(offered, plan.AHEAD, strict=False) if row[3] != "plain"}
        assert few == (tensor_cores if target in plan.CLUSTER_TARGETS else set())


def test_whatever_a_plan_picks_is_among_the_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else is, but related functions. The cluster split-KV variant is picked wherever there is one."""
    monkeypatch.setattr(plan, "_CLUSTER_GAIN", 1e9)
    chosen = set()
    for target, capability in (*((name, None) for name in plan.TARGETS), ("sm_80", (8, 6))):
        for head_size, dtype, layout in product(HEAD_SIZES, FLOATS, LAYOUTS):
            for kv_dtype, block_size in product((dtype, *FP8), (1, 3, 16)):
                problem = replace(
                    PROBLEM,
                    head_size=head_size,
                    dtype=dtype,
                    kv_dtype=kv_dtype,
                    kv_layout=layout,
                    block_size=block_size,
                )
                chosen.add(plan.plan(problem, arch.named(target), capability).source)
                chosen.add(plan.plan(problem, arch.named(target), capability, MULTIPROCESSORS).source)
    offered = plan.variants()
    assert len(set(offered)) == len(offered)
    assert set(plan.sources()) <= set(offered)
    assert {source for source in offered if source.entry in (NAME, plan.CLUSTER_KERNEL)} == chosen
    assert {source.arch for source in chosen if source.entry == plan.CLUSTER_KERNEL} == set(plan.CLUSTER_TARGETS)


def test_later_architectures_take_the_same_source() -> None:
    assert plan.plan(PROBLEM, arch.named("sm_100f")).source.arch == "sm_100f"


def test_every_target_that_a_gpu_is_given_is_one_that_is_listed() -> None:
    """A kernel that runs somewhere without a row in the support table is one that nobody has looked at."""
    listed = registry.named("xl_paged_attention").targets
    assert listed == plan.TARGETS
    # Of two targets for one GPU that of the larger preference is taken.
    given = {known.capability: known for known in sorted(arch.ARCHES, key=lambda known: known.preference)}
    assert {plan.plan(PROBLEM, known).source.arch for known in given.values()} == set(listed)


def test_older_architectures_are_named() -> None:
    older = replace(arch.named("sm_80"), name="sm_75", capability=(7, 5))
    with pytest.raises(UnsupportedError, match="sm_75"):
        plan.plan(PROBLEM, older)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        *[("head_size", value) for value in (48, "128", None, True, 10**5000)],
        *[("dtype", value) for value in ("float64", 16, None)],
        *[("kv_dtype", value) for value in ("float16", "float8_e4m3", 8)],
        *[("kv_layout", value) for value in ("NDH", 0)],
        *[("block_size", value) for value in (0, 257, "16", 1.0)],
    ],
    ids=shown,
)
def test_a_variant_that_does_not_exist_is_refused_by_name(word: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        raw_module("xl_paged_attention", arch="sm_90a", **{word: value})
    assert (caught.value.operator, caught.value.argument) == ("xl_paged_attention", word)
