"""Translation units of the backward: which one each stage is compiled from, and the definitions that it takes.

A unit is one kernel. It lies in the folder of the first target that it serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...build.source import KernelSource
from .spec import OPERATOR


@dataclass(frozen=True, slots=True)
class Unit:
    """A translation unit.

    Attributes:
        kernel: the name of the kernel, and of its file in `cuda/sparse_mla_bwd/<folder>`.
        takes: its definitions, without their "CUPYMLA_".
        folder: "sm90" where it is written for Hopper, or for Hopper and newer.
    """

    kernel: str
    takes: tuple[str, ...] = ()
    folder: str = "sm90"

    def source(self, arch_name: str, values: Mapping[str, int]) -> KernelSource:
        """What to compile for a target, with its definitions among `values`."""
        defines = tuple((f"CUPYMLA_{name}", values[name]) for name in self.takes)
        return KernelSource(f"{OPERATOR}/{self.folder}/{self.kernel}.cu", self.kernel, defines, arch_name)


SINGLE: Mapping[str, Unit] = {
    "attention": Unit("sparse_mla_bwd", ("D_QK", "FP16", "PARTIALS")),
    "zero": Unit("sparse_mla_bwd_zero", ("D_QK",)),
    "round": Unit("sparse_mla_bwd_round", ("D_QK", "FP16")),
    "sink": Unit("sparse_mla_bwd_sink"),
    "clear": Unit("sparse_mla_bwd_clear", ("CHUNKS",)),
    "count": Unit("sparse_mla_bwd_count", ("CHUNKS",)),
    "scan": Unit("sparse_mla_bwd_scan", ("CHUNKS",)),
    "place": Unit("sparse_mla_bwd_place", ("CHUNKS",)),
    "sum": Unit("sparse_mla_bwd_sum", ("D_QK",)),
    "sort": Unit("sparse_mla_bwd_sort"),
    "scatter": Unit("sparse_mla_bwd_scatter"),
    "p_ds": Unit("sparse_mla_bwd_p_ds", ("D_QK", "FP16")),
    "dq_dkv": Unit("sparse_mla_bwd_dq_dkv", ("D_QK", "FP16", "PARTIALS")),
    "sink_lse": Unit("sparse_mla_bwd_sink_lse"),
}
"""By stage: of queries that take their rows by themselves, on Hopper."""

BLACKWELL: Mapping[str, Unit] = {
    "attention": Unit("sparse_mla_bwd", ("D_QK", "FP16", "HEADS", "PARTIALS"), "sm100"),
}
"""What Blackwell has in their place."""

CLUSTER: Mapping[str, Unit] = {
    "attention": Unit("sparse_mla_bwd_cluster", ("D_QK", "FP16", "PARTIALS")),
    "zero": Unit("sparse_mla_bwd_cluster_zero", ("D_QK",)),
    "round": Unit("sparse_mla_bwd_cluster_round", ("D_QK", "FP16")),
}
"""What a 2-CTA cluster on Hopper has in their place; two phases have its sums."""

CLUSTER_SUM = Unit("sparse_mla_bwd_cluster_sum", ("D_QK",))
"""The stage `sum` where their rows are packed."""

PACKED: Mapping[str, Unit] = {
    "attention": Unit("sparse_mla_bwd_packed", ("D_QK", "FP16", "QUERIES")),
    "zero": Unit("sparse_mla_bwd_packed_zero", ("D_QK", "FP16")),
    "round": SINGLE["round"],
    "sink": SINGLE["sink"],
    "merge": Unit("sparse_mla_bwd_merge", ("QUERIES", "FIXED_ORDER")),
}
"""Of packed queries."""

STORED: Mapping[str, Unit] = {
    "attention": Unit("sparse_mla_bwd_stored", ("D_QK", "FP16", "QUERIES")),
    "sum": Unit("sparse_mla_bwd_stored_sum", ("D_QK", "QUERIES")),
    "merge": PACKED["merge"],
}
"""Of one CTA that stores packed rows; it has its other stages from those above."""
