"""context_lens may change while xl_paged_attention runs: numbers may be anything, but nothing hangs or leaves its
arrays, and the next run of the same call is right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from xl_kit import named, take_for_long

from cupymla.ops.xl_paged_attention import cases, plan, xl_paged_attention
from cupymla.ops.xl_paged_attention.cases import XlCase, make
from cupymla_lab.emulate.host.memory import Arrays
from cupymla_lab.emulated import emulated


class Call(NamedTuple):
    """Which kernel is to run what.

    Attributes:
        case: the problem.
        clusters: of the cluster split-KV variant, in the grid; 0 for the kernel for any work.
        multiprocessors: of the GPU.
        long: of the kernel for any work, whether it has CTAs for small parts, however little there is to do.
    """

    case: XlCase
    clusters: int = 0
    multiprocessors: int = 3
    long: bool = False


SMALL: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "context_lens": (37, 0, 90)}
MANY: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 4, "head_size": 64, "bias": "dense", "max_blocks": 60}
ALONE = {**SMALL, "num_kv_heads": 1, "context_lens": (300,), "max_blocks": 70}

# Sequences spread over CTAs, several in a CTA, empty ones: for each engine of the kernel for any work. Of the one for
# few units, too, and units that several clusters share.
CALLS = {
    "pages": Call(named("gqa4-2x64_b6_c0-700_dense_5x700x0x64x1x333")),
    "rows": Call(named("gqa4-2x64_b4_c0-90_rel24_bfloat16_NHD_zero")),
    "plain": Call(replace(named("gqa4-2x64_b4_c0-90_rel24_float32_NHD_zero"), head_size=32)),
    # Readers may differ on whether all are equally long, and on whether the work is.
    "small parts": Call(make("options", **MANY, context_lens=(700, 0, 333, 65)), long=True),
    "equally long": Call(make("options", **MANY, context_lens=(300,) * 4), long=True),
    "few pages": Call(make("cluster", **SMALL, bias="dense"), 6, 8),
    "few rows": Call(make("cluster", **SMALL, kv_layout="NHD", bias="relative", extent=24), 6, 8),
    "shared unit": Call(make("cluster", **ALONE, bias="alibi"), 3, 132),
}


@pytest.mark.compile
@pytest.mark.parametrize(("seed", "call"), list(enumerate(CALLS.values())), ids=CALLS)
def test_lengths_that_change_under_way(call: Call, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_CLUSTER_GAIN", 1e9 if call.clusters else -1e9)
    if call.long:
        take_for_long(monkeypatch)
    rng = np.random.default_rng(seed)
    add = Arrays.add

    def initialised(self: Arrays, name: str, base: int, size: int, *_: Any, **others: Any) -> None:
        # A CTA may count parts that another one does not leave: memory of the workspace, with whatever it holds.
        add(self, name, base, size)

    monkeypatch.setattr(Arrays, "add", initialised)
    with emulated(multiprocessors=call.multiprocessors) as machine:
        given = machine.arguments(cases.inputs(call.case, 0))
        run = machine.call(xl_paged_attention.prepare, **given)
        expected = [array.get().copy() for array in machine.call(run)]
        lengths = given["context_lens"]
        longest = int(lengths.get().max())
        unchanged, changed, changes = lengths.host.copy(), 0, True

        def changing(address: int, size: int, loads: bool, stores: bool) -> None:
            nonlocal changed
            # Another one for every thread that reads, or now and then what the one before has read.
            if changes and not (call.long and rng.random() < 0.3):
                lengths.host[...] = rng.integers(0, longest + 1, size=lengths.shape)
            changed += changes

        machine.watch(lengths, changing)
        machine.allow_unwritten()  # a warp may work on a stage that it did not fill
        machine.most_turns = 20 * machine.turns
        # CTAs that read different lengths may write the same part of the workspace: its numbers may be anything.
        ordered = machine.settings
        machine.settings = replace(ordered, races="unchecked")
        machine.call(run)
        machine.settings = ordered
        lengths.host[...] = unchanged
        changes = False
        assert changed
        for array, wanted in zip(machine.call(run), expected, strict=True):
            np.testing.assert_array_equal(array.get().view(np.uint8), wanted.view(np.uint8))
        assert set(machine.launched) == {"xl_attention_cluster" if call.clusters else "xl_paged_attention"}
        if call.long:
            assert {geometry.grid[0] for geometry in machine.launches} == {10}
        if call.clusters:
            assert {geometry.grid[0] for geometry in machine.launches} == {call.clusters * plan.CLUSTER_SIZE}
