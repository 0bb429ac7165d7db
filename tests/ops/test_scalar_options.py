"""Integers and flags of every public function: NumPy's do as Python's do, and neither passes for the other."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

import cupymla
from cupymla import InputError
from cupymla.ops import registry
from cupymla.testing.operators import as_tuple
from cupymla_lab.subjects import Subject

OPERATORS = [entry.name for entry in registry.OPERATORS]
FUNCTIONS = registry.public_functions()

_BYTES, _KEYS = np.arange(48, dtype=np.uint8).reshape(2, 6, 4), np.ones((2, 2, 64), np.float32)
_CACHES = {name: np.zeros((3, 16, 2, 64), np.float32) for name in ("k_cache", "v_cache")}
_QUERY = {"query": _KEYS, "pos_emb": np.ones((3, 2, 64), np.float32), "context_lens": np.array([2, 5], np.int32)}

RELATED: dict[str, dict[str, Any]] = {
    "quantize_nvfp4": {"x": np.ones((2, 6, 4), np.float32)},
    "dequantize_nvfp4": {"packed": _BYTES, "scales": np.full((2, 6, 1), 56, np.uint8)},
    "swizzle_scales": {"scales": _BYTES},
    "unswizzle_scales": {"swizzled": np.zeros((128, 4), np.uint8), "rows": 1, "columns": 1},
    "reshape_and_cache": {
        **{"key": _KEYS, "value": _KEYS, "slot_mapping": np.array([1, 17], np.int32), "kv_layout": "NHD"},
        **_CACHES,
    },
    "copy_blocks": {**_CACHES, "mapping": np.array([[0, 1]], np.int32)},
    "rel_shift": {"x": _KEYS},
    "indexer_k_quant_and_cache": {
        **{"k": np.ones((2, 128), np.float32), "cache": np.zeros((2, 3, 132), np.uint8)},
        "slot_mapping": np.array([1, 4], np.int32),
    },
    "concat_and_cache_mla": {
        **{"kv_c": np.ones((2, 512), np.float32), "k_pe": np.ones((2, 64), np.float32), "cache_format": "v32_fp8"},
        **{"cache": np.zeros((2, 3, 656), np.uint8), "slot_mapping": np.array([1, 4], np.int32)},
    },
    "gather_mla_cache": {
        **{"cache": np.zeros((2, 3, 656), np.uint8), "slots": np.array([1, 4], np.int32)},
        "cache_format": "v32_fp8",
    },
    "gather_indexer_cache": {"cache": np.zeros((2, 3, 132), np.uint8), "slots": np.array([1, 4], np.int32)},
    "paged_indexer_logits": {
        **{"q": np.zeros((2, 1, 4, 64), np.uint8), "k_cache": np.zeros((3, 2, 68), np.uint8)},
        **{"weights": np.ones((2, 1, 4), np.float32), "block_tables": np.zeros((2, 2), np.int32)},
        "context_lens": np.array([1, 4], np.int32),
    },
    "hadamard": {"x": np.ones((2, 8), np.float32)},
    "dequantize_fp8": {"codes": np.arange(64, dtype=np.uint8).reshape(1, 64), "scales": np.ones((1, 2), np.float32)},
    "matrix_bd": {**_QUERY, "max_context": 1},
}


def options(kind: str) -> list[tuple[str, str]]:
    """Every option of that annotation."""
    return [
        (name, parameter.name)
        for name in FUNCTIONS
        for parameter in inspect.signature(getattr(cupymla, name)).parameters.values()
        if parameter.annotation == kind
    ]


@cache
def smallest(name: str) -> tuple[Subject, Any]:
    """The smallest case whose indices `check_indices` lets pass, where there is such an option."""
    subject = Subject(name)
    cases = sorted((case for case in subject.cases.CASES if subject.cases.flops(case) > 0), key=subject.cases.flops)
    if (name, "check_indices") in options("bool"):
        cases = [next(case for case in cases if legal(subject, case))]
    return subject, cases[0]


def legal(subject: Subject, case: Any) -> bool:
    try:
        subject.call(**subject.cases.inputs(case, 0), check_indices=True)
    except cupymla.InputError as error:
        assert "indices" in str(error) or "block_tables" in str(error), error
        return False
    return True


def arguments(name: str) -> dict[str, Any]:
    if name in RELATED:
        given = RELATED[name]
        return {key: value.copy() if isinstance(value, np.ndarray) else value for key, value in given.items()}
    subject, case = smallest(name)
    made: dict[str, Any] = subject.cases.inputs(case, 0)
    return made


def results(name: str, **changed: Any) -> tuple[Any, ...]:
    return as_tuple(getattr(cupymla, name)(**{**arguments(name), **changed}))


class Whole:
    """An integer of somebody's own kind."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __index__(self) -> int:
        return self._value


KINDS: tuple[Callable[[int], Any], ...] = (np.int64, np.int8, np.array, Whole)


def good(option: str) -> int:
    return {"batch_axis": 0, "q_start": 0, "group": 32}.get(option, 1)


@pytest.mark.parametrize(("name", "option"), options("int"))
def test_whatever_is_an_integer_does(name: str, option: str) -> None:
    plain = results(name, **{option: good(option)})
    for kind in KINDS:
        for got, expected in zip(results(name, **{option: kind(good(option))}), plain, strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("name", "option"), options("int"))
def test_whatever_is_none_does_not(name: str, option: str) -> None:
    results(name, **{option: good(option)})
    for value in (False, np.False_, True, np.True_, 0.0, np.float32(1), "0", None, np.zeros(2, int)):
        with pytest.raises(InputError) as caught:
            results(name, **{option: value})
        assert (caught.value.operator, caught.value.argument) == (name, option), repr(value)


@pytest.mark.parametrize(("name", "option"), options("bool"))
def test_flags_are_bools_of_python_or_of_numpy(name: str, option: str) -> None:
    for value in (False, True):
        plain = results(name, **{option: value})
        for got, expected in zip(results(name, **{option: np.bool_(value)}), plain, strict=True):
            np.testing.assert_array_equal(got, expected)
    for wrong in (0, 1, np.int64(1), "yes", None):
        with pytest.raises(InputError) as caught:
            results(name, **{option: wrong})
        assert (caught.value.operator, caught.value.argument) == (name, option)


def test_both_kinds_of_options_were_found() -> None:
    has_neither = {"merge_attention"}
    assert {name for name, _ in options("int") + options("bool")} >= set(OPERATORS) - has_neither
    assert {"batch_axis", "rows", "max_context", "q_start"} <= {option for _, option in options("int")}
    assert set(RELATED) == set(FUNCTIONS) - set(OPERATORS)
