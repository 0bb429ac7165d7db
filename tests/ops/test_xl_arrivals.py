"""Launches of any grid of the kernel for any work share the counters of a workspace, one after the other, and take
turns with its two sets."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
from xl_kit import named, workspaces

from cupymla.ops.xl_paged_attention import cases, plan, xl_paged_attention
from cupymla.testing.operators import as_tuple
from cupymla_lab.emulated import emulated

# Of a few CTAs and of many, which all share sequences. The largest workspace first: all others find room in it.
NAMES = ("gqa4-2x64_b4_c0-90_rel24_bfloat16_NHD_zero", "gqa4-2x64_b1_c64_fp32_fp8_four_rows")
ROUND = 4096  # `kRound` in cuda/xl_paged_attention/sm80/arrivals.cuh


@pytest.mark.compile
@pytest.mark.parametrize("before", [0, 2**32 - 2 * ROUND], ids=["first", "wraps"])
def test_every_launch_takes_one_turn(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of launches so far goes by no grid, and may wrap."""
    monkeypatch.setattr(plan, "_CLUSTER_GAIN", -1e9)
    made = workspaces(monkeypatch)
    chosen = [named(NAMES[0]), replace(named(NAMES[1]), head_size=32)]
    with emulated(multiprocessors=7) as machine:
        given = [machine.arguments(cases.inputs(case, 0)) for case in chosen]
        results: list[list[bytes]] = [[], []]

        def run(which: int) -> None:
            outputs = as_tuple(xl_paged_attention(**given[which]))
            results[which].append(b"".join(output.get().tobytes() for output in outputs))

        def calls() -> None:
            run(0)
            run(1)
            launches = ctypes.c_uint32.from_address(made[0].arrivals)
            assert launches.value == 2 * ROUND
            launches.value = before
            for turn, which in enumerate((0, 1, 1, 0, 0, 1), start=1):
                run(which)
                assert launches.value == (before + turn * ROUND) % 2**32

        machine.call(calls)
        assert set(machine.launched) == {"xl_paged_attention"}
        assert len(made) == 1 and len({geometry.grid for geometry in machine.launches}) == 2
    assert all(len(set(each)) == 1 for each in results)
