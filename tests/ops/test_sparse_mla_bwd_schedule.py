"""The pipeline of the sm_90a backward as a model (`sparse_mla_bwd_schedule.py`): what it finds, and that the sources
have its steps."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from sass_kit import require_groups_end_where_products_are_marked
from schedule_machine import Violation, steps_of
from sparse_mla_bwd_schedule import Query

from cupymla import arch
from cupymla.ops.mla import D_QK
from cupymla.ops.sparse_mla_bwd import plan

KERNEL = Path(__file__).resolve().parents[2] / "cuda" / "sparse_mla_bwd" / "sm90"

MUTATIONS = (
    *(
        "heads_free",
        "heads_full",
        "free left",
        "free staging 0",
        "free staging 1",
        "full 0",
        "full 1",
        "full 2",
        "full 3",
    ),
    *("tiles_free", "p_ready 0", "p_ready 1", "ds_ready of 0", "ds_ready of 1", "staging_ready", "received", "drained"),
    *("wgmma wait of scores", "wgmma wait of dQ", "wgmma wait of dKV"),
    # Consumer 1 fences after it has waited for P, so its fence would do for both; the kernel fences where it writes.
    # "first_ready" orders nothing but who multiplies first.
    *("fence behind gathered rows", "fence behind dS", "second set of tokens"),
    *("statistics_out", "statistics_out at the end of a pass", "slots_in", "cluster barrier"),
    *("named barrier before adding", "named barrier behind adding", "fence behind adding"),
)
SINGLE = frozenset({"heads_free", "tiles_free", "full 0", "statistics_out at the end of a pass"})
"""Steps that a pair of CTAs could do without: its key tiles are free later, consumers wait for both left parts before
they multiply either, and there is a cluster barrier between passes."""


@pytest.mark.parametrize("rope", [True, False], ids=["d576", "d512"])
@pytest.mark.parametrize("ctas", [1, 2])
def test_every_schedule_is_free_of_races_and_deadlocks(ctas: int, rope: bool) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        partials = rng.random() < 0.3
        Query(ctas, rng.randint(0, 5), rng.randint(1, 3), rope, rng.random() < 0.5, partials=partials).run(seed)
        if ctas == 1:
            Query(1, rng.randint(0, 5), rng.randint(1, 3), rope, rng.random() < 0.5, joint=True).run(seed)


@pytest.mark.parametrize("drop", MUTATIONS)
def test_the_model_misses_what_is_taken_away(drop: str) -> None:
    """Every wait and fence is needed, and the model sees it."""
    with pytest.raises(Violation):
        for seed in range(60):
            Query(1 if drop in SINGLE else 2, random.Random(seed).randint(1, 4), 3, rope=True, drop=drop).run(seed)


@pytest.mark.parametrize("drop", ["decided", "cleared"])
def test_the_model_misses_what_is_taken_away_of_several_queries(drop: str) -> None:
    with pytest.raises(Violation):
        for seed in range(60):
            Query(1, random.Random(seed).randint(1, 4), 3, rope=True, joint=True, drop=drop).run(seed)


def test_the_model_misses_the_fence_behind_cleared_heads_that_have_no_block() -> None:
    with pytest.raises(Violation, match=r"writes .*: no proxy fence"):
        Query(1, 0, 3, rope=True, joint=True, drop="fence behind cleared heads").run(0)


@pytest.mark.parametrize("ctas", [1, 2])
def test_the_model_misses_the_fence_behind_heads_that_have_no_block(ctas: int) -> None:
    """Where there are blocks, the fences behind their rows do."""
    with pytest.raises(Violation, match=r"writes .*: no proxy fence"):
        Query(ctas, 0, 3, rope=True, drop="fence behind dO").run(0)


def test_the_model_misses_the_cluster_barrier_at_the_end_of_a_pass() -> None:
    """Behind the last pass there is none."""
    with pytest.raises(Violation):
        for seed in range(60):
            Query(2, 2, 3, rope=True, drop="cluster barrier").run(seed)


@pytest.mark.parametrize("blocks", [0, 2])
def test_neither_cta_uses_what_the_other_had_when_it_has_ended(blocks: int) -> None:
    for seed in range(60):
        Query(2, blocks, 1, rope=True).run(seed)


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("producer.cuh", (2, 1, 0, 0, 0, 0)),
        ("consumer.cuh", (3, 2, 3, 4, 1, 0)),
        ("gradients.cuh", (4, 12, 0, 0, 4, 0)),
        ("statistics.cuh", (2, 3, 2, 0, 0, 0)),
        ("attention.cuh", (3, 2, 0, 0, 0, 2)),
    ],
)
def test_the_sources_have_the_steps_of_the_model(file: str, counts: tuple[int, ...]) -> None:
    assert steps_of(KERNEL / file) == counts


def test_the_exchange_waits_where_the_model_does() -> None:
    text = (KERNEL / "gradients.cuh").read_text()
    assert len(re.findall(r"store_at_other\(sums\)", text)) == 1
    assert len(re.findall(r"arrive_at_other\(storage\.", text)) == 3


def test_consumers_free_what_the_model_says_and_wait_in_its_order() -> None:
    """Which consumer it is the counts above do not tell."""
    text = (KERNEL / "gradients.cuh").read_text()
    assert re.findall(r"storage\.free\[0\]\[(.*?)\]\.arrive", text) == ["2", "0", "1", "2", "1", "1 + kWho"]
    assert re.findall(r"storage\.first_ready\.(\w+)", text) == ["wait", "arrive"]
    assert "if constexpr (kWho == 1) {\n        exchange_by_turns(more);" in text
    assert "if constexpr (kWho == 0) give_up_staging();" in text
    assert "kHasKeyRope = Config::kHasRope && !ThisConsumer::kHasNarrow;" in text
    consumer = (KERNEL / "consumer.cuh").read_text()
    assert "kHasNarrow = Config::kHasRope && kWho == 0;" in consumer
    ahead = re.search(r"kPartsAhead = (.*?);", consumer, re.S)
    assert ahead is not None
    assert " ".join(ahead[1].split()) == (
        "Config::kCluster == 1 ? (kHasNarrow ? 0 : Config::kParts) "
        ": kWho == 1 && !Config::kPartials ? Config::kLeftParts : 0"
    )
    assert re.findall(r"\? -1 : 1 \+ part - Config::kLeftParts;", (KERNEL / "producer.cuh").read_text())


@pytest.mark.compile
@pytest.mark.parametrize("pass_heads", [64, 128])
@pytest.mark.parametrize("d_qk", D_QK)
def test_waits_are_for_no_more_products_than_they_say(d_qk: int, pass_heads: int, tmp_path: Path) -> None:
    """Else the wait for dQ is for the first sums as well."""
    source = plan.variant(arch.named("sm_90a"), d_qk=d_qk, pass_heads=pass_heads)
    require_groups_end_where_products_are_marked(source, {0, 1} if pass_heads == 64 else {0, 1, 2}, tmp_path)
