"""Operators that are registered before their files are there."""

from __future__ import annotations

from pathlib import Path

from cupymla.ops import registry
from cupymla.ops.registry import OperatorEntry

ROOT = Path(__file__).resolve().parent.parent
FILES = ("__init__", "spec", "plan", "run", "reference")

REGISTERED = registry.subjects()
"""Every row of the registry, complete or not: operators, and members of families."""


def missing_files(entry: OperatorEntry) -> list[str]:
    """What a row lacks, relative to the checkout: modules that every operator has, and its translation units."""
    names = (*FILES, entry.cases.replace(".", "/"))
    modules = [*(f"cupymla/ops/{entry.folder}/{name}.py" for name in names), f"cupymla_lab/problems/{entry.name}.py"]
    units = [unit for kernel in entry.kernels for unit in (f"{kernel.folder}/{kernel.name}", *kernel.units)]
    sources = [f"cuda/{entry.folder}/{unit}.cu" for unit in dict.fromkeys(units)]
    return [file for file in (*modules, *sources) if not (ROOT / file).is_file()]


def leave_out_incomplete() -> None:
    """Let tests see complete operators alone, since most are parametrised by what operators have.

    Without it one missing file breaks the collection of a dozen files of tests, and none says which file it is.
    `test_layering.test_every_operator_has_the_same_files` looks at all of `REGISTERED`.
    """
    registry.OPERATORS = tuple(entry for entry in registry.OPERATORS if not missing_files(entry))
    registry.MEMBERS = tuple(entry for entry in registry.MEMBERS if not missing_files(entry))
