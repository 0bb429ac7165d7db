"""Arrays of every namespace of array-api-compat: same results, same memory, and no output that cannot be one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import interop_kit as kit
import ml_dtypes
import numpy as np
import pytest
from fake_arrays import Foreign

import cupymla
from cupymla import CupymlaError, InputError
from cupymla.ops import registry
from cupymla.testing.operators import as_tuple
from cupymla_lab.subjects import Subject

compat = pytest.importorskip("array_api_compat")
NAMESPACES = ("numpy", "torch", "jax.numpy")


def namespace(name: str) -> Any:
    pytest.importorskip(name)
    if name == "jax.numpy":
        return importlib.import_module(name)
    return importlib.import_module(f"array_api_compat.{name}")


def on(xp: Any, array: np.ndarray[Any, Any]) -> Any:
    """A namespace's own array with these elements, on the CPU."""
    name = xp.__name__
    if name == "array_api_compat.torch":
        carrier = array if array.dtype.isbuiltin == 1 else array.view({1: np.uint8, 2: np.int16}[array.dtype.itemsize])
        made = xp.asarray(carrier.copy())
        return made if carrier is array else made.view(getattr(xp, array.dtype.name))
    if name == "jax.numpy":
        jax = importlib.import_module("jax")
        return jax.device_put(array, jax.devices("cpu")[0])
    return xp.asarray(array)


def back(array: Any) -> np.ndarray[Any, Any]:
    if hasattr(array, "untyped_storage"):
        name = str(array.dtype).removeprefix("torch.")
        if hasattr(ml_dtypes, name):
            torch = importlib.import_module("torch")
            carrier = {1: torch.uint8, 2: torch.int16}[array.element_size()]
            bits: np.ndarray[Any, Any] = array.view(carrier).numpy().view(getattr(ml_dtypes, name))
            return bits
    made: np.ndarray[Any, Any] = np.asarray(array)
    return made


@pytest.mark.parametrize("name", NAMESPACES)
@pytest.mark.parametrize("entry", registry.OPERATORS, ids=lambda entry: entry.name)
def test_results_are_of_the_namespace_and_on_its_device(name: str, entry: registry.OperatorEntry) -> None:
    xp = namespace(name)
    subject = Subject(entry.name)
    problem = next(p for p in kit.operator_problems(1) if p.declaration.name == entry.name)
    inputs = kit.batch_first(problem, problem.inputs())
    given = {n: on(xp, np.ascontiguousarray(a)) if isinstance(a, np.ndarray) else a for n, a in inputs.items()}
    results = as_tuple(subject.call(**given))
    first = next(iter(given.values()))
    for result in results:
        assert type(result) is type(first)
        assert compat.array_namespace(result) is compat.array_namespace(first)
        assert compat.device(result) == compat.device(first)
    kit.require_same((), tuple(map(back, results)), problem.expected(inputs))


@pytest.mark.parametrize("name", NAMESPACES)
def test_results_are_handed_on_without_a_copy(name: str) -> None:
    """`from_dlpack(copy=False)` of a result is the result's memory."""
    xp = namespace(name)
    q, kv, indices = (on(xp, array) for array in small())
    _, _, lse = cupymla.sparse_mla_fwd(q, kv, indices)
    shared = np.from_dlpack(lse, copy=False) if name != "jax.numpy" else np.from_dlpack(lse)
    assert np.shares_memory(shared, np.from_dlpack(lse))
    np.testing.assert_array_equal(shared, back(lse))


def small(s_q: int = 3) -> tuple[np.ndarray[Any, Any], ...]:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((s_q, 16, 576)).astype(ml_dtypes.bfloat16)
    return q, q[0].repeat(2, 0).copy(), rng.integers(0, 32, (s_q, 5)).astype(np.int32)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_nothing_is_copied_on_the_way_in(name: str) -> None:
    """A prepared call works on the caller's memory: what is written there afterwards counts."""
    xp = namespace(name)
    q, kv, indices = (on(xp, array) for array in small())
    prepared = cupymla.sparse_mla_fwd.prepare(q, kv, indices)
    before = back(prepared()[0]).copy()
    indices[...] = 0
    after = back(prepared()[0])
    assert not np.array_equal(before, after)
    kit.require_same((), (after,), (back(cupymla.sparse_mla_fwd(q, kv, indices)[0]),))


def outputs_of(subject: Subject, problem: kit.Problem) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    """Contiguous arguments of a case, and fresh outputs for them."""
    made = kit.batch_first(problem, problem.inputs())
    inputs = {n: np.ascontiguousarray(v) if isinstance(v, np.ndarray) else v for n, v in made.items()}
    inputs = kit.without_requests(inputs)
    results = as_tuple(subject.call(**inputs))
    return inputs, {n: np.empty(r.shape, r.dtype) for n, r in zip(subject.outputs, results, strict=False)}


def problems_of(entry: registry.OperatorEntry) -> list[kit.Problem]:
    return [p for p in kit.operator_problems(1) if p.declaration.name == entry.name]


def over_itself(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array of this shape whose entries along the first axis that has several are one in memory."""
    axis = next(axis for axis, extent in enumerate(array.shape) if extent > 1)
    return np.lib.stride_tricks.as_strided(np.broadcast_to(array.take([0], axis), array.shape), writeable=True)


SPOILED: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "read-only": lambda array: np.lib.stride_tricks.as_strided(array, writeable=False),
    "shares its own memory": over_itself,
    "immutable": lambda array: pytest.importorskip("jax.numpy").asarray(array),
}


@pytest.mark.parametrize("spoiled", SPOILED)
@pytest.mark.parametrize("entry", registry.OPERATORS, ids=lambda entry: entry.name)
def test_outputs_that_cannot_be_written_are_refused(entry: registry.OperatorEntry, spoiled: str) -> None:
    subject = Subject(entry.name)
    every = (outputs_of(subject, problem) for problem in problems_of(entry))
    inputs, outputs = next(each for each in every if all(array.size > 1 for array in each[1].values()))
    for name, array in outputs.items():
        with pytest.raises(InputError) as caught:
            subject.call(**inputs, **{name: SPOILED[spoiled](array)})
        assert caught.value.argument == name and caught.value.operator == entry.name


@pytest.mark.parametrize("entry", registry.OPERATORS, ids=lambda entry: entry.name)
def test_outputs_over_inputs_are_refused(entry: registry.OperatorEntry) -> None:
    """Every output and every input in memory that begins with both."""
    subject = Subject(entry.name)
    tried = 0
    for problem in problems_of(entry):
        inputs, outputs = outputs_of(subject, problem)
        for name, array in outputs.items():
            for argument, given in inputs.items():
                if not array.size or not isinstance(given, np.ndarray) or not given.size:
                    continue
                memory = np.zeros(max(array.nbytes, given.nbytes), np.uint8)
                over, own = (memory[: like.nbytes].view(like.dtype).reshape(like.shape) for like in (array, given))
                own[...] = given
                with pytest.raises(InputError, match=name):
                    subject.call(**{**inputs, argument: own, name: over})
                tried += 1
    assert tried


@pytest.mark.parametrize("problem", (*kit.operator_problems(1), *kit.related_problems()), ids=lambda p: p.name)
def test_arrays_on_a_device_that_is_not_there_are_our_error(problem: kit.Problem) -> None:
    """Whatever works first, the plan, the outputs or the workspace."""
    inputs = kit.without_requests(problem.inputs())
    there = {
        n: Foreign(index=99, host=value) if isinstance(value, np.ndarray) else value for n, value in inputs.items()
    }
    call = getattr(cupymla, problem.declaration.name)
    with pytest.raises(CupymlaError) as caught:
        call(**there)
    assert str(caught.value)


def test_views_pass_validation_as_they_are() -> None:
    """What a foreign-function handler knows of an array is enough, and is not changed."""
    from cupymla import device, tensor

    array = np.arange(6, dtype=np.uint8)
    seen = tensor.View(array.ctypes.data, (6,), (1,), "uint8", device.CPU, False, "raw", None)
    assert tensor.view(seen, "x") is seen
    labelled = tensor.view(seen, "x", "float8_e4m3fn")
    assert labelled.dtype == "float8_e4m3fn" and seen.dtype == "uint8" and labelled.ptr == seen.ptr
    assert isinstance(tensor.empty(seen, (3,), "float32"), np.ndarray)


@pytest.mark.gpu
def test_cupy_arrays_take_the_same_way() -> None:
    cupy = pytest.importorskip("cupy")
    q, kv, indices = small()
    results = cupymla.sparse_mla_fwd(*(cupy.asarray(array) for array in (q, kv, indices)))
    assert all(isinstance(result, cupy.ndarray) for result in results)
    assert compat.array_namespace(results[2]).__name__ == "array_api_compat.cupy"
