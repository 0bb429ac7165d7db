"""Arguments that no function can use get an InputError from JAX and torch as well, before anything is computed.

Bridges work out results before the operator sees an array, so arguments for which there is no telling have to be
explained by the operator's own checks; in JAX all of this happens while a program is traced.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import interop_kit as kit
import numpy as np
import pytest

from cupymla import InputError


def fullest(problems: list[kit.Problem]) -> kit.Problem:
    """The one with most arrays, of these the smallest."""

    def extent(problem: kit.Problem) -> tuple[int, int]:
        arrays = [value for value in problem.inputs().values() if isinstance(value, np.ndarray)]
        return len(arrays), -sum(array.nbytes for array in arrays)

    return max(problems, key=extent)


PROBLEMS = [*kit.operator_problems(1), *kit.related_problems()]
BY_NAME = {
    name: fullest([problem for problem in PROBLEMS if problem.declaration.name == name])
    for name in dict.fromkeys(problem.declaration.name for problem in PROBLEMS)
}
"""One call of every function."""


def inputs_of(name: str) -> dict[str, Any]:
    """Its arguments, as a framework without strides takes them."""
    return kit.batch_first(BY_NAME[name], BY_NAME[name].inputs())


def wrong_arrays(array: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    yield np.zeros((), array.dtype)
    yield np.zeros(7, array.dtype)
    yield array[(None,) * (5 - array.ndim)]
    yield array.astype(np.float32).astype(np.complex64)


@pytest.mark.parametrize("framework", ["jax", "torch"])
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_docstrings_tell_of_what_the_public_function_has_not(framework: str, name: str) -> None:
    """They send readers there for the arguments."""
    pytest.importorskip(framework)
    bridge = getattr(importlib.import_module(f"cupymla.interop.{framework}"), name)
    public = inspect.signature(BY_NAME[name].declaration.function()).parameters
    own = [option for option in inspect.signature(bridge).parameters if option not in public]
    assert [option for option in own if f"`{option}" not in bridge.__doc__] == []
    assert bool(own) == (name in ("sparse_mla_fwd", "sparse_mla_bwd", "indexer_loss"))


WRONG_OPTIONS: tuple[object, ...] = ("sideways", "", -7, 1.5, float("nan"), 2**31, 2**100)
"""Some of which one or the other option takes. Results of the last two sizes have no memory."""


def bad_calls(name: str, convert: Callable[[np.ndarray[Any, Any]], Any]) -> Iterator[tuple[str, object, Any]]:
    """(argument, value, all arguments, arrays converted) with one argument that cannot be used."""
    declaration, inputs = BY_NAME[name].declaration, inputs_of(name)
    given = {n: convert(value) if isinstance(value, np.ndarray) else value for n, value in inputs.items()}
    for argument in declaration.required:
        yield argument, None, {**given, argument: None}
    for argument in declaration.arrays:
        if isinstance(inputs.get(argument), np.ndarray):
            for wrong in wrong_arrays(inputs[argument]):
                if wrong.shape != inputs[argument].shape or wrong.dtype != inputs[argument].dtype:
                    yield argument, f"{wrong.dtype.name}{list(wrong.shape)}", {**given, argument: convert(wrong)}
    for argument in declaration.options:
        for value in WRONG_OPTIONS:
            yield argument, value, {**given, argument: value}


def refusals(
    name: str, call: Callable[[dict[str, Any]], object], convert: Callable[[np.ndarray[Any, Any]], Any]
) -> int:
    """How many bad calls were refused. Fails where one ended in anything but an InputError or success."""
    count = 0
    for argument, value, arguments in bad_calls(name, convert):
        try:
            call(arguments)
        except InputError as error:
            assert error.operator == name, error
            assert not re.search(r"NoneType|View|shape \[[^]]*'", str(error)), error
            count += 1
        except Exception as error:
            raise AssertionError(f"{argument} = {value}") from error
    return count


@pytest.mark.parametrize("name", BY_NAME)
def test_jax_finds_them_while_tracing(name: str) -> None:
    jax = pytest.importorskip("jax")
    from cupymla.interop import jax as mla

    def trace(arguments: dict[str, Any]) -> object:
        arrays = {n: a for n, a in arguments.items() if isinstance(a, jax.Array)}
        options = {n: a for n, a in arguments.items() if n not in arrays}
        return jax.eval_shape(lambda given: getattr(mla, name)(**given, **options), arrays)

    # Which of an error's frames are JAX's own is asked of the disk, for longer than everything else takes.
    with jax._src.config.traceback_filtering("off"):
        trace({n: kit.placed(a) if isinstance(a, np.ndarray) else a for n, a in inputs_of(name).items()})
        assert refusals(name, trace, kit.placed) >= 3


@pytest.mark.parametrize("name", BY_NAME)
def test_jax_asks_for_what_is_missing(name: str) -> None:
    pytest.importorskip("jax")
    from cupymla.interop import jax as mla

    for argument in BY_NAME[name].declaration.required:
        with pytest.raises(InputError, match=f"argument '{argument}': expected a JAX or NumPy array, got None"):
            getattr(mla, name)(**{**inputs_of(name), argument: None})


MISPLACED: tuple[tuple[str, dict[str, Any], str], ...] = (
    (
        "gather_indexer_cache",
        {"block_tables": np.zeros((1, 1), np.int32)},
        "None with slots, got an array of shape [1, 1]",
    ),
    ("gather_indexer_cache", {"rows": 3}, "None with slots, got 3"),
    (
        "concat_and_cache_mla",
        {"cache_format": "bf16", "scale_rule": "amax"},
        "None with a cache without scales, got 'amax'",
    ),
)


@pytest.mark.parametrize("framework", ["numpy", "jax", "torch"])
@pytest.mark.parametrize(("name", "wrong", "message"), MISPLACED)
def test_what_does_not_belong_is_named_as_the_caller_knows_it(
    framework: str, name: str, wrong: dict[str, Any], message: str
) -> None:
    """JAX's arrays come to the checks as views, whose type nobody passed."""
    package = pytest.importorskip("cupymla" if framework == "numpy" else f"cupymla.interop.{framework}")
    convert = {"numpy": "array", "jax": "asarray", "torch": "from_numpy"}[framework]
    array = getattr(importlib.import_module("jax.numpy" if framework == "jax" else framework), convert)
    given: dict[str, Any] = {"cache": np.zeros((2, 64, 132), np.uint8), "slots": np.zeros(3, np.int32)}
    if name == "concat_and_cache_mla":
        floats = {"kv_c": np.zeros((3, 512), np.float32), "k_pe": np.zeros((3, 64), np.float32)}
        given = {**floats, "cache": given["cache"], "slot_mapping": given["slots"]}
    arguments = {n: array(a) if isinstance(a, np.ndarray) else a for n, a in {**given, **wrong}.items()}
    with pytest.raises(InputError, match=re.escape(f"expected {message}")):
        getattr(package, name)(**arguments)


@pytest.mark.parametrize("name", BY_NAME)
def test_torch_refuses_them(name: str) -> None:
    torch = pytest.importorskip("torch")
    from test_torch import tensor

    from cupymla.interop import torch as mla

    def call(arguments: dict[str, Any]) -> object:
        return getattr(mla, name)(**arguments)

    call({n: tensor(a) if isinstance(a, np.ndarray) else a for n, a in inputs_of(name).items()})
    assert refusals(name, call, tensor) >= 3
    with torch._subclasses.fake_tensor.FakeTensorMode() as fake:
        for argument, value, arguments in bad_calls(name, lambda array: fake.from_tensor(tensor(array))):
            try:
                call(arguments)  # a fake looks at no more than it needs for the results
            except InputError:
                pass
            except Exception as error:
                raise AssertionError(f"{argument} = {value}") from error
