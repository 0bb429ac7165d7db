"""The caller's workspace is the memory that the kernels work in, and one that is too small is refused in time."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from cupymla import driver
from cupymla.errors import InputError
from cupymla.ops.mla_cases import MlaCase
from cupymla.ops.sparse_mla_bwd import cases, sparse_mla_bwd
from cupymla_lab.emulated import Emulated, emulated, kind_of
from cupymla_lab.problems import sparse_mla_bwd as problems

CASE = next(case for case in problems.CASES if case.name == "h16_d576_k65_q6_kv200_det")
EMPTY = next(case for case in problems.CASES if case.name == "h16_d576_k65_q0_kv100")  # no query, and sums all the same


def arguments(machine: Emulated, case: MlaCase = CASE) -> dict[str, Any]:
    return machine.arguments(cases.inputs(case, 0))


@pytest.mark.compile
def test_kernels_work_in_the_callers_memory() -> None:
    with emulated(multiprocessors=3) as machine:
        given = arguments(machine)
        expected = [array.get().tobytes() for array in machine.call(sparse_mla_bwd, **given)]
        size = machine.call(sparse_mla_bwd.workspace_bytes, **given)
        assert size > 0
        workspace = machine.empty((size,), np.dtype(np.uint8), "workspace")
        got = machine.call(sparse_mla_bwd, **given, workspace=workspace)
        assert [array.get().tobytes() for array in got] == expected
        assert (workspace.get() != 0xFF).any()


@pytest.mark.compile
@pytest.mark.parametrize(("capturing", "own"), [(False, False), (True, False), (True, True)])
def test_the_workspace_of_a_captured_call_is_kept(capturing: bool, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph goes on writing to it; without one its memory goes back at once."""
    made: list[weakref.ref[object]] = []

    with emulated(multiprocessors=3) as machine:
        allocate = machine._cupy.ndarray

        def watched(shape: tuple[int, ...], dtype: np.dtype[Any] | str) -> Any:
            array = allocate(shape, dtype)
            if array.dtype == np.uint8:
                made.append(weakref.ref(array))
            return array

        monkeypatch.setattr(machine._cupy, "ndarray", kind_of(watched))
        monkeypatch.setattr(driver, "capturing", lambda stream: capturing)
        given = arguments(machine, EMPTY)
        if own:
            size = machine.call(sparse_mla_bwd.workspace_bytes, **given)
            given["workspace"] = machine.empty((size,), np.dtype(np.uint8), "workspace")
        machine.call(sparse_mla_bwd, **given)
    gc.collect()
    assert [kept() is not None for kept in made] == ([] if own else [capturing])


@pytest.mark.compile
def test_too_small_a_workspace_is_refused_before_anything_is_launched() -> None:
    with emulated(multiprocessors=3) as machine:
        given = arguments(machine)
        size = machine.call(sparse_mla_bwd.workspace_bytes, **given)
        small = machine.empty((size - 1,), np.dtype(np.uint8), "workspace")
        with pytest.raises(InputError, match=f"at least {size} bytes") as caught:
            machine.call(sparse_mla_bwd, **given, workspace=small)
        assert (caught.value.operator, caught.value.argument) == ("sparse_mla_bwd", "workspace")
        assert not machine.launches
