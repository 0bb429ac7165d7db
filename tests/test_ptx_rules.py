"""Every form of instruction in kernels up to sm_90a is one whose rules docs/ptx_rules.md tells."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cupymla import build
from cupymla.build.source import KernelSource
from cupymla.ops import registry
from cupymla.ptx import parse
from cupymla.ptx.syntax import Instruction

PAGE = Path(__file__).resolve().parent.parent / "docs" / "ptx_rules.md"
ARCHES = ("sm_80", "sm_90", "sm_90a")


def told() -> tuple[frozenset[str], tuple[str, ...]]:
    """The forms that the page names whole, and the beginnings that it names with a star."""
    text = PAGE.read_text()
    firsts = re.findall(r"^\| (`.*?`) \|", text, flags=re.M) + re.findall(r"^`.*", text, flags=re.M)
    forms = [form for first in firsts for form in re.findall(r"`([a-z].*?)`", first)]
    return frozenset(forms), tuple(form.removesuffix("*") for form in forms if form.endswith(".*"))


def sources() -> Iterator[KernelSource]:
    """Of every kernel and target variants that have each value of each definition."""
    seen: set[tuple[str, str, str, str | int]] = set()
    for entry in registry.OPERATORS:
        plan = importlib.import_module(f"{entry.module}.plan") if entry.kernels else None
        for source in plan.sources() if plan else ():
            values = {(source.entry, source.arch, name, value) for name, value in source.defines or (("", ""),)}
            if source.arch in ARCHES and not values <= seen:
                seen |= values
                yield source


@pytest.mark.compile
@pytest.mark.parametrize("source", tuple(sources()), ids=str)
def test_the_page_tells_the_rules_of_every_instruction(source: KernelSource) -> None:
    pytest.importorskip("cupy", reason="compiling goes through CuPy's NVRTC bindings")
    whole, beginnings = told()
    kernel = parse(build.ptx(source), str(source)).kernel(source.entry)
    assert kernel is not None and kernel.body is not None
    forms = {found.opcode for found, _ in kernel.body.walk() if isinstance(found, Instruction)}
    assert {form for form in forms if form not in whole and not form.startswith(beginnings)} == set()


def test_the_page_names_no_form_twice() -> None:
    text = PAGE.read_text()
    firsts = re.findall(r"^\| (`.*?`) \|", text, flags=re.M)
    forms = [form for first in firsts for form in re.findall(r"`([a-z].*?)`", first)]
    assert len(forms) == len(set(forms)) > 40
