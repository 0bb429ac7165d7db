"""Ordinary calls of nvfp4_gemv that come again: what changes between them reaches the kernel, or another one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupymla.ops.nvfp4_gemv import cases, cuda, nvfp4_gemv
from cupymla_lab.emulated import DeviceArray, Emulated, Kernel, emulated
from cupymla_lab.problems import nvfp4_gemv as problems


@pytest.mark.compile
def test_a_new_alpha_takes_no_new_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 / (ga * gb) is another number with every activation, and a binding costs ten calls. One is for 1, one for
    other positive numbers, one for negative ones."""
    alphas = (1.0, 0.5, -2.0, 1.0, 0.25)
    case = next(c for c in problems.CASES if c.name == "m1_k2_l1_n1")
    inputs = {name: value for name, value in cases.inputs(case, 0).items() if name != "alpha"}
    made: list[object] = []
    bind = cuda._bind

    def counted(*arguments: Any) -> cuda.Binding:
        made.append(arguments)
        return bind(*arguments)

    monkeypatch.setattr(cuda, "_bind", counted)
    with emulated("sm_90") as machine:
        machine.allow_unwritten()
        given = machine.arguments(inputs)

        def calls() -> list[Any]:
            return [nvfp4_gemv(**given, alpha=alpha).get() for alpha in alphas]

        got = machine.call(calls)
    expected = [nvfp4_gemv(**inputs, alpha=alpha) for alpha in alphas]
    for have, want in zip(got, expected, strict=True):
        np.testing.assert_array_equal(have, want)
    assert len({array.tobytes() for array in expected}) == 4
    assert len(made) == 3


@pytest.mark.compile
def test_addresses_choose_the_variant_anew_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """One binding serves rows at multiples of 16 bytes and any others; which they are is not known before the call."""
    case = cases.make("whole", m=66, n=1, k=256)
    inputs = {name: value for name, value in cases.inputs(case, 0).items() if name != "alpha"}
    launched: list[object] = []
    execute = Emulated.execute

    def noted(machine: Emulated, kernel: Kernel, *rest: Any) -> None:
        launched.append(dict(kernel.source.defines)["CUPYMLA_WHOLE"])
        execute(machine, kernel, *rest)

    monkeypatch.setattr(Emulated, "execute", noted)
    with emulated("sm_90", 3) as machine:
        machine.allow_unwritten()
        given = machine.arguments(inputs)

        def moved(name: str, by: int) -> dict[str, Any]:
            """The arguments with one array so many bytes further on."""
            array = inputs[name]
            memory = machine.array(np.zeros(array.nbytes + by, np.uint8), name=name).host[by:]
            there = np.lib.stride_tricks.as_strided(memory.view(array.dtype), array.shape, array.strides)
            there[...] = array
            return dict(given, **{name: DeviceArray(there)})

        each = [given, moved("a", 1), moved("b", 8), moved("sfa", 1), moved("sfa", 4), moved("sfb", 1), given]
        got = machine.call(lambda: [nvfp4_gemv(**arguments).get() for arguments in each])
    for have in got:
        np.testing.assert_array_equal(have, got[0])
    np.testing.assert_array_equal(got[0], nvfp4_gemv(**inputs))
    assert launched == [1, 0, 0, 0, 2, 1, 1]


@pytest.mark.compile
@pytest.mark.parametrize(("m", "batches", "loaded"), [(300, 1, [0]), (66, 2, [0]), (66, 1, [1])])
def test_only_the_variant_that_runs_is_loaded(m: int, batches: int, loaded: list[int]) -> None:
    case = cases.make("whole", m=m, n=1, k=256, batches=batches)
    with emulated("sm_90", 1) as machine:
        machine.allow_unwritten()
        given = machine.arguments(cases.inputs(case, 0))
        machine.call(lambda: nvfp4_gemv(**given).get())
        assert [dict(made.source.defines)["CUPYMLA_WHOLE"] for made in machine.kernels] == loaded
