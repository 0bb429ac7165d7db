"""The backward's attention in two phases: when, in which launches, with which workspace; and what no case brings
about."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from backward_plan_kit import HOPPER, LISTS, ORDERED, PROBLEM, planned
from plan_kit import CUDA
from writer_kit import uses_in_a_call

from cupymla import InputError, arch
from cupymla.ops.mla_cases import sized
from cupymla.ops.sparse_mla_bwd import plan
from cupymla.ops.sparse_mla_bwd.paths import path, two_phase
from cupymla_lab import ab
from cupymla_lab.emulated import Emulated, emulated
from cupymla_lab.subjects import Subject

FOLDER = CUDA / "sparse_mla_bwd" / "sm90"
SUBJECT = Subject("sparse_mla_bwd")


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"h_q": 64}, False),
        ({"h_q": 65}, True),
        ({"h_q": 128}, True),
        ({"h_q": 129}, False),
        ({"options": ORDERED}, True),
        ({"topk": (2 << 20) - 64}, True),
        ({"topk": 2 << 20}, False),  # a gibibyte and eight bytes for one query
        ({"s_q": 4096, "s_kv": 8192, "topk": 2048}, True),
        ({"s_q": 4096, "s_kv": 32768, "topk": 2048}, True),
        ({"s_q": 4096, "s_kv": 43402, "topk": 2048}, True),  # 50 MB of 192 columns and their sums
        ({"s_q": 4096, "s_kv": 43403, "topk": 2048}, False),
        ({"s_q": 4096, "s_kv": 131072, "topk": 512}, False),  # in the order of entries
        ({"s_q": 4096, "s_kv": 131072, "topk": 2048, "options": ORDERED}, True),
        ({"s_q": 44, "s_kv": 131072, "topk": 2048}, True),  # one wave
        ({"s_q": 45, "s_kv": 131072, "topk": 2048}, False),
        ({"batch": 11, "s_q": 4, "s_kv": 131072, "topk": 2048}, True),
        ({"batch": 12, "s_q": 4, "s_kv": 131072, "topk": 2048}, False),
    ],
    ids=str,
)
def test_the_plan_takes_two_phases_where_they_are_faster(sizes: dict[str, Any], expected: bool) -> None:
    chosen = planned(**sizes)
    assert chosen.in_phases == expected


LONG: dict[str, Any] = {"s_q": 4096, "topk": 2048}


@pytest.mark.parametrize(
    ("sizes", "columns_outermost", "in_order"),
    [
        ({"s_kv": 8192}, False, False),
        ({"s_kv": 12442}, False, False),  # 43 MB of keys and sums
        ({"s_kv": 12443}, True, False),
        ({"s_kv": 13997, "d_qk": 512}, False, False),
        ({"s_kv": 13998, "d_qk": 512}, True, False),
        ({"s_kv": 16384, "topk": 1024}, True, False),
        ({"s_kv": 32768}, True, True),
        ({"s_kv": 32768, "options": ORDERED}, False, False),  # rows are stored
        ({"s_kv": 131072}, False, True),  # of pairs
        ({"s_kv": 131072, "s_q": 1}, True, False),  # nobody to share rows with
        ({"s_kv": 8192, "batch": 3, "s_q": 44}, False, False),  # together one entry at a time
        ({"s_kv": 8192, "batch": 3, "s_q": 22}, True, True),  # two
        ({"s_kv": 8192, "batch": 3, "s_q": 200}, False, False),
    ],
    ids=str,
)
def test_columns_come_in_splits_where_l2_has_no_room_for_all(
    sizes: dict[str, Any], columns_outermost: bool, in_order: bool
) -> None:
    chosen = planned(**(LONG | sizes))
    assert (chosen.columns_outermost, chosen.in_order) == (columns_outermost, in_order)
    assert not chosen.columns_outermost or chosen.in_phases
    grids = {launch.grid for launch in chosen.launches() if launch.stage == "dq_dkv"}
    assert {grid[1] for grid in grids} == ({3} if columns_outermost else {1} if chosen.in_phases else set())


def test_splits_have_a_cta_for_each_query() -> None:
    """The same CTAs, in another order: blockIdx.y is the share."""
    together, apart = (planned(s_q=1000, topk=2048, s_kv=s_kv).launches() for s_kv in (4096, 20000))
    count = [[x.grid[0] * x.grid[1] for x in launches if x.stage == "dq_dkv"] for launches in (together, apart)]
    assert count == [[924 * 3, 76 * 3]] * 2
    assert [x.grid for x in apart if x.stage == "dq_dkv"] == [(924, 3, 1), (76, 3, 1)]
    text = (FOLDER / "dq_dkv_storage.cuh").read_text()
    assert "gridDim.y == 1 ? blockIdx.x / Config::kSplits : blockIdx.x" in text


def test_two_phases_in_order_have_lists_and_a_distribution_of_each_chunk() -> None:
    chosen = planned(replace(PROBLEM, has_attn_dist=True), s_q=1000, topk=2048, s_kv=32768)
    assert [x.stage for x in chosen.launches()] == ["zero", *["sort", "p_ds", "dq_dkv", "scatter"] * 2, "round"]
    layout = chosen.workspace
    parts = [layout.rows, layout.row_topk_entries, layout.row_counts, layout.listed_dist, layout.p_ds]
    assert None not in parts and len(set(parts)) == 5


def test_cases_of_splits_are_run_in_them() -> None:
    """Which kernel ran does not say."""
    kernel = next(kernel for kernel in SUBJECT.entry.kernels if kernel.name == "sparse_mla_bwd")
    found = [case for case in SUBJECT.cases.CASES if case.intent in ("columns_outermost", "columns_outermost_in_order")]
    assert len(found) >= 8
    for case in found:
        sizes = {name: getattr(case, name) for name in ("s_q", "s_kv", "h_q", "topk", "d_qk", "batch")}
        with ab.chosen(SUBJECT, kernel, case):
            chosen = planned(**sizes)
        assert chosen.in_phases and chosen.columns_outermost, case.name
        assert chosen.in_order == (case.intent == "columns_outermost_in_order"), case.name


def test_rows_that_are_stored_whole_have_an_attention_in_one_piece() -> None:
    assert not planned(replace(PROBLEM, dkv_dtype="float32"), options=ORDERED).in_phases
    assert planned(replace(PROBLEM, dkv_dtype="float32")).in_phases


def test_blackwell_has_none() -> None:
    assert not planned(target=arch.named("sm_100f")).in_phases
    with pytest.raises(InputError, match="stage"):
        plan.variant(arch.named("sm_100f"), stage="p_ds")


def test_one_phase_follows_the_other() -> None:
    """P and dS are overwritten by the next queries': dQ and dKV have to be made of them before."""
    chosen = planned(s_q=3000, topk=2048, s_kv=4096)
    launches = chosen.launches()
    assert chosen.chunk == 924  # whole waves, of a gibibyte
    assert [launch.stage for launch in launches] == ["zero", *["p_ds", "dq_dkv"] * 4, "round"]
    begins = [(x.query_begin, x.query_end) for x in launches if x.stage == "dq_dkv"]
    assert begins == [(0, 924), (924, 1848), (1848, 2772), (2772, 3000)]
    assert begins == [(x.query_begin, x.query_end) for x in launches if x.stage == "p_ds"]


def test_p_and_ds_have_a_place_of_their_own() -> None:
    chosen = planned(options=ORDERED, s_q=1000, topk=2000, s_kv=4096, has_sink=True)
    layout = chosen.workspace
    assert layout.p_ds is not None and layout.p_ds % 256 == 0
    assert layout.bytes - layout.p_ds >= chosen.chunk * 32 * 32768  # blocks of 64 entries, 32 KiB each
    others = (layout.sums, layout.sink_terms, layout.partials, layout.row_ends, layout.entry_list)
    assert all(start is not None and start < layout.p_ds for start in others)
    assert [x.stage for x in chosen.launches()][1:2] == LISTS


def test_numbers_are_those_of_the_kernels() -> None:
    text = "".join((FOLDER / name).read_text() for name in ("stored_p_ds.cuh", "dq_dkv_storage.cuh"))
    found = {name: int(value) for name, value in re.findall(r"constexpr int (k\w+) = (\d+);", text)}
    assert found["kTiles"] * found["kTileColumns"] == two_phase.DQ_DKV_CTA_COLUMNS
    assert found["kPdsGroups"] * found["kPdsHeads"] == two_phase.HEADS[1] == path.BLOCK_HEADS[1]
    block = found["kPdsGroups"] * found["kPdsHeads"] * found["kPdsKeys"] * 2 * 2 + 4 * found["kPdsGroups"]
    one = replace(PROBLEM.shared, topk=found["kPdsKeys"])
    assert two_phase.p_ds_bytes(replace(PROBLEM, shared=one)) == block


def test_stored_rows_are_packed() -> None:
    source = plan.variant(HOPPER, stage="dq_dkv", partials=True, packed=True)
    assert dict(source.defines)["CUPYMLA_PARTIALS"] == 2
    assert plan.variant(HOPPER, stage="p_ds", partials=True, packed=True) == plan.variant(HOPPER, stage="p_ds")
    with pytest.raises(InputError, match="partials"):
        plan.variant(HOPPER, stage="dq_dkv", partials=True)


@pytest.fixture
def machine() -> Iterator[Emulated]:
    with emulated(multiprocessors=2, seed=3) as made:
        yield made


@pytest.mark.compile
def test_indices_and_lengths_may_change_while_it_runs(machine: Emulated) -> None:
    """Between the two_phase as well. No hang, and no access out of bounds, whatever they hold by then."""
    case = sized(70, 512, 300, 3, 400, "_x", "two_phase", lengths="hostile", wants_dist=True, dtype="float16")
    arguments = machine.arguments(SUBJECT.cases.inputs(case, 2), SUBJECT.written)
    limits = {"indices": 400, "topk_length": 301}
    assert sum(uses_in_a_call(machine, SUBJECT.call, arguments, limits, 1 << 20)) > 1000
