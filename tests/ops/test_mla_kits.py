"""The kits of MLA tests judge all that a call makes: what it returns, and what it writes beside that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import emulated_kit
import numpy as np
import pytest
from mla_gpu_kit import OnGpu

from cupymla.ops.mla_cases import sized
from cupymla.testing.compare import Mismatch
from cupymla.testing.operators import Array
from cupymla_lab.subjects import Subject

SUBJECT = Subject("sparse_mla_bwd")
CASE = sized(16, 576, 65, 3, 200, "_dist", "options", wants_dist=True)
INPUTS = SUBJECT.cases.inputs(CASE, 0)
RETURNED = ("dq", "dkv")


def results(spoil: str | None = None) -> dict[str, Array]:
    """What a right kernel would make; with a name, of an array of which one element is off."""
    made = SUBJECT.expected(INPUTS, "same")
    if spoil is not None:
        made[spoil].reshape(-1)[17] += np.asarray(1, made[spoil].dtype)
    return made


class OnDevice:
    """A NumPy array with the one method of CuPy's that is asked for."""

    def __init__(self, host: Array) -> None:
        self.get: Callable[[], Array] = host.copy


def judged_as_on_a_gpu(made: dict[str, Array]) -> None:
    given = {name: OnDevice(made[name]) for name in SUBJECT.written}
    OnGpu("sparse_mla_bwd", SUBJECT.cases.CASES[0].name).require_right(
        INPUTS, tuple(OnDevice(made[name]) for name in RETURNED), given
    )


def judged_as_emulated(made: dict[str, Array]) -> None:
    @contextmanager
    def emulated(*_: Any) -> Iterator[Any]:
        yield SimpleNamespace(results=lambda subject, inputs: made)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated_kit, "emulated", emulated)
        assert emulated_kit.check_inputs(SUBJECT, INPUTS, "eager") is made


@pytest.mark.parametrize("judge", [judged_as_on_a_gpu, judged_as_emulated])
def test_a_kit_sees_what_is_wrong_in_any_array(judge: Callable[[dict[str, Array]], None]) -> None:
    judge(results())
    for name in (*RETURNED, *SUBJECT.written):
        with pytest.raises(Mismatch, match=name):
            judge(results(spoil=name))


def test_a_test_on_a_gpu_has_to_bring_what_the_call_writes_to() -> None:
    on_gpu = OnGpu("sparse_mla_bwd", SUBJECT.cases.CASES[0].name)
    with pytest.raises(KeyError, match="attn_dist"):
        on_gpu.require_right(INPUTS, tuple(OnDevice(results()[name]) for name in RETURNED))


def test_an_array_that_is_missing_or_unknown_is_not_passed_over() -> None:
    made = results()
    for wrong in ({name: made[name] for name in RETURNED}, made | {"other": made["dq"]}):
        with pytest.raises(ValueError, match="results dq, dkv"):
            SUBJECT.reports(INPUTS, wrong)


def test_a_test_on_a_gpu_passes_over_nothing_that_a_call_returns() -> None:
    inputs = SUBJECT.cases.inputs(sized(16, 576, 65, 3, 200, "_sink", "options", sink="finite"), 0)
    made = tuple(OnDevice(array) for array in SUBJECT.expected(inputs, "same").values())
    on_gpu = OnGpu("sparse_mla_bwd", SUBJECT.cases.CASES[0].name)
    on_gpu.require_right(inputs, made)
    with pytest.raises(ValueError, match="longer than"):
        on_gpu.require_right(inputs, (*made, made[0]))
