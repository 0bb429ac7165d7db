"""Tests that need a GPU, and what came of them: frameworks, graphs, several GPUs, calls beside the operators' cases.

    python -m cupymla_lab gpu-tests [PATH ...]      runs `pytest -m gpu`, writes tests/evidence/gpu_tests.json
    python -m cupymla_lab gpu-tests --show          prints what the file says, and whether it is still so

Needs a checkout. Each file of tests has a process, several at a time. A run renews those of which it ran a test and
leaves the others as they were; each says with which GPUs, versions and sources it ran. Tests of transformers have an
entry for each version of it that they ran with. A file that has a failure is
written as well, and the exit status is 1.

Without a path it runs all but `tests/ops/test_kernels.py`, the operators' cases: `python -m cupymla_lab gpu check`
runs these, with processes for the references, and leaves evidence of each kernel.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from cupymla import evidence
from cupymla.bench import machine
from cupymla.cli.doctor import version_of
from cupymla.cli.terminal import Terminal, exit_with
from cupymla.errors import InputError

from . import examples
from .emulate import by_content

FILE = evidence.FOLDER / "gpu_tests.json"
FRAMEWORKS = (("numpy",), ("cupy-cuda12x", "cupy-cuda13x", "cupy"), ("torch",), ("jax",), ("transformers",))
"""By the names of the distributions that each may come from."""
CASES = "tests/ops/test_kernels.py"
"""What another command runs; see above."""
JOBS = 12
"""Processes at a time: what takes time are references on the CPU."""
SOURCES = (("cupymla", "*.py"), ("cuda", "*.cu*"), ("scripts", "*.py"), ("tests", "*.py"))
"""Folders of a checkout on which a test's result depends, and their files."""
_TEST = re.compile(r"\S+\.py::")
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider")


@dataclass(frozen=True, slots=True)
class FileResult:
    """What a file of tests came to.

    Attributes:
        file: its path in the checkout.
        passed, skipped, failed: how many of its tests that need a GPU.
        seconds: how long they took.
        gpu, driver, date, commit: as `machine.provenance` has them.
        devices: how many GPUs there were.
        versions: of Python and of the frameworks that were installed.
        content_hash: of the sources, by `content_hash`.
        examples: seconds that each example took that passed, by its name in `examples.RUNS`.
        examples_hash: of the examples' files, by `examples.content_hash`; empty where none was run.
    """

    file: str
    passed: int
    skipped: int
    failed: int
    seconds: float
    gpu: str
    driver: str
    date: str
    commit: str
    devices: int
    versions: dict[str, str]
    content_hash: str
    examples: dict[str, float] = field(default_factory=dict)
    examples_hash: str = ""


def content_hash(root: Path = machine.ROOT) -> str:
    """Of all sources in a checkout on which tests depend."""
    files = [file for folder, pattern in SOURCES for file in (root / folder).rglob(pattern)]
    return by_content.digest(*by_content.digests(file for file in files if "third_party" not in file.parts))


def versions() -> dict[str, str]:
    """Of Python, and of the frameworks that are installed."""
    found = filter(None, (version_of(*names) for names in FRAMEWORKS))
    return {"python": platform.python_version(), **dict(named.split(" ", 1) for named in found)}


def counted(report: Path) -> dict[str, dict[str, float]]:
    """Passed, skipped, failed and seconds of each file, from pytest's JUnit report."""
    found: dict[str, dict[str, float]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        counts = found.setdefault(_file_of(case), {"passed": 0, "skipped": 0, "failed": 0, "seconds": 0.0})
        outcomes = {child.tag for child in case}
        if outcomes & {"failure", "error"}:
            counts["failed"] += 1
        elif "skipped" in outcomes:
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
        counts["seconds"] += float(case.get("time") or 0)
    return found


def examples_in(report: Path) -> dict[str, float]:
    """Seconds of each example that passed, from pytest's JUnit report: its test has recorded the property `example`."""
    cases = ElementTree.parse(report).iter("testcase")
    return {
        each.get("value", ""): round(float(case.get("time") or 0), 1)
        for case in cases
        for each in case.iterfind("properties/property[@name='example']")
    }


def _file_of(case: ElementTree.Element) -> str:
    """Names like "tests.ops.test_x" or "tests.ops.test_x.TestClass", as a path."""
    parts = (case.get("classname") or case.get("name") or "").split(".")
    while parts and not parts[-1].startswith("test_"):
        parts.pop()
    return "/".join(parts) + ".py"


def read(file: Path = FILE) -> list[FileResult]:
    """What is on record; nothing where there is no file."""
    return [FileResult(**entry) for entry in json.loads(file.read_text(encoding="utf-8"))] if file.exists() else []


def write(results: Iterable[FileResult], file: Path = FILE) -> None:
    """Put results on record, in the place of earlier ones of the same files.

    A file of which all tests were skipped, as those of several GPUs are on one, keeps what it had.
    """
    known = {_place(result): result for result in read(file)}
    for result in results:
        if result.passed or result.failed or _place(result) not in known:
            known[_place(result)] = result
    entries = [asdict(known[name]) for name in sorted(known)]
    for entry in entries:
        if not entry["examples"]:  # as of all files but one
            del entry["examples"], entry["examples_hash"]
    file.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")


def _place(result: FileResult) -> tuple[str, str]:
    """The file, and the version of transformers where the file has its tests."""
    return result.file, result.versions.get("transformers", "") if "transformers" in result.file else ""


def files_of(paths: Sequence[str]) -> list[str]:
    """The files in these folders, or at these places, that have tests for a GPU; all but `CASES` without a path."""
    command = [*_PYTEST, "--collect-only", "--assert=plain", *(paths or ["tests"])]
    listed = subprocess.run(
        command, cwd=machine.ROOT, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    if listed.returncode not in (0, 5):  # 5: there are none
        raise InputError("PATH", "folders or files of tests", f"{' '.join(paths)}\n{listed.stdout}{listed.stderr}")
    found = dict.fromkeys(line.partition("::")[0] for line in listed.stdout.splitlines() if _TEST.match(line))
    files = [file for file in found if paths or file != CASES]
    if not files:
        raise InputError("PATH", "folders or files with tests for a GPU", " ".join(paths) or "none")
    return files


def _one(file: str, folder: str) -> tuple[int, dict[str, dict[str, float]], dict[str, float]]:
    """Run the tests of a file: pytest's exit status, counts, and what examples took."""
    report = Path(folder) / f"{file.replace('/', '.')}.xml"
    command = [*_PYTEST, f"--junitxml={report}", file]
    done = subprocess.run(
        command, cwd=machine.ROOT, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    if done.returncode:
        print(f"{done.stdout}{done.stderr}", file=sys.stderr)
    print(f"{file}: {done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.returncode}", flush=True)
    counts, ran = (counted(report), examples_in(report)) if report.exists() else ({}, {})
    if done.returncode and file not in counts:  # the process died
        counts[file] = {"passed": 0, "skipped": 0, "failed": 1, "seconds": 0.0}
    return done.returncode, counts, ran


def run(paths: Sequence[str], commit: str | None = None, jobs: int = JOBS) -> tuple[int, list[FileResult]]:
    """Run the tests in these folders or files, so many files at a time.

    Returns pytest's first exit status that is no success, and results by file. Raises InputError, DriverError.
    """
    from cupymla import driver

    facts = machine.provenance(commit)
    names = files_of(paths)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        done = list(pool.map(lambda name: _one(name, folder), names))
    status = next((status for status, *_ in done if status), 0)
    files = {name: (counts, ran) for _, found, ran in done for name, counts in found.items()}
    shared: dict[str, Any] = {**facts, "devices": driver.device_count(), "versions": versions()}
    shared["content_hash"] = content_hash()
    results = [
        FileResult(
            file=name,
            passed=int(counts["passed"]),
            skipped=int(counts["skipped"]),
            failed=int(counts["failed"]),
            seconds=round(counts["seconds"], 1),
            examples=ran,
            examples_hash=examples.content_hash() if ran else "",
            **shared,
        )
        for name, (counts, ran) in files.items()
    ]
    return status, results


def show(results: Sequence[FileResult], never_ran: Sequence[str] = ()) -> None:
    """Print a table of what is on record, and of files that are not."""
    current = content_hash()
    rows = [
        (
            result.file,
            str(result.passed),
            str(result.skipped),
            str(result.failed),
            f"{result.devices} x {result.gpu}",
            result.date,
            "yes" if result.content_hash == current else "no",
        )
        for result in results
    ]
    rows += [(file, "", "", "", "not run", "", "no") for file in never_ran]
    columns = ("file", "passed", "skipped", "failed", "on", "date", "of these sources")
    Terminal(as_json=False).table("Tests on a GPU", columns, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and record, or show what is on record; 2 without a GPU, 1 where a test failed."""
    from cupymla import driver

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", metavar="PATH", help=f"default: all tests but {CASES}")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"files at a time (default: {JOBS})")
    parser.add_argument("--out", type=Path, default=FILE, help="the file to renew")
    parser.add_argument("--commit", metavar="HASH", help="the commit to record (default: ask git)")
    parser.add_argument("--show", action="store_true", help="print what is on record, and run nothing")
    options = parser.parse_args(arguments)
    if options.show:
        found = read(options.out)
        on_record = {result.file for result in found}
        show(found, [file for file in files_of(options.paths) if file not in on_record])
        return 0
    if not driver.device_count():
        print("these tests are for a CUDA GPU, and there is none", file=sys.stderr)
        return 2
    if options.jobs < 1:
        parser.error("--jobs: at least 1")
    try:
        status, results = run(options.paths, options.commit, options.jobs)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write(results, options.out)
    show(results)
    return 1 if status else 0


if __name__ == "__main__":
    exit_with(main)
