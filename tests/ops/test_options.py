"""No option is lost on its way from the public call to the kernel, whoever adds one."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from option_kit import DECLARED, MLA, another

import cupymla
from cupymla.ops import registry
from cupymla.ops.arguments import Arguments, Check
from cupymla.ops.calls import Calls
from cupymla.testing import compare
from cupymla_lab import without_gpu
from cupymla_lab.subjects import Subject

NAMES = [entry.name for entry in registry.OPERATORS]
NOT_OF_THE_RESULT = {"stream", "check_indices", "workspace"}


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_is_in_a_case(name: str) -> None:
    """An option that no case has does not reach the engine. Its default does not count."""
    subject = Subject(name)
    parameters = inspect.signature(subject.call).parameters
    missing = parameters.keys() - set(subject.outputs) - NOT_OF_THE_RESULT
    for case in sorted(without_gpu.small_cases(subject), key=subject.cases.bytes_moved):
        for argument, value in subject.cases.inputs(case, 0).items() if missing else ():
            if isinstance(value, np.ndarray) or value != parameters[argument].default:
                missing.discard(argument)
    assert missing == set()


OTHERS = [name for name in NAMES if name not in MLA]


@pytest.mark.parametrize("name", OTHERS)
def test_every_argument_has_its_effect_on_the_cpu(name: str) -> None:
    """The call is what the reference is, in the cheapest case that has each argument: none is lost on the way there."""
    subject = Subject(name)
    parameters = inspect.signature(subject.call).parameters
    wanted = parameters.keys() - set(subject.outputs) - NOT_OF_THE_RESULT
    cheapest: dict[str, Any] = {}
    for case in sorted(without_gpu.small_cases(subject), key=subject.cases.flops):
        if cheapest.keys() >= wanted:
            break
        for argument, value in subject.cases.inputs(case, 0).items() if subject.cases.flops(case) else ():
            if isinstance(value, np.ndarray) or value != parameters[argument].default:
                cheapest.setdefault(argument, case)
    for case in dict.fromkeys(cheapest.values()):
        inputs = subject.cases.inputs(case, 0)
        compare.require(subject.reports(inputs, subject.named(subject.call(**inputs))))


# What operators declare ---------------------------------------------------------------------------------------------

FUNCTIONS = [name for entry in registry.OPERATORS for name in (entry.name, *entry.related)]
AN_OPTION = [
    pytest.param(name, *option, id=f"{name}-{option[0]}")
    for name, declared in MLA.items()
    for option in zip(declared.options, declared.checks, declared.defaults, strict=True)
]


def arrays(name: str) -> dict[str, Any]:
    """The arrays that an operator wants at least."""
    q, kv = np.zeros((3, 2, 512), np.float16), np.zeros((4, 512), np.float16)
    lse, indices = np.zeros((3, 2), np.float32), np.zeros((3, 5), np.int32)
    known = {"q": q, "kv": kv, "out": q, "dout": q, "lse": lse, "indices": indices}
    return {argument: known[argument] for argument in DECLARED[name].inputs[: DECLARED[name].required]}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_signature_is_the_declared_one(name: str) -> None:
    """Names, defaults and annotations of the options; arrays that may be left out have the declared default."""
    declared = getattr(cupymla, name).calls.arguments
    parameters = dict(inspect.signature(getattr(cupymla, name)).parameters)
    _, _, (*left_out,) = declared.placed({})
    defaults = dict(zip(declared.inputs, declared.placed({})[0], strict=True))
    for number, argument in enumerate(declared.inputs):
        default = parameters.pop(argument).default
        assert (default is inspect.Parameter.empty) == (number < declared.required)
        assert default in (defaults[argument], inspect.Parameter.empty)
    for entry in fields(declared.options_type):
        shown = parameters.pop(entry.name)
        default = inspect.Parameter.empty if entry.default is MISSING else entry.default
        assert (shown.default, type(shown.default), shown.annotation) == (default, type(default), entry.type)
    for argument in declared.outputs:
        assert parameters.pop(argument).default is None
    assert not any(left_out)
    assert parameters.keys() in ({"stream"}, {"check_indices", "stream"})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_comes_to_the_calls_under_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function lists its arguments once more, in the declared order."""
    declared = getattr(cupymla, name).calls.arguments
    seen: dict[str, Any] = {}

    def called(self: Calls, inputs: Any, options: Any, outputs: Any, check_indices: Any, stream: Any) -> str:
        names = (*declared.inputs, *declared.options, *declared.outputs)
        seen.update(zip(names, (*inputs, *options, *outputs), strict=True))
        seen.update(check_indices=check_indices, stream=stream)
        return "as far as it goes"

    monkeypatch.setattr(Calls, "__call__", called)
    given = {argument: object() for argument in inspect.signature(getattr(cupymla, name)).parameters}
    assert getattr(cupymla, name)(**given) == "as far as it goes"
    if "check_indices" not in given:
        assert seen.pop("check_indices") is False
    assert seen == given


@pytest.mark.parametrize("name", [name for name in NAMES if name != "nvfp4_gemv"])
def test_the_reference_takes_what_the_operator_takes(name: str) -> None:
    declared, parameters = DECLARED[name], inspect.signature(Subject(name)._reference).parameters
    assert parameters.keys() - {"precision"} == {*declared.inputs, *declared.written, *declared.options}


@pytest.mark.parametrize(("name", "option", "check", "default"), AN_OPTION)
def test_every_option_is_part_of_the_problem(name: str, option: str, check: Check, default: object) -> None:
    """Also where the same arrays were looked at before with the option left out."""
    spec: Any = import_module(f"cupymla.ops.{name}.spec")
    given, value = arrays(name), another(check, default)
    if option == "attn_dist_sink":
        given["attn_sink"] = np.zeros(2, np.float32)
    (_, plain), (_, problem), (_, again) = spec.read(**given), spec.read(**given, **{option: value}), spec.read(**given)
    assert getattr(getattr(problem, "shared", problem).options, option) == value
    assert getattr(getattr(plain, "shared", plain).options, option) == default
    assert problem != plain == again


def test_validation_takes_no_argument_that_nobody_declared() -> None:
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


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_is_on_the_operators_page(name: str) -> None:
    folder = Path(__file__).resolve().parents[2] / "docs" / "operators"
    page = (folder / f"{registry.named(name).folder}.md").read_text(encoding="utf-8")
    parameters = inspect.signature(getattr(cupymla, name)).parameters
    assert [p for p in parameters if not re.search(rf"`[^`\n]*\b{p}\b", page)] == []
