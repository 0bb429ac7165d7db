"""context_lens may change while xl_paged_attention runs: numbers may be anything, but nothing hangs or leaves its
arrays, and the next run of the same call is right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupymla.interpret.memory import GlobalMemory
from cupymla.ops.xl_paged_attention import cases, xl_paged_attention
from cupymla.testing.interpreted import interpreted

# Sequences spread over CTAs, several in a CTA, empty ones: for each engine.
NAMES = {
    "pages": "gqa4-2x64_b6_c0-700_dense_5x700x0x64x1x333",
    "rows": "gqa4-2x64_b4_c0-90_rel24_bfloat16_NHD_zero",
    "plain": "gqa4-2x64_b4_c0-90_rel24_float32_NHD_zero",
}


@pytest.mark.compile
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_lengths_that_change_under_way(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in cases.CASES if case.name == name)
    rng = np.random.default_rng(seed)
    load, add_range = GlobalMemory.load, GlobalMemory.add_range

    def initialised(self: GlobalMemory, name: str, base: int, size: int, *_: Any) -> None:
        # A CTA may count parts that another one does not leave: memory of the workspace, with whatever it holds.
        add_range(self, name, base, size)

    monkeypatch.setattr(GlobalMemory, "add_range", initialised)
    with interpreted(multiprocessors=3) as machine:
        given = machine.arguments(cases.inputs(case, 0))
        run = machine.call(xl_paged_attention.prepare, **given)
        expected = [array.get().copy() for array in machine.call(run)]
        lengths = given["context_lens"]
        longest = int(lengths.get().max())
        begin, end = lengths.data.ptr, lengths.data.ptr + 4 * lengths.shape[0]

        def changing(self: GlobalMemory, address: Any, dtype: Any, count: int) -> Any:
            values = load(self, address, dtype, count)
            lengths_read = (address >= begin) & (address < end)
            if lengths_read.any():
                # Another one for every thread that reads.
                values = values.copy()
                values[lengths_read] = rng.integers(0, longest + 1, size=values[lengths_read].shape)
            return values

        machine.strict = False  # a warp may work on a stage that it did not fill
        machine.max_steps = 20 * machine.steps
        with monkeypatch.context() as patch:
            patch.setattr(GlobalMemory, "load", changing)
            machine.call(run)
        machine.strict = True
        for _ in range(3):
            for array, wanted in zip(machine.call(run), expected, strict=True):
                np.testing.assert_array_equal(array.get().view(np.uint8), wanted.view(np.uint8))
