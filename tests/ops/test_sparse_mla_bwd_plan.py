"""What the host tells the backward's kernels: the parameter record, the launches and their queries, the workspace."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from backward_plan_kit import HOPPER, LISTS, ORDERED, PACKED, PROBLEM, SINGLE, STORED, planned
from hypothesis import example, given
from hypothesis import strategies as st
from plan_kit import CUDA, MLA, require_mirrored

from cupymla import InputError, UnsupportedError, arch, raw_module, tensor
from cupymla.errors import shown
from cupymla.ops.head_tiles import head_tiles
from cupymla.ops.mla_cases import MlaCase, sized
from cupymla.ops.sparse_mla_bwd import cases, cuda, plan, spec
from cupymla.ops.sparse_mla_bwd.layout import SPARE_ROWS
from cupymla.ops.sparse_mla_bwd.paths import cluster, fixed_order, packed_queries, path, token_order
from cupymla.ops.sparse_mla_bwd.sizes import GROUP_ENTRIES, LIST_BYTES
from cupymla_lab import ab
from cupymla_lab.problems import sparse_mla_bwd as problems
from cupymla_lab.subjects import Subject


def test_parameter_record_is_the_one_that_the_kernels_read() -> None:
    require_mirrored(cuda.Parameters, "sparse_mla_bwd/params.cuh")
    own, file = cuda.SinkLseParameters, "sparse_mla_bwd/sink_lse.cuh"
    require_mirrored(own, file, "SinkLseParameters", Parameters=cuda.Parameters)
    lists, file = cuda.ListParameters, "sparse_mla_bwd/entry_lists.cuh"
    require_mirrored(lists, file, "ListParameters", Parameters=cuda.Parameters)


@given(tokens=st.integers(0, 3000), topk=st.integers(1, 4096), heads=st.integers(1, 300), ordered=st.booleans())
def test_every_query_is_attended_to_once(tokens: int, topk: int, heads: int, ordered: bool) -> None:
    chosen = planned(options=spec.Options(deterministic=ordered), s_q=tokens, topk=topk, h_q=heads)
    assert chosen.in_phases == (path.CTA_HEADS < heads <= path.BLOCK_HEADS[1])
    ctas = {"p_ds": 2, "dq_dkv": 3} if chosen.in_phases else {"attention": chosen.cluster}
    for stage, each in ctas.items():
        attended = [launch for launch in chosen.launches() if launch.stage == stage]
        query_groups = [index for launch in attended for index in range(launch.query_begin, launch.query_end)]
        assert query_groups == list(range(-(-tokens // chosen.queries)))
        assert all(x.ctas == (x.query_end - x.query_begin) * each for x in attended)
    assert chosen.head_blocks * chosen.block_heads >= heads
    assert chosen.block_heads * chosen.queries == ctas.get("p_ds", chosen.cluster) * path.CTA_HEADS
    assert chosen.cluster == (2 if heads > path.BLOCK_HEADS[1] else 1)


@pytest.mark.parametrize(("heads", "head_blocks"), [(1, 1), (64, 1), (65, 1), (128, 1), (129, 2), (300, 3)])
def test_pairs_share_the_channels_of_64_or_128_heads_on_blackwell(heads: int, head_blocks: int) -> None:
    chosen = planned(target=arch.named("sm_100f"), h_q=heads)
    assert (chosen.cluster, chosen.head_blocks, chosen.block_heads) == (2, head_blocks, 64 if heads <= 64 else 128)
    source = chosen.source("attention")
    assert source.path == "sparse_mla_bwd/sm100/sparse_mla_bwd.cu"
    assert dict(source.defines)["CUPYMLA_HEADS"] == chosen.block_heads
    assert chosen.kv_map is not None and planned(h_q=heads).kv_map is None
    attention = next(launch for launch in chosen.launches() if launch.stage == "attention")
    assert attention.ctas == 2 * chosen.tokens


def test_ordered_sums_are_made_between_the_chunks_of_queries() -> None:
    """Partial rows are overwritten by the next chunk: they have to be summed before. Lists are of all chunks."""
    chosen = planned(options=ORDERED, s_q=1300, topk=2048, s_kv=4096)
    launches = chosen.launches()
    assert (chosen.chunk, chosen.lists) == (528, 3)  # whole waves of 132 CTAs, of either half
    assert [launch.stage for launch in launches] == ["zero", *LISTS, *["p_ds", "dq_dkv", "sum"] * 3, "round"]
    assert [(x.ctas, x.lists) for x in launches if x.stage in LISTS] == [(8 * 5, 3)]
    sums = [(x.query_begin, x.query_end, x.list) for x in launches if x.stage == "sum"]
    assert sums == [(0, 528, 0), (528, 1056, 1), (1056, 1300, 2)]


@given(tokens=st.integers(0, 300), kv=st.integers(0, 9), dist=st.booleans(), ordered=st.booleans(), sink=st.booleans())
def test_all_launches_but_the_first_are_dependent(tokens: int, kv: int, dist: bool, ordered: bool, sink: bool) -> None:
    """The first waits for other people's kernels in the ordinary way, and the last lets none of theirs in early."""
    problem, options = replace(PROBLEM, has_attn_dist=dist), spec.Options(deterministic=ordered)
    launches = planned(problem, s_q=tokens, s_kv=kv, topk=2048, has_sink=sink, options=options).launches()
    assert [x.dependent for x in launches] == [k > 0 for k in range(len(launches))]
    assert [x.has_dependent for x in launches] == [k < len(launches) - 1 for k in range(len(launches))]
    assert all(x.ctas for x in launches), "a grid that is not launched is nobody's predecessor"


@given(topk=st.integers(1, 1 << 20), tokens=st.integers(1, 1 << 20), multiprocessors=st.integers(2, 200))
def test_the_workspace_is_bounded(topk: int, tokens: int, multiprocessors: int) -> None:
    """However many queries there are, their partial rows take no more than the bound, or one query's."""
    shared = replace(MLA, topk=topk, s_q=tokens, h_q=8, options=ORDERED)
    chosen = plan.plan(replace(PROBLEM, shared=shared, dkv_dtype="float32"), HOPPER, multiprocessors)
    partials = chosen.chunk * topk * 576 * 4
    assert partials <= max(fixed_order.PARTIAL_BYTES, topk * 576 * 4)
    assert chosen.chunk * topk < 2**31
    lists = chosen.lists * (chosen.chunk * topk + shared.s_kv) * 4
    assert lists <= max(LIST_BYTES, (topk * chosen.chunk + shared.s_kv) * 4)
    assert chosen.workspace.bytes <= partials + lists + (shared.s_kv + SPARE_ROWS) * 576 * 4 + 5 * 256


@given(
    s_q=st.integers(0, 1 << 20),
    s_kv=st.integers(0, 1 << 20),
    topk=st.one_of(st.integers(1, 8), st.integers(1, 1 << 15)),
    heads=st.integers(1, 300),
    batch=st.sampled_from([None, 1, 3]),
    multiprocessors=st.integers(2, 200),
    flags=st.tuples(*[st.booleans()] * 4),
)
@example(979_169, 3, 55, 32, 1, 132, (False, False, False, False))  # many query groups of two queries
@example(381_191, 65, 2, 1, 1, 10, (True, False, True, False))
def test_the_workspace_takes_what_the_readme_says(
    s_q: int, s_kv: int, topk: int, heads: int, batch: int | None, multiprocessors: int, flags: tuple[bool, ...]
) -> None:
    """Its table, line by line; each of the thirteen arrays is rounded up to 256 bytes."""
    deterministic, has_sink, has_dist, is_fp32 = flags
    options = spec.Options(deterministic=deterministic, attn_dist_sink=has_sink)
    sizes = {"s_q": s_q, "s_kv": s_kv, "topk": topk, "h_q": heads, "batch": batch}
    shared = replace(MLA, **sizes, has_sink=has_sink, options=options)  # type: ignore[arg-type]
    problem = replace(PROBLEM, shared=shared, has_attn_dist=has_dist, dkv_dtype="float32" if is_fp32 else "bfloat16")
    chosen = plan.plan(problem, HOPPER, multiprocessors)
    queries, rows = s_q * (batch or 1), s_kv * (batch or 1)
    most = 13 * 255 + (rows + 64) * 576 * 4
    if has_sink:
        most += queries * heads * 4 * (2 if has_dist else 1)
    if chosen.queries > 1:
        most += (128 << 20) + chosen.query_groups * 4 + rows
    if chosen.in_order:
        most += (128 << 20) + queries * 4
    if chosen.in_phases:
        most += 1 << 30
    if deterministic:
        most += max(5 << 28, topk * 576 * 4)
        most += max(128 << 20, (chosen.chunk * topk + rows) * 4)
    assert chosen.workspace.bytes <= min(most, plan.workspace_limit(problem))


def test_parts_of_the_workspace_do_not_overlap() -> None:
    options = replace(ORDERED, attn_dist_sink=True)
    layout = planned(replace(PROBLEM, has_attn_dist=True), options=options, has_sink=True).workspace
    heads = {"sink_terms": 4 * 128, "sink_lse": 4 * 128}
    sizes = {"sums": 8 * 576, **heads, "partials": 4 * 8 * 576 // 2, "row_ends": 8, "entry_list": 4 * 8}
    end = 0
    for name, words in sizes.items():
        start = getattr(layout, name)
        assert start >= end and start % 256 == 0, name
        end = start + words * 4
    assert layout.bytes >= end


def test_fp32_gradients_are_summed_where_they_are_wanted() -> None:
    chosen = planned(replace(PROBLEM, dkv_dtype="float32"), arch.named("sm_100f"), h_q=128)
    assert chosen.workspace.sums is None and chosen.workspace.bytes == 0
    assert [launch.stage for launch in chosen.launches()] == ["zero", "attention"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("heads", [64, 129])
def test_sums_on_hopper_lie_in_the_workspace_with_spare_rows(dtype: str, heads: int) -> None:
    """Their columns are in an order of their own, so that no dkv can be the sums."""
    chosen = planned(replace(PROBLEM, dkv_dtype=dtype), has_sink=True, h_q=heads)
    assert chosen.attends_in_clusters == (heads > 64) and chosen.workspace.sums == 0
    assert chosen.workspace.sink_terms == (8 + SPARE_ROWS) * 576 * 4
    assert [launch.stage for launch in chosen.launches()] == ["zero", "attention", "round", "sink"]
    assert dict(chosen.source("round").defines)["CUPYMLA_FP16"] == (2 if dtype == "float32" else 0)


def test_numbers_of_a_cluster_are_those_of_its_kernel() -> None:
    """Spare rows that are not there would be somebody else's memory; other boxes, other bytes than are waited for."""
    folder = CUDA / "sparse_mla_bwd" / "sm90"
    text = "".join((folder / name).read_text() for name in ("cluster_config.cuh", "runs.cuh"))
    found = dict(re.findall(r"constexpr int (k\w+) = (\d+);", text))
    mirrored = {"kHeadTile": cluster.HEAD_TILE, "kRopeColumns": cluster.ROPE_COLUMNS, "kSpareRows": SPARE_ROWS}
    assert {name: int(found[name]) for name in mirrored} == mirrored
    assert int(found["kHeads"]) == path.BLOCK_HEADS[1]


@pytest.mark.parametrize(
    ("sizes", "target", "boxes"),
    [
        ({}, "sm_90a", (64, 2)),
        ({"h_q": 200}, "sm_90a", (32, 3)),
        ({"h_q": 64}, "sm_90a", (64, 2)),
        ({"h_q": 16, "s_q": 4096, "s_kv": 8192, "topk": 2048}, "sm_90a", (16, 2)),
        ({}, "sm_100f", (64, 3)),
        ({"h_q": 64}, "sm_100f", (64, 3)),
    ],
    ids=str,
)
def test_boxes_have_the_heads_of_a_copy(sizes: dict[str, Any], target: str, boxes: tuple[int, int]) -> None:
    chosen = planned(target=arch.named(target), **sizes)
    assert (chosen.box_heads, chosen.maps) == boxes


@pytest.mark.parametrize(("box", "swizzle"), [({}, 128), ({"box_channels": cluster.ROPE_COLUMNS}, 64)], ids=str)
def test_a_row_of_a_box_is_a_row_of_the_swizzle(box: dict[str, int], swizzle: int) -> None:
    request = head_tiles(PROBLEM.shared, 1 << 20, PROBLEM.shared.q_strides, 576, cluster.HEAD_TILE, **box)
    assert (request.swizzle, request.box) == (swizzle, (swizzle // 2, 32, 1, 1))


def test_without_queries_the_gradients_are_still_written() -> None:
    stages = [launch.stage for launch in planned(s_q=0, has_sink=True).launches()]
    assert stages == ["zero", "round", "sink"]


def test_record_has_the_strides_of_every_array() -> None:
    """One array's strides in another's fields would go unseen with contiguous arrays."""
    case = sized(16, 576, 65, 4, 50, "_x", "options", batch=2, layout="strided", sink="finite", wants_dist=True)
    arguments = cases.inputs(case, 0)
    dist = np.full((2, 5, 80), np.nan, np.float32)[:, :4, :65]
    views, problem = spec.read(**(arguments | {"attn_dist": dist}))
    outputs = [arguments["q"], arguments["kv"], np.zeros(64, np.float32)[::4]]
    record: Any = cuda.parameters(plan.plan(problem, HOPPER, 132), views, [tensor.view(a, "output") for a in outputs])

    def expect(prefix: str, array: np.ndarray, names: tuple[str, ...]) -> None:
        for name, stride in zip(names, array.strides, strict=False):
            in_bytes = name.endswith("bytes")
            assert getattr(record, f"{prefix}_{name}") == stride // (1 if in_bytes else array.itemsize), (prefix, name)

    heads = ("batch_bytes", "query_bytes", "head_bytes")
    expect("kv", arguments["kv"], ("batch_bytes", "token_bytes"))
    expect("out", arguments["out"], heads)
    expect("dq", arguments["q"], heads)
    expect("dkv", arguments["kv"], ("batch_bytes", "token_bytes"))
    expect("lse", arguments["lse"], ("batch", "query", "head"))
    expect("indices", arguments["indices"], ("batch", "query"))
    expect("attn_dist", dist, ("batch", "query"))
    expect("attn_sink", arguments["attn_sink"], ("head",))
    expect("d_sink", outputs[2], ("head",))
    assert (record.sums_batch, record.sums_token) == (50 * 576, 576)
    record = cuda.sink_lse_parameters(views, problem.shared)
    expect("dout", arguments["dout"], heads)


@pytest.mark.parametrize(("target", "heads"), [("sm_90a", 64), ("sm_90a", 128), ("sm_100f", 128)])
def test_a_float32_dkv_may_have_any_strides(target: str, heads: int) -> None:
    """Where it is the sums, as on Blackwell, they are its own; where it is made from them, in bytes of its elements."""
    step = 1 << 29  # 2 GiB, whose bytes no 32 bits with a sign count
    views, problem = spec.read(**cases.inputs(sized(heads, 576, 65, 4, 50, "_x", "options"), 0))
    problem = replace(problem, dkv_dtype="float32")
    dkv = np.lib.stride_tricks.as_strided(np.zeros(576, np.float32), (50, 576), (step * 4, 4))
    outputs = [tensor.view(np.zeros((4, heads, 576), np.uint16), "dq"), tensor.view(dkv, "dkv")]
    record = cuda.parameters(plan.plan(problem, arch.named(target), 132), views, outputs)
    if target == "sm_100f":
        assert (record.sums_token, record.dkv_token_bytes) == (step, 0)
    else:
        assert (record.sums_token, record.dkv_token_bytes) == (576, step * 4)


@pytest.mark.parametrize("numbers", [{"block_heads": 128}, {"block_heads": 64}, {"queries": 4}])
def test_hopper_makes_a_float32_dkv_from_sums(numbers: dict[str, Any]) -> None:
    numbers = {"stage": "round", **numbers}
    made = {dtype: plan.variant(HOPPER, **numbers, dtype=dtype) for dtype in ("bfloat16", "float16", "float32")}
    assert [dict(source.defines)["CUPYMLA_FP16"] for source in made.values()] == [0, 1, 2]
    assert set(made.values()) <= set(plan.sources("sm_90a"))
    for other in ({"stage": "zero"}, {"stage": "attention"}):
        with pytest.raises(InputError, match="'bfloat16' or 'float16', got") as caught:
            plan.variant(HOPPER, **(numbers | other), dtype="float32")
        assert caught.value.argument == "dtype"
    with pytest.raises(InputError, match="'bfloat16' or 'float16', got"):
        plan.variant(arch.named("sm_100f"), stage="round", dtype="float32")
    assert {v for source in plan.sources("sm_100f") for name, v in source.defines if name == "CUPYMLA_FP16"} == {0, 1}


def test_grid_limit_is_an_error_before_anything_is_launched() -> None:
    with pytest.raises(UnsupportedError, match="heads"):
        planned(batch=2**10, s_q=2**20)
    blackwell = arch.named("sm_100f")
    planned(target=blackwell, s_q=2**30 - 1, h_q=1)
    with pytest.raises(UnsupportedError, match="heads"):
        planned(target=blackwell, s_q=2**30, h_q=1)


def test_a_cluster_is_given_no_more_entries_than_it_can_count() -> None:
    """Past that, its count of blocks would begin again with the first entries."""
    folder = CUDA / "sparse_mla_bwd" / "sm90"
    text = "".join((folder / name).read_text() for name in ("cluster_config.cuh", "cluster_consumer.cuh"))
    block = re.search(r"kBlock = (0x[0-9a-f]+)u;", text)
    entries = re.search(r"constexpr int kTileKeys = (\d+);", text)
    assert block is not None
    assert entries is not None
    assert 2**32 // int(block[1], 16) * int(entries[1]) == cluster.CLUSTER_TOPK
    assert planned(topk=cluster.CLUSTER_TOPK, h_q=65).attends_in_clusters
    with pytest.raises(UnsupportedError, match=f"up to {cluster.CLUSTER_TOPK} with more than 64 heads"):
        planned(topk=cluster.CLUSTER_TOPK + 1, h_q=65)
    planned(topk=cluster.CLUSTER_TOPK + 1, h_q=64)
    planned(target=arch.named("sm_100f"), topk=cluster.CLUSTER_TOPK + 1, h_q=65)


@pytest.mark.parametrize("name", ["sm_80", "sm_89", "sm_90"])
def test_other_architectures_are_named(name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        plan.plan(PROBLEM, arch.named(name), 132)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        *[("stage", value) for value in ("forward", 0, None, 10**5000)],
        *[("d_qk", value) for value in (128, "576", 576.0, None)],
        *[("dtype", value) for value in ("float32", 16, None)],
        *[("block_heads", value) for value in (0, 2, 96, True, "64", None)],
        *[("partials", value) for value in ("no", 1, None)],
        *[("packed", value) for value in ("no", 1, None, True)],  # True, but without `partials`
    ],
    ids=shown,
)
def test_a_variant_that_does_not_exist_is_refused_by_name(word: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        raw_module("sparse_mla_bwd", arch="sm_90a", **{word: value})
    assert (caught.value.operator, caught.value.argument) == ("sparse_mla_bwd", word)


@given(
    multiprocessors=st.integers(1, 200),
    s_q=st.integers(0, 5000),
    topk=st.integers(1, 4096),
    deterministic=st.booleans(),
    has_sink=st.booleans(),
    dkv_dtype=st.sampled_from(["bfloat16", "float32"]),
    heads=st.sampled_from([16, 20, 128]),
    has_dist=st.booleans(),
)
@example(  # no query: P and dS of one have a place all the same
    multiprocessors=1,
    s_q=0,
    topk=1,
    deterministic=False,
    has_sink=False,
    dkv_dtype="bfloat16",
    heads=128,
    has_dist=False,
)
def test_the_limit_is_enough_everywhere(
    multiprocessors: int,
    s_q: int,
    topk: int,
    deterministic: bool,
    has_sink: bool,
    dkv_dtype: str,
    heads: int,
    has_dist: bool,
) -> None:
    """A compiled program gives its workspace before it knows the GPU."""
    options = spec.Options(deterministic=deterministic)
    shared = replace(MLA, s_q=s_q, topk=topk, h_q=heads, has_sink=has_sink, options=options)
    problem = replace(PROBLEM, shared=shared, dkv_dtype=dkv_dtype, has_attn_dist=has_dist)
    needed = plan.plan(problem, HOPPER, multiprocessors).workspace.bytes
    spare = fixed_order.PARTIAL_BYTES + (topk * 12 + 576 * 4) * s_q + shared.s_kv * 4 * s_q + 2048
    assert needed <= plan.workspace_limit(problem) <= needed + spare


MANY: dict[str, Any] = {"s_q": 4096, "s_kv": 8192, "topk": 2048, "h_q": 16}


@pytest.mark.parametrize(
    ("sizes", "queries"),
    [
        ({}, 4),
        ({"h_q": 1}, 4),
        ({"h_q": 17}, 2),
        ({"h_q": 32}, 2),
        ({"h_q": 33}, 1),
        ({"topk": 2049}, 2),
        ({"topk": 4096}, 2),
        ({"topk": 4097}, 1),
        ({"s_kv": 131072, "batch": 3}, 4),  # as many blocks, and less between them
        ({"s_kv": 131073}, 1),
        ({"s_kv": 0}, 1),
        ({"s_q": 130}, 1),  # query groups would leave most multiprocessors idle
        ({"s_q": 264}, 2),  # two waves of queries, one of pairs of them, half a one of fours
        ({"s_q": 0}, 1),
        ({"options": ORDERED}, 4),
    ],
    ids=str,
)
def test_neighbours_are_packed_where_that_pays(sizes: dict[str, object], queries: int) -> None:
    chosen = planned(**(MANY | sizes))
    assert chosen.queries == queries
    attention = [launch for launch in chosen.launches() if launch.stage == "attention"]
    source = chosen.source("attention")
    packed = STORED if chosen.packed else PACKED
    assert source.entry == (packed if queries > 1 else SINGLE)
    assert not attention or attention[-1].query_end == -(-chosen.tokens // queries)
    assert planned(target=arch.named("sm_100f"), **(MANY | sizes)).queries == 1


def test_lists_are_made_between_the_chunks_of_query_groups() -> None:
    """The next chunk's are written over them."""
    shared = replace(MLA, **MANY, options=spec.Options())
    chosen = plan.plan(replace(PROBLEM, shared=replace(shared, s_q=20000), has_attn_dist=True), HOPPER, 132)
    assert chosen.chunk == 1320  # whole waves, of 128 MiB
    assert [launch.stage for launch in chosen.launches()] == ["zero", *["merge", "attention"] * 4, "round"]


@given(
    s_q=st.integers(1, 100_000),
    topk=st.integers(1, 4096),
    heads=st.integers(1, 32),
    multiprocessors=st.integers(1, 200),
    has_dist=st.booleans(),
)
def test_lists_of_rows_are_bounded(s_q: int, topk: int, heads: int, multiprocessors: int, has_dist: bool) -> None:
    """However many queries there are; and parts do not overlap."""
    shared = replace(MLA, s_q=s_q, s_kv=5000, topk=topk, h_q=heads, options=spec.Options())
    chosen = plan.plan(replace(PROBLEM, shared=shared, has_attn_dist=has_dist), HOPPER, multiprocessors)
    layout = chosen.workspace
    if chosen.queries == 1:
        assert layout.rows is layout.row_topk_entries is layout.row_counts is layout.non_finite_rows is None
        return
    entries = chosen.chunk * chosen.queries * topk
    sizes = {"sums": 5000 * 576 * 4, "rows": entries * 4}
    if has_dist:
        sizes["row_topk_entries"] = entries * chosen.queries * 2
    assert sizes["rows"] + sizes.get("row_topk_entries", 0) <= LIST_BYTES
    end = 0
    for name, size in (sizes | {"row_counts": chosen.chunk * 4, "non_finite_rows": 5000}).items():
        start = getattr(layout, name)
        assert start >= end and start % 256 == 0, name
        end = start + size
    assert end <= layout.bytes <= end + 256
    assert entries < 2**32, "where a list begins is kept in 32 bits"


LONG: dict[str, Any] = {"s_q": 4096, "s_kv": 32768, "topk": 2048, "h_q": 128}


@pytest.mark.parametrize(
    ("sizes", "in_order"),
    [
        ({}, True),
        ({"h_q": 64}, True),
        ({"h_q": 200}, True),
        ({"s_kv": 131072}, True),
        ({"s_kv": 1 << 18, "h_q": 64}, True),
        ({"s_kv": (1 << 18) + 1, "h_q": 64}, False),  # more tokens than there are bits for
        ({"s_kv": 1 << 18}, True),
        ({"s_kv": 1 << 18, "topk": 1024}, False),  # 66 queries at a time have few rows in common
        ({"s_kv": 8192}, False),  # all rows and sums are in L2
        ({"s_kv": 16384}, False),
        ({"s_q": 1}, False),  # nobody to share with
        ({"s_q": 8, "s_kv": 8192, "batch": 2}, False),
        ({"s_q": 8, "s_kv": 8192, "batch": 8}, True),  # 66 queries of eight batch entries, whose rows L2 does not hold
        ({"s_q": 1, "s_kv": 8192, "batch": 512}, False),
        ({"s_q": 0}, False),
        ({"topk": 128}, False),
        ({"topk": 8192}, True),
        ({"topk": 8193}, False),
        ({"h_q": 16}, False),  # together, and so in order
        ({"options": ORDERED}, False),
    ],
    ids=str,
)
def test_rows_are_taken_in_order_where_that_finds_more_of_them_in_l2(sizes: dict[str, object], in_order: bool) -> None:
    chosen = planned(**(LONG | sizes))
    assert chosen.in_order == in_order
    assert ("sort" in [launch.stage for launch in chosen.launches()]) == in_order
    assert not planned(target=arch.named("sm_100f"), **(LONG | sizes)).in_order


def test_cases_of_this_order_are_run_in_it() -> None:
    """Which kernel ran does not say: it is the same in the order of entries."""
    subject = Subject("sparse_mla_bwd")
    kernel = next(kernel for kernel in subject.entry.kernels if kernel.name == "sparse_mla_bwd")

    def in_order(case: MlaCase, multiprocessors: int) -> bool:
        sizes = {name: getattr(case, name) for name in ("s_q", "s_kv", "h_q", "topk", "d_qk", "batch")}
        problem = replace(PROBLEM, shared=replace(PROBLEM.shared, **sizes))
        return plan.plan(problem, HOPPER, multiprocessors).in_order

    order = [case for case in problems.CASES if case.intent == "order"]
    shapes = [case for case in problems.CASES if case.intent == "shapes"]
    for case in (*order, *shapes):
        with ab.chosen(subject, kernel, case):
            assert all(in_order(case, n) == (case in order) for n in (1, 3, 132)), case.name
    assert [in_order(case, 132) for case in order] == [False] * (len(order) - 1) + [True]


def test_the_distribution_is_scattered_between_the_chunks_of_queries() -> None:
    shared = replace(MLA, **LONG, options=spec.Options())
    shared = replace(shared, s_q=20000, s_kv=50000)  # of pairs
    chosen = plan.plan(replace(PROBLEM, shared=shared, has_attn_dist=True), HOPPER, 132)
    assert chosen.chunk == 6534  # whole waves, of 128 MiB
    assert [launch.stage for launch in chosen.launches()] == ["zero", *["sort", "attention", "scatter"] * 4, "round"]


@given(
    s_q=st.integers(2, 100_000),
    topk=st.integers(1, 8192),
    heads=st.integers(1, 300),
    multiprocessors=st.integers(1, 200),
    has_dist=st.booleans(),
    batch=st.sampled_from([None, 1, 3, 40]),
)
def test_lists_in_order_are_bounded(
    s_q: int, topk: int, heads: int, multiprocessors: int, has_dist: bool, batch: int | None
) -> None:
    """However many queries there are; and parts do not overlap."""
    shared = replace(MLA, s_q=s_q, s_kv=30000, topk=topk, h_q=heads, batch=batch, options=spec.Options())
    problem = replace(PROBLEM, shared=shared, has_attn_dist=has_dist)
    chosen = plan.plan(problem, HOPPER, multiprocessors)
    layout = chosen.workspace
    assert layout.bytes <= plan.workspace_limit(problem)
    if not chosen.in_order:
        assert layout.listed_dist is None
        return
    entries = chosen.chunk * topk
    sizes = {"sums": (batch or 1) * 30000 * 576 * 4, "rows": entries * 4}
    if has_dist:
        sizes |= {"row_topk_entries": entries * 2, "row_counts": chosen.chunk * 4, "listed_dist": entries * 4}
    assert sum(sizes.values()) - sizes["sums"] - chosen.chunk * 4 <= LIST_BYTES
    end = 0
    for name, size in sizes.items():
        start = getattr(layout, name)
        assert start >= end and start % 256 == 0, name
        end = start + size
    assert end <= layout.bytes
    assert layout.non_finite_rows is None


def test_the_attention_is_given_the_lists_in_the_place_of_indices() -> None:
    """Of a later chunk, whose lists lie where those of the first one's queries lay."""
    chosen = planned(replace(PROBLEM, has_attn_dist=True), **(LONG | {"batch": 2}))
    record, listed = cuda.Parameters(), cuda.Parameters()
    record.indices, record.topk_length, record.attn_dist, record.sm_scale = 1, 2, 3, 0.5
    record.rows, record.row_counts, record.listed_dist = 1 << 20, 1 << 30, 1 << 35
    cuda.put_in_order(listed, record, chosen, 700)
    query = 700 * 2048 * 4
    assert (listed.indices + query) % 2**64 == record.rows
    assert (listed.topk_length + 700 * 4) % 2**64 == record.row_counts
    assert (listed.attn_dist + query) % 2**64 == record.listed_dist
    assert (listed.indices_batch, listed.indices_query) == (4096 * 2048, 2048)
    assert (listed.topk_length_batch, listed.topk_length_query) == (4096, 1)
    assert (listed.attn_dist_batch, listed.attn_dist_query) == (4096 * 2048, 2048)
    assert listed.sm_scale == 0.5 and record.indices == 1


def test_limits_of_lists_are_those_that_the_kernel_has_room_for() -> None:
    text = (CUDA / "sparse_mla_bwd" / "query_group.cuh").read_text()
    found = dict(re.findall(r"constexpr int\w* (k\w+) = ([^;]+);", text))
    assert 1 << int(found["kTokenBits"]) == packed_queries.GROUP_TOKENS and found["kMaxTokens"] == "1 << kTokenBits"
    assert int(found["kMaxEntries"]) == GROUP_ENTRIES
    assert found["kMaxTokensSingle"] == "1 << 18" and token_order.ORDER_TOKENS == 1 << 18
    assert {queries * heads for queries, heads in packed_queries.GROUP_HEADS.items()} == {path.CTA_HEADS}


@pytest.mark.parametrize("stage", token_order.ORDER_STAGES)
def test_blackwell_has_no_order_of_tokens(stage: str) -> None:
    with pytest.raises(InputError, match="on sm_100f"):
        raw_module("sparse_mla_bwd", arch="sm_100f", stage=stage)


@pytest.mark.parametrize(
    ("numbers", "argument"),
    [
        *[({"queries": value}, "queries") for value in (0, 3, 8, "4", 4.0, True, None, 10**5000)],
        ({"queries": 4, "partials": True}, "partials"),
        ({"queries": 2, "stage": "sum"}, "stage"),
        ({"stage": "merge"}, "stage"),
        ({"queries": 4, "stage": "sort"}, "stage"),
        ({"queries": 4, "stage": "scatter"}, "stage"),
    ],
    ids=shown,
)
def test_a_variant_for_neighbours_that_does_not_exist_is_refused_by_name(
    numbers: dict[str, object], argument: str
) -> None:
    with pytest.raises(InputError) as caught:
        raw_module("sparse_mla_bwd", arch="sm_90a", **numbers)
    assert (caught.value.operator, caught.value.argument) == ("sparse_mla_bwd", argument)
