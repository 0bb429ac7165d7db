"""The kernel of xl_paged_attention for few units: when it is chosen, how its clusters share units, what they leave."""

from __future__ import annotations

import ctypes
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_kit import CUDA
from xl_kit import MULTIPROCESSORS, PROBLEM, SHARED_CLUSTERS, SHARED_UNITS, named, shared, workspaces

from cupymla import UnsupportedError, arch, build
from cupymla.build import KernelSource
from cupymla.launch import Geometry, check
from cupymla.ops.xl_paged_attention import cases, cuda, plan, xl_paged_attention
from cupymla.ops.xl_paged_attention.spec import NAME
from cupymla.testing import compare
from cupymla.testing.operators import as_tuple
from cupymla_lab.emulated import Emulated, emulated
from cupymla_lab.subjects import Subject

HOPPER = arch.named("sm_90a")
FACTS = {"rows": 16, "tile": 16, "most_clusters": 16, "shared_ctas": 96}
SHARED_CTAS = SHARED_UNITS * SHARED_CLUSTERS * plan.CLUSTER_SIZE
ALONE = replace(PROBLEM, num_seqs=1, num_heads=4, num_kv_heads=1, max_blocks=512)  # one unit of 8192 keys


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel runs wherever it can."""
    monkeypatch.setattr(plan, "_CLUSTER_GAIN", 1e9)


# When ----------------------------------------------------------------------------------------------------------------


def test_it_is_for_few_units() -> None:
    chosen = plan.plan(ALONE, HOPPER, multiprocessors=MULTIPROCESSORS)
    assert chosen.source.entry == plan.CLUSTER_KERNEL and chosen.clusters == 16
    many = replace(PROBLEM, num_seqs=32, max_blocks=256)
    for problem, multiprocessors in ((many, MULTIPROCESSORS), (ALONE, None)):
        kept = plan.plan(problem, HOPPER, multiprocessors=multiprocessors)
        assert kept.source.entry == NAME and kept.clusters == 0
    # Where a sequence may be long, and need not be, those that share a line are done sooner.
    ragged = replace(ALONE, num_seqs=8, max_blocks=1 << 14)
    assert plan.plan(ragged, HOPPER, multiprocessors=MULTIPROCESSORS).source.entry == NAME


def test_clusters_that_wait_for_others_count() -> None:
    """Of large 16-bit heads one CTA fits on an SM: what does not run at once comes later."""
    large = replace(PROBLEM, num_seqs=3, num_heads=16, num_kv_heads=8, head_size=256, max_blocks=32)
    assert plan.useful_clusters(large, MULTIPROCESSORS) == 0
    assert plan.useful_clusters(replace(large, num_seqs=2), MULTIPROCESSORS) == 1
    assert plan.useful_clusters(replace(large, head_size=128), MULTIPROCESSORS) == 1


@pytest.mark.compile
def test_where_no_cluster_fits_the_other_kernel_runs(forced: None) -> None:
    """As on a part of a GPU."""
    with emulated("sm_90a", 7) as machine:
        compare.require(machine.check(NAME, named("gqa16-1x64_b1_c3000_dense_clusters")))
        assert set(machine.launched) == {NAME}


@pytest.mark.parametrize(
    ("target", "changes"),
    [
        ("sm_90a", {"dtype": "float32", "kv_dtype": "float32"}),
        ("sm_90a", {"dtype": "float32", "kv_dtype": "float8_e4m3fn", "kv_layout": "NHD"}),
        ("sm_90a", {"block_size": 8}),
        ("sm_80", {}),
        ("sm_89", {}),
        ("sm_100f", {}),
    ],
)
@pytest.mark.usefixtures("forced")
def test_what_it_does_not_serve_the_other_kernel_does(target: str, changes: dict[str, Any]) -> None:
    problem = replace(ALONE, **changes)
    chosen = plan.plan(problem, arch.named(target), multiprocessors=MULTIPROCESSORS)
    assert chosen.source.entry == NAME and chosen.clusters == 0
    # Nothing else keeps it from serving this.
    assert plan.plan(ALONE, HOPPER, multiprocessors=MULTIPROCESSORS).source.entry == plan.CLUSTER_KERNEL
    words = {name: getattr(problem, name) for name in ("dtype", "kv_dtype", "kv_layout", "block_size")}
    with pytest.raises(UnsupportedError) as caught:
        plan.variant(arch.named(target), **words, cluster=True)
    message = str(caught.value)
    assert f"{target}, {problem.dtype}, {problem.kv_layout} blocks of {problem.block_size}" in message
    assert "sm_90a, 16-bit queries, and blocks of 1 or a multiple of 16 tokens" in message
    assert plan.CLUSTER_KERNEL in message


# How units are shared ------------------------------------------------------------------------------------------------


def tiles_of(tiles: int, ctas: int, cta: int, warp: int) -> range:
    """What a warp takes of a unit's tiles: as `take_tiles` and `Feeder` in cluster_split.cuh."""
    each, more = divmod(tiles, ctas)
    first = cta * each + min(cta, more)
    return range(first + warp, first + each + (cta < more), plan._CLUSTER_WARPS)


@given(tiles=st.integers(0, 3000), clusters=st.integers(1, plan._CLUSTER_MOST))
def test_every_tile_is_taken_by_one_warp(tiles: int, clusters: int) -> None:
    ctas = clusters * plan.CLUSTER_SIZE
    parts = [[tiles_of(tiles, ctas, cta, warp) for warp in range(plan._CLUSTER_WARPS)] for cta in range(ctas)]
    taken = Counter(tile for part in parts for own in part for tile in own)
    assert taken == Counter(range(tiles))
    sizes = [sum(map(len, part)) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@given(
    units=st.integers(1, 60), clusters=st.integers(1, 40), running=st.integers(0, 80),
    most=st.integers(1, plan._CLUSTER_MOST), shared_ctas=st.sampled_from([8, 96, 200]),
)  # fmt: skip
def test_a_grid_is_of_whole_clusters_that_run_at_once(
    units: int, clusters: int, running: int, most: int, shared_ctas: int
) -> None:
    assignment = plan.assign_clusters(units, clusters, running, {"most_clusters": most, "shared_ctas": shared_ctas})
    of_unit, rest = divmod(assignment.fields["large_parts"], plan.CLUSTER_SIZE)
    assert rest == 0 and assignment.ctas == units * assignment.fields["large_parts"]
    assert 1 <= of_unit <= min(clusters, most)
    assert assignment.slots == (assignment.ctas if of_unit > 1 else 0)
    if of_unit > 1:
        assert units * of_unit <= running, "others would begin when these have ended"
        assert units * plan.CLUSTER_SIZE <= shared_ctas, "more than there are counters for"
    elif units * plan.CLUSTER_SIZE <= shared_ctas:
        assert clusters == 1 or most == 1 or running < 2 * units, "room for another cluster"


@given(
    num_seqs=st.integers(0, 10**6), group=st.integers(1, 40), kv_heads=st.integers(1, 16),
    max_blocks=st.integers(0, 70_000), multiprocessors=st.integers(1, 200),
    gain=st.sampled_from([-math.inf, 5.0, math.inf]),
)  # fmt: skip
def test_a_plan_asks_for_clusters_that_may_run(
    num_seqs: int, group: int, kv_heads: int, max_blocks: int, multiprocessors: int, gain: float
) -> None:
    sizes: dict[str, Any] = {
        "num_seqs": num_seqs,
        "num_heads": group * kv_heads,
        "num_kv_heads": kv_heads,
        "max_blocks": max_blocks,
    }
    units = num_seqs * kv_heads * -(-group // 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "_CLUSTER_GAIN", gain)
        clusters = plan.useful_clusters(replace(PROBLEM, **sizes), multiprocessors)
    assert 0 <= clusters <= plan._CLUSTER_MOST
    if clusters > 1:
        assert units * clusters * plan.CLUSTER_SIZE <= multiprocessors
        assert max_blocks * 16 > 16 * plan.CLUSTER_SIZE * plan._CLUSTER_WARPS * (clusters - 1), (
            "CTAs without a tile each"
        )
    if clusters:
        grid = plan.assign_clusters(units, clusters, multiprocessors // plan.CLUSTER_SIZE, FACTS).ctas
        check(Geometry((grid, 1, 1), 128, 0, plan.CLUSTER_SIZE))
    if gain != 5.0:
        assert bool(clusters) == (gain > 0 and units > 0 and max_blocks > 0)


@pytest.mark.parametrize(("changes", "clusters"), [({"num_seqs": 12}, 1), ({"num_seqs": 3}, 5), ({}, 16)])
@pytest.mark.usefixtures("forced")
def test_clusters_of_some_problems(changes: dict[str, Any], clusters: int) -> None:
    assert plan.useful_clusters(replace(ALONE, **changes), MULTIPROCESSORS) == clusters
    # A GPU of any number of SMs has counters for so many units.
    units = changes.get("num_seqs", 1)
    assert plan.assign_clusters(13 * units, 16, 10**6, FACTS).fields["large_parts"] == plan.CLUSTER_SIZE
    assert plan.assign_clusters(units, 16, 10**6, FACTS).fields["large_parts"] == 16 * plan.CLUSTER_SIZE


@pytest.mark.parametrize(
    ("sizes", "tile", "multiprocessors", "grid", "of_unit"),
    [
        ((1, 4, 1, 8192), 16, 132, 128, 128),
        ((1, 4, 1, 8192), 32, 132, 128, 128),
        ((1, 4, 1, 8192), 16, 7, 8, 8),
        ((5, 4, 1, 8192), 16, 132, 120, 24),
        ((1, 35, 1, 600), 16, 132, 48, 16),
        ((32, 32, 8, 4096), 16, 132, 2048, 8),
        ((1, 4, 1, 0), 16, 132, 8, 8),
        ((0, 4, 1, 8192), 16, 132, 0, 128),
    ],
)
def test_a_launch_on_its_own(
    sizes: tuple[int, int, int, int], tile: int, multiprocessors: int, grid: int, of_unit: int
) -> None:
    num_seqs, num_heads, num_kv_heads, capacity = sizes
    assigned = plan.raw_work_assignment(
        plan.variant(HOPPER, cluster=True), {**FACTS, "tile": tile}, multiprocessors,
        num_seqs=num_seqs, num_heads=num_heads, num_kv_heads=num_kv_heads, capacity=capacity,
    )  # fmt: skip
    group = num_heads // num_kv_heads
    row_blocks = -(-group // 16)
    assert assigned.ctas == grid
    assert assigned.fields == {"group": group, "row_blocks": row_blocks, "capacity": capacity, "large_parts": of_unit}
    if num_seqs:
        assert grid == of_unit * num_seqs * num_kv_heads * row_blocks


def test_mirrored_constants_agree() -> None:
    folder = CUDA / "xl_paged_attention" / "sm90"
    for name, file, value in (
        ("kCluster", "config.cuh", plan.CLUSTER_SIZE),
        ("kMostClusters", "join.cuh", plan._CLUSTER_MOST),
        ("kSharedCtas", "join.cuh", FACTS["shared_ctas"]),
    ):
        assert re.findall(rf"constexpr \w+ {name} = (\d+);", (folder / file).read_text()) == [str(value)]


@pytest.mark.compile
@pytest.mark.parametrize(
    "source",
    [source for source in plan.sources() if source.entry == plan.CLUSTER_KERNEL],
    ids=lambda source: str(source.defines),
)
def test_a_kernel_says_what_the_plan_takes_for_granted(source: KernelSource) -> None:
    facts = build.cubin(source).facts
    assert facts["arrivals_bytes"] <= cuda._ARRIVALS_BYTES
    assert facts["cluster"] == plan.CLUSTER_SIZE and facts["most_clusters"] == plan._CLUSTER_MOST
    assert facts["rows"] == plan._CLUSTER_ROWS and facts["tile"] >= plan._CLUSTER_TILE
    assert facts["threads"] == 32 * plan._CLUSTER_WARPS and facts["shared_ctas"] == FACTS["shared_ctas"]


# In the interpreter --------------------------------------------------------------------------------------------------


class Traffic:
    """What kernels store in ranges of memory, in order, and how often they load each of its bytes."""

    def __init__(self, machine: Emulated, *ranges: tuple[int, int]) -> None:
        self.loads: list[tuple[int, int]] = []
        self.stores: list[tuple[int, int]] = []
        self._stored: int | None = None
        for base, size in ranges:
            machine.watch_memory(base, size, self._look)

    def _look(self, address: int, size: int, loads: bool, stores: bool) -> None:
        self.settle()
        if loads:
            self.loads.append((address, size))
        if stores:
            self._stored = address

    def settle(self) -> None:
        """Read what the last store has left, which is looked at before it happens."""
        if self._stored is not None:
            self.stores.append((self._stored, ctypes.c_uint32.from_address(self._stored).value))
        self._stored = None

    def reads(self, array: Any) -> Any:
        """For each byte of a contiguous array, by its first axis, how often it was loaded."""
        size = array.host.nbytes
        counts = np.zeros(size, np.int64)
        for address, width in self.loads:
            if array.data.ptr <= address < array.data.ptr + size:
                counts[address - array.data.ptr : address - array.data.ptr + width] += 1
        return counts.reshape(len(array.host), -1)

    def stored(self, begin: int, size_bytes: int) -> list[tuple[int, int]]:
        """(offset, first word) of each store there."""
        self.settle()
        return [(at - begin, number) for at, number in self.stores if begin <= at < begin + size_bytes]


def outputs_of(outputs: tuple[Any, ...]) -> Any:
    """Outputs as NumPy arrays."""
    return tuple(output.get() for output in outputs)


def counters(workspace: cuda.Workspace, facts: Mapping[str, int]) -> tuple[int, int]:
    """Where those of the cluster split-KV variant lie, behind those of the other: address and size in bytes."""
    size = 4 * FACTS["shared_ctas"] * plan._CLUSTER_WARPS
    return workspace.arrivals + facts["arrivals_bytes"] - size, size


@pytest.mark.compile
@pytest.mark.usefixtures("forced")
def test_the_same_bits_and_counters_at_zero_after_each_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever cluster is the last of a unit's; and nothing that a launch finds in its memory shows."""
    made = workspaces(monkeypatch)
    case = shared()
    subject = Subject(NAME)
    inputs = cases.inputs(case, 0)
    found: list[tuple[bytes, ...]] = []
    orders: list[tuple[int, ...]] = []
    outputs: tuple[Any, ...] = ()
    with emulated(multiprocessors=MULTIPROCESSORS) as machine:
        run = machine.call(xl_paged_attention.prepare, **machine.arguments(inputs))
        (workspace,) = made
        at, size = counters(workspace, machine.kernels[0].facts)
        traffic = Traffic(machine, (at, size), (workspace.partials, workspace.size_bytes))
        for seed in (0, 11, 12):
            if outputs:
                # What was written once may be read again: now all of it is NaN.
                ctypes.memset(workspace.partials, 0xFF, workspace.size_bytes)
                for output in outputs:
                    output.host.view(np.uint8)[...] = 0xFF
            machine.seed = seed
            traffic.stores.clear()
            outputs = as_tuple(machine.call(run))
            found.append(tuple(output.get().tobytes() for output in outputs))
            # A counter of each warp, counted up by each cluster but the last, which leaves zero.
            of_counter: dict[int, list[int]] = {}
            for offset, number in traffic.stored(at, size):
                of_counter.setdefault(offset, []).append(number)
            assert sorted(of_counter) == [4 * index for index in range(SHARED_UNITS * plan.CLUSTER_SIZE * 4)]
            assert all(numbers == [1, 2, 0] for numbers in of_counter.values())
            assert not any(ctypes.string_at(workspace.arrivals, cuda._ARRIVALS_BYTES))
            left = traffic.stored(workspace.partials, workspace.size_bytes)
            orders.append(tuple(dict.fromkeys(offset // (workspace.size_bytes // SHARED_CTAS) for offset, _ in left)))
            assert sorted(orders[-1]) == list(range(SHARED_CTAS))
        assert machine.launched == [plan.CLUSTER_KERNEL] * 3
        assert {geometry.grid for geometry in machine.launches} == {(SHARED_CTAS, 1, 1)}
        compare.require(subject.reports(inputs, subject.named(outputs_of(outputs))))
    assert len(set(found)) == 1
    assert len(set(orders)) == 3, "CTAs left their parts in the same order"


@pytest.mark.compile
@pytest.mark.parametrize("keys", [30, 1])
@pytest.mark.usefixtures("forced")
def test_most_ctas_without_a_tile(keys: int) -> None:
    """Where the table has room for more, whole clusters have nothing to add."""
    with emulated(multiprocessors=MULTIPROCESSORS) as machine:
        compare.require(machine.check(NAME, shared(keys)))
        assert machine.launched == [plan.CLUSTER_KERNEL] and machine.launches[0].grid == (SHARED_CTAS, 1, 1)


@pytest.mark.compile
@pytest.mark.parametrize(("kv_layout", "head_size"), [("vllm", 96), ("NHD", 64)])
@pytest.mark.usefixtures("forced")
def test_each_key_is_read_once(kv_layout: str, head_size: int) -> None:
    """By one of the CTAs that share a unit; a unit's second block of query heads reads them again."""
    case = shared(784, kv_layout, head_size)  # full blocks: a page is read as a whole
    with emulated(multiprocessors=MULTIPROCESSORS) as machine:
        arguments = machine.arguments(cases.inputs(case, 0))
        caches = [arguments[name] for name in ("k_cache", "v_cache")]
        traffic = Traffic(machine, *((cache.data.ptr, cache.host.nbytes) for cache in caches))
        machine.call(xl_paged_attention, **arguments)
        assert machine.launched == [plan.CLUSTER_KERNEL]
    used = arguments["block_tables"].host[0, : 784 // 16]
    for name in ("k_cache", "v_cache"):
        reads = traffic.reads(arguments[name])
        assert (reads[used] == SHARED_UNITS).all()
        assert not np.delete(reads, used, axis=0).any()


@pytest.mark.compile
def test_both_kernels_take_turns_in_one_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    made = workspaces(monkeypatch)
    chosen = {plan.CLUSTER_KERNEL: (shared(60), 1e9), NAME: (named("gqa4-2x64_b4_c0-90_rel24_bfloat16_NHD_zero"), -1e9)}
    subject = Subject(NAME)
    with emulated(multiprocessors=MULTIPROCESSORS) as machine:
        inputs = {name: cases.inputs(case, 0) for name, (case, _) in chosen.items()}
        arguments = {name: machine.arguments(given) for name, given in inputs.items()}
        results: dict[str, list[tuple[bytes, ...]]] = {name: [] for name in chosen}

        def run(name: str) -> None:
            monkeypatch.setattr(plan, "_CLUSTER_GAIN", chosen[name][1])
            found = outputs_of(as_tuple(xl_paged_attention(**arguments[name])))
            compare.require(subject.reports(inputs[name], subject.named(found)))
            results[name].append(tuple(array.tobytes() for array in found))

        def calls() -> None:
            # The first calls make the workspace that has room for both.
            for name in chosen:
                run(name)
            before = len(made)
            for name in (NAME, plan.CLUSTER_KERNEL):
                run(name)
            assert len(made) == before

        machine.call(calls)
        assert machine.launched == [plan.CLUSTER_KERNEL, NAME, NAME, plan.CLUSTER_KERNEL]
    assert all(len(set(each)) == 1 for each in results.values())
