"""attn_dist's kernel for neighbouring queries, in the interpreter: what the operator's cases do not bring about."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from writer_kit import uses_in_a_call

from cupymla.ops.attn_dist import plan
from cupymla.testing import compare
from cupymla_lab.emulated import Emulated, emulated
from cupymla_lab.subjects import Subject

SUBJECT = Subject("attn_dist")
CASES = {case.name: case for case in SUBJECT.cases.CASES}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulated]:
    """One multiprocessor, on which neighbours are packed wherever they can be."""
    monkeypatch.setattr(plan, "_MARGIN", 1e9)
    with emulated(multiprocessors=1, seed=3) as made:
        yield made
        assert set(made.launched) == {plan.GROUP_KERNEL}


@pytest.mark.compile
def test_indices_and_lengths_may_change_while_it_runs(machine: Emulated) -> None:
    """No hang, and no access out of bounds, whatever they hold by then."""
    given = SUBJECT.cases.inputs(CASES["h16_d576_k130_q17_kv400_packed_queries"], 2)
    arguments = machine.arguments(given)
    limits = {"indices": 400, "topk_length": 131}
    uses = uses_in_a_call(machine, SUBJECT.call, arguments, limits, plan.GROUP_TOKENS)
    assert uses and uses[0] > 1000


@pytest.mark.compile
@pytest.mark.parametrize("normalize", [None, "l1"])
def test_what_one_query_reads_stays_its_own(machine: Emulated, normalize: str | None) -> None:
    """Rows of NaN and infinity that one query of a query group names, and an lse of NaN, show in that query's row
    alone."""
    given = SUBJECT.cases.inputs(CASES["h16_d576_k65_q11_kv200_packed_queries_duplicates"], 4) | {
        "normalize": normalize
    }
    indices, kv, lse = (np.array(given[name]) for name in ("indices", "kv", "lse"))
    for token, query, value in ((5, 3, np.nan), (6, 9, np.inf)):
        indices[indices == token] = 7
        indices[query, 0] = token
        kv[token] = value
    lse[4, 0] = np.nan
    given |= {"indices": indices, "kv": kv, "lse": lse}
    reports = SUBJECT.reports(given, machine.results(SUBJECT, given))
    compare.require(reports)
    (found,) = SUBJECT.reference(given, "float64")
    non_finite = set(np.flatnonzero(~np.isfinite(found).all(axis=-1)).tolist())
    assert {3, 4} <= non_finite <= {3, 4, 9}
