"""Random arguments of the MLA operators: a result or a CupymlaError, never anything else."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from fake_arrays import Foreign
from hypothesis import given, settings
from hypothesis import strategies as st
from option_kit import MLA as DECLARED
from option_kit import anything

import cupymla
from cupymla import dlpack
from cupymla.errors import CupymlaError
from cupymla.ops.arguments import Flag

Array = npt.NDArray[Any]
DTYPES = (ml_dtypes.bfloat16, np.float16, np.float32, np.int32, np.int64, np.uint8, ml_dtypes.float8_e4m3fn)

KINDS = (1, dlpack.CUDA, 3, 8, 10, 13, 99)
"""Of memory: the CPU's, a GPU's that is not there, pinned, two of others, managed, one that DLPack has not got."""


def laid_out(sizes: list[int], kind: np.dtype[Any], padding: int, step: int, offset: int, data: bytes) -> Array:
    """An array of that shape over repeated `data`: rows `padding` elements longer, every `step`-th element used."""
    memory_shape = [*sizes[:-1], (sizes[-1] + padding) * abs(step)] if sizes else []
    count = int(np.prod(memory_shape, dtype=np.int64)) * kind.itemsize
    memory = np.zeros(count + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    memory[start : start + count] = np.resize(np.frombuffer(data, np.uint8), count)
    whole = np.ndarray(tuple(memory_shape), kind, buffer=memory.data, offset=start)
    array: Array = whole[..., : sizes[-1] * abs(step) : abs(step)] if sizes else whole
    return array[::-1] if step < 0 else array


@st.composite
def nearly(draw: st.DrawFn, shape: tuple[int, ...], dtype: Any) -> Any:
    """An array as wanted; now and then one whose shape, dtype, strides, address, access or device is another."""
    sizes, kind, data = list(shape), np.dtype(dtype), draw(st.binary(min_size=1, max_size=8))
    if draw(st.integers(0, 9)):
        return laid_out(sizes, kind, draw(st.sampled_from([0, 0, 16])), 1, 0, data)
    change = draw(
        st.sampled_from(
            ["extent", "more", "fewer", "dtype", "strides", "address", "broadcast", "frozen", "elsewhere", "no"]
        )
    )
    if change == "extent":
        sizes[draw(st.integers(0, len(sizes) - 1))] = draw(st.sampled_from([0, 1, 2, 3, 512, 576]))
    elif change == "more":
        sizes.insert(draw(st.integers(0, len(sizes))), draw(st.sampled_from([1, 2])))
    elif change == "fewer":
        sizes.pop()
    elif change == "dtype":
        kind = np.dtype(draw(st.sampled_from(DTYPES)))
    elif change == "no":
        return draw(st.sampled_from([None, 3, "array", [[1, 2]]]))
    padding, step = draw(st.sampled_from([(0, 2), (0, -1), (1, 1), (8, -2)])) if change == "strides" else (0, 1)
    offset = draw(st.sampled_from([2, 3, 8])) if change == "address" else 0
    array = laid_out(sizes, kind, padding, step, offset, data)
    if change == "broadcast" and array.shape[0]:
        array = np.broadcast_to(array[:1], array.shape)
    if change == "elsewhere":
        return Foreign(draw(st.sampled_from(KINDS)), draw(st.sampled_from([-1, 99])), host=array)
    array.flags.writeable = change != "frozen" and array.flags.writeable
    return array


@functools.cache
def options_of(operator: str) -> dict[str, st.SearchStrategy[Any]]:
    declared = DECLARED[operator]
    checks = zip(declared.options, declared.checks, strict=True)
    return {"check_indices": anything(Flag())} | {name: anything(check) for name, check in checks}


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """An operator and arguments for it, mostly right, some of the optional ones left out."""
    operator = draw(st.sampled_from(sorted(DECLARED)))
    declared, options = DECLARED[operator], options_of(operator)
    required = declared.inputs[: declared.required]
    optional = (*declared.inputs[declared.required :], *declared.written, *declared.results)
    lead = draw(st.sampled_from([(), (), (), (1,), (2,), (0,)]))
    s_q, s_kv, h_q, topk = (draw(st.integers(low, 4)) for low in (0, 0, 1, 1))
    d_qk = draw(st.sampled_from([512, 576]))
    half = draw(st.sampled_from(DTYPES[:2]))
    heads, rows = (*lead, s_q, h_q), (*lead, s_q, topk)
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        **dict.fromkeys(("q", "dq"), ((*heads, d_qk), half)),
        **dict.fromkeys(("kv", "dkv"), ((*lead, s_kv, d_qk), half)),
        **dict.fromkeys(("out", "dout"), ((*heads, 512), half)),
        **dict.fromkeys(("lse", "max_logits", "delta"), (heads, np.float32)),
        **dict.fromkeys(("attn_sink", "d_sink"), ((h_q,), np.float32)),
        **dict.fromkeys(("dist", "attn_dist"), (rows, np.float32)),
        "indices": (rows, np.int32),
        "topk_length": ((*lead, s_q), np.int32),
        "lists": ((*lead, s_kv + 1 + s_q * topk), np.int32),
        "p": ((*heads, topk), np.float32),
    }
    chosen = [*required, *(name for name in optional if draw(st.integers(0, 2)) == 0)]
    arguments = {name: draw(nearly(*shapes[name])) for name in chosen}
    return operator, arguments | {name: draw(options[name]) for name in options if draw(st.integers(0, 9)) == 0}


@settings(max_examples=250)
@given(calls())
def test_only_our_own_errors(call: tuple[str, dict[str, Any]]) -> None:
    """Shapes, strides, dtypes, addresses and options at random, any bytes as data; errors name an argument given."""
    operator, arguments = call
    try:
        getattr(cupymla, operator)(**arguments)
    except CupymlaError as error:
        assert getattr(error, "operator", operator) == operator
        assert getattr(error, "argument", "q") in arguments
