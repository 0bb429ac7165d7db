"""Evidence that a kernel ran and was right: written by `cupymla_lab.recorder`, read by the support table.

One file for each kernel, `tests/evidence/<operator>.<kernel>.<arch>.json`. It holds a hash of the include closure of
the kernel, and of those of its further units, without comments, so that an edit of any code the kernel is made from
shows as evidence that is no longer current.
A run without a GPU leaves a second file, `<operator>.<kernel>.<arch>.cpu.json`. What both say is told in one of five
words (`Status`).
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from . import build
from .bench import machine
from .build.pack import COUNTS
from .errors import CupymlaError
from .ops import registry
from .ops.registry import KernelEntry, OperatorEntry
from .testing import operators

FOLDER = machine.ROOT / "tests" / "evidence"
PACKED = machine.ROOT / "cupymla" / "_packed" / "evidence.json"
BEGIN, END = "<!-- support:begin -->", "<!-- support:end -->"

Ran = Literal["hardware", "emulated"]
Status = Literal["verified", "emulated", "not run", "unknown", "none"]
"""What is known of a kernel as its sources are now: "verified" when every case that there was passed on a GPU of the
target; "emulated" when a CPU, or another GPU, stood in for it; "not run"; "unknown" where it ran, and its sources are
not all here to be compared, as without CUTLASS's headers; "none" where there is no kernel."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one GPU run of a kernel's cases showed.

    Attributes:
        operator, kernel, arch: which kernel.
        content_hash: of the sources that ran (`build.code_hash`).
        gpu: product name of the GPU.
        driver: its driver's release.
        toolkit: compiler and headers.
        cases: how many cases passed; they are all that the kernel can run, but for what is too large to be emulated.
        of: how many cases the operator has for the kernel, 0 where that is not known.
        worst_errors: for each output, the error and its limit in the case that came nearest to its limit.
        ran: "hardware", or "emulated" for code translated to run on another architecture.
        date: ISO 8601, UTC.
        repeats: "cases" that gave equal bits in "runs" runs each; empty when repetition was not checked.
        sanitizers: each compute-sanitizer tool that ran, with its summary line; empty when none did.
        same_code_as: content hash of the sources that ran, where those of `content_hash` are others that compile to the
            same code (`cupymla_lab.same_code`).
        carried_from: the target that was emulated, where another one than `arch` was: its translation is the same.
        how: for what was emulated, in which modes and with which seeds each case ran.
        emulator: and the digest of the emulator it ran in (`emulate.program.identity`).
    """

    operator: str
    kernel: str
    arch: str
    content_hash: str
    gpu: str
    driver: str
    toolkit: str
    cases: int
    worst_errors: dict[str, dict[str, float]]
    ran: Ran
    date: str
    repeats: dict[str, int] = field(default_factory=dict)
    of: int = 0
    sanitizers: dict[str, str] = field(default_factory=dict)
    same_code_as: str = ""
    how: str = ""
    emulator: str = ""
    carried_from: str = ""


@dataclass(frozen=True, slots=True)
class WithoutGpu:
    """What a run of a kernel's small cases on a CPU showed (`cupymla_lab.without_gpu`).

    Attributes:
        operator, kernel, arch: which kernel.
        content_hash: of the sources that ran.
        ran: "emulated" (docs/emulation.md).
        how: what was varied, such as the emulator's modes.
        toolkit: compiler and headers.
        cases: how many cases passed, all that were small enough.
        of: how many cases the operator has for the kernel.
        worst_errors: as of `Evidence`.
        date: ISO 8601, UTC.
    """

    operator: str
    kernel: str
    arch: str
    content_hash: str
    ran: Literal["emulated"]
    how: str
    toolkit: str
    cases: int
    of: int
    worst_errors: dict[str, dict[str, float]]
    date: str


_Run = TypeVar("_Run", Evidence, WithoutGpu)


@dataclass(frozen=True, slots=True)
class Support:
    """A row of the support table.

    Attributes:
        operator: its name.
        kernel: the kernel's name, or "reference" for an operator that has only its NumPy reference.
        arch: the kernel's target, or "cpu".
        current: whether `found` is of the present sources; None where that cannot be told.
        found: the evidence of a GPU, None when there is none.
        without_gpu: what a run of the present sources on a CPU showed, None when there was none. Where it cannot be
            told of which sources a run was it is given all the same.
    """

    operator: str
    kernel: str
    arch: str
    current: bool | None = False
    found: Evidence | None = field(default=None, repr=False)
    without_gpu: WithoutGpu | None = field(default=None, repr=False)

    @property
    def status(self) -> Status:
        """The word for it."""
        if self.arch == "cpu":
            return "none"
        if self.current is None:
            return "not run" if self.found is None and self.without_gpu is None else "unknown"
        if self.current and self.found is not None and self.found.ran == "hardware":
            return "verified"
        return "emulated" if self.current or self.without_gpu is not None else "not run"

    def as_dict(self) -> dict[str, Any]:
        """The row as `list --json` prints it: its words, and each run that they rest on."""
        row: dict[str, Any] = {name: getattr(self, name) for name in ("operator", "kernel", "arch", "status")}
        runs = []
        if self.found is not None:
            runs.append(_facts(self.found, self.found.gpu, self.current))
        if self.without_gpu is not None:
            runs.append(_facts(self.without_gpu, None, None if self.current is None else True))
        return {**row, "detail": detail(self), "evidence": runs}


def path(operator: str, kernel: KernelEntry, folder: Path = FOLDER) -> Path:
    """Where a kernel's evidence is kept."""
    return folder / f"{operator}.{kernel.name}.{kernel.arch}.json"


def path_without_gpu(operator: str, kernel: KernelEntry, folder: Path = FOLDER) -> Path:
    """Where a kernel's evidence from runs on a CPU is kept."""
    return path(operator, kernel, folder).with_suffix(".cpu.json")


def _facts(found: Evidence | WithoutGpu, gpu: str | None, current: bool | None) -> dict[str, Any]:
    """A run in figures: how, on which GPU (None for a CPU), how many cases of how many, by which compiler, when.

    `current` says whether it was of the present sources, and None where that cannot be told.
    """
    return {
        "ran": found.ran,
        "gpu": gpu,
        "current": current,
        "cases": found.cases,
        "of": max(found.of, found.cases),
        "cases_since": cases_since(found),
        "compiler": _compiler(found),
        "date": found.date,
    }


def current_hash(entry: OperatorEntry, kernel: KernelEntry) -> str | None:
    """The hash of a kernel's present sources and its units', without comments; None when they are not all there."""
    try:
        hashes = [build.code_hash(unit) for unit in operators.units(entry, kernel)]
    except CupymlaError:
        return None
    return hashes[0] if len(hashes) == 1 else hashlib.sha256(" ".join(hashes).encode()).hexdigest()


def read(file: Path) -> Evidence | None:
    """The evidence in a file; None when there is none that can be read."""
    return _made(Evidence, _content(file))


def _content(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _made(kind: type[_Run], content: Any) -> _Run | None:
    try:
        return kind(**content)
    except TypeError:
        return None


def _kept(place: Path) -> dict[str, Any]:
    """The content of every file of evidence by its name; a wheel brings them in one (`build.pack.runs`)."""
    if place.is_dir():
        return {file.name: _content(file) for file in place.glob("*.json")}
    return _content(place) or {}


def support_rows(folder: Path | None = None) -> list[Support]:
    """One row for each operator and kernel; an operator without a kernel has one row for its reference.

    The evidence is that of `folder`; by default the checkout's, or that which a wheel brought along.
    """
    if folder is None:
        folder = FOLDER if FOLDER.is_dir() else PACKED
    kept = _kept(folder)
    rows = []
    for entry in registry.subjects():
        for kernel in entry.kernels:
            digest = current_hash(entry, kernel)
            found = _made(Evidence, kept.get(path(entry.name, kernel).name))
            current = None if digest is None else found is not None and found.content_hash == digest
            cpu = _made(WithoutGpu, kept.get(path_without_gpu(entry.name, kernel).name))
            if cpu is not None and digest is not None and cpu.content_hash != digest:
                cpu = None
            rows.append(Support(entry.name, kernel.name, kernel.arch, current, found, cpu))
        if not entry.kernels:
            rows.append(Support(entry.name, "reference", "cpu"))
    return rows


def told(row: Support) -> str:
    """What the support table says of a row: its status, and what that rests on."""
    return ": ".join(filter(None, (row.status, detail(row))))


def detail(row: Support) -> str:
    """What a row's status rests on, and what ran before the sources were edited; empty where nothing ran."""
    if row.status == "none":
        return "NumPy reference only; CUDA arrays raise `UnsupportedError`"
    if row.current and row.found is not None:
        return _run(row.found) + _since(row.found)
    cpu = row.without_gpu
    said = []
    if cpu is not None:
        said.append(f"{_count(cpu)} on a CPU, {_compiler(cpu)}, {cpu.date}")
    if row.found is not None:
        how = "were emulated" if row.found.ran == "emulated" else "passed"
        edited = "" if row.current is None else "edited since "
        said.append(f"{edited}{_run(row.found, how)}")
    if row.status == "unknown":
        said.append("whether with these sources cannot be told")
    return "; ".join(said)


def cannot_tell() -> str:
    """Why sources cannot be compared with those that ran, such as CUTLASS's headers missing; empty where they can."""
    for entry in registry.subjects():
        for kernel in entry.kernels:
            try:
                for unit in operators.units(entry, kernel):
                    build.content_hash(unit)
            except CupymlaError as error:
                return str(error)
    return ""


def _count(found: Evidence | WithoutGpu) -> str:
    of = f" of {found.of}" if found.of > found.cases else ""
    return f"{found.cases}{of} cases"


def _compiler(found: Evidence | WithoutGpu) -> str:
    return " ".join(found.toolkit.split()[:2])


def _run(found: Evidence, how: str = "") -> str:
    return " ".join(filter(None, (_count(found), how, f"on {found.gpu}, {_compiler(found)}, {found.date}")))


def _since(found: Evidence) -> str:
    """In brackets, what has changed since a run of which evidence is kept."""
    remarks = []
    if later := cases_since(found):
        remarks.append(f"{later} further cases came since")
    if found.carried_from:
        remarks.append(f"as {found.carried_from}, emulated by the same code")
    elif found.same_code_as:
        remarks.append("words of its sources have changed since, its code has not")
    return f" ({'; '.join(remarks)})" if remarks else ""


def cases_since(found: Evidence | WithoutGpu) -> int:
    """How many cases there are for a kernel beside those that there were when it ran."""
    there = _case_counts().get(f"{found.operator}.{found.kernel}.{found.arch}", 0)
    return max(0, there - max(found.of, found.cases))


def forget_counts() -> None:
    """Read anew how many cases there are."""
    _case_counts.cache_clear()


@functools.cache
def _case_counts() -> dict[str, int]:
    """How many cases each kernel has: the laboratory, which has the cases, writes it down with the pages."""
    counts: dict[str, int] = (_content(FOLDER / COUNTS) if FOLDER.is_dir() else _kept(PACKED).get(COUNTS)) or {}
    return counts


def support_markdown(rows: Sequence[Support] | None = None) -> str:
    """The support table, between the markers that docs/support.md keeps it in."""
    lines = [BEGIN, "| operator | kernel | target | status |", "| --- | --- | --- | --- |"]
    for row in support_rows() if rows is None else rows:
        lines.append(f"| `{row.operator}` | `{row.kernel}` | `{row.arch}` | {told(row)} |")
    return "\n".join([*lines, END])
