"""Waits for wgmma in machine code: each is for no more products than its source says."""

from __future__ import annotations

from pathlib import Path

import pytest
from backward_plan_kit import CLUSTER, SINGLE
from sass_kit import machine_code, marked_products, product_waits, require_groups_end_where_products_are_marked
from variants_kit import compiled_with

from cupymla import arch, build
from cupymla.ops.attn_dist import plan as dist
from cupymla.ops.mla import D_QK

pytestmark = pytest.mark.compile

PARTS = 4  # of the values, where heads are few


@pytest.mark.parametrize("block_heads", dist.BLOCK_HEADS)
@pytest.mark.parametrize("d_qk", D_QK)
def test_the_distribution_waits_for_a_whole_block(d_qk: int, block_heads: int, tmp_path: Path) -> None:
    """A block's products are one group, and its scores are waited for when the row of the block before is written."""
    source = compiled_with("cupymla.ops.attn_dist", "sm_90a", D_QK=d_qk, HEADS=block_heads)
    require_groups_end_where_products_are_marked(source, {0}, tmp_path)


@pytest.mark.parametrize("d_qk", D_QK)
def test_the_packed_queries_distribution_waits_for_the_left_half_alone(d_qk: int, tmp_path: Path) -> None:
    source = dist.variant(arch.named("sm_90a"), d_qk=d_qk, queries=dist.GROUP_SIZE)
    require_groups_end_where_products_are_marked(source, {0, 1}, tmp_path)


@pytest.mark.parametrize("entry", [SINGLE, CLUSTER])
@pytest.mark.parametrize("d_qk", D_QK)
def test_gradients_wait_for_dq_without_the_first_sums(d_qk: int, entry: str, tmp_path: Path) -> None:
    source = compiled_with("cupymla.ops.sparse_mla_bwd", "sm_90a", entry, D_QK=d_qk)
    require_groups_end_where_products_are_marked(source, {0, 1}, tmp_path)


@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("d_qk", D_QK)
def test_a_part_is_given_back_before_the_next_ones_products_are_done(d_qk: int, heads: int, tmp_path: Path) -> None:
    """One product of each part of the values is marked, so a wait for all parts but one is for no more."""
    pytest.importorskip("cupy", reason="compiling goes through CuPy's NVRTC bindings")
    source = compiled_with("cupymla.ops.sparse_mla_fwd", "sm_90a", D_QK=d_qk, HEADS=heads)
    code = machine_code(build.cubin(source), tmp_path)
    assert marked_products(code, f"64x{heads}x16") == PARTS
    assert product_waits(code) == {0, 1}
