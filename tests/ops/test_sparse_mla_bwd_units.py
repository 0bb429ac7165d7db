"""Translation units of the backward: each is one kernel, has the variants that it needs, and is in its evidence."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from backward_plan_kit import ATTENTIONS, HOPPER
from plan_kit import CUDA

from cupymla import arch, evidence
from cupymla.ops import registry
from cupymla.ops.sparse_mla_bwd import paths, plan, units
from cupymla.ops.sparse_mla_bwd.launches import STAGES
from cupymla.ops.sparse_mla_bwd.paths import path
from cupymla.testing import operators


def test_units_take_the_definitions_that_they_name() -> None:
    """One more is a variant compiled twice; one that a file does not tell of is read as 0."""
    tables = (units.SINGLE, units.BLACKWELL, units.CLUSTER, units.PACKED, units.STORED)
    for unit in (units.CLUSTER_SUM, *(unit for table in tables for unit in table.values())):
        text = (CUDA / "sparse_mla_bwd" / unit.folder / f"{unit.kernel}.cu").read_text()
        assert set(re.findall(r"CUPYMLA_(\w+)(?:: )", text)) == set(unit.takes), unit.kernel
        assert re.search(rf"\b{unit.kernel}\(", text)


@pytest.mark.parametrize("target", paths.ARCHS)
def test_evidence_speaks_for_every_unit(target: str) -> None:
    """An edit of a unit that no kernel names would leave its evidence as it is."""
    entry = registry.named("sparse_mla_bwd")
    kernels = [kernel for kernel in entry.kernels if kernel.arch == target]
    named = {unit.path for kernel in kernels for unit in operators.units(entry, kernel)}
    assert named == {source.path for source in plan.sources(target)}
    for kernel in kernels:
        fewer = replace(kernel, units=kernel.units[:-1])
        assert not kernel.units or evidence.current_hash(entry, fewer) != evidence.current_hash(entry, kernel)


def test_variants_differ_only_in_what_a_stage_depends_on() -> None:
    """The lists know no dtype: compiling them once for each would cost time and cache for nothing."""
    lists = {plan.variant(HOPPER, stage="list", d_qk=d, dtype=t) for d in (576, 512) for t in ("bfloat16", "float16")}
    assert len(lists) == 1
    attention = [source for source in plan.sources() if source.entry in ATTENTIONS]
    assert len(attention) == 2 * 16 + 8 + 4 + 12  # of neighbours, of packed rows, and of a CTA's
    blackwell = arch.named("sm_100f")
    assert plan.variant(blackwell, stage="list", block_heads=64) == plan.variant(
        blackwell, stage="list", dtype="float16"
    )


def test_one_cta_and_a_cluster_have_all_stages_but_the_attention_in_common() -> None:
    for stage in set(STAGES) - {"attention", "merge"}:
        assert len({plan.variant(HOPPER, stage=stage, block_heads=heads) for heads in path.BLOCK_HEADS}) == 1, stage
