"""Plans of indexer_logits: every key tile has one CTA, and the record is the kernel's."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from cupymla import arch
from cupymla.device import Device
from cupymla.errors import InputError, UnsupportedError
from cupymla.ops.indexer_logits import cuda, plan
from cupymla.ops.indexer_logits.spec import Options, Problem
from cupymla.ops.work_assignment import WorkAssignment

PROBLEM = Problem((), 4096, 32768, 64, 128, "float8_e4m3fn", False, Options(), Device("cuda", 0))
SM90 = arch.named("sm_90a")
FACTS = {"tile_queries": 8, "tile_keys": 128, "consumers": 2}


def taken(work: WorkAssignment) -> list[int]:
    """Key tiles in the order in which CTAs take them: as `Walk` of cuda/indexer_logits/sm90/work.cuh does."""
    steps: list[int] = []
    for cta in range(work.ctas):
        unit = cta
        while unit * work.fields["unit_steps"] < work.fields["steps"]:
            steps += range(
                unit * work.fields["unit_steps"], min(work.fields["steps"], (unit + 1) * work.fields["unit_steps"])
            )
            unit += work.ctas
    return steps


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("queries", "keys", "batch"), [(1, 1, 1), (9, 1000, 1), (4096, 4096, 1), (100, 3001, 3)])
@pytest.mark.parametrize("facts", [FACTS, {"tile_queries": 4, "tile_keys": 64, "consumers": 3}])
def test_every_key_tile_is_taken_once(queries: int, keys: int, batch: int, masked: bool, facts: dict[str, int]) -> None:
    problem = replace(PROBLEM, lead=(batch,), queries=queries, keys=keys, masked=masked)
    work = plan.work_assignment(problem, facts, 132)
    assert sorted(taken(work)) == list(range(work.fields["steps"]))
    assert (
        work.fields["query_tiles"] * facts["tile_queries"]
        >= queries
        > (work.fields["query_tiles"] - 1) * facts["tile_queries"]
    )
    assert work.fields["key_tiles"] * facts["tile_keys"] >= keys > (work.fields["key_tiles"] - 1) * facts["tile_keys"]
    assert 1 <= work.ctas <= 132


def test_ctas_have_equal_parts_where_queries_see_all_keys() -> None:
    work = plan.work_assignment(PROBLEM, FACTS, 132)
    assert work.ctas * work.fields["unit_steps"] < 1.02 * work.fields["steps"]


@pytest.mark.parametrize(
    ("heads", "filled"), [(1, 8), (8, 8), (9, 16), (32, 32), (33, 64), (64, 64), (65, 128), (128, 128)]
)
def test_heads_are_filled_up(heads: int, filled: int) -> None:
    for dtype in ("float8_e4m3fn", "bfloat16"):
        defines = dict(plan.plan(replace(PROBLEM, heads=heads, dtype=dtype), SM90).defines)
        assert defines["CUPYMLA_HEADS"] == filled
        # Zero times an infinite key is no number: 16-bit kernels leave such heads out.
        assert defines["CUPYMLA_FILLED"] == (heads != filled and dtype == "bfloat16")


def test_what_is_compiled_ahead_is_among_all_variants() -> None:
    assert set(plan.sources()) <= set(plan.variants())
    assert len(plan.sources()) <= 12


def test_what_no_kernel_serves_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="sm_100f"):
        plan.variant(arch.named("sm_100f"))
    for wrong in ({"dtype": "float32"}, {"channels": 96}, {"heads": 24}, {"filled": 1}, {"relu": None}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            plan.variant(SM90, **wrong)


def test_the_record_is_the_kernels() -> None:
    text = (Path(__file__).parents[2] / "cuda/indexer_logits/sm90/params.cuh").read_text()
    body = re.sub(r"//.*", "", text[text.index("struct Parameters {") : text.index("};")])
    declared = [
        name
        for line in re.findall(r"(?:const )?(?:u?int\d+_t|float)\*? ([^;]+);", body)
        for name in re.split(r",\s*", line.strip())
    ]
    assert declared == [name for name, *_ in cuda.Parameters._fields_]
