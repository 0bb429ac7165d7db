"""What the tests of the backward's plans share: a problem, and its plan with other sizes or options."""

from __future__ import annotations

from dataclasses import replace

from plan_kit import MLA

from cupymla import arch
from cupymla.ops.sparse_mla_bwd import plan, spec, units

PROBLEM = spec.Problem(
    replace(MLA, options=spec.Options()), has_attn_dist=False, dkv_dtype="bfloat16", dkv_shape=(8, 576)
)
ORDERED = spec.Options(deterministic=True)
HOPPER = arch.named("sm_90a")
_TABLES = (units.SINGLE, units.CLUSTER, units.PACKED, units.STORED)
ATTENTIONS = SINGLE, CLUSTER, PACKED, STORED = tuple(table["attention"].kernel for table in _TABLES)
"""Kernels of the attention in one piece, on Hopper."""
LISTS = ["list"]
"""The stage that lists entries."""


def planned(problem: spec.Problem = PROBLEM, target: arch.Arch = HOPPER, **shared: object) -> plan.Plan:
    changed = replace(problem, shared=replace(problem.shared, **shared))  # type: ignore[arg-type]
    return plan.plan(changed, target, 132)
