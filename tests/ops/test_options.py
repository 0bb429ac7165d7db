"""No option is lost on its way from the public call to the kernel, whoever adds one."""

from __future__ import annotations

import inspect
from dataclasses import fields
from importlib import import_module
from typing import Any

import numpy as np
import pytest

import cupymla
from cupymla import tensor
from cupymla.ops import mla, registry
from cupymla.testing import without_gpu
from cupymla.testing.operators import Subject

NAMES = [entry.name for entry in registry.OPERATORS]
NOT_OF_THE_RESULT = {"stream", "check_indices", "workspace"}


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_is_in_a_case(name: str) -> None:
    """An option that no case has reaches neither the interpreter nor the emulator nor a GPU's tests."""
    subject = Subject(name)
    given: set[str] = set()
    for case in without_gpu.small_cases(subject):
        given |= subject.cases.inputs(case, 0).keys()
    parameters = set(inspect.signature(subject.call).parameters)
    assert parameters - given - set(subject.outputs) - NOT_OF_THE_RESULT == set()


REPEATED = [
    (name, module)
    for name in NAMES
    for module in (f"cupymla.ops.{name}", f"cupymla.ops.{name}.run")
    if hasattr(import_module(module), "_repeats")
]


@pytest.mark.parametrize(("name", "module"), REPEATED)
def test_every_argument_is_part_of_what_is_remembered(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is told apart by each of its arguments, under that argument's name, or goes through the door."""
    home = import_module(module)
    kept, seen = home._repeats, []

    def remembered(arrays: tuple[Any, ...], options: tuple[Any, ...]) -> object:
        seen.append(dict(zip((*kept._names, *kept._options), (*arrays, *options), strict=True)))
        return arrays

    monkeypatch.setattr(home, "_repeats", remembered)
    parameters = inspect.signature(getattr(cupymla, name)).parameters
    required = {p.name: object() for p in parameters.values() if p.default is p.empty}
    for parameter in parameters:
        given = required | {parameter: object()}
        seen.clear()
        try:
            getattr(cupymla, name)(**given)
        except cupymla.InputError:
            assert not seen  # the door, which wants arrays
        else:
            assert {argument: value for argument, value in seen[0].items() if argument in given} == given


def test_some_operators_remember() -> None:
    assert len(REPEATED) >= 5


MLA_OPTIONS: dict[str, Any] = {"sm_scale": 0.5, "causal": True, "q_start": 1, "k_stride": 2, "lse_base": "2"}


def test_every_option_is_part_of_an_mla_problem() -> None:
    """Also where the same arrays were looked at before with the option left out."""
    half = np.zeros((3, 2, 512), np.float16)
    q, kv = tensor.view(half, "q"), tensor.view(np.zeros((4, 512), np.float16), "kv")
    indices = tensor.view(np.zeros((3, 5), np.int32), "indices")
    parameters = list(inspect.signature(mla.read_problem).parameters)
    assert parameters[5:] == list(MLA_OPTIONS), "say here which value the new option is tried with"
    assert set(MLA_OPTIONS) <= {entry.name for entry in fields(mla.MlaProblem)}
    plain = mla.read_problem(q, kv, indices, None, None)
    for name, value in MLA_OPTIONS.items():
        problem = mla.read_problem(q, kv, indices, None, None, **{name: value})
        assert getattr(problem, name) == value != getattr(plain, name)
        assert mla.read_problem(q, kv, indices, None, None) == plain
