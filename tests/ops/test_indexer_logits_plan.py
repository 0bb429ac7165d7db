"""Plans of indexer_logits: tiles, CTAs that share them, and the record, which is the kernel's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_kit import require_mirrored

from cupymla import arch
from cupymla.device import Device
from cupymla.errors import InputError, UnsupportedError
from cupymla.ops.indexer_logits import cuda, plan
from cupymla.ops.indexer_logits.spec import Options, Problem
from cupymla.testing import compare
from cupymla_lab.emulated import emulated
from cupymla_lab.subjects import Subject

PROBLEM = Problem((), 4096, 32768, 64, 128, "float8_e4m3fn", False, Options(), Device("cuda", 0))
SM90 = arch.named("sm_90a")
FACTS = {"tile_queries": 8, "tile_keys": 128}


@pytest.mark.parametrize(("queries", "keys", "batch"), [(1, 1, 1), (9, 1000, 1), (4096, 4096, 1), (100, 3001, 3)])
@pytest.mark.parametrize("facts", [FACTS, {"tile_queries": 4, "tile_keys": 64}])
def test_tiles_cover_queries_and_keys(queries: int, keys: int, batch: int, facts: dict[str, int]) -> None:
    work = plan.work_assignment(replace(PROBLEM, lead=(batch,), queries=queries, keys=keys), facts, 132)
    for tiles, size, extent in (("query_tiles", "tile_queries", queries), ("key_tiles", "tile_keys", keys)):
        assert (work.fields[tiles] - 1) * facts[size] < extent <= work.fields[tiles] * facts[size]
    assert work.ctas == min(132, batch * work.fields["query_tiles"] * work.fields["key_tiles"])


@pytest.mark.compile
@pytest.mark.parametrize("multiprocessors", [1, 2, 7])
def test_every_score_is_written_however_many_ctas_share(multiprocessors: int) -> None:
    """Parts of the line begin in scored tiles, in filled ones and between; what nobody writes stays poison."""
    case = next(case for case in Subject("indexer_logits").cases.CASES if case.name.endswith("causal_unseen"))
    with emulated("sm_90a", multiprocessors) as machine:
        compare.require(machine.check("indexer_logits", case))
        assert {launch.grid[0] for launch in machine.launches} == {multiprocessors}


@pytest.mark.compile
@pytest.mark.parametrize("keys", [100, 300])
def test_query_buffers_come_round(keys: int) -> None:
    """Five query tiles in one CTA. With one key tile each, a consumer has none in every second; with three, its last
    weights are read when the next query tile has begun."""
    unseen = next(case for case in Subject("indexer_logits").cases.CASES if case.name.endswith("causal_unseen"))
    case = replace(unseen, queries=40, keys=keys, q_start=keys - 40)
    with emulated("sm_90a", 1) as machine:
        compare.require(machine.check("indexer_logits", case))


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
