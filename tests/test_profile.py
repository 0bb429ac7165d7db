"""Hardware counters: what is asked for, how Nsight Compute's answer is read, and the page that shows it."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from cupymla_lab import profile
from cupymla_lab.profile import METRICS, STALLS

ROOT = Path(__file__).resolve().parent.parent


def printed(*launches: dict[str, str]) -> str:
    """As Nsight Compute prints them: its own words, names, units, then a row for each launch."""
    columns = ["ID", "Kernel Name", "Grid Size", *METRICS.values(), "unknown"]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, quoting=csv.QUOTE_ALL, restval="")
    writer.writeheader()
    writer.writerow({METRICS["us"]: "ns"})
    for number, launch in enumerate(launches):
        writer.writerow({"ID": str(number), "Kernel Name": "k(Parameters)", "Grid Size": "(4, 2, 1)", **launch})
    return "==PROF== Connected to process 1\n" + text.getvalue() + "==PROF== Disconnected\n"


def launch(nanoseconds: float, cycles: float, **others: str) -> dict[str, str]:
    return {METRICS["us"]: f"{nanoseconds:,}", METRICS["cycles"]: f"{cycles:,}", **others}


def test_launches_are_assigned_to_cases_and_what_is_left_is_the_ceiling() -> None:
    text = printed(launch(1500.0, 3000), launch(2000.0, 3000), launch(2500.0, 3000), launch(4000.0, 6000))
    found = profile.read(text, [("a", 1), ("b", 2)])
    assert [(case.case, [each.counters["us"] for each in case.launches]) for case in found] == [
        ("a", [1.5]),
        ("b", [2.0, 2.5]),
        (profile.CEILING, [4.0]),
    ]
    assert found[0].launches[0].kernel == "k" and found[0].launches[0].grid == 8
    assert found[0].launches[0].ghz == 2.0


def test_counters_that_are_not_there_are_left_out() -> None:
    text = printed(launch(1000.0, 2000, **{METRICS["dram_percent"]: "n/a", METRICS["l2_percent"]: "12.5"}))
    ((only,), _) = [case.launches for case in profile.read(text, [("a", 1)])]
    assert only.counters == {"us": 1.0, "cycles": 2000.0, "l2_percent": 12.5}
    (row,) = profile.table([profile.Profiled("a", [only])])
    assert dict(zip(profile.COLUMNS, row, strict=True)) == {
        **dict.fromkeys(profile.COLUMNS, ""),
        **{"case": "a", "kernel": "k", "us": "1.0", "GHz": "2.00", "L2 %": "12"},
    }


def test_too_few_launches_are_an_error() -> None:
    with pytest.raises(ValueError, match="3 launches and 1 profiles"):
        profile.read(printed(launch(1.0, 1)), [("a", 3)])
    with pytest.raises(ValueError, match="no table"):
        profile.read("==ERROR== no permission", [])


def test_only_what_nsight_compute_knows_is_asked_for() -> None:
    every = profile.wanted(frozenset())
    assert len(every) == len(set(every)) == len(METRICS) + len(STALLS)
    some = frozenset({"gpu__time_duration", "smsp__average_warps_issue_stalled_gmma_per_issue_active"})
    assert profile.wanted(some) == [METRICS["us"], "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio"]


def test_short_launches_have_no_row() -> None:
    text = printed(launch(10.0, 10), launch(1000.0, 1000))
    found = profile.read(text, [("a", 2)])[:1]
    assert len(profile.table(found)) == 1 and len(profile.table(found, 0.0)) == 2


def test_the_page_has_the_tables_of_the_files() -> None:
    """Renew it with `python -m cupymla_lab profile --page docs/counters.md --out docs/benchmarks/h200`."""
    page = (ROOT / "docs" / "counters.md").read_text()
    assert profile.renewed(page, ROOT / "docs" / "benchmarks" / "h200") == page
    assert page.count(profile.CEILING) >= 5


def test_without_nsight_compute_it_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert profile.main([]) == 2
    assert "Nsight Compute on the PATH" in capsys.readouterr().err
