"""Ordinary calls of nvfp4_gemv that come again: what changes between them reaches the kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupymla.ops.nvfp4_gemv import cases, cuda, nvfp4_gemv
from cupymla.testing.interpreted import interpreted


@pytest.mark.compile
def test_a_new_alpha_takes_no_new_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 / (ga * gb) is another number with every activation; a binding costs ten calls."""
    case = next(c for c in cases.CASES if c.name == "m1_k2_l1_n1")
    inputs = {name: value for name, value in cases.inputs(case, 0).items() if name != "alpha"}
    made: list[object] = []
    bind = cuda._bind

    def counted(*arguments: Any) -> cuda.Binding:
        made.append(arguments)
        return bind(*arguments)

    monkeypatch.setattr(cuda, "_bind", counted)
    with interpreted("sm_90") as machine:
        machine.strict = False
        given = machine.arguments(inputs)

        def calls() -> list[Any]:
            return [nvfp4_gemv(**given, alpha=alpha).get() for alpha in (1.0, 0.5, -2.0, 1.0)]

        got = machine.call(calls)
    expected = [nvfp4_gemv(**inputs, alpha=alpha) for alpha in (1.0, 0.5, -2.0, 1.0)]
    for have, want in zip(got, expected, strict=True):
        np.testing.assert_array_equal(have, want)
    assert len({array.tobytes() for array in expected}) == 3
    assert len(made) == 1
