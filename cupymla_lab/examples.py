"""The programs of scripts/examples, and how each is started on a GPU.

tests/test_examples.py starts them. `python -m cupymla_lab gpu-tests` keeps which of them passed, and docs/support.md
shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    "train_dsa in torch": _with_framework("train_dsa", "torch", "brief", "the indexer has learned"),
}
"""By a name that the record and the page have."""


def content_hash() -> str:
    """Of the programs and what they share; the package that they call has evidence of its own."""
    return by_content.digest(*by_content.digests(FOLDER.rglob("*.py")))
