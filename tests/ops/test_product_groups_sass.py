"""Waits for wgmma in machine code: each is for no more products than its source says."""

from __future__ import annotations

from pathlib import Path

import pytest
from sass_kit import require_groups_end_where_products_are_marked

from cupymla import arch
from cupymla.ops.attn_dist import plan as dist
from cupymla.ops.mla import D_QK
from cupymla.ops.sparse_mla_bwd import plan as bwd

pytestmark = pytest.mark.compile


@pytest.mark.parametrize("pass_heads", dist.PASS_HEADS)
@pytest.mark.parametrize("d_qk", D_QK)
def test_the_distribution_waits_for_a_whole_block(d_qk: int, pass_heads: int, tmp_path: Path) -> None:
    """A block's products are one group, and its scores are waited for when the row of the block before is written."""
    source = dist.variant(arch.named("sm_90a"), d_qk=d_qk, pass_heads=pass_heads)
    require_groups_end_where_products_are_marked(source, {0}, tmp_path)


@pytest.mark.parametrize("d_qk", D_QK)
def test_the_joint_distribution_waits_for_the_left_half_alone(d_qk: int, tmp_path: Path) -> None:
    source = dist.variant(arch.named("sm_90a"), d_qk=d_qk, queries=dist.JOINT_QUERIES)
    require_groups_end_where_products_are_marked(source, {0, 1}, tmp_path)


@pytest.mark.parametrize("pass_heads", [64, 128])
@pytest.mark.parametrize("d_qk", D_QK)
def test_gradients_wait_for_dq_without_the_first_sums(d_qk: int, pass_heads: int, tmp_path: Path) -> None:
    source = bwd.variant(arch.named("sm_90a"), d_qk=d_qk, pass_heads=pass_heads)
    require_groups_end_where_products_are_marked(source, {0, 1}, tmp_path)
