"""No option is lost on its way from the public call to the kernel, whoever adds one."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from option_kit import DECLARED, another

import cupymla
from cupymla.ops import registry
from cupymla.ops.arguments import Arguments, Check
from cupymla.testing import compare
from cupymla.testing.operators import Subject
from cupymla_lab import without_gpu

NAMES = [entry.name for entry in registry.OPERATORS]
NOT_OF_THE_RESULT = {"stream", "check_indices", "workspace"}


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_is_in_a_case(name: str) -> None:
    """An option that no case has does not reach the engine. Its default does not count."""
    subject = Subject(name)
    parameters = inspect.signature(subject.call).parameters
    given: set[str] = set()
    for case in without_gpu.small_cases(subject):
        inputs = subject.cases.inputs(case, 0)
        assert inputs.keys() <= parameters.keys()
        for argument, value in inputs.items():
            if isinstance(value, np.ndarray) or value != parameters[argument].default:
                given.add(argument)
    assert parameters.keys() - given - set(subject.outputs) - NOT_OF_THE_RESULT == set()


OWN_DOORS = [name for name in NAMES if name not in DECLARED]
"""Operators whose arguments are listed by hand from room to room."""


@pytest.mark.parametrize("name", OWN_DOORS)
def test_every_argument_has_its_effect_on_the_cpu(name: str) -> None:
    """The call is what the reference is, in the cheapest case that has each argument: none is lost on the way there."""
    subject = Subject(name)
    parameters = inspect.signature(subject.call).parameters
    cheapest: dict[str, Any] = {}
    for case in sorted(without_gpu.small_cases(subject), key=subject.cases.flops):
        for argument, value in subject.cases.inputs(case, 0).items() if subject.cases.flops(case) else ():
            if isinstance(value, np.ndarray) or value != parameters[argument].default:
                cheapest.setdefault(argument, case)
    for case in dict.fromkeys(cheapest.values()):
        inputs = subject.cases.inputs(case, 0)
        compare.require(subject.reports(inputs, subject.named(subject.call(**inputs))))


@pytest.mark.parametrize("name", OWN_DOORS)
def test_the_door_has_the_defaults_of_the_call(name: str) -> None:
    """Prepared calls and bridges go to the door with what they were given."""
    parameters = inspect.signature(getattr(cupymla, name)).parameters
    own = inspect.signature(import_module(f"cupymla.ops.{name}.spec").read).parameters
    assert own.keys() == parameters.keys() - {"stream"}
    assert {n: p.default for n, p in own.items()} == {n: p.default for n, p in parameters.items() if n != "stream"}


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


# Operators that declare what they take --------------------------------------------------------------------------------

OPERATORS = list(DECLARED)
AN_OPTION = [
    pytest.param(name, *option, id=f"{name}-{option[0]}")
    for name, declared in DECLARED.items()
    for option in zip(declared.options, declared.checks, declared.defaults, strict=True)
]


def arrays(name: str) -> dict[str, Any]:
    """The arrays that an operator wants at least."""
    q, kv = np.zeros((3, 2, 512), np.float16), np.zeros((4, 512), np.float16)
    lse, indices = np.zeros((3, 2), np.float32), np.zeros((3, 5), np.int32)
    known = {"q": q, "kv": kv, "out": q, "dout": q, "lse": lse, "indices": indices}
    return {argument: known[argument] for argument in DECLARED[name].inputs[: DECLARED[name].required]}


@pytest.mark.parametrize("name", OPERATORS)
def test_the_signature_is_the_declared_one(name: str) -> None:
    """Names, defaults and annotations of the options; arrays that may be left out are None without them."""
    declared = DECLARED[name]
    parameters = dict(inspect.signature(getattr(cupymla, name)).parameters)
    for number, argument in enumerate(declared.inputs):
        default = parameters.pop(argument).default
        assert (default is inspect.Parameter.empty) == (number < declared.required)
        assert default in (None, inspect.Parameter.empty)
    home = import_module(f"cupymla.ops.{name}.spec")
    for entry in fields(home.Options):
        shown = parameters.pop(entry.name)
        assert (shown.default, type(shown.default), shown.annotation) == (
            entry.default,
            type(entry.default),
            entry.type,
        )
    for argument in declared.outputs:
        assert parameters.pop(argument).default is None
    assert parameters.keys() == {"check_indices", "stream"}


@pytest.mark.parametrize("name", OPERATORS)
def test_every_argument_comes_to_the_door_under_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call lists its arguments once more, in the declared order."""
    home, declared = import_module(f"cupymla.ops.{name}"), DECLARED[name]
    seen: dict[str, Any] = {}

    def checked(inputs: Any, options: Any, written: Any, check_indices: Any, stream: Any) -> Any:
        names = (*declared.inputs, *declared.options, *declared.outputs)
        seen.update(zip(names, (*inputs, *options, *written), strict=True))
        seen.update(check_indices=check_indices, stream=stream)
        raise cupymla.InputError("none", "this is as far as it goes", "here")

    monkeypatch.setattr(home.spec, "checked", checked)
    given = {argument: object() for argument in inspect.signature(getattr(cupymla, name)).parameters}
    with pytest.raises(cupymla.InputError, match="as far as it goes"):
        getattr(cupymla, name)(**given)
    assert seen == given


@pytest.mark.parametrize("name", OPERATORS)
def test_the_reference_takes_what_the_operator_takes(name: str) -> None:
    declared, parameters = DECLARED[name], inspect.signature(Subject(name)._reference).parameters
    assert parameters.keys() - {"precision"} == {*declared.inputs, *declared.written, *declared.options}


@pytest.mark.parametrize(("name", "option", "check", "default"), AN_OPTION)
def test_every_option_is_part_of_the_problem(name: str, option: str, check: Check, default: object) -> None:
    """Also where the same arrays were looked at before with the option left out."""
    spec: Any = import_module(f"cupymla.ops.{name}.spec")
    given, value = arrays(name), another(check, default)
    (_, plain), (_, problem), (_, again) = spec.read(**given), spec.read(**given, **{option: value}), spec.read(**given)
    assert getattr(getattr(problem, "shared", problem).options, option) == value
    assert getattr(getattr(plain, "shared", plain).options, option) == default
    assert problem != plain == again


def test_the_door_takes_no_argument_that_nobody_declared() -> None:
    spec: Any = import_module("cupymla.ops.sparse_mla_fwd.spec")
    with pytest.raises(TypeError, match=r"sparse_mla_fwd\(\) has no argument nonsense"):
        spec.read(**arrays("sparse_mla_fwd"), nonsense=1)


def test_views_end_in_the_outputs() -> None:
    """What comes last is not read as an input."""
    spec: Any = import_module("cupymla.ops.sparse_mla_fwd.spec")
    with pytest.raises(TypeError, match="views end in lse, out"):
        Arguments("sparse_mla_fwd", spec.Views, spec.Options, results=("lse", "out"))


# What is written for callers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_has_its_place_in_the_docstring(name: str) -> None:
    call = getattr(cupymla, name)
    missing = [p for p in inspect.signature(call).parameters if f"\n        {p}: " not in (call.__doc__ or "")]
    assert missing == []


@pytest.mark.parametrize("name", OPERATORS)
def test_every_argument_is_on_the_operators_page(name: str) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "operators" / f"{name}.md").read_text(encoding="utf-8")
    parameters = inspect.signature(getattr(cupymla, name)).parameters
    assert [p for p in parameters if not re.search(rf"`[^`\n]*\b{p}\b", page)] == []
