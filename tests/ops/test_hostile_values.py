"""What no operator may trip over: integers too long to print, and objects whose every method raises."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import pytest

import cupymla
from cupymla.errors import InputError
from cupymla.ops import registry
from cupymla_lab.subjects import Subject

ROWS = np.zeros((2, 3, 64), np.float32)
KEYS, VALUES = np.zeros((1, 3, 16, 8, 4), np.float32), np.zeros((1, 3, 64, 8), np.float32)
BYTES = np.zeros((4, 16), np.uint8)
CALLS: dict[str, dict[str, Any]] = {
    "nvfp4_gemv": {"a": BYTES, "b": BYTES, "sfa": BYTES[:, :2], "sfb": BYTES[:, :2]},
    "quantize_nvfp4": {"x": np.ones((4, 32), np.float32)},
    "dequantize_nvfp4": {"packed": BYTES, "scales": BYTES[:, :2]},
    "swizzle_scales": {"scales": BYTES[:, :2]},
    "unswizzle_scales": {"swizzled": np.zeros((128, 4), np.uint8), "rows": 4, "columns": 2},
    "reshape_and_cache": {
        **{"key": ROWS, "value": ROWS, "k_cache": KEYS, "v_cache": VALUES},
        "slot_mapping": np.zeros(2, np.int32),
    },
    "copy_blocks": {"k_cache": KEYS, "v_cache": VALUES, "mapping": np.zeros((0, 2), np.int32)},
    "rel_shift": {"x": ROWS},
    "indexer_k_quant_and_cache": {
        **{"k": np.zeros((2, 128), np.float32), "cache": np.zeros((2, 3, 132), np.uint8)},
        "slot_mapping": np.zeros(2, np.int32),
    },
    "concat_and_cache_mla": {
        **{"kv_c": np.ones((2, 512), np.float32), "k_pe": np.ones((2, 64), np.float32), "cache_format": "v32_fp8"},
        **{"cache": np.zeros((2, 3, 656), np.uint8), "slot_mapping": np.zeros(2, np.int32)},
    },
    "gather_mla_cache": {
        **{"cache": np.zeros((2, 3, 656), np.uint8), "slots": np.zeros(2, np.int32)},
        "cache_format": "v32_fp8",
    },
    "gather_indexer_cache": {"cache": np.zeros((2, 3, 132), np.uint8), "slots": np.zeros(2, np.int32)},
    "paged_indexer_logits": {
        **{"q": np.zeros((2, 1, 4, 64), np.uint8), "k_cache": np.zeros((3, 2, 68), np.uint8)},
        **{"weights": np.ones((2, 1, 4), np.float32), "block_tables": np.zeros((2, 2), np.int32)},
        "context_lens": np.array([1, 4], np.int32),
    },
    "hadamard": {"x": np.zeros((2, 8), np.float32)},
    "dequantize_fp8": {"codes": np.zeros((2, 128), np.uint8), "scales": np.ones((2, 1), np.float32)},
    "matrix_bd": {"query": ROWS, "pos_emb": ROWS, "context_lens": np.ones(2, np.int32), "max_context": 2},
}
NAMES = registry.public_functions()


@functools.cache
def good(name: str) -> dict[str, Any]:
    """The arrays of a small call that passes, its options left out."""
    if name in CALLS:
        return CALLS[name]
    cases = Subject(name).cases
    case = min((case for case in cases.CASES if cases.flops(case)), key=cases.flops)
    parameters = inspect.signature(getattr(cupymla, name)).parameters
    arguments = cases.inputs(case, 0)
    return {word: value for word, value in arguments.items() if parameters[word].default is inspect.Parameter.empty}


def raising(*_: object, **__: object) -> Any:
    raise RuntimeError("hostile")


METHODS = ("eq", "ne", "lt", "le", "gt", "ge", "hash", "repr", "str", "format", "bool", "index", "int", "float", "len")
HOSTILE_METHODS = {f"__{name}__": raising for name in (*METHODS, "getattr")}
HostileObject = type("HostileObject", (), HOSTILE_METHODS)
HostileInt = type("HostileInt", (int,), HOSTILE_METHODS)
HostileStr = type("HostileStr", (str,), HOSTILE_METHODS)
VALUES_NOBODY_TAKES: dict[str, Any] = {
    "huge": 10**5000,
    "huge negative": -(10**5000),
    "long word": "x" * 5000,
    "hostile object": HostileObject(),
    "hostile int": HostileInt(10**5000),
    "hostile str": HostileStr("nothing"),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", VALUES_NOBODY_TAKES)
def test_every_argument_is_refused_by_name(name: str, kind: str) -> None:
    """Each parameter in turn; the error names it and stays short enough to read."""
    call = getattr(cupymla, name)
    arguments = dict(good(name))
    call(**arguments)
    for word in inspect.signature(call).parameters:
        if word == "stream":
            continue
        with pytest.raises(InputError) as caught:
            call(**{**arguments, word: VALUES_NOBODY_TAKES[kind]})
        assert (caught.value.operator, caught.value.argument) == (name, word)
        assert len(caught.value.got) < 150
