"""Translation units of the backward: which one each stage is compiled from, and the definitions that it takes."""

from __future__ import annotations

from collections.abc import Mapping

from ..units import Unit
from .spec import OPERATOR

SINGLE: Mapping[str, Unit] = {
    "attention": Unit(OPERATOR, "sparse_mla_bwd", ("D_QK", "FP16", "PARTIALS")),
    "zero": Unit(OPERATOR, "sparse_mla_bwd_zero", ("D_QK",)),
    "round": Unit(OPERATOR, "sparse_mla_bwd_round", ("D_QK", "FP16")),
    "sink": Unit(OPERATOR, "sparse_mla_bwd_sink"),
    "list": Unit(OPERATOR, "sparse_mla_bwd_list"),
    "sum": Unit(OPERATOR, "sparse_mla_bwd_sum", ("D_QK",)),
    "sort": Unit(OPERATOR, "sparse_mla_bwd_sort"),
    "scatter": Unit(OPERATOR, "sparse_mla_bwd_scatter"),
    "p_ds": Unit(OPERATOR, "sparse_mla_bwd_p_ds", ("D_QK", "FP16")),
    "dq_dkv": Unit(OPERATOR, "sparse_mla_bwd_dq_dkv", ("D_QK", "FP16", "PARTIALS")),
    "sink_lse": Unit(OPERATOR, "sparse_mla_bwd_sink_lse"),
}
"""By stage: of queries that take their rows by themselves, on Hopper."""

BLACKWELL: Mapping[str, Unit] = {
    "attention": Unit(OPERATOR, "sparse_mla_bwd", ("D_QK", "FP16", "HEADS", "PARTIALS"), "sm100"),
    "zero": Unit(OPERATOR, "sparse_mla_bwd_zero", ("D_QK",), "sm100"),
    "round": Unit(OPERATOR, "sparse_mla_bwd_round", ("D_QK", "FP16"), "sm100"),
}
"""What Blackwell has in their place."""

CLUSTER: Mapping[str, Unit] = {
    "attention": Unit(OPERATOR, "sparse_mla_bwd_cluster", ("D_QK", "FP16", "PARTIALS")),
}
"""What a 2-CTA cluster on Hopper has in their place."""

CLUSTER_SUM = Unit(OPERATOR, "sparse_mla_bwd_cluster_sum", ("D_QK",))
"""The stage `sum` where their rows are packed."""

PACKED: Mapping[str, Unit] = {
    "attention": Unit(OPERATOR, "sparse_mla_bwd_packed", ("D_QK", "FP16", "QUERIES")),
    "zero": Unit(OPERATOR, "sparse_mla_bwd_packed_zero", ("D_QK", "FP16")),
    "round": SINGLE["round"],
    "sink": SINGLE["sink"],
    "merge": Unit(OPERATOR, "sparse_mla_bwd_merge", ("QUERIES", "FIXED_ORDER")),
}
"""Of packed queries."""

STORED: Mapping[str, Unit] = {
    "attention": Unit(OPERATOR, "sparse_mla_bwd_stored", ("D_QK", "FP16", "QUERIES")),
    "sum": Unit(OPERATOR, "sparse_mla_bwd_stored_sum", ("D_QK", "QUERIES")),
    "merge": PACKED["merge"],
}
"""Of one CTA that stores packed rows; it has its other stages from those above."""
