"""The pipeline of a pair of CTAs in the sm_90a backward as a model (`sparse_mla_bwd_pair_schedule.py`): what it finds,
and that the sources have its steps."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from schedule_machine import Violation, steps_of
from sparse_mla_bwd_pair_schedule import Pair

KERNEL = Path(__file__).resolve().parents[2] / "cuda" / "sparse_mla_bwd" / "sm90"

MUTATIONS = (
    *("heads_full", "full", "free", "room", "partial of P", "partial of dS", "ready"),
    *("delta_in", "distribution_in", "statistics_out", "statistics_out at the end of a pass", "slots_in"),
    *("wgmma wait of S", "wgmma wait of dP", "wgmma wait of dQ", "wgmma wait of dKV"),
    *("fence behind gathered rows", "fence behind P and dS", "second set of tokens", "cluster barrier"),
    "nothing said behind the last block",
)


@pytest.mark.parametrize("rope", [True, False], ids=["d576", "d512"])
def test_every_schedule_is_free_of_races_and_deadlocks(rope: bool) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        Pair(rng.randint(0, 5), rng.randint(1, 3), rope, rng.random() < 0.6).run(seed)


@pytest.mark.parametrize("drop", MUTATIONS)
def test_the_model_misses_what_is_taken_away(drop: str) -> None:
    """Every wait and fence is needed, and the model sees it."""
    with pytest.raises(Violation):
        for seed in range(60):
            Pair(random.Random(seed).randint(1, 4), 3, rope=seed % 2 == 0, drop=drop).run(seed)


def test_the_model_misses_the_fence_behind_heads_that_have_no_block() -> None:
    """Where there are blocks, the fences behind their rows do."""
    with pytest.raises(Violation, match=r"writes .*: no proxy fence"):
        Pair(0, 3, rope=True, drop="fence behind dO").run(0)


@pytest.mark.parametrize("blocks", [0, 2])
def test_neither_cta_uses_what_the_other_had_when_it_has_ended(blocks: int) -> None:
    for seed in range(60):
        Pair(blocks, 1, rope=True).run(seed)


@pytest.mark.parametrize(
    ("file", "counts", "sent"),
    [
        ("pair_producer.cuh", (1, 3, 0, 0, 0, 0), 0),
        ("pair_consumer.cuh", (3, 3, 1, 0, 1, 0), 3),
        ("pair_gradients.cuh", (0, 1, 0, 0, 4, 0), 1),
        ("pair_statistics.cuh", (2, 1, 1, 0, 0, 0), 1),
        ("pair_attention.cuh", (3, 2, 1, 0, 0, 2), 1),
    ],
)
def test_the_sources_have_the_steps_of_the_model(file: str, counts: tuple[int, ...], sent: int) -> None:
    assert steps_of(KERNEL / file) == counts
    to_the_other = r"cluster_(?:store_async_\w+|arrive_after_reads_at)\("
    assert len(re.findall(to_the_other, (KERNEL / file).read_text())) == sent


def test_weights_are_made_in_the_order_of_the_model() -> None:
    """Where a step stands the counts above do not tell."""
    text = (KERNEL / "pair_consumer.cuh").read_text()
    steps = re.search(r"void make_weights\(.*?\) \{(.*?)\n  \}", text, re.S)
    assert steps is not None
    names = ("read_validity", "wait", r"hand_over<k\w+>", r"issue<k\w+>", r"make_\w+", "finish_scores", "say_ready")
    assert re.findall(rf"\b({'|'.join(names)})\(", steps[1]) == [
        "read_validity",
        "wait",
        "hand_over<kOfScores>",
        "make_probabilities",
        "issue<kOfScoreGradients>",
        "make_probabilities",
        "finish_scores",
        "hand_over<kOfScoreGradients>",
        "make_score_gradients",
        "say_ready",
    ]
