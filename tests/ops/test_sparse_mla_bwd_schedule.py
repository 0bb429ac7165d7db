"""The pipeline of the sm_90a backward as a model (`sparse_mla_bwd_schedule.py`): what it finds, and that the sources
have its steps."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from sass_kit import require_groups_end_where_products_are_marked
from schedule_machine import Violation, steps_of
from sparse_mla_bwd_schedule import Cta

from cupymla import arch
from cupymla.ops.mla import D_QK
from cupymla.ops.sparse_mla_bwd import plan

KERNEL = Path(__file__).resolve().parents[2] / "cuda" / "sparse_mla_bwd" / "sm90"

MUTATIONS = (
    # Of the three barriers that free the keys the later two are arrived at with the first: they order nothing more.
    *("heads_free", "heads_full", "free 0", "full 0", "full 1", "full 2", "full 3"),
    *("tiles_free", "p_ready 0", "p_ready 1", "ds_ready of 0", "ds_ready of 1"),
    *("wgmma wait of scores", "wgmma wait of dQ", "wgmma wait of dKV"),
    # Consumer 1 fences after it has waited for P, so its fence would do for both; the kernel fences where it writes.
    *("fence behind gathered rows", "fence behind dS", "second set of tokens"),
    *("statistics_out", "statistics_out at the end of a pass"),
    # The one behind adding could go: sums over heads are written anew behind `tiles_free`, which every consumer has
    # arrived at.
    "named barrier before adding",
)


@pytest.mark.parametrize("rope", [True, False], ids=["d576", "d512"])
@pytest.mark.parametrize("joint", [False, True], ids=["one query", "several"])
def test_every_schedule_is_free_of_races_and_deadlocks(joint: bool, rope: bool) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        Cta(rng.randint(0, 5), rng.randint(1, 3), rope, rng.random() < 0.5, joint=joint).run(seed)


@pytest.mark.parametrize("drop", MUTATIONS)
def test_the_model_misses_what_is_taken_away(drop: str) -> None:
    """Every wait and fence is needed, and the model sees it."""
    with pytest.raises(Violation):
        for seed in range(60):
            Cta(random.Random(seed).randint(1, 4), 3, rope=True, drop=drop).run(seed)


@pytest.mark.parametrize("drop", ["decided", "cleared"])
def test_the_model_misses_what_is_taken_away_of_several_queries(drop: str) -> None:
    with pytest.raises(Violation):
        for seed in range(60):
            Cta(random.Random(seed).randint(1, 4), 3, rope=True, joint=True, drop=drop).run(seed)


def test_the_model_misses_the_fence_behind_cleared_heads_that_have_no_block() -> None:
    with pytest.raises(Violation, match=r"writes .*: no proxy fence"):
        Cta(0, 3, rope=True, joint=True, drop="fence behind cleared heads").run(0)


def test_the_model_misses_the_fence_behind_heads_that_have_no_block() -> None:
    """Where there are blocks, the fences behind their rows do."""
    with pytest.raises(Violation, match=r"writes .*: no proxy fence"):
        Cta(0, 3, rope=True, drop="fence behind dO").run(0)


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("producer.cuh", (2, 1, 0, 0, 0, 0)),
        ("consumer.cuh", (4, 2, 4, 4, 1, 0)),
        ("gradients.cuh", (0, 2, 0, 0, 2, 0)),
        ("statistics.cuh", (1, 2, 2, 0, 0, 0)),
        ("meet_consumers.cuh", (1, 1, 0, 0, 0, 0)),
        ("attention.cuh", (2, 1, 0, 0, 0, 0)),
    ],
)
def test_the_sources_have_the_steps_of_the_model(file: str, counts: tuple[int, ...]) -> None:
    assert steps_of(KERNEL / file) == counts


def test_consumers_free_what_the_model_says_and_wait_in_its_order() -> None:
    """Which consumer it is the counts above do not tell."""
    text = (KERNEL / "gradients.cuh").read_text()
    assert "for (Mbarrier& side : storage.free[0]) side.arrive();" in text
    run = re.search(r"void run\(bool more\) \{(.*?)\n  \}", text, re.S)
    assert run is not None
    assert re.findall(r"send\w*(?:<.*?>)?\(.*?\);", run[1]) == [
        "send_first(kFirst);",
        "send(kFirst + 1, true);",
        "send_and_multiply_ahead(kFirst + 2, more);",
        "send(kFirst + 3, false);",
        "send_last<!kHasKeyRope>(kLast);",
    ]
    assert "if constexpr (kHasKeyRope) send(kFirst + 3, false);" in run[1]
    assert "kHasKeyRope = Config::kHasRope && !ThisConsumer::kHasNarrow;" in text
    consumer = (KERNEL / "consumer.cuh").read_text()
    assert "kHasNarrow = Config::kHasRope && kWho == 0;" in consumer
    assert "kMultipliesAhead = !kHasNarrow;" in consumer
    assert "return part == 0 ? 0 : part == 1 ? -1 : part - 1;" in (KERNEL / "producer.cuh").read_text()


@pytest.mark.compile
@pytest.mark.parametrize("pass_heads", [64, 128])
@pytest.mark.parametrize("d_qk", D_QK)
def test_waits_are_for_no_more_products_than_they_say(d_qk: int, pass_heads: int, tmp_path: Path) -> None:
    """Else the wait for dQ is for the first sums as well."""
    source = plan.variant(arch.named("sm_90a"), d_qk=d_qk, pass_heads=pass_heads)
    require_groups_end_where_products_are_marked(source, {0, 1}, tmp_path)
