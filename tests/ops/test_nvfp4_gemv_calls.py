"""Ordinary calls of nvfp4_gemv that come again: what changes between them reaches the kernel, or another one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupymla.ops.nvfp4_gemv import cases, cuda, nvfp4_gemv
from cupymla.testing.interpreted import DeviceArray, interpreted


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


@pytest.mark.compile
def test_addresses_choose_the_variant_anew_in_each_call() -> None:
    """One binding serves rows at multiples of 16 bytes and any others; which they are is not known before the call."""
    case = next(c for c in cases.CASES if c.name == "m66_k256_l2_n1_whole_alpha_number_bias_none")
    inputs = cases.inputs(case, 0)
    expected = nvfp4_gemv(**inputs)
    a = inputs["a"]
    with interpreted("sm_90", 3) as machine:
        machine.strict = False
        given = machine.arguments(inputs)
        bytes_ = machine.array(np.zeros(a.nbytes + 1, np.uint8), name="a").host[1:]
        odd = np.lib.stride_tricks.as_strided(bytes_.view(a.dtype), a.shape, a.strides)
        odd[...] = a
        moved = dict(given, a=DeviceArray(odd))

        def calls() -> list[Any]:
            return [nvfp4_gemv(**each).get() for each in (given, moved, given)]

        for have in machine.call(calls):
            np.testing.assert_array_equal(have, expected)
        served = [dict(machine.source(program).defines)["CUPYMLA_WHOLE"] for program in machine.programs]
    assert served == [1, 0]
