"""The caller's workspace is the memory that the kernels work in, and one that is too small is refused in time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupymla.errors import InputError
from cupymla.ops.sparse_mla_bwd import cases, sparse_mla_bwd
from cupymla.testing.interpreted import Interpreted, interpreted

CASE = next(case for case in cases.CASES if case.name == "h16_d576_k65_q6_kv200_det")


def arguments(machine: Interpreted) -> dict[str, Any]:
    given = cases.inputs(CASE, 0)
    return {n: machine.array(v, name=n) if isinstance(v, np.ndarray) else v for n, v in given.items()}


@pytest.mark.compile
def test_kernels_work_in_the_callers_memory() -> None:
    with interpreted(multiprocessors=3) as machine:
        given = arguments(machine)
        expected = [array.get().tobytes() for array in machine.call(sparse_mla_bwd, **given)]
        size = machine.call(sparse_mla_bwd.workspace_bytes, **given)
        assert size > 0
        workspace = machine.empty((size,), np.dtype(np.uint8), "workspace")
        got = machine.call(sparse_mla_bwd, **given, workspace=workspace)
        assert [array.get().tobytes() for array in got] == expected
        assert (workspace.get() != 0xFF).any()


@pytest.mark.compile
def test_too_small_a_workspace_is_refused_before_anything_is_launched() -> None:
    with interpreted(multiprocessors=3) as machine:
        given = arguments(machine)
        size = machine.call(sparse_mla_bwd.workspace_bytes, **given)
        small = machine.empty((size - 1,), np.dtype(np.uint8), "workspace")
        with pytest.raises(InputError, match=f"at least {size} bytes") as caught:
            machine.call(sparse_mla_bwd, **given, workspace=small)
        assert (caught.value.operator, caught.value.argument) == ("sparse_mla_bwd", "workspace")
        assert not machine.launches
