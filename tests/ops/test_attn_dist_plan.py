"""What the host tells the kernel: the parameter record, and how queries and their entries are assigned to CTAs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_kit import MLA, queries_of, require_mirrored

from cupymla import InputError, UnsupportedError, arch, raw_module
from cupymla.build.source import KernelSource
from cupymla.errors import shown
from cupymla.ops.attn_dist import plan, records
from cupymla.ops.attn_dist.spec import Options, Problem


def problem(normalize: str | None = None, **sizes: int) -> Problem:
    return replace(MLA, options=Options(normalize=normalize), **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("source", plan.sources(), ids=str)
def test_parameter_record_is_the_one_that_the_kernel_reads(source: KernelSource) -> None:
    require_mirrored(records.record(source), f"{Path(source.path).parent}/params.cuh")


def covered(assigned: plan.Assignment, row_blocks: int) -> list[tuple[int, int]]:
    """(query, block) of each CTA in turn; as `TileIterator` in tile_iterator.cuh."""
    places = []
    for cta in range(assigned.ctas):
        index, part = divmod(cta, assigned.slices)
        blocks = range(part * assigned.slice_blocks, min((part + 1) * assigned.slice_blocks, row_blocks))
        assert blocks, "a CTA without work"
        places += [(query, block) for query in queries_of(assigned, index) for block in blocks]
    return places


@given(
    tokens=st.integers(0, 1000),
    topk=st.integers(1, 3000),
    multiprocessors=st.integers(1, 200),
    normalize=st.sampled_from([None, "l1"]),
)
def test_every_block_of_every_query_is_assigned_once(
    tokens: int, topk: int, multiprocessors: int, normalize: str | None
) -> None:
    assigned = plan.assign_at_once(tokens, topk, normalize is not None, 64, multiprocessors)
    row_blocks = -(-topk // 64)
    assert sorted(covered(assigned, row_blocks)) == [(t, b) for t in range(tokens) for b in range(row_blocks)]
    if normalize:
        assert assigned.slices == 1
    if assigned.slices > 1:
        assert assigned.ctas <= multiprocessors


def covered_in_turn(assigned: plan.Assignment, cluster: int, tokens: int, row_blocks: int) -> list[tuple[int, int]]:
    """(query, block) of each cluster in turn; as `Planner` in sm100/planner.cuh."""
    places, clusters = [], assigned.ctas // cluster
    for first in range(clusters):
        items = range(first, tokens * assigned.slices, clusters)
        assert items, "a cluster without work"
        for token, part in (divmod(item, assigned.slices) for item in items):
            blocks = range(part * assigned.slice_blocks, min((part + 1) * assigned.slice_blocks, row_blocks))
            assert blocks, "a slice without blocks"
            places += [(token, b) for b in blocks]
    return places


@given(
    tokens=st.integers(0, 1000),
    topk=st.integers(1, 3000),
    multiprocessors=st.integers(1, 200),
    cluster=st.sampled_from([1, 2]),
    normalize=st.sampled_from([None, "l1"]),
)
def test_every_block_is_assigned_once_in_turn(
    tokens: int, topk: int, multiprocessors: int, cluster: int, normalize: str | None
) -> None:
    tile_keys = 128 * cluster
    assigned = plan.assign_in_turn(tokens, topk, normalize is not None, tile_keys, multiprocessors, cluster)
    row_blocks = -(-topk // tile_keys)
    found = covered_in_turn(assigned, cluster, tokens, row_blocks)
    assert sorted(found) == [(t, b) for t in range(tokens) for b in range(row_blocks)]
    assert assigned.ctas % cluster == 0 and assigned.ctas <= max(multiprocessors, cluster)
    if normalize:
        assert assigned.slices == 1


def test_one_query_keeps_many_multiprocessors_busy() -> None:
    assert plan.assign_at_once(1, 2048, False, 64, 132).ctas == 32
    assert plan.assign_at_once(16, 2048, False, 64, 132).ctas == 16 * 8
    assert plan.assign_at_once(1, 2048, True, 64, 132).ctas == 1


@pytest.mark.parametrize(("h_q", "block_heads"), [(1, 64), (64, 64), (65, 128), (128, 128), (129, 128), (1000, 128)])
@pytest.mark.parametrize("target", ["sm_90a", "sm_100f"])
def test_heads_of_a_head_block(h_q: int, block_heads: int, target: str) -> None:
    chosen = plan.plan(problem(h_q=h_q), arch.named(target), 132)
    assert dict(chosen.source.defines)["CUPYMLA_HEADS"] == block_heads


@given(
    batch=st.integers(1, 5),
    s_q=st.integers(0, 300),
    multiprocessors=st.integers(1, 40),
)
def test_every_query_group_is_assigned_once(batch: int, s_q: int, multiprocessors: int) -> None:
    assigned = plan.assign_query_groups(s_q, batch, 2048, multiprocessors)
    query_groups = [
        query_group for cta in range(assigned.ctas) for query_group in range(cta, assigned.groups, assigned.ctas)
    ]
    assert sorted(query_groups) == list(range(batch * -(-s_q // plan.GROUP_SIZE)))
    assert assigned.ctas <= multiprocessors


MANY = {"h_q": 16, "s_q": 4096, "topk": 2048, "s_kv": 8192}


@pytest.mark.parametrize(
    ("sizes", "queries"),
    [
        ({}, 8),
        ({"h_q": 1}, 8),
        ({"s_kv": 2048}, 8),
        ({"h_q": 17}, 1),
        ({"topk": 2049}, 1),
        ({"s_kv": 16385}, 1),
        ({"s_kv": 0}, 1),
        ({"topk": 64}, 1),  # neighbours have hardly a row in common
        ({"s_q": 100}, 1),  # query groups would leave most multiprocessors idle
        ({"s_q": 0}, 1),
    ],
    ids=str,
)
def test_neighbours_are_packed_where_that_pays(sizes: dict[str, int], queries: int) -> None:
    wanted = problem(None, **(MANY | sizes))
    chosen = plan.plan(wanted, arch.named("sm_90a"), 132)
    assert chosen.queries == queries
    assert chosen.source.path == (plan.GROUP_SOURCES if queries > 1 else plan.SOURCES)["sm_90a"]
    assert plan.plan(wanted, arch.named("sm_100f"), 132).queries == 1


def test_limits_of_query_groups_are_those_that_the_kernel_has_room_for() -> None:
    config = Path(__file__).resolve().parents[2] / "cuda/attn_dist/sm90/packed_config.cuh"
    found = dict(re.findall(r"constexpr int (k\w+) = (\d+);", config.read_text()))
    assert {name: int(found[name]) for name in ("kQueries", "kQueryHeads", "kMaxEntries", "kMaxTokens")} == {
        "kQueries": plan.GROUP_SIZE,
        "kQueryHeads": plan.GROUP_HEADS,
        "kMaxEntries": plan.GROUP_TOPK,
        "kMaxTokens": plan.GROUP_TOKENS,
    }


def test_grid_limit_is_an_error_before_anything_is_launched() -> None:
    with pytest.raises(UnsupportedError, match="queries"):
        plan.plan(problem(batch=2**12, s_q=2**20), arch.named("sm_90a"), 132)


@pytest.mark.compile
def test_raw_kernels_come_with_their_own_record() -> None:
    pytest.importorskip("cupy", reason="compiling goes through CuPy's NVRTC bindings")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cupymla.build.raw_module", lambda compiled: None)
        made = {name: raw_module("attn_dist", arch=name).parameters for name in ("sm_90a", "sm_100f")}
    assert made == {"sm_90a": records.Hopper, "sm_100f": records.Blackwell}


@pytest.mark.parametrize("name", ["sm_80", "sm_90"])
def test_other_architectures_are_named(name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        plan.plan(problem(), arch.named(name), 132)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        *[("queries", value) for value in (0, 2, 16, "8", 8.0, True, None, 10**5000)],
        *[("block_heads", value) for value in (32, "64", 64.0, True, None, 10**5000)],
        *[("d_qk", value) for value in (128, "576", 576.0, None, 10**5000)],
        *[("dtype", value) for value in ("float32", 16, None, 10**5000)],
    ],
    ids=shown,
)
def test_a_variant_that_does_not_exist_is_refused_by_name(word: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        raw_module("attn_dist", arch="sm_90a", **{word: value})
    assert (caught.value.operator, caught.value.argument) == ("attn_dist", word)


def test_blackwell_has_no_kernel_for_query_groups() -> None:
    with pytest.raises(InputError, match="'queries': expected 1 on sm_100f, got 8"):
        plan.variant(arch.named("sm_100f"), queries=8)
