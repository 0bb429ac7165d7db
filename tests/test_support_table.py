"""The support table, the README's examples and the table of environment variables are true."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from snippets_kit import GROUP, require_success

from cupymla import config, driver, evidence
from cupymla.build import pack
from cupymla.ops import registry
from cupymla_lab import gpu_tests, pages

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
SUPPORT = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")

WITHOUT_GPU = evidence.WithoutGpu("a", "a", "sm_90a", "", "emulated", "", "", 1, 1, {}, "2026-01-02")


def test_support_table_is_the_generated_one() -> None:
    """`python -m cupymla_lab pages` renews it."""
    begin, end = SUPPORT.index(evidence.BEGIN), SUPPORT.index(evidence.END) + len(evidence.END)
    assert SUPPORT[begin:end] == evidence.support_markdown()


def test_the_short_table_says_the_least_that_holds() -> None:
    """For operators alike in one row. And it leaves no target out."""

    def row(operator: str, kernel: str, arch: str, ran: bool) -> evidence.Support:
        return evidence.Support(operator, kernel, arch, without_gpu=WITHOUT_GPU if ran else None)

    made = pages.support(
        [
            row("a", "a", "sm_90a", True),
            row("a", "b", "sm_90a", False),
            row("b", "b", "sm_100f", True),
            row("c", "c", "sm_90a", False),
        ]
    )
    assert "| `a`, `c` | none | not run | none |" in made.splitlines()
    assert "| `b` | none | none | emulated |" in made.splitlines()
    targets = {target for entry in registry.OPERATORS for target in entry.targets}
    assert targets <= {target for group in pages.GENERATIONS.values() for target in group}


def test_every_evidence_file_belongs_to_a_kernel() -> None:
    """Evidence of a kernel that was renamed or removed would sit there unread. Two files are not of one kernel."""
    rows = evidence.support_rows()
    known = {f"{row.operator}.{row.kernel}.{row.arch}{end}.json" for row in rows for end in ("", ".cpu")}
    assert {file.name for file in evidence.FOLDER.glob("*.json")} <= {*known, pack.COUNTS, gpu_tests.FILE.name}


def test_environment_variables_are_the_ones_that_are_read() -> None:
    rows = dict(re.findall(r"^\| `(CUPYMLA_\w+)` \| (.+) \|$", REFERENCE, flags=re.M))
    assert rows == config.VARIABLES


def examples() -> dict[str, str]:
    """The Python examples, by the heading they stand under."""
    return dict(re.findall(r"^### (\w+)$.*?^```python\n(.*?)^```$", README, flags=re.M | re.S))


def test_there_is_an_example_for_each_framework() -> None:
    found = examples()
    assert set(found) == {"CuPy", "JAX", "torch"}
    for name, code in found.items():
        assert len(code.splitlines()) <= 12, name


def run_example(name: str) -> None:
    require_success(examples()[name], JAX_PLATFORMS="cpu")


@GROUP
@pytest.mark.parametrize(("name", "package"), [("JAX", "jax"), ("torch", "torch")])
def test_examples_run_on_the_cpu(name: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if name == "torch" and driver.available():
        pytest.skip("the example puts its tensors on the GPU when there is one")
    run_example(name)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "package"), [("CuPy", "cupy"), ("torch", "torch")])
def test_examples_run_on_the_gpu(name: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    run_example(name)
