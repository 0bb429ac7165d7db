"""Kernels of one call of sparse_mla_bwd overlap: each but the first is a dependent launch, and waits before it uses
global memory. The interpreter and the host emulator look at every access, SASS shows what the compilers made of it.

Compiles, needs no GPU.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from emulated_kit import settings
from sass_kit import machine_code
from variants_kit import compiled

from cupymla import build, driver
from cupymla import device as devices
from cupymla.errors import CupymlaError
from cupymla.interop.call import Call, run
from cupymla.interop.declaration import Facts
from cupymla.interop.table import declared
from cupymla.launch import Geometry
from cupymla.ops.mla_cases import sized
from cupymla.ops.sparse_mla_bwd import cases
from cupymla.ops.sparse_mla_bwd.paths import packed_queries, token_order
from cupymla.tensormap import TileMap
from cupymla.testing import compare
from cupymla_lab.emulated import Emulated, Kernel, emulated

pytestmark = pytest.mark.compile

CASE = sized(3, 576, 5, 2, 9, "_overlap", "options", deterministic=True, sink="finite", wants_dist=True)
STAGES = ("zero", "list", "attention", "sum", "round", "sink")
"""What its call launches: every stage."""

LISTED = sized(3, 512, 5, 2, 9, "_overlap_order", "order", sink="finite", wants_dist=True, attn_dist_sink=True)
LISTED_STAGES = ("zero", "sink_lse", "sort", "attention", "scatter", "round", "sink")
"""What its call launches where queries take their rows in the order of tokens, and the distribution has the sink."""

DEVICES: Mapping[str, Callable[[], AbstractContextManager[Emulated]]] = {
    "sm_90a": lambda: emulated("sm_90a", 2),
    "sm_100f": lambda: emulated("sm_100f", 2, settings("random")),
}


@contextlib.contextmanager
def without_wait(machine: Emulated, stage: str, stages: Sequence[str] = STAGES) -> Iterator[None]:
    """A block in which a stage of a call lacks its griddepcontrol.wait."""
    execute = machine.execute

    def mutated(kernel: Kernel, geometry: Geometry, parameters: Sequence[bytes], maps: Mapping[int, TileMap]) -> None:
        if len(machine.launches) != stages.index(stage):
            execute(kernel, geometry, parameters, maps)
        else:
            sites = kernel.host.translation.sites
            (wait,) = (site.number for site in sites if site.text.startswith("griddepcontrol.wait"))
            chosen = machine.settings
            machine.settings = replace(chosen, removed=wait)
            execute(kernel, geometry, parameters, maps)
            machine.settings = chosen

    with mock.patch.object(machine, "execute", mutated):
        yield


@pytest.mark.parametrize("arch", DEVICES)
def test_every_kernel_waits_for_its_primary(arch: str) -> None:
    with DEVICES[arch]() as machine:
        compare.require(machine.check("sparse_mla_bwd", CASE))
        assert [geometry.pdl for geometry in machine.launches] == [stage != "zero" for stage in STAGES]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("arch", DEVICES)
def test_a_wait_that_is_missing_is_noticed(arch: str, stage: str) -> None:
    """In every stage but the first, which is launched ordinarily."""
    with DEVICES[arch]() as machine, without_wait(machine, stage):
        if stage == "zero":
            compare.require(machine.check("sparse_mla_bwd", CASE))
            return
        with pytest.raises(CupymlaError, match=r"before its griddepcontrol\.wait") as caught:
            machine.check("sparse_mla_bwd", CASE)
        assert "CTA" in str(caught.value) and "thread" in str(caught.value)
        assert len(machine.launches) == STAGES.index(stage)


@pytest.mark.parametrize("stage", LISTED_STAGES)
def test_a_wait_that_is_missing_is_noticed_in_order_of_tokens(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_queries, "_MARGIN", 0.0)
    monkeypatch.setattr(token_order, "_ORDER_GAIN", -1.0)
    with emulated("sm_90a", 2) as machine, without_wait(machine, stage, LISTED_STAGES):
        if stage == "zero":
            compare.require(machine.check("sparse_mla_bwd", LISTED))
            assert len(machine.launches) == len(LISTED_STAGES)
            return
        with pytest.raises(CupymlaError, match=r"before its griddepcontrol\.wait"):
            machine.check("sparse_mla_bwd", LISTED)
        assert len(machine.launches) == LISTED_STAGES.index(stage)


def test_where_launches_cannot_be_dependent_they_are_ordinary() -> None:
    with emulated("sm_90a", 2) as machine, mock.patch.object(driver, "has_dependent_launch", lambda index: False):
        compare.require(machine.check("sparse_mla_bwd", CASE))
        assert len(machine.launches) == len(STAGES) and not any(geometry.pdl for geometry in machine.launches)


def test_what_xla_may_record_is_launched_ordinarily() -> None:
    """The call that JAX's handler makes, with a workspace among its results."""
    inputs = cases.inputs(CASE, 0)
    given = {name: value for name, value in inputs.items() if isinstance(value, np.ndarray) and name != "attn_dist"}
    options = {name: p.default for name, p in declared("sparse_mla_bwd").options.items()}
    facts = {name: Facts(value.shape, value.dtype.name) for name, value in given.items()}
    call = Call.of(declared("sparse_mla_bwd"), facts, {**options, "deterministic": True})
    with emulated("sm_90a", 2) as machine:
        arrays = [machine.array(given[name]) for name in call.arrays]
        arrays += [machine.empty(tuple(map(int, made.shape)), np.dtype(made.dtype)) for made in call.results.values()]
        machine.call(run, "key", call, devices.cuda(0), [array.data.ptr for array in arrays], 0)
        assert len(machine.launches) == len(STAGES) and not any(geometry.pdl for geometry in machine.launches)


ACCESSES = r"\b(LDG|STG|REDG?|ATOMG?|LDGSTS|UTMALDG|UTMASTG|UTMAPF|UTMAREDG|UBLKCP|UBLKPF|UBLKRED|LD|ST)\b[^;]*"


def kernels() -> list[build.KernelSource]:
    """One of each kernel, architecture and way to share a query, whatever the dtype and the channels."""
    plain = ("CUPYMLA_D_QK", "CUPYMLA_FP16")
    every = compiled("cupymla.ops.sparse_mla_bwd")
    found = {(s.arch, s.entry, *(each for each in s.defines if each[0] not in plain)): s for s in every}
    return list(found.values())


@pytest.mark.parametrize("source", kernels(), ids=str)
def test_machine_code_waits_first(source: build.KernelSource, tmp_path: Path) -> None:
    """One wait (ACQBULK) and one trigger (PREEXIT), and no access to memory above them that is not shared memory's."""
    text = machine_code(build.cubin(source, fail_on_spill=True), tmp_path)
    waits, triggers = (list(re.finditer(rf"\b{name}\b", text)) for name in ("ACQBULK", "PREEXIT"))
    assert len(waits) == len(triggers) == 1
    assert waits[0].start() < triggers[0].start()
    accesses = list(re.finditer(ACCESSES, text))
    assert accesses and triggers[0].start() < accesses[0].start()


@pytest.mark.parametrize("source", kernels(), ids=str)
def test_what_the_call_writes_is_not_read_past_the_cache(source: build.KernelSource) -> None:
    """ld.global.nc is for memory that nothing writes while the grid runs, its wait included: callers' arrays, which the
    sources read so by `__ldg`. The compiler makes no others of them."""
    found = uncached(build.ptx(source))
    attend = ("", "_cluster", "_packed", "_stored", "_p_ds", "_sink_lse")
    readers = (*attend, "_list", "_sort", "_merge", "_packed_zero")
    assert bool(found) == (source.entry.removeprefix("sparse_mla_bwd") in readers)
    # indices; rows of out, on sm_90a and Blackwell, of dout and of kv
    row = "reinterpret_cast<const uint4*>({}) + chunk"
    fours = "reinterpret_cast<const int4*>(own) + i * 8"
    callers = ("indices + entry", fours, row.format("out"), row.format("dout"), "left + tile * 8", row.format("start"))
    assert all(any(f"__ldg({array})" in line for array in callers) for line in found), found


def uncached(ptx: str) -> set[str]:
    """The CUDA lines that ld.global.nc comes from."""
    files = dict(re.findall(r'\.file\s+(\d+)\s+"(.*?)"', ptx))
    found, place = set(), None
    for line in ptx.splitlines():
        location = re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line)
        place = (files[location[1]], int(location[2])) if location else place
        if "ld.global.nc" in line:
            assert place is not None
            path = build.source.cuda_root() / place[0].rpartition("cuda/")[2]
            found.add(path.resolve().read_text().splitlines()[place[1] - 1])
    return found
