"""The mutation survey's subjects compare all that a call makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import operator_subjects
import pytest
import survey

from cupymla.ops.mla_cases import sized
from cupymla.testing.compare import Mismatch
from cupymla.testing.operators import Array
from cupymla_lab.emulate import Settings, mutation
from cupymla_lab.subjects import Subject

CASE = sized(16, 576, 65, 1, 200, "_dist", "options", wants_dist=True, selection="full", dkv_dtype="float32")
PROBLEM = operator_subjects.Problem("sparse_mla_bwd", CASE, (60,), 2)


@pytest.mark.parametrize("name", ["dq", "dkv", "attn_dist"])
def test_a_mutant_is_caught_by_any_array(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = PROBLEM.inputs()
    made = Subject("sparse_mla_bwd").expected(inputs, "same")
    spoilt = {**made, name: made[name].copy()}
    spoilt[name].reshape(-1)[17] += np.asarray(1, made[name].dtype)
    runs: list[dict[str, Array]] = [made, made, spoilt]

    @contextmanager
    def emulated(*_: Any) -> Iterator[Any]:
        yield SimpleNamespace(results=lambda subject, given: runs.pop(0), sites=())

    monkeypatch.setattr(operator_subjects, "emulated", emulated)
    run, _ = operator_subjects.subject(PROBLEM)
    assert (run(Settings()), run(Settings())) == (0, 1)
    runs.append(spoilt)
    with pytest.raises(Mismatch, match=name):
        operator_subjects.subject(PROBLEM)


@pytest.mark.compile
@pytest.mark.slow
def test_every_wait_that_is_missing_shows_as_a_race() -> None:
    """In whatever order threads run. Waits for loads from Tensor Memory show in the text (`test_early_loads.py`).

    The first CTA of the cluster begins late: one that does not wait for it signals to barriers that are not there yet.
    """
    run, sites = operator_subjects.subject(operator_subjects.PROBLEMS["sparse_mla_bwd-h128-dist"])
    waits = [site for site in sites if site.mutation == "wait" and not site.text.startswith("tcgen05.wait::ld")]
    waits.append(next(site for site in sites if site.text.startswith("barrier.cluster.wait")))
    settings = Settings("eager", races="hardware", patience_seconds=5.0)
    assert run(settings) == 0
    missed = [verdict.site for verdict in mutation.survey(run, waits, [settings]) if not verdict.how]
    assert len(waits) > 15 and missed == []


@pytest.mark.parametrize(
    ("words", "message"),
    [(["nothing"], "sparse_mla_bwd_phase1-h128"), (["02_mma_tma"], "wants the folder of its PTX")],
)
def test_what_cannot_be_surveyed_is_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`survey.py` is a command of the docs."""
    with pytest.raises(SystemExit):
        survey.main(words)
    assert message in capsys.readouterr().err
