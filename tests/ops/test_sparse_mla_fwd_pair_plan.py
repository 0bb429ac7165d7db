"""What the host tells the Blackwell kernel: the parameter record, the grid, KV as one matrix of rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_kit import MLA, require_twin

from cupymla import InputError, UnsupportedError, arch
from cupymla.ops.kv_rows import MAX_ROWS, kv_rows
from cupymla.ops.sparse_mla_fwd import binding, pair_plan, plan

BLACKWELL = arch.named("sm_100a")


def test_parameter_record_is_the_one_that_the_kernel_reads() -> None:
    require_twin(binding.PairParameters, "sparse_mla_fwd/sm100/params.cuh")


@pytest.mark.parametrize("target", plan.PAIRED)
def test_each_target_has_its_own_source_and_record(target: str) -> None:
    chosen = pair_plan.pair_plan(MLA, arch.named(target), 148)
    assert chosen.source.arch == target and chosen.source in plan.sources(target)
    assert binding.record(chosen.source) is binding.PairParameters
    assert binding.record(plan.variant(arch.named("sm_90a"))) is binding.Parameters


@pytest.mark.parametrize(
    ("h_q", "s_q", "topk", "head_blocks", "parts", "clusters"),
    [
        (1, 4096, 2048, 1, 1, 74),
        (128, 4096, 2048, 1, 1, 74),
        (129, 4096, 2048, 2, 1, 74),
        (128, 20, 2048, 1, 2, 20),
        (128, 1, 2048, 1, 8, 1),
        (256, 1, 2048, 2, 8, 2),
        (128, 1, 256, 1, 1, 1),
        (128, 3, 512, 1, 1, 3),
    ],
)
def test_grid(h_q: int, s_q: int, topk: int, head_blocks: int, parts: int, clusters: int) -> None:
    """128 heads a pair, as many clusters as run at once; slots are shared only where that leaves room and pays."""
    chosen = pair_plan.pair_plan(replace(MLA, h_q=h_q, s_q=s_q, topk=topk), BLACKWELL, 148)
    assert (chosen.head_blocks, chosen.parts, chosen.clusters) == (head_blocks, parts, clusters)
    assert (chosen.cluster, chosen.ctas) == (2 * parts, 2 * parts * clusters)
    assert dict(chosen.source.defines)["CUPYMLA_SPLIT"] == int(parts > 1)


@given(items=st.integers(1, 4000), topk=st.integers(1, 100_000), multiprocessors=st.integers(1, 200))
def test_a_split_never_asks_for_more_ctas_than_run_at_once(items: int, topk: int, multiprocessors: int) -> None:
    parts = pair_plan.parts(items, topk, multiprocessors)
    assert parts == 1 or 2 * parts * items <= multiprocessors


@pytest.mark.parametrize(("sm_scale", "any_scale"), [(0.1, 0), (0.0, 1), (-0.1, 1), (1e-38, 1), (1e30, 0)])
def test_scales_that_are_not_surely_positive_take_the_general_variant(sm_scale: float, any_scale: int) -> None:
    chosen = pair_plan.pair_plan(replace(MLA, sm_scale=sm_scale), BLACKWELL, 148)
    assert dict(chosen.source.defines)["CUPYMLA_ANY_SCALE"] == any_scale


def test_too_many_heads_are_an_error_before_anything_is_launched() -> None:
    with pytest.raises(UnsupportedError, match="heads"):
        pair_plan.pair_plan(replace(MLA, batch=2**10, s_q=2**20), BLACKWELL, 148)


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
