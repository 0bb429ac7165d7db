"""Kernels compile for their targets, without spills, and state the facts their launches need: each two definitions
together in some variant (`variants_kit`).

`--compile-planned` adds the others that a plan can choose, some 240, as CI does; `--compile-all` also some 1400 that
numbers of a call make.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator

import pytest
from variants_kit import PLANNED, compiled, on_first_use, sources

from cupymla import arch, build
from cupymla.build import compiler
from cupymla.build.source import KernelSource, units
from cupymla.ops import registry

SHORT = {"CUPYMLA_SCORES": 2, "CUPYMLA_SHORT": 8, "CUPYMLA_CLUSTER": 0}
"""Definitions of `topk` for fp16 rows that one CTA keeps."""


def all_sources() -> Iterator[KernelSource]:
    for entry in PLANNED:
        yield from sources(entry.module)


def all_variants() -> Iterator[object]:
    """Every kernel, once: operators may share one."""
    every = dict.fromkeys(source for entry in PLANNED for source in compiled(entry.module))
    for source in every:
        yield pytest.param(source, id=str(source))
    for more, mark in ((sources, pytest.mark.compile_planned), (on_first_use, pytest.mark.compile_all)):
        others = dict.fromkeys(source for entry in PLANNED for source in more(entry.module) if source not in every)
        for source in others:
            yield pytest.param(source, id=str(source), marks=mark)
        every |= others


@pytest.mark.parametrize("entry", PLANNED, ids=lambda entry: entry.name)
def test_a_plan_offers_sources_for_every_target_in_the_registry(entry: registry.OperatorEntry) -> None:
    offered = sources(entry.module)
    assert {source.arch for source in offered} == {kernel.arch for kernel in entry.kernels}
    assert len(set(offered)) == len(offered)
    for kernel in entry.kernels:
        chosen = importlib.import_module(f"{entry.module}.plan").sources(kernel.arch)
        assert chosen == tuple(source for source in offered if source.arch == kernel.arch)


def test_every_translation_unit_belongs_to_a_plan() -> None:
    operators = {unit for unit in units() if not unit.startswith("emulate/")}
    assert operators == {source.path for source in all_sources()}


@pytest.mark.compile
@pytest.mark.parametrize("source", tuple(all_variants()))
def test_kernel_compiles_without_spills_and_fits_its_target(source: KernelSource) -> None:
    pytest.importorskip("cupy", reason="compiling goes through CuPy's NVRTC bindings")
    made = build.cubin(source, fail_on_spill=True)
    static, dynamic = made.resources.static_smem_bytes, made.facts["smem_bytes"]
    assert static + dynamic <= arch.named(source.arch).smem_bytes
    # Swizzled tiles want dynamic shared memory to begin at a multiple of 1024: nothing static may be ahead of it.
    assert not (static and dynamic)
    # Registers are given to warps by eights per thread.
    assert made.facts["threads"] * (-(-made.resources.registers // 8) * 8) <= 65536
    # setmaxnreg grants what the CTA got at launch; asked for more it waits for ever.
    assert made.facts.get("warpgroup_registers", 0) * 128 <= made.facts["threads"] * made.resources.registers
    # A kernel that says nothing of clusters has none.
    assert 1 <= made.facts.get("cluster", 1) <= 16
    # The parameter record is one of the kernel's parameters; the others are 128-byte tensor maps.
    assert made.facts["parameter_bytes"] in made.parameters
    assert sum(made.parameters) <= 4096


@pytest.mark.compile
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
def test_nvcc_finds_no_mistake_where_a_row_has_one_cta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its front end compares with constants of a class where NVRTC's does not: `part < rank`, rank 0."""
    monkeypatch.setenv("CUPYMLA_COMPILER", "nvcc")
    (source,) = (each for each in sources("cupymla.ops.topk") if each.arch == "sm_90" and dict(each.defines) == SHORT)
    assert compiler.compile(source).data
