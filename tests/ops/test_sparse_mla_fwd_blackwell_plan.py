"""What the host tells the Blackwell kernels: the parameter record, the grid, KV as one matrix of rows."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_kit import MLA, require_mirrored

from cupymla import InputError, UnsupportedError, arch, build, driver
from cupymla.device import Device
from cupymla.ops.kv_rows import MAX_ROWS, kv_rows
from cupymla.ops.mla import SoftmaxOptions
from cupymla.ops.sparse_mla_fwd import binding, blackwell_plan, plan

BLACKWELL = arch.named("sm_100f")


def test_parameter_record_is_the_one_that_the_kernel_reads() -> None:
    require_mirrored(binding.BlackwellParameters, "sparse_mla_fwd/sm100/params.cuh")


@pytest.mark.parametrize("target", [plan.BLACKWELL])
def test_each_target_has_its_own_source_and_record(target: str) -> None:
    chosen = blackwell_plan.blackwell_plan(MLA, arch.named(target), 148)
    assert chosen.source.arch == target and chosen.source in plan.sources(target)
    assert binding.record(chosen.source) is binding.BlackwellParameters
    assert binding.record(plan.variant(arch.named("sm_90a"))) is binding.Parameters


@pytest.mark.parametrize(
    ("h_q", "s_q", "topk", "head_blocks", "parts", "clusters"),
    [
        (65, 4096, 2048, 1, 1, 74),
        (128, 4096, 2048, 1, 1, 74),
        (129, 4096, 2048, 2, 1, 74),
        (128, 20, 2048, 1, 2, 20),
        (128, 1, 2048, 1, 8, 1),
        (256, 1, 2048, 2, 8, 2),
        (128, 1, 256, 1, 1, 1),
        (128, 3, 512, 1, 1, 3),
    ],
)
def test_grid_of_pairs(h_q: int, s_q: int, topk: int, head_blocks: int, parts: int, clusters: int) -> None:
    """128 heads a pair, as many clusters as run at once; entries are shared only where that leaves room and pays."""
    chosen = blackwell_plan.blackwell_plan(replace(MLA, h_q=h_q, s_q=s_q, topk=topk), BLACKWELL, 148)
    assert (chosen.head_blocks, chosen.parts, chosen.clusters) == (head_blocks, parts, clusters)
    assert (chosen.cluster, chosen.ctas) == (2 * parts, 2 * parts * clusters)
    defines = dict(chosen.source.defines)
    assert (defines["CUPYMLA_HEADS"], defines["CUPYMLA_SPLIT"]) == (128, int(parts > 1))


@given(h_q=st.integers(0, 300), s_q=st.integers(0, 400), multiprocessors=st.integers(2, 160), batch=st.integers(1, 3))
def test_a_launch_on_its_own_has_the_same_grid(h_q: int, s_q: int, multiprocessors: int, batch: int) -> None:
    """Without clusters that share queries."""
    problem = replace(MLA, h_q=h_q, s_q=s_q, batch=batch)
    chosen = blackwell_plan.blackwell_plan(problem, BLACKWELL, multiprocessors, without=plan.CLUSTERS)
    facts = {"cluster": chosen.item_ctas, "heads_per_cta": plan.BLACKWELL_CTA_HEADS}
    assigned = plan.raw_work_assignment(chosen.source, facts, multiprocessors, s_q=s_q, h_q=h_q, batch=batch)
    assert chosen.parts == 1
    assert assigned.ctas == chosen.ctas
    assert assigned.fields == {"head_blocks": chosen.head_blocks, "items": chosen.items}


@pytest.mark.parametrize(
    ("h_q", "s_q", "topk", "parts", "clusters"),
    [
        (0, 4096, 2048, 1, 148),
        (1, 4096, 2048, 1, 148),
        (64, 4096, 2048, 1, 148),
        (64, 100, 2048, 1, 100),
        (64, 20, 2048, 4, 20),
        (64, 1, 2048, 16, 1),
        (64, 1, 512, 8, 1),
        (64, 1, 448, 1, 1),
    ],
)
def test_grid_of_few_heads(h_q: int, s_q: int, topk: int, parts: int, clusters: int) -> None:
    """Up to 64 heads a CTA, by itself or with others that share the entries of its query."""
    chosen = blackwell_plan.blackwell_plan(replace(MLA, h_q=h_q, s_q=s_q, topk=topk), BLACKWELL, 148)
    assert (chosen.head_blocks, chosen.parts, chosen.clusters) == (1, parts, clusters)
    assert (chosen.cluster, chosen.ctas) == (parts, parts * clusters)
    defines = dict(chosen.source.defines)
    assert (defines["CUPYMLA_HEADS"], defines["CUPYMLA_SPLIT"]) == (64, int(parts > 1))


@given(
    items=st.integers(1, 4000),
    topk=st.integers(1, 100_000),
    multiprocessors=st.integers(1, 200),
    ctas=st.sampled_from((1, 2)),
)
def test_a_split_never_asks_for_more_ctas_than_run_at_once(
    items: int, topk: int, multiprocessors: int, ctas: int
) -> None:
    parts = blackwell_plan.parts(items, topk, multiprocessors, ctas)
    assert parts == 1 or ctas * parts * items <= multiprocessors
    assert ctas * parts <= 16


@pytest.mark.parametrize(
    ("h_q", "active", "parts"),
    [
        (128, {2: 74, 4: 37, 8: 18, 16: 8}, 8),
        (128, {2: 74, 4: 37, 8: 18, 16: 0}, 4),
        (64, {2: 74, 4: 37, 8: 18, 16: 0}, 8),
        (64, dict.fromkeys((2, 4, 8, 16), 0), 1),
    ],
)
def test_clusters_that_do_not_all_run_at_once_are_not_asked_for(
    h_q: int, active: dict[int, int], parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"threads": 384, "smem_bytes": 1024}
    monkeypatch.setattr(driver, "arch_of", lambda device: BLACKWELL)
    monkeypatch.setattr(driver, "multiprocessor_count", lambda index: 148)
    monkeypatch.setattr(build, "kernel", lambda source, device: SimpleNamespace(function=1, facts=facts))
    monkeypatch.setattr(binding, "active_clusters", lambda kernel, geometry: active[geometry.cluster])
    problem = replace(MLA, h_q=h_q, s_q=1, topk=2048)
    chosen = binding.running_plan(blackwell_plan.blackwell_plan, problem, Device("cuda", 0))
    assert chosen.parts == parts
    assert parts == 1 or chosen.clusters <= active[chosen.cluster]


@pytest.mark.parametrize(("sm_scale", "any_scale"), [(0.1, 0), (0.0, 1), (-0.1, 1), (1e-38, 1), (1e30, 0)])
def test_scales_that_are_not_surely_positive_take_the_general_variant(sm_scale: float, any_scale: int) -> None:
    chosen = blackwell_plan.blackwell_plan(replace(MLA, options=SoftmaxOptions(sm_scale=sm_scale)), BLACKWELL, 148)
    assert dict(chosen.source.defines)["CUPYMLA_ANY_SCALE"] == any_scale


def test_too_many_heads_are_an_error_before_anything_is_launched() -> None:
    with pytest.raises(UnsupportedError, match="heads"):
        blackwell_plan.blackwell_plan(replace(MLA, batch=2**10, s_q=2**20), BLACKWELL, 148)


def test_a_kernel_of_other_heads_is_refused_by_name() -> None:
    with pytest.raises(InputError) as caught:
        plan.variant(BLACKWELL, heads=32)
    assert caught.value.argument == "heads"


@given(
    batch=st.none() | st.integers(0, 4),
    s_kv=st.integers(0, 9),
    token=st.integers(0, 90).map(lambda n: 8 * n),
    entry=st.integers(0, 900).map(lambda n: 8 * n),
)
def test_every_token_is_a_row(batch: int | None, s_kv: int, token: int, entry: int) -> None:
    """Strides of zero, and strides that are no multiple of each other, among them."""
    problem = replace(MLA, batch=batch, s_kv=s_kv, kv_strides=(0 if batch is None else entry, token))
    rows = kv_rows(problem, "test")
    assert rows.row_bytes % 16 == 0 and rows.row_bytes > 0
    found = {0}
    for b in range(batch or 1):
        for t in range(s_kv):
            row = b * rows.batch_rows + t * rows.token_rows
            assert row * rows.row_bytes == 2 * (b * problem.kv_strides[0] + t * token)
            found.add(row)
    assert rows.rows == max(found) + 1 or s_kv == 0
    tiles = rows.tiles(1 << 20)
    assert tiles.shape == (problem.d_qk, rows.rows) and tiles.box == (64, 1) and tiles.swizzle == 128


def test_rows_that_cannot_be_numbered_are_an_error() -> None:
    far = replace(MLA, batch=2, s_kv=2**22, kv_strides=(2**36 + 8, 2**13))
    with pytest.raises(UnsupportedError, match="rows"):
        kv_rows(far, "test")
    near = replace(far, kv_strides=(2**36, 2**13))
    assert kv_rows(near, "test").rows <= MAX_ROWS
    assert np.int32(kv_rows(near, "test").rows - 1) >= 0
