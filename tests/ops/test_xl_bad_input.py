"""What xl_paged_attention does with arguments it cannot use: an InputError that names the argument, nothing written."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_arrays import Foreign
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cupymla import tensor
from cupymla.errors import CupymlaError, InputError
from cupymla.ops.xl_paged_attention import spec, xl_paged_attention
from cupymla.ops.xl_paged_attention.cases import inputs, make
from cupymla.tensor import Device

SMALL: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "context_lens": (37, 0, 1, 90)}


def float32_case(**changes: Any) -> dict[str, Any]:
    return inputs(make("options", **{**SMALL, "dtype": "float32", **changes}), seed=4)


def readonly(array: Any) -> Any:
    array = array.copy()
    array.flags.writeable = False
    return array


def misaligned(array: Any) -> Any:
    room = np.zeros(array.nbytes + 16, np.uint8)
    start = 4 if room.ctypes.data % 16 == 0 else (16 - room.ctypes.data % 16) + 4
    moved = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


def f32(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


ALIAS = f32(4, 4, 64)
Change = Callable[[dict[str, Any]], dict[str, Any]]

BAD: list[tuple[str, Change]] = [
    ("query", lambda a: {"query": None}),
    ("query", lambda a: {"query": [[1.0]]}),
    ("query", lambda a: {"query": f32(4, 64)}),
    ("query", lambda a: {"query": f32(4, 4, 72)}),
    ("query", lambda a: {"query": f32(4, 0, 64)}),
    ("query", lambda a: {"query": a["query"].astype(np.float64)}),
    ("query", lambda a: {"query": a["query"].astype(np.int32)}),
    ("query", lambda a: {"query": f32(4, 4, 128)[:, :, ::2]}),
    ("query", lambda a: {"query": f32(4, 4, 64)[::-1]}),
    ("query", lambda a: {"query": f32(4, 4 * 65)[:, : 4 * 65].reshape(4, 4, 65)[:, :, :64]}),
    ("query", lambda a: {"query": misaligned(a["query"])}),
    ("k_cache", lambda a: {"k_cache": a["k_cache"].astype(np.float16)}),
    ("k_cache", lambda a: {"k_cache": a["k_cache"][..., 0]}),
    ("k_cache", lambda a: {"k_cache": a["k_cache"].reshape(a["k_cache"].shape[0], 2, 8, 16, 8)}),
    ("k_cache", lambda a: {"k_cache": f32(3, 3, 16, 16, 4), "v_cache": f32(3, 3, 64, 16)}),
    ("k_cache", lambda a: {"k_cache": f32(3, 0, 16, 16, 4), "v_cache": f32(3, 0, 64, 16)}),
    ("k_cache", lambda a: {"k_cache": f32(1, 2, 16, 257, 4), "v_cache": f32(1, 2, 64, 257)}),
    ("k_cache", lambda a: {"k_cache": f32(1, 2, 16, 0, 4), "v_cache": f32(1, 2, 64, 0)}),
    ("k_cache", lambda a: {"k_cache": a["k_cache"].swapaxes(2, 3).copy().swapaxes(2, 3)}),
    ("v_cache", lambda a: {"v_cache": a["v_cache"][:-1]}),
    ("v_cache", lambda a: {"v_cache": a["v_cache"].astype(np.float16)}),
    ("v_cache", lambda a: {"v_cache": a["v_cache"].swapaxes(2, 3).copy().swapaxes(2, 3)}),
    ("v_cache", lambda a: {"v_cache": misaligned(a["v_cache"])}),
    ("kv_layout", lambda a: {"kv_layout": "nhd"}),
    ("kv_layout", lambda a: {"kv_layout": np.zeros(3)}),
    ("kv_dtype", lambda a: {"kv_dtype": "float8_e4m3fn"}),
    ("kv_dtype", lambda a: {"k_cache": np.zeros((3, 2, 4, 16, 16), np.uint8), "kv_dtype": None}),
    ("kv_dtype", lambda a: {"k_cache": np.zeros((3, 2, 4, 16, 16), np.uint8), "kv_dtype": "fp8"}),
    ("block_tables", lambda a: {"block_tables": a["block_tables"].astype(np.int64)}),
    ("block_tables", lambda a: {"block_tables": a["block_tables"][:-1]}),
    ("block_tables", lambda a: {"block_tables": a["block_tables"].T.copy().T}),
    ("context_lens", lambda a: {"context_lens": a["context_lens"][None]}),
    ("context_lens", lambda a: {"context_lens": a["context_lens"].astype(np.int64)}),
    ("context_lens", lambda a: {"context_lens": a["context_lens"][:2]}),
    ("pos_bias_u", lambda a: {"pos_bias_u": f32(2, 64)}),
    ("pos_bias_u", lambda a: {"pos_bias_u": f32(4, 64).astype(np.float16)}),
    ("pos_bias_v", lambda a: {"pos_bias_v": f32(4, 64)}),
    ("pos_bias_v", lambda a: {"pos_bias_v": f32(4, 32), "pos_emb": f32(9, 4, 64)}),
    ("matrix_bd", lambda a: {"matrix_bd": f32(4, 2, 96)}),
    ("matrix_bd", lambda a: {"matrix_bd": f32(4, 4, 192)[:, :, ::2]}),
    ("matrix_bd", lambda a: {"matrix_bd": f32(4, 4, 96).astype(np.float16)}),
    ("rel_bias", lambda a: {"rel_bias": f32(4, 4, 0)}),
    ("rel_bias", lambda a: {"rel_bias": f32(4, 4)}),
    ("rel_bias", lambda a: {"matrix_bd": f32(4, 4, 96), "rel_bias": f32(4, 4, 24)}),
    ("alibi_slopes", lambda a: {"pos_emb": f32(9, 4, 64), "alibi_slopes": f32(4)}),
    ("alibi_slopes", lambda a: {"alibi_slopes": f32(5)}),
    ("alibi_slopes", lambda a: {"alibi_slopes": np.zeros(4, np.float16)}),
    ("pos_emb", lambda a: {"pos_emb": f32(0, 4, 64)}),
    ("pos_emb", lambda a: {"pos_emb": f32(9, 2, 64)}),
    ("pos_emb", lambda a: {"pos_emb": f32(9, 4, 64).astype(np.float16)}),
    ("rel_extend", lambda a: {"rel_extend": "wrap"}),
    ("rel_extend", lambda a: {"rel_extend": "clamp"}),
    ("rel_extend", lambda a: {"rel_extend": "clamp", "matrix_bd": f32(4, 4, 96)}),
    ("rel_extend", lambda a: {"rel_extend": "clamp", "alibi_slopes": f32(4)}),
    ("bias_scaled", lambda a: {"bias_scaled": 1}),
    ("scale", lambda a: {"scale": math.nan}),
    ("scale", lambda a: {"scale": 10**400}),
    ("scale", lambda a: {"scale": True}),
    ("k_scale", lambda a: {"k_scale": 0.5}),
    ("v_scale", lambda a: {"v_scale": f32(2)}),
    ("v_scale", lambda a: {"v_scale": "1"}),
    ("v_scale", lambda a: {"v_scale": f32(3)}),
    ("k_scale", lambda a: {"k_scale": np.ones(2)}),
    ("return_lse", lambda a: {"return_lse": "yes"}),
    ("lse_base", lambda a: {"lse_base": "10"}),
    ("lse_base", lambda a: {"lse_base": 2}),
    ("check_indices", lambda a: {"check_indices": None}),
    ("out", lambda a: {"out": f32(4, 4, 32)}),
    ("out", lambda a: {"out": f32(4, 4, 64).astype(np.float16)}),
    ("out", lambda a: {"out": readonly(f32(4, 4, 64))}),
    ("out", lambda a: {"out": np.lib.stride_tricks.as_strided(f32(4, 64), (4, 4, 64), (256, 0, 4), writeable=True)}),
    ("out", lambda a: {"out": a["query"]}),
    ("out", lambda a: {"query": ALIAS, "out": ALIAS[:]}),
    ("lse", lambda a: {"lse": f32(4, 2)}),
    ("lse", lambda a: {"lse": np.zeros((4, 4))}),
    ("lse", lambda a: {"lse": readonly(f32(4, 4))}),
    ("lse", lambda a: {"out": ALIAS, "lse": ALIAS.reshape(4, 256)[:, :4]}),
]


@pytest.mark.parametrize("number", range(len(BAD)), ids=lambda n: f"{n}-{BAD[n][0]}")
def test_bad_input_names_its_argument(number: int) -> None:
    """Wrong rank, shape, dtype, stride or option, read-only or aliasing output: InputError, nothing written.

    Good calls came before it, which must not be taken for it.
    """
    argument, change = BAD[number]
    a = float32_case()
    for outputs in ({}, {"out": f32(4, 4, 64)}, {"out": f32(4, 4, 64), "lse": f32(4, 4)}):
        xl_paged_attention(**a, **outputs)
    changes = change(a)
    before = [np.array(value) for value in changes.values() if isinstance(value, np.ndarray)]
    with pytest.raises(InputError) as caught:
        xl_paged_attention(**{**a, **changes})
    assert caught.value.argument == argument
    assert caught.value.operator == "xl_paged_attention"
    after = [value for value in changes.values() if isinstance(value, np.ndarray)]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize(("argument", "extent"), [("query", 2**29), ("query", 2**29 - 15), ("k_cache", 2**31)], ids=str)
def test_sizes_past_what_kernels_count_are_refused(argument: str, extent: int) -> None:
    """In 32 bits they would come out negative. The first axis of such an array need not take memory."""
    a = float32_case()
    for name in (argument, "v_cache") if argument == "k_cache" else (argument,):
        a[name] = np.broadcast_to(a[name][:1], (extent, *a[name].shape[1:]))
    with pytest.raises(InputError, match=f"up to {spec.MAX_BLOCKS if argument == 'k_cache' else 2**31 - 64}") as caught:
        xl_paged_attention(**a)
    assert (caught.value.argument, caught.value.operator) == (argument, "xl_paged_attention")


def test_as_many_blocks_as_kernels_count() -> None:
    """The largest entry of a table that a cache can have names its last block."""
    a = float32_case()
    last = a["block_tables"].copy()
    for name in ("k_cache", "v_cache"):
        block = np.nan_to_num(a[name][:1], nan=0.5)
        a[name] = np.broadcast_to(block, (spec.MAX_BLOCKS, *block.shape[1:]))
    a["block_tables"], last[...] = np.zeros_like(last), spec.MAX_BLOCKS - 1
    np.testing.assert_array_equal(xl_paged_attention(**a)[0], xl_paged_attention(**{**a, "block_tables": last})[0])


def test_head_size_120_in_fp8_has_no_vllm_layout() -> None:
    """120 elements are not whole 16-element chunks; the error names the layout and the way out."""
    a = inputs(make("dtypes", **{**SMALL, "head_size": 120}, kv_dtype="float8_e5m2", kv_layout="NHD"), seed=10)
    with pytest.raises(InputError, match="NHD") as caught:
        xl_paged_attention(**{**a, "kv_layout": "vllm"})
    assert caught.value.argument == "kv_layout"


def test_interleaved_memory_is_no_alias() -> None:
    """An output between the rows of an input is apart from it; one that shares a byte is not."""
    buffer = f32(4, 3, 4, 64)
    a = float32_case()
    a["query"] = buffer[:, 0]
    xl_paged_attention(**a, out=buffer[:, 2])
    with pytest.raises(InputError) as caught:
        xl_paged_attention(**{**a, "query": buffer[:, 2]}, out=buffer[:, 2])
    assert caught.value.argument == "out"


def test_index_checks_on_request() -> None:
    """check_indices=True names the array, the value and the place; without it the same call masks."""
    a = float32_case()
    for name, place, value in (
        ("context_lens", 2, 16 * a["block_tables"].shape[1] + 1),
        ("context_lens", 0, -1),
        ("block_tables", (3, 2), -1),
        ("block_tables", (3, 2), a["k_cache"].shape[0]),
    ):
        wrong = {**a, name: a[name].copy()}
        wrong[name][place] = value
        xl_paged_attention(**wrong)
        with pytest.raises(InputError, match=str(value)) as caught:
            xl_paged_attention(**wrong, check_indices=True)
        assert caught.value.argument == name
    xl_paged_attention(**a, check_indices=True)


@pytest.mark.parametrize("argument", ["k_cache", "v_cache", "block_tables", "context_lens", "matrix_bd", "out", "lse"])
def test_mixed_devices(argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first array fixes the device; any other one elsewhere is named."""

    def elsewhere(look: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def moved(array: Any, name: str) -> Any:
            seen = look(array, name)
            return replace(seen, device=Device("cuda", 0)) if name == argument else seen

        return moved

    monkeypatch.setattr(tensor, "view", elsewhere(tensor.view))
    monkeypatch.setattr(tensor, "view_output", elsewhere(tensor.view_output))
    a = float32_case(bias="dense")
    with pytest.raises(InputError, match="cuda:0") as caught:
        xl_paged_attention(**a, out=f32(4, 4, 64), lse=f32(4, 4))
    assert caught.value.argument == argument


def odd_arrays() -> st.SearchStrategy[Any]:
    """Arrays and other things that a caller might pass by mistake."""
    shapes = st.lists(st.sampled_from([0, 1, 2, 3, 4, 16, 64]), max_size=5).map(tuple)
    dtypes = st.sampled_from(
        ["float32", "float16", "bfloat16", "float64", "int32", "int64", "uint8", "bool", "complex64"]
    )
    arrays = st.builds(np.zeros, shapes, dtypes)
    flipped = arrays.map(lambda array: array[::-1] if array.ndim else array)
    elsewhere = st.builds(Foreign, st.sampled_from([1, 2, 3, 10, 13]), st.just(99), host=arrays)
    return st.one_of(
        arrays, elsewhere, flipped, arrays.map(np.transpose), st.none(), st.text(max_size=3), st.integers(), st.floats()
    )


ODD = odd_arrays()
"""Made once: Hypothesis looks at what a strategy is made of again for each one that is made."""


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_fuzzed_calls_raise_only_our_errors(data: st.DataObject) -> None:
    """One to three arguments replaced by anything: a result, or a CupymlaError."""
    a = float32_case(context_lens=(5, 0, 20))
    names = [name for name in inspect.signature(xl_paged_attention).parameters if name != "stream"]
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)):
        a[name] = data.draw(ODD)
    try:
        xl_paged_attention(**a)
    except CupymlaError as error:
        assert str(error)


def test_messages_name_known_sizes_layouts_and_numbers() -> None:
    def message(**changes: Any) -> str:
        with pytest.raises(InputError) as raised:
            xl_paged_attention(**float32_case() | changes)
        return raised.value.expected

    assert message(query=f32(4, 64)) == "shape [num_seqs, num_heads, head_size]"
    expected = message(k_cache=f32(8, 16, 2, 64))
    assert "head_size/x = 16" in expected and expected.endswith("for kv_layout='vllm'")
    assert message(k_cache=f32(8, 64), v_cache=f32(8, 64), kv_layout="NHD").endswith("for kv_layout='NHD'")
    for wrong in (None, "1", [1.0]):
        assert message(k_scale=wrong) == "a number or a float32 array"
