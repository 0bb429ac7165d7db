"""The references' work follows what counts: valid top-k entries, keys that are seen; never the size of the arrays."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest

from cupymla.ops import indexer_score, mla_reference
from cupymla_lab.subjects import Subject

TOPK, LONGEST, TOKENS, QUERIES, HEADS = 3000, 20, 400, 5, 4
LENGTHS = np.array([3, LONGEST, 0, -4, 7], np.int32)
MLA = ("sparse_mla_fwd", "sparse_mla_bwd", "sparse_mla_bwd_phase1", "attn_dist")


def arguments(name: str, topk: int) -> dict[str, Any]:
    """A call of `topk` entries a query; every number is the same whatever `topk` is."""
    random = np.random.default_rng(5)
    given: dict[str, Any] = {
        "q": random.standard_normal((QUERIES, HEADS, 576)).astype(np.float16),
        "kv": random.standard_normal((TOKENS, 576)).astype(np.float16),
        "out": random.standard_normal((QUERIES, HEADS, 512)).astype(np.float16),
        "dout": random.standard_normal((QUERIES, HEADS, 512)).astype(np.float16),
        "lse": random.uniform(4, 6, (QUERIES, HEADS)).astype(np.float32),
        "indices": random.integers(0, TOKENS, (QUERIES, TOPK)).astype(np.int32)[:, :topk],
    }
    taken = {
        "sparse_mla_fwd": ("q", "kv", "indices"),
        "sparse_mla_bwd": tuple(given),
        "sparse_mla_bwd_phase1": ("q", "kv", "out", "dout", "indices"),
        "attn_dist": ("q", "kv", "indices", "lse"),
    }[name]
    chosen = {argument: given[argument] for argument in taken}
    return {**chosen, "topk_length": LENGTHS}


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows of keys each block of queries takes."""
    rows: list[int] = []
    gather = mla_reference._gather

    def counted(kv: Any, tokens: Any, *rest: Any) -> Any:
        rows.append(tokens.size)
        return gather(kv, tokens, *rest)

    monkeypatch.setattr(mla_reference, "_gather", counted)
    return rows


@pytest.mark.parametrize("name", MLA)
@pytest.mark.parametrize("precision", ["float64", "same"])
def test_work_follows_topk_length_and_the_results_are_those_of_short_lists(
    name: str, precision: Literal["float64", "same"], gathered: list[int]
) -> None:
    reference = Subject(name).reference
    long = reference(arguments(name, TOPK), precision)
    assert sum(gathered) <= QUERIES * LONGEST
    for one, other in zip(long, reference(arguments(name, LONGEST), precision), strict=True):
        np.testing.assert_array_equal(one[..., : other.shape[-1]], other)
        empty = -np.inf if name == "sparse_mla_bwd_phase1" else 0
        assert (one[..., other.shape[-1] :] == empty).all()


@pytest.mark.parametrize("name", MLA)
def test_work_ends_with_the_last_valid_entry(name: str, gathered: list[int]) -> None:
    """Lists that end in -1, as a top-k gives them where there are fewer tokens, cost no more than shorter ones."""
    given = arguments(name, TOPK)
    given["indices"][:, LONGEST:] = -1
    del given["topk_length"]
    Subject(name).reference(given, "same")
    assert sum(gathered) <= QUERIES * LONGEST


def test_a_distribution_that_is_given_is_written_whole() -> None:
    dist = np.full((QUERIES, TOPK), np.nan, np.float32)
    Subject("sparse_mla_bwd").reference({**arguments("sparse_mla_bwd", TOPK), "attn_dist": dist}, "same")
    assert not dist[:, LONGEST:].any() and np.isfinite(dist).all() and dist[1].any()


def test_the_indexer_s_work_follows_the_keys_that_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(6)
    q = random.standard_normal((4, 8, 128)).astype(np.float16)
    k = random.standard_normal((5000, 128)).astype(np.float16)
    weights = random.standard_normal((4, 8)).astype(np.float32)
    limits = {"starts": np.array([900, 910, 920, 0], np.int32), "ends": np.array([930, 940, 950, 0], np.int32)}
    widths: list[int] = []
    scores = indexer_score.scores

    def counted(exact: Any, *rest: Any) -> Any:
        widths.append(exact.shape[-1])
        return scores(exact, *rest)

    given = {"q": q, "k": k, "weights": weights}
    reference = Subject("indexer_logits").reference
    (everything,) = reference(given, "same")
    monkeypatch.setattr(indexer_score, "scores", counted)
    (some,) = reference({**given, **limits}, "same")
    assert widths == [50]
    for row, (start, end) in enumerate(zip(*limits.values(), strict=True)):
        np.testing.assert_array_equal(some[row, start:end], everything[row, start:end])
        assert np.isneginf(np.delete(some[row], slice(start, end))).all()
    (none,) = reference({**given, "ends": np.zeros(4, np.int32)}, "same")
    assert np.isneginf(none).all()
