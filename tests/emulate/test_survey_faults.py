"""What a survey of mutants makes of those that fault: a process without its GPU catches nothing."""

from __future__ import annotations

import pytest

from cupymla.errors import DriverError
from cupymla_lab.emulate import Settings, Site, mutation

SITES = [Site(number, 10 * number, "bar.sync 0;", "kernel", "barrier", "") for number in (1, 2, 3)]
RUNS = [Settings("eager")]


def fault() -> DriverError:
    return DriverError(719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure", "running")


def test_a_lost_gpu_ends_the_survey() -> None:
    lost = False

    def run(settings: Settings) -> float:
        nonlocal lost
        lost = lost or settings.removed == 2
        if lost:
            raise fault()
        return 1.0 if settings.removed else 0.0

    with pytest.raises(RuntimeError, match=r"since barrier 2 \(line 20: bar.sync 0;\) in eager was removed"):
        mutation.survey(run, SITES, RUNS)


def test_a_fault_counts_where_another_process_goes_on() -> None:
    def run(settings: Settings) -> float:
        if settings.removed == 2:
            raise fault()
        return 1.0 if settings.removed else 0.0

    found = mutation.survey(run, SITES, RUNS)
    assert [verdict.how for verdict in found] == ["wrong result", "DriverError", "wrong result"]


def test_a_fault_that_comes_late_is_not_the_next_ones() -> None:
    """A kernel may fault when its own run is over: the next run meets the fault, in a process that then ends."""
    pending = False

    def run(settings: Settings) -> float:
        nonlocal pending
        if pending:
            pending = False
            raise fault()
        pending = settings.removed == 1
        return 1.0 if settings.removed == 1 else 0.0

    assert [verdict.how for verdict in mutation.survey(run, SITES, RUNS)] == ["wrong result", "", ""]
