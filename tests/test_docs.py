"""The docs are true, complete and short.

Snippets run, top to bottom. Links lead somewhere. Every public function is on the reference page. Every operator has a
page. Generated parts are what their makers make. Pages keep their limits. The site builds without a warning.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
import typing
from fnmatch import fnmatch
from pathlib import Path
from xml.etree import ElementTree

import pytest
from snippets_kit import GROUP, require_success

import cupymla
from cupymla.bench import report
from cupymla.ops import registry
from cupymla_lab import pages
from cupymla_lab.emulate.host import machine

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PROSE = {"architecture.md", "how_a_call_flows.md", "testing.md", "support.md", "reference.md", "glossary.md"}
"""Pages without Python to run: prose, interfaces, what is generated."""
EMULATING = {"emulation.md", "changing_a_kernel.md"}
"""Pages whose code runs a kernel in the emulator."""
PAGES = sorted(page.name for page in DOCS.glob("*.md") if page.name not in PROSE)
OPERATORS = sorted(f"docs/operators/{page.name}" for page in DOCS.glob("operators/*.md"))
LINKED = [
    *sorted(f"docs/{page.name}" for page in DOCS.glob("*.md")),
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/README.md"),
    *OPERATORS,
    *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("cupymla/ops/*/README.md")),
    *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("cuda/**/README.md") if "third_party" not in p.parts),
]


def text_of(page: str) -> str:
    """Of a page under docs/, or at a path in the repository."""
    place = ROOT / page if (ROOT / page).exists() else DOCS / page
    return place.read_text(encoding="utf-8")


# Code ----------------------------------------------------------------------------------------------------------------


def snippets(page: str) -> list[str]:
    """The Python of a page."""
    return re.findall(r"^```python\n(.*?)^```$", text_of(page), flags=re.M | re.S)


def run(page: str, **settings: str) -> None:
    """All snippets of a page as one program."""
    code = "\n".join(snippets(page))
    for package in ("jax", "torch"):
        if re.search(rf"^import {package}\b", code, flags=re.M) and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    require_success(code, **settings)


@GROUP
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.compile if page in EMULATING else ()) for page in PAGES]
)
def test_every_page_has_code_that_runs(page: str) -> None:
    assert snippets(page)
    if page in EMULATING and not machine.available():
        pytest.skip("the host machine needs a C++ compiler on x86-64")
    run(page, JAX_PLATFORMS="cpu")


@GROUP
@pytest.mark.parametrize("page", OPERATORS)
def test_every_operator_has_an_example_that_runs(page: str) -> None:
    assert snippets(page)
    run(page)


@pytest.mark.gpu
@pytest.mark.parametrize("page", ["cupy_numpy_dlpack.md", "raw_kernels.md", "streams_and_graphs.md", "torch.md"])
def test_parts_for_a_gpu_run_there(page: str) -> None:
    """What stands under `if available` is skipped elsewhere."""
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("cupy is not installed")
    run(page)


# Links ---------------------------------------------------------------------------------------------------------------


def test_links_lead_somewhere() -> None:
    missing = [
        (page, target)
        for page in LINKED
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text_of(page))
        if not ((ROOT / page).parent / target).exists()
    ]
    assert missing == []


def headings(page: Path) -> set[str]:
    """What links to a part of a page may end in: its headings, as Markdown's readers make anchors of them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    found = (match.lower() for match in re.findall(r"^#+ (.+)$", text, flags=re.M))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in found}


def test_links_lead_to_headings_that_are_there() -> None:
    missing = [
        (page, f"{target}#{part}")
        for page in LINKED
        for target, part in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", text_of(page))
        if part not in headings((ROOT / page).parent / target if target else ROOT / page)
    ]
    assert missing == []


# Kernels' pages ------------------------------------------------------------------------------------------------------

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


KERNELS = sorted(page for page in ROOT.glob("cuda/**/README.md") if "third_party" not in page.parts)
KERNEL_WORDS = 800


@pytest.mark.parametrize("page", KERNELS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_kernels_page_is_short(page: Path) -> None:
    """Words as `wc -w` counts them: no table there is generated. What is too much goes to docs/log."""
    assert len(page.read_text(encoding="utf-8").split()) <= KERNEL_WORDS


@pytest.mark.parametrize("page", KERNELS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_kernels_page_links_to_pages_of_the_log_as_wholes(page: Path) -> None:
    links = re.findall(r"\[([^\]]*)\]\([^)]*docs/log/([^)]*)\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if link[0].lower() != "see the log" or "#" in link[1]] == []


@pytest.mark.parametrize(
    "folder", sorted({page.parent for page in ROOT.glob("cuda/*/README.md")}), ids=lambda f: f.name
)
def test_pages_of_an_operator_name_all_of_its_files(folder: Path) -> None:
    """Also those that no target has for itself, and where one page is for all targets."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in folder.rglob("README.md"))
    told = [cell.rpartition("/")[2] for cell in re.findall(r"`([^`\n]*)`", text)]
    files = {file.name for file in folder.rglob("*.cu*")}
    assert files
    assert [name for name in sorted(files) if not any(fnmatch(name, pattern) for pattern in told)] == []


# Completeness --------------------------------------------------------------------------------------------------------


def test_every_operator_has_a_page() -> None:
    missing = [e.folder for e in registry.OPERATORS if not (DOCS / "operators" / f"{e.folder}.md").exists()]
    said = ", ".join(f"docs/operators/{name}.md" for name in missing)
    assert not missing, f"an operator has no page; write {said} (docs/adding_an_operator.md says what it holds)"
    listed = {f"docs/operators/{entry.folder}.md" for entry in registry.OPERATORS}
    assert not set(OPERATORS) - listed, "a page in docs/operators is of no registered operator"


BRIDGES = ("jax", "jax.dsa", "jax.parallel", "torch", "torch.parallel", "transformers")


@pytest.mark.parametrize("bridge", BRIDGES)
def test_what_a_bridge_adds_is_on_the_reference_page(bridge: str) -> None:
    """All but the operators, which have the same docstrings there."""
    pytest.importorskip(bridge.partition(".")[0])
    module = importlib.import_module(f"cupymla.interop.{bridge}")
    operators = set(registry.public_functions()) if bridge in ("jax", "torch") else set()
    names = {f"cupymla.interop.{bridge}.{name}" for name in module.__all__ if name not in operators}
    missing = names - set(re.findall(r"^ +heading: (\S+)$", text_of("reference.md"), flags=re.M))
    assert not missing, f"docs/reference.md lacks {', '.join(sorted(missing))}"


@pytest.mark.parametrize("bridge", BRIDGES)
def test_what_a_bridge_adds_says_what_it_takes_and_gives(bridge: str) -> None:
    """Functions with parameters; the operators' own docstrings are held to more (`ops/test_options.py`)."""
    pytest.importorskip(bridge.partition(".")[0])
    module = importlib.import_module(f"cupymla.interop.{bridge}")
    operators = set(registry.public_functions()) if bridge in ("jax", "torch") else set()
    added = {name: getattr(module, name) for name in module.__all__ if name not in operators}
    for name, function in added.items():
        if not inspect.isclass(function) and inspect.signature(function).parameters:
            said = inspect.getdoc(function) or ""
            returns = typing.get_type_hints(function).get("return") is not type(None)
            assert "Args:" in said and ("Returns:" in said) == returns, name


def test_every_public_function_is_on_the_reference_page() -> None:
    page = text_of("reference.md")
    shown = set(re.findall(r"^::: (\S+)$", page, flags=re.M))
    missing = [name for name in registry.public_functions() if pages.written_in(name) not in shown]
    errors = ("CupymlaError", "InputError", "UnsupportedError", "CompileError", "DriverError")
    missing += [name for name in errors if f"cupymla.errors.{name}" not in shown]
    assert not missing, f"docs/reference.md lacks {', '.join(missing)}; run python -m cupymla_lab pages"
    assert "cupymla.raw.raw_module" in shown and callable(cupymla.raw_module)


@pytest.mark.parametrize("name", pages.PARTS)
def test_generated_parts_are_what_their_makers_make(name: str) -> None:
    file = ROOT / name
    assert file.exists(), f"{name} is missing"
    page = file.read_text(encoding="utf-8")
    assert pages.renewed(name, page) == page, f"{name} is not up to date; run python -m cupymla_lab pages"


def test_the_picture_shows_the_numbers_of_the_table() -> None:
    picture = (ROOT / pages.PICTURE).read_text(encoding="utf-8")
    assert picture == pages.picture(), "run python -m cupymla_lab pages"
    shown = [element.text for element in ElementTree.fromstring(picture).iter() if element.text]
    _, found = pages.compared()
    assert len(found) == len(pages.COMPARISONS)
    assert all(f"{one.ratio:.2f}x" in shown for one in found)


def test_the_pictures_texts_fit() -> None:
    """By 0.56 of the font's size a character, and 0.6 where it is bold: what sans-serif fonts take of such words."""
    picture = ElementTree.fromstring((ROOT / pages.PICTURE).read_text(encoding="utf-8"))
    texts = [element for element in picture.iter() if element.tag.endswith("text")]
    ends = {
        element.text: float(element.attrib["x"])
        + len(element.text or "")
        * float(element.get("font-size", picture.attrib["font-size"]))
        * (0.6 if element.get("font-weight") else 0.56)
        for element in texts
    }
    assert len(ends) > 10
    assert {text: end for text, end in ends.items() if end > float(picture.attrib["width"])} == {}


def test_the_readmes_table_has_a_loss() -> None:
    _, found = pages.compared()
    rows = [one for one in found if one.entry.in_table]
    assert len(rows) == 3 and any(one.ratio < 1 for one in rows)
    assert all(f"| {one.gpu} | {one.ours} | {one.entry.words}: {one.theirs} |" in pages.comparison() for one in rows)


def test_the_readme_has_models_with_and_without_cupymla() -> None:
    """The numbers of the newest run, beside its picture."""
    table = pages.readme_models()
    file = pages.newest("models")
    assert file is not None and f"]({file.with_suffix('.png').relative_to(ROOT)})" in table
    content = json.loads(file.read_text(encoding="utf-8"))
    wanted = {"what": "train", "tokens": 8192, "attention": "cupymla"}
    (step,) = (row for row in content["rows"] if wanted.items() <= row.items())
    assert f"{report.in_digits(step['ms'])} ms, {step['peak_gib']:.1f} GiB |" in table
    assert content["gpu"] in table and step["date"] in table
    assert all(f"| {words} |" in table for words in pages.MODELS_IN_README.values())


def test_the_command_renews_what_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (*pages.PARTS, pages.PICTURE, pages.COUNTS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    for folder in (folder for folder in (DOCS / "benchmarks").iterdir() if folder.is_dir()):
        (tmp_path / "docs" / "benchmarks" / folder.name).symlink_to(folder)
    old = (tmp_path / "README.md").read_text(encoding="utf-8")
    (tmp_path / "README.md").write_text(old.replace("| none |", "| verified |"), encoding="utf-8")
    monkeypatch.setattr("cupymla.bench.machine.ROOT", tmp_path)
    assert pages.main([]) == 0
    assert capsys.readouterr().out.split() == ["README.md"]
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == old


# Limits --------------------------------------------------------------------------------------------------------------

LIMITS = {
    "CONTRIBUTING.md": 600,
    "CHANGELOG.md": 1000,
    "docs/emulation.md": 1500,
    "docs/glossary.md": 500,
    **dict.fromkeys(OPERATORS, 600),
}
"""Words that a page may have; another page of docs/ has 1000. Code and generated parts are not counted."""


def words(text: str) -> int:
    """Words of prose and of tables that people wrote: what has a letter or a digit in it."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    text = re.sub(r"<!-- ([\w-]+):begin -->.*?<!-- \1:end -->", "", text, flags=re.S)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return sum(re.search(r"\w", word) is not None for word in text.split())


def test_words_are_counted_as_said() -> None:
    generated = "<!-- made:begin -->\n| 1 | 2 |\n<!-- made:end -->"
    assert words(f"Two words, [a link](to/some place) | and - | `code` |\n\n```bash\nls\n```\n{generated}") == 6


@pytest.mark.parametrize(
    "page", ["CONTRIBUTING.md", "CHANGELOG.md", *OPERATORS, *(f"docs/{p.name}" for p in DOCS.glob("*.md"))]
)
def test_pages_are_short(page: str) -> None:
    limit = LIMITS.get(page, 1000)
    count = words((ROOT / page).read_text(encoding="utf-8"))
    assert count <= limit, f"{page} has {count} words, and may have {limit}"


@pytest.mark.parametrize(("page", "lines"), [("README.md", 150), ("docs/how_a_call_flows.md", 60)])
def test_pages_have_few_lines(page: str, lines: int) -> None:
    """That of a call fits on one screen."""
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= lines


def test_the_glossary_has_few_words() -> None:
    rows = [line for line in text_of("glossary.md").splitlines() if line.startswith("| ")][2:]
    assert 0 < len(rows) <= 20


# The site ------------------------------------------------------------------------------------------------------------


def test_what_builds_the_site_is_an_extra_that_developers_have() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert any(line.startswith("mkdocs>=") for line in extras["docs"])
    assert any("docs" in re.findall(r"\w+", line.partition("[")[2]) for line in extras["dev"])


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """As `scripts/docs` builds it."""
    for package in ("mkdocs", "material", "mkdocstrings_handlers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; the extra docs brings it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    reference = (tmp_path / "site" / "reference" / "index.html").read_text(encoding="utf-8")
    missing = [name for name in registry.public_functions() if f'id="{pages.written_in(name)}"' not in reference]
    assert missing == []
    for entry in registry.OPERATORS:
        assert (tmp_path / "site" / "operators" / entry.folder / "index.html").exists()
    home = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert 'src="benchmarks/comparison.svg"' in home
