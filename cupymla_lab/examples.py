"""The programs of scripts/examples, and how each is started on a GPU.

tests/test_examples.py starts them. `python -m cupymla_lab gpu-tests` keeps which of them passed, and docs/support.md
shows it.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cupymla.bench import machine

from .emulate import by_content

FOLDER = machine.ROOT / "scripts" / "examples"


class Example(NamedTuple):
    """A run of a program.

    Attributes:
        program: its file's name, without `.py`.
        framework: that its arrays are of.
        says: what it prints once a GPU has computed and it has found that right.
        arguments: that it is given.
    """

    program: str
    framework: str
    says: str
    arguments: tuple[str, ...] = ()


def _with_framework(program: str, framework: str, size: str, says: str) -> Example:
    return Example(program, framework, says, ("--device", "cuda", "--size", size, "--framework", framework))


RUNS: Mapping[str, Example] = {
    "gpumode_nvfp4_gemv": Example("gpumode_nvfp4_gemv", "cupy", "cupy: largest error"),
    "standalone_gemv": Example("standalone_gemv", "cupy", "the same bits as cupymla.nvfp4_gemv"),
    "standalone_launch": Example("standalone_launch", "cupy", "the same bits as cupymla.sparse_mla_fwd"),
    "decode_dsa in CuPy": _with_framework("decode_dsa", "cupy", "small", "cupy on a GPU"),
    "decode_dsa in JAX": _with_framework("decode_dsa", "jax", "small", "jax on a GPU"),
    "train_dsa in JAX": _with_framework("train_dsa", "jax", "brief", "the indexer has learned"),
    "train_layer in JAX": _with_framework("train_layer", "jax", "brief", "the model has learned"),
    "train_dsa in torch": _with_framework("train_dsa", "torch", "brief", "the indexer has learned"),
}
"""By a name that the record and the page have."""


def content_hash(folder: Path = FOLDER) -> str:
    """Of the programs and what they share, comments and docstrings aside; the package that they call has evidence of
    its own."""
    files = sorted(folder.rglob("*.py"))
    texts = (f"{file.relative_to(folder)}\n{code_of(file.read_text(encoding='utf-8'))}" for file in files)
    return by_content.digest(*texts)


def code_of(source: str) -> str:
    """A module's lines without comments, docstrings and what is blank then; the same by every version of Python."""
    lines = source.splitlines()
    spans = [
        (token.start, token.end)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    for node in ast.walk(ast.parse(source)):
        # Positions are counted in bytes; before a docstring there are only blanks.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            first, last = node.lineno, node.end_lineno or node.lineno
            spans.append(((first, node.col_offset), (last, len(lines[last - 1]))))
    for (first, begin), (last, end) in spans:
        tail = lines[last - 1][end:]
        lines[first - 1] = lines[first - 1][:begin] + (tail if first == last else "")
        lines[first:last] = [""] * (last - first)
    return "\n".join(line.rstrip() for line in lines if line.strip())
