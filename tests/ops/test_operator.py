"""What every public function promises beside its result: one signature for the call and its prepared form."""

from __future__ import annotations

import copy
import inspect
import pickle
import typing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cupymla
from cupymla.ops import registry
from cupymla.ops.operator import Prepared, operator

NAMES = registry.public_functions()


@pytest.mark.parametrize("name", NAMES)
def test_every_public_function_is_an_operator_of_its_name(name: str) -> None:
    """Companions like those that they go with."""
    assert getattr(cupymla, name).name == name
    assert callable(getattr(cupymla, name).prepare)


@pytest.mark.parametrize("name", NAMES)
def test_prepare_shows_the_signature_of_the_call_and_its_own_words(name: str) -> None:
    call = getattr(cupymla, name)
    shown, wanted = inspect.signature(call.prepare), inspect.signature(call)
    assert shown.parameters == wanted.parameters
    assert shown.return_annotation == Prepared[Any]
    assert call.prepare.__doc__.startswith(f"Do all of a call of `{name}` but the launch")
    assert "A prepared call" in call.prepare.__doc__ and "{" not in call.prepare.__doc__
    assert call.prepare.__name__ == f"{name}.prepare"
    assert typing.get_type_hints(call.prepare)["return"] == Prepared[Any]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ["pickle", "copy", "deepcopy"])
def test_a_function_is_itself_wherever_it_is_sent(name: str, way: str) -> None:
    """To another process, or within a model that is copied: like all functions, by its name."""
    ways = {"pickle": lambda value: pickle.loads(pickle.dumps(value)), "copy": copy.copy, "deepcopy": copy.deepcopy}
    call = getattr(cupymla, name)
    for form in (call, call.prepare, getattr(call, "workspace_bytes", call)):
        assert ways[way](form) is form


def test_workspace_bytes_has_its_own_words() -> None:
    told = cupymla.sparse_mla_bwd.workspace_bytes.__doc__
    assert told is not None and told.startswith("How many bytes") and "`sparse_mla_bwd`" in told


@pytest.mark.parametrize("name", NAMES)
def test_no_call_claims_to_return_its_prepared_form(name: str) -> None:
    call = getattr(cupymla, name)
    assert "Prepared" not in str(inspect.signature(call).return_annotation)
    assert "Prepared" not in str(typing.get_type_hints(call)["return"])


@pytest.mark.parametrize("name", NAMES)
def test_prepare_refuses_the_calls_that_the_call_refuses(name: str) -> None:
    """Too few arguments, too many by place, a word nobody knows: a TypeError that names the public function."""
    call = getattr(cupymla, name)
    parameters = inspect.signature(call).parameters.values()
    by_place = [entry for entry in parameters if entry.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    arrays = [np.zeros(1)] * len(by_place)
    for arguments, words in ((arrays[:0], {}), ([*arrays, 1.0], {}), (arrays, {"no_such_word": 1})):
        for form, named in ((call, name), (call.prepare, f"{name}.prepare")):
            with pytest.raises(TypeError, match=rf"^{named}\(\)"):
                form(*arguments, **words)


def test_prepare_passes_what_was_given_by_name() -> None:
    """By place or by name, and nothing that was left out."""

    def call(x: int, y: int = 2, *, z: int = 3) -> dict[str, Any]:
        """Words."""
        return {}

    def prepare(**arguments: Any) -> Any:
        return lambda: arguments

    made = operator(SimpleNamespace(prepare=prepare, required_bytes=prepare))(call)
    assert made.prepare(1)() == {"x": 1}
    assert made.prepare(1, 5, z=6)() == made.prepare(z=6, y=5, x=1)() == {"x": 1, "y": 5, "z": 6}
