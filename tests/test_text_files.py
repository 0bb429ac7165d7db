"""Text files and the output of tools are UTF-8, whatever the locale says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from build_kit import python

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("cupymla", "cupymla_lab", "scripts")

C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""Python takes text for ASCII there, unless it is told otherwise."""

KERNEL = '// \u00a7 6.3: \u03b1 \u2264 1\nextern "C" __global__ void k() {}\n'


def without_encoding(tree: ast.Module) -> Iterator[int]:
    """Lines of calls that leave the encoding to the locale, those that ruff's PLW1514 does not see."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and "encoding" not in (given := {keyword.arg for keyword in node.keywords}):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if called in ("read_text", "write_text") or given & {"text", "universal_newlines"}:
                yield node.lineno


def test_calls_without_an_encoding_are_found() -> None:
    tree = ast.parse(
        "f.read_text()\nf.write_text('x', 'utf-8')\nrun(text=True)\nf.read_text(encoding='utf-8')\nf.read()"
    )
    assert list(without_encoding(tree)) == [1, 2, 3]


def test_every_text_names_its_encoding() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for folder in FOLDERS
        for file in sorted((ROOT / folder).rglob("*.py"))
        if "_packed" not in file.parts
        for line in without_encoding(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert not found, "say encoding='utf-8'"


def test_a_kernel_with_words_beyond_ascii_compiles_in_the_c_locale(tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="compiling goes through CuPy's NVRTC bindings")
    (tmp_path / "k.cu").write_text(KERNEL, encoding="utf-8")
    code = (
        "import sys, locale; from cupymla.build import KernelSource, cubin\n"
        "print(locale.getencoding(), len(cubin(KernelSource('k.cu', 'k', root=sys.argv[1])).data) > 0)"
    )
    done = python(code, str(tmp_path), CUPYMLA_CACHE_DIR=str(tmp_path / "cache"), **C_LOCALE)
    assert done.returncode == 0, done.stderr
    encoding, compiled = done.stdout.split()
    assert compiled == "True"
    assert encoding != "UTF-8", "this Python does not obey the C locale, so the test shows nothing"


def test_commands_print_in_the_c_locale(tmp_path: Path) -> None:
    """One interpreter runs them all: to start it takes longer than they do."""
    code = """
import sys
from cupymla.cli import main
for words in ("list", "list --markdown", "doctor", "--help"):
    print("=== of", words)
    try:
        main(words.split())
    except SystemExit:
        pass
"""
    done = python(code, CUPYMLA_CACHE_DIR=str(tmp_path), **C_LOCALE)
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr
    for told in done.stdout.split("=== of ")[1:]:
        assert told.partition("\n")[2], told
