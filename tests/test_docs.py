"""The docs are true: snippets of pages and of operators' READMEs run, top to bottom, and links lead somewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from cupymla_lab.emulate.host import machine

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PROSE = {"architecture.md", "testing.md"}
"""Pages of interfaces and prose."""
PAGES = sorted(page.name for page in DOCS.glob("*.md") if page.name not in PROSE)
OPERATORS = sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("cupymla/ops/*/README.md"))
LINKED = [
    *sorted(f"docs/{page.name}" for page in DOCS.glob("*.md")),
    "README.md",
    "tests/README.md",
    *OPERATORS,
    *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("cuda/**/README.md") if "third_party" not in p.parts),
]


def snippets(page: str) -> list[str]:
    """Of a page under docs/, or at a path in the repository."""
    place = ROOT / page if "/" in page else DOCS / page
    return re.findall(r"^```python\n(.*?)^```$", place.read_text(), flags=re.M | re.S)


def run(page: str, **settings: str) -> None:
    """All snippets of a page as one program."""
    code = "\n".join(snippets(page))
    for package in ("jax", "torch"):
        if re.search(rf"^import {package}\b", code, flags=re.M) and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **settings}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("page", PAGES)
def test_every_page_has_code_that_runs(page: str) -> None:
    assert snippets(page)
    if page == "emulation.md" and not machine.available():
        pytest.skip("the host machine needs a C++ compiler on x86-64")
    run(page, JAX_PLATFORMS="cpu")


@pytest.mark.parametrize("page", OPERATORS)
def test_every_operator_has_an_example_that_runs(page: str) -> None:
    assert snippets(page)
    run(page)


@pytest.mark.gpu
@pytest.mark.parametrize("page", ["cupy_numpy_dlpack.md", "streams_and_graphs.md", "torch.md"])
def test_parts_for_a_gpu_run_there(page: str) -> None:
    """What stands under `if available` is skipped elsewhere."""
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("cupy is not installed")
    run(page)


@pytest.mark.parametrize("page", LINKED)
def test_links_lead_somewhere(page: str) -> None:
    place = ROOT / page
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", place.read_text())
    assert [target for target in targets if not (place.parent / target).exists()] == []


def headings(page: Path) -> set[str]:
    """What links to a part of a page may end in: its headings, as Markdown's readers make anchors of them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    found = (match.lower() for match in re.findall(r"^#+ (.+)$", text, flags=re.M))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", LINKED)
def test_links_lead_to_headings_that_are_there(page: str) -> None:
    place = ROOT / page
    links = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", place.read_text())
    missing = [
        f"{target}#{part}"
        for target, part in links
        if part not in headings((place.parent / target) if target else place)
    ]
    assert missing == []


TARGETS = sorted(ROOT.glob("cuda/*/sm*/README.md"))


@pytest.mark.parametrize("page", TARGETS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_kernels_page_names_all_of_its_files(page: Path) -> None:
    (table,) = re.findall(r"^## Files\n\n(.*?)\n\n", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    named = {
        file.resolve()
        for pattern in re.findall(r"`([\w./*]+\.cuh?)`", table)
        for file in ([page.parent / pattern] if pattern.startswith("../") else page.parent.glob(pattern))
    }
    assert [file for file in sorted(named) if not file.exists()] == []
    assert sorted(file for file in page.parent.glob("*.cu*") if file.resolve() not in named) == []


@pytest.mark.parametrize(
    "folder", sorted({page.parent for page in ROOT.glob("cuda/*/README.md")}), ids=lambda f: f.name
)
def test_pages_of_an_operator_name_all_of_its_files(folder: Path) -> None:
    """Also those that no target has for itself, and where one page is for all targets."""
    text = "\n".join(page.read_text() for page in folder.rglob("README.md"))
    told = [cell.rpartition("/")[2] for cell in re.findall(r"`([^`\n]*)`", text)]
    files = {file.name for file in folder.rglob("*.cu*")}
    assert files
    assert [name for name in sorted(files) if not any(fnmatch(name, pattern) for pattern in told)] == []
