"""Two CTAs for each query of more than 64 heads on Hopper: each has half of the columns of all heads' gradients.

It is chosen where two phases cannot be, or are slower: where rows of kv and sums are so many that even a split of the
columns does not fit in L2, with more than 128 heads, and of a dkv in float32 that has to be deterministic.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ....errors import UnsupportedError, shown
from ...units import Unit
from .. import units
from ..spec import OPERATOR, Problem
from .path import BLOCK_HEADS, CTA_HEADS, Path

HEAD_TILE = 32
"""Neighbouring heads that are one CTA's of a cluster on sm_90a, and that one tensor copy brings in: as `kHeadTile` in
cuda/sparse_mla_bwd/sm90/cluster_config.cuh."""

ROPE_COLUMNS = 32
"""Columns of the RoPE that a CTA of such a cluster has: as `kRopeColumns` there."""

CLUSTER_TOPK = 1 << 26
"""Entries of a query that such a cluster can count: blocks of 64 by the bits from `kBlock` on in
cuda/sparse_mla_bwd/sm90/cluster_consumer.cuh."""


@dataclass(frozen=True, slots=True)
class Cluster(Path):
    """A 2-CTA cluster a query."""

    block_heads: int = BLOCK_HEADS[1]

    title: ClassVar[str] = "2-CTA cluster"
    heads: ClassVar[range] = range(CTA_HEADS + 1, sys.maxsize)
    cluster: ClassVar[int] = 2
    row_ctas: ClassVar[int] = 2
    attends_in_clusters: ClassVar[bool] = True
    own_units: ClassVar[Mapping[str, Unit]] = units.CLUSTER
    packed_units: ClassVar[Mapping[str, Unit]] = {"sum": units.CLUSTER_SUM}

    def require(self, problem: Problem) -> None:
        """Raise UnsupportedError for more entries than it can count."""
        shared = problem.shared
        if shared.topk > CLUSTER_TOPK:
            wanted = f"{OPERATOR} with a topk of {shown(shared.topk)} and {shared.h_q} heads"
            raise UnsupportedError(wanted, self.arch_name, f"up to {CLUSTER_TOPK} with more than {CTA_HEADS} heads")
