"""What several commands show: the doctor's report, compiled kernels; and the folder that an option names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .doctor import Check
from .doctor import summary as summary_of_checks
from .terminal import Terminal

if TYPE_CHECKING:
    from ..build.precompile import Outcome


def folder_for(argument: str, folder: Path) -> Path:
    """The folder that an option names, made when it is missing. Raises InputError when nothing can be written there."""
    wanted = "a folder that can be made and written to"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(argument, wanted, f"{folder} ({error})") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(argument, wanted, f"{folder} (not writable)")
    return folder


def show_checks(terminal: Terminal, checks: Sequence[Check]) -> None:
    """The doctor's report: a line for what was found, lines for what to do, and what works here."""
    state, name = (max(map(len, words)) for words in zip(*((c.state, c.name) for c in checks), strict=True))
    for check in checks:
        head = f"{check.state:{state}}  {check.name:{name}}  "
        terminal.paragraph(check.found, head)
        if check.advice:
            terminal.paragraph(check.advice, " " * len(head))
    terminal.line()
    terminal.paragraph(summary_of_checks(checks))


def show_variables(terminal: Terminal, variables: Mapping[str, tuple[str | None, str]]) -> None:
    """The environment variables: what each is set to, and what it means."""
    terminal.line()
    terminal.line("Environment variables")
    for name, (value, meaning) in variables.items():
        terminal.paragraph(f"{name}={value}" if value else name, "  ")
        terminal.paragraph(meaning, "      ")


def outcome_row(outcome: Outcome) -> dict[str, Any]:
    """A compiled kernel as JSON shows it."""
    resources = asdict(outcome.resources) if outcome.resources else {}
    source = outcome.source
    return {
        "kernel": source.entry,
        "arch": source.arch,
        "defines": dict(source.defines),
        "cached": outcome.cached,
        "kept": outcome.kept,
        "seconds": round(outcome.seconds, 2),
        **resources,
        "smem_bytes": outcome.smem_bytes,
        "error": outcome.error,
    }


def state_of(outcome: Outcome) -> str:
    """What became of a kernel, in a word or its seconds."""
    return "FAILED" if outcome.error else "cached" if outcome.cached else f"{outcome.seconds:.1f} s"


def show_outcomes(terminal: Terminal, outcomes: Sequence[Outcome]) -> None:
    """Compiled kernels as a table, failures below it."""
    rows = []
    for outcome in outcomes:
        row = outcome_row(outcome)
        variant = " ".join(f"{name}={value}" for name, value in outcome.source.defines)
        cells = (
            row["kernel"],
            row["arch"],
            variant,
            state_of(outcome),
            row.get("registers", "-"),
            spill_bytes(row),
            row["smem_bytes"],
        )
        rows.append(cells)
    columns = ("kernel", "target", "variant", "compiled", "registers", "spill bytes", "shared memory bytes")
    if rows:
        terminal.table("Kernels", columns, rows)
        terminal.line(summary(outcomes))
    for error, failed in failures(outcomes).items():
        more = f" and {len(failed) - 1} more" if failed[1:] else ""
        terminal.line(f"{failed[0].source}{more}: {error}")


def failures(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """What went wrong, each with the kernels it went wrong for: most often it is not about one variant."""
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.error:
            found.setdefault(outcome.error, []).append(outcome)
    return found


def spill_bytes(row: dict[str, Any]) -> int:
    """What a kernel's threads store and load because of too few registers; 0 for one that is not compiled."""
    return int(row.get("spill_store_bytes", 0) + row.get("spill_load_bytes", 0))


def summary(outcomes: Sequence[Outcome]) -> str:
    """How many compiled kernels there are, how many are not, and how many spill."""
    made = [outcome_row(outcome) for outcome in outcomes if outcome.ok]
    spilling = sum(spill_bytes(row) > 0 for row in made)
    failed = len(outcomes) - len(made)
    return f"{len(made)} compiled, {failed or 'none'} failed, {spilling or 'none'} with spills"
