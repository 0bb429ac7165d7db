"""Writes evidence of runs, on a GPU and without one: `cupymla.evidence` says what it holds and reads it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from cupymla import evidence
from cupymla.bench import machine
from cupymla.evidence import FOLDER, Evidence, Ran, WithoutGpu
from cupymla.ops.case import Case
from cupymla.ops.registry import KernelEntry
from cupymla.testing.compare import Report

from . import subjects
from .subjects import Subject


def write_without_gpu(found: WithoutGpu, folder: Path = FOLDER) -> Path:
    """Keep evidence of a run on a CPU; returns its file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = evidence.path_without_gpu(found.operator, KernelEntry(found.kernel, found.arch), folder)
    file.write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")
    return file


def _says_more(kept: Evidence, found: Evidence) -> bool:
    """Whether evidence says more than another of the same sources."""
    if kept.carried_from and not found.carried_from:
        return False
    if kept.ran != found.ran:
        return kept.ran == "hardware"
    return kept.cases > found.cases or bool(kept.sanitizers and not found.sanitizers)


def write(found: Evidence, folder: Path = FOLDER) -> Path | None:
    """Keep evidence; returns its file, or None when the file says more of the same sources and is left as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    file = evidence.path(found.operator, KernelEntry(found.kernel, found.arch), folder)
    kept = evidence.read(file)
    if kept and kept.content_hash == found.content_hash and _says_more(kept, found):
        return None
    file.write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")
    return file


class Recorder:
    """Collects the reports of passed cases, and writes the evidence of each kernel whose cases all passed."""

    def __init__(self, folder: Path = FOLDER, ran: Ran = "hardware", how: str = "") -> None:
        self._folder = folder
        self._ran: Ran = ran
        self._how = how
        self._passed: dict[tuple[str, KernelEntry], dict[str, list[Report]]] = {}

    def record(self, operator: str, kernel: KernelEntry, case: Case, reports: Sequence[Report]) -> None:
        """Count a case of a kernel whose reports hold no failure; ignore any other."""
        if not any(report.failure for report in reports):
            self._passed.setdefault((operator, kernel), {})[case.name] = list(reports)

    def write(
        self, device: int = 0, repeats: dict[str, int] | None = None, sanitizers: dict[str, str] | None = None
    ) -> list[Path]:
        """Write what is complete; returns the files. Nothing is written for kernels of which a case is missing.

        `repeats` and `sanitizers` are kept as they are (see Evidence).
        """
        files: list[Path | None] = []
        for (operator, kernel), passed in self._passed.items():
            subject = Subject(operator)
            if {case.name for case in subjects.cases_run(subject, kernel, self._ran == "emulated")} <= passed.keys():
                found = self._evidence(subject, kernel, passed, device)
                if found is not None:
                    found = replace(found, repeats=dict(repeats or {}), sanitizers=dict(sanitizers or {}))
                    files.append(write(found, self._folder))
        return [file for file in files if file is not None]

    def _evidence(
        self, subject: Subject, kernel: KernelEntry, passed: dict[str, list[Report]], device: int
    ) -> Evidence | None:
        from cupymla import driver
        from cupymla.build import compiler

        from .emulate import program

        digest = evidence.current_hash(subject.entry, kernel)
        if digest is None:
            return None
        return Evidence(
            operator=subject.name,
            kernel=kernel.name,
            arch=kernel.arch,
            content_hash=digest,
            gpu=driver.device_name(device),
            driver=machine.driver_text(),
            toolkit=str(compiler.toolchain()),
            cases=len(passed),
            of=len(subject.cases_of(kernel)),
            worst_errors=worst(passed.values()),
            ran=self._ran,
            date=machine.today(),
            how=self._how,
            emulator=program.identity() if self._ran == "emulated" else "",
        )


def worst(cases: Iterable[Sequence[Report]]) -> dict[str, dict[str, float]]:
    """For each output, error and limit of the report whose error takes the largest share of its limit."""
    found: dict[str, tuple[float, Report]] = {}
    for reports in cases:
        for report in reports:
            share = report.error / report.limit if report.limit else 0.0
            if report.output not in found or share > found[report.output][0]:
                found[report.output] = (share, report)
    return {name: {"error": report.error, "limit": report.limit} for name, (_, report) in found.items()}
