"""Registers of `tcgen05.ld` are used behind `tcgen05.wait::ld` only, in all kernels for sm_100f."""

from __future__ import annotations

from collections.abc import Iterator

import gemm
import pytest
from variants_kit import PLANNED, compiled

from cupymla import build
from cupymla.build.source import KernelSource, closure
from cupymla_lab.emulate.loads import early_uses, waits

HEAD = ".version 8.8\n.target sm_100a\n.address_size 64\n.visible .entry k()\n{\n.reg .pred %p; .reg .b32 %r<9>, %t;\n"
LOAD = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%t];\n"
WAIT = "tcgen05.wait::ld.sync.aligned;\n"
USE = "add.u32 %r3, %r4, %r2;\n"


def sources() -> Iterator[KernelSource]:
    """Of every kernel for sm_100f whose files load from Tensor Memory a variant for each number of heads, whose loads
    and waits are their own."""
    seen: set[tuple[str, tuple[tuple[str, str | int], ...]]] = set()
    for entry in PLANNED:
        for source in compiled(entry.module):
            own = tuple(each for each in source.defines if each[0] == "CUPYMLA_HEADS")
            if source.arch == "sm_100f" and (source.entry, own) not in seen and loads(source):
                seen.add((source.entry, own))
                yield source


def loads(source: KernelSource) -> bool:
    """Whether any file of a kernel has the instruction."""
    return any("tcgen05.ld" in member.file.read_text() for member in closure(source))


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        (LOAD + WAIT + USE, []),
        (LOAD + USE + WAIT, [8]),
        (LOAD + "add.u32 %r3, %r4, %r5;\n" + WAIT + USE, []),
        (LOAD + "@%p " + WAIT + USE, [9]),
        (LOAD + "@%p bra past;\n" + WAIT + "past:\n" + USE, [11]),
        ("again:\n" + USE + LOAD + "@%p bra again;\n" + WAIT, [8]),
        (LOAD + "{\n.reg .b32 %r<9>;\n" + USE + "}\n" + WAIT, []),
        (LOAD + "{\n.reg .b32 u;\n" + USE + "}\n" + WAIT, [10]),
        (LOAD + "ret;\n" + USE, []),
        (LOAD + LOAD + WAIT + USE, []),
        (LOAD + "mov.b32 %r4, %r1;\n" + WAIT + "add.u32 %r3, %r4, %r4;\n", []),
        (LOAD + "mov.b32 %r4, %r1;\nadd.u32 %r3, %r4, %r4;\n" + WAIT, [9]),
        (LOAD + "st.shared.b32 [%r1+4], 0;\n" + WAIT, [8]),
    ],
)
def test_every_path_is_followed(body: str, lines: list[int]) -> None:
    assert [use.line for use in early_uses(HEAD + body + "ret;\n}\n")] == lines


def require_waits(text: str) -> None:
    """No early use as it stands, and one when any of its waits is taken away."""
    assert early_uses(text) == []
    for line in waits(text):
        assert early_uses(text, without=line), line


@pytest.mark.compile
def test_the_gemm() -> None:
    require_waits(gemm.ptx())


@pytest.mark.compile
@pytest.mark.parametrize("source", tuple(sources()), ids=str)
def test_kernels(source: KernelSource) -> None:
    require_waits(build.ptx(source))
