"""Plans of indexer_logits: every key tile has one CTA, and the record is the kernel's."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from plan_kit import require_mirrored

from cupymla import arch
from cupymla.device import Device
from cupymla.errors import InputError, UnsupportedError
from cupymla.ops.indexer_logits import cuda, plan
from cupymla.ops.indexer_logits.spec import Options, Problem
from cupymla.ops.work_assignment import WorkAssignment
from cupymla.testing import compare
from cupymla_lab.emulated import emulated
from cupymla_lab.subjects import Subject

PROBLEM = Problem((), 4096, 32768, 64, 128, "float8_e4m3fn", False, Options(), Device("cuda", 0))
SM90 = arch.named("sm_90a")
FACTS = {"tile_queries": 8, "tile_keys": 128, "consumers": 2}


def taken(work: WorkAssignment) -> list[list[int]]:
    """Key tiles of each CTA, in its order: as `Walk` of cuda/indexer_logits/sm90/work.cuh takes them."""
    size, steps = work.fields["unit_steps"], work.fields["steps"]
    found: list[list[int]] = [[] for _ in range(work.ctas)]
    for number in range(-(-steps // (size * work.ctas))):
        for cta in range(work.ctas):
            unit = number * work.ctas + (cta + number) % work.ctas
            found[cta] += range(unit * size, min(steps, (unit + 1) * size))
    return found


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("queries", "keys", "batch"), [(1, 1, 1), (9, 1000, 1), (4096, 4096, 1), (100, 3001, 3)])
@pytest.mark.parametrize("facts", [FACTS, {"tile_queries": 4, "tile_keys": 64, "consumers": 3}])
def test_every_key_tile_is_taken_once(queries: int, keys: int, batch: int, masked: bool, facts: dict[str, int]) -> None:
    problem = replace(PROBLEM, lead=(batch,), queries=queries, keys=keys, masked=masked)
    work = plan.work_assignment(problem, facts, 132)
    assert sorted(itertools.chain.from_iterable(taken(work))) == list(range(work.fields["steps"]))
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


@pytest.mark.parametrize(("queries", "keys"), [(4096, 4096), (4096, 8192), (8192, 8192), (4096, 32768)])
def test_ctas_have_about_equal_parts_of_what_a_causal_mask_leaves(queries: int, keys: int) -> None:
    """Without rotation the CTA with most had 1.8 times the mean at 4096 keys: there are four units a row."""
    work = plan.work_assignment(replace(PROBLEM, queries=queries, keys=keys, masked=True), FACTS, 132)
    tiles = work.fields["key_tiles"]
    seen = [sum((step // tiles + 1) * 8 + keys - queries > step % tiles * 128 for step in own) for own in taken(work)]
    assert max(seen) < 1.2 * sum(seen) / len(seen)


@pytest.mark.compile
def test_units_that_nobody_sees_and_many_rounds() -> None:
    case = next(case for case in Subject("indexer_logits").cases.CASES if case.name.endswith("causal_unseen"))
    with emulated("sm_90a", 2) as machine:
        compare.require(machine.check("indexer_logits", case))
        assert {launch.grid[0] for launch in machine.launches} == {2}


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
    for wrong in ({"dtype": "float32"}, {"channels": 96}, {"heads": 24}, {"filled": 1}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            plan.variant(SM90, **wrong)


def test_the_record_is_the_kernels() -> None:
    require_mirrored(cuda.Parameters, "indexer_logits/sm90/params.cuh")
