"""nvfp4_gemv on the CPU: against a float64 product of operands that ml_dtypes decoded, and at the validation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from fake_arrays import Foreign
from hypothesis import given, settings
from hypothesis import strategies as st

from cupymla import tensor
from cupymla.errors import CupymlaError, InputError
from cupymla.ops.nvfp4_gemv import cases, reference, swizzle_scales, unswizzle_scales
from cupymla.ops.nvfp4_gemv import nvfp4_gemv as gemv
from cupymla.ops.nvfp4_gemv.cases import GemvCase, make
from cupymla_lab.problems import nvfp4_gemv as problems

Array = npt.NDArray[Any]

BLOCK = {"nvfp4": 16, "mxfp4": 32}
SCALE_DTYPE: dict[str, Any] = {"nvfp4": ml_dtypes.float8_e4m3fn, "mxfp4": ml_dtypes.float8_e8m0fnu}
DTYPE: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


# An independent product ------------------------------------------------------------------------------------------


def linear_scales(scales: Array, layout: str, rows: int, columns: int) -> Array:
    """Scale bytes of one batch, the 128x4 layout undone entry by entry with the formula of the documentation."""
    if layout == "linear":
        return scales
    flat = scales.reshape(-1)
    tiles = -(-columns // 4)
    found = np.empty((rows, columns), np.uint8)
    for i in range(rows):
        for j in range(columns):
            found[i, j] = flat[((i // 128) * tiles + j // 4) * 512 + (i % 32) * 16 + (i % 128 // 32) * 4 + j % 4]
    return found


def decoded(packed: Array, scales: Array, fmt: str, layout: str) -> Array:
    """One batch `[rows, k]` in float64, by ml_dtypes' casts."""
    rows, half = packed.shape
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, 2 * half)
    columns = -(-2 * half // BLOCK[fmt])
    factors = linear_scales(scales, layout, rows, columns).view(SCALE_DTYPE[fmt]).astype(np.float64)
    values: Array = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    scaled: Array = values * np.repeat(factors, BLOCK[fmt], axis=1)[:, : 2 * half]
    return scaled


@dataclass
class Expected:
    """What a call should give, `[l, m, n]` in float64, and the documented bound."""

    product: Array
    bound: Array


def expected(arguments: dict[str, Any]) -> Expected:
    options = {"format": "nvfp4", "scale_layout": "linear", "batch_axis": -1, "alpha": None, "bias": None, **arguments}
    batched = options["a"].ndim == 3

    def batch_first(array: Array, matrix_axes: int) -> Array:
        if array.ndim == matrix_axes:
            return array[np.newaxis]
        return array if options["batch_axis"] == 0 else np.moveaxis(array, -1, 0)

    fmt, layout = options["format"], options["scale_layout"]
    a, b, sfa = (batch_first(options[name], 2) for name in ("a", "b", "sfa"))
    sfb = None if options["sfb"] is None else batch_first(options["sfb"], 2)
    batches, m, n, k = a.shape[0], a.shape[1], b.shape[1], 2 * a.shape[2]
    product, terms = np.zeros((batches, m, n)), np.zeros((batches, m, n))
    with np.errstate(invalid="ignore"):
        for i in range(batches):
            left = decoded(a[i], sfa[i], fmt, layout)
            right = b[i].astype(np.float64) if sfb is None else decoded(b[i], sfb[i], fmt, layout)
            product[i] = np.einsum("mk,nk->mn", left, right)
            terms[i] = np.einsum("mk,nk->mn", np.abs(left), np.abs(right))
        alpha: Array = np.ones((1, 1))
        bias: Array = np.zeros((1, 1))
        if options["alpha"] is not None:
            alpha = np.asarray(options["alpha"], np.float32).astype(np.float64)
            per_batch = alpha.ndim == (2 if batched else 1)
            alpha = batch_first(alpha, 1)[..., np.newaxis] if per_batch else alpha.reshape(-1, 1)
        if options["bias"] is not None:
            bias = batch_first(options["bias"].astype(np.float64), 1)[..., np.newaxis]
        magnitude = np.abs(alpha) * terms + np.abs(bias)
        bound = (k / 32 + 48) * 2.0**-24 * magnitude + 36 * k * 2.0**-149 * np.maximum(1, np.abs(alpha))
        return Expected(alpha * product + bias, bound)


def batch_first_result(c: Array, arguments: dict[str, Any]) -> Array:
    if c.ndim == 2:
        return c[np.newaxis]
    return c if arguments.get("batch_axis", -1) == 0 else np.moveaxis(c, -1, 0)


def assert_rounds(c: Array, wanted: Expected) -> None:
    """c is what a value within the bound of the exact product rounds to: NaN where it is NaN, inf where it overflows.

    Rounding is monotone, so c lies between the roundings of both ends, which float32 steps push outwards.
    """
    nan = np.isnan(wanted.product)
    np.testing.assert_array_equal(np.isnan(c.astype(np.float32)), nan)
    with np.errstate(over="ignore", invalid="ignore"):
        low = np.nextafter((wanted.product - wanted.bound).astype(np.float32), np.float32(-np.inf)).astype(c.dtype)
        high = np.nextafter((wanted.product + wanted.bound).astype(np.float32), np.float32(np.inf)).astype(c.dtype)
        inside = (low.astype(np.float64) <= c.astype(np.float64)) & (c.astype(np.float64) <= high.astype(np.float64))
    assert (inside | nan).all(), f"worst at {np.argwhere(~(inside | nan))[:4].tolist()}"


# The product -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", problems.CASES, ids=lambda case: case.name)
def test_every_case_is_the_product_within_its_documented_bound(case: GemvCase) -> None:
    arguments = cases.inputs(case, seed=7)
    c = gemv(**arguments)
    assert c.dtype == DTYPE[case.out_dtype]
    matrix, l_axis = (case.m, case.n), (case.batches,)
    assert c.shape == {"none": matrix, "last": matrix + l_axis, "first": l_axis + matrix}[case.batch]
    assert_rounds(batch_first_result(c, arguments), expected(arguments))


@pytest.mark.parametrize("case", problems.CASES[::7], ids=lambda case: case.name)
def test_float64_reference_and_its_bound_agree_with_the_independent_ones(case: GemvCase) -> None:
    """Kernels are judged by these two functions, so they must not lean on the float32 path's own errors."""
    arguments = cases.inputs(case, seed=8)
    wanted = expected(arguments)
    found = batch_first_result(reference.nvfp4_gemv(**arguments, precision="float64"), arguments)
    bound = batch_first_result(reference.error_bound(**arguments), arguments)
    assert found.dtype == np.float64
    finite = ~np.isnan(wanted.product)
    np.testing.assert_array_equal(np.isnan(found), ~finite)
    # float64 sums of k terms in any order: k * 2^-53 of their magnitude, which the float32 bound holds times 2^-19.
    assert (np.abs(found - wanted.product)[finite] <= wanted.bound[finite] * 2.0**-19).all()
    np.testing.assert_allclose(bound[finite], wanted.bound[finite], rtol=1e-10)


def test_every_case_has_one_name_and_the_benchmark_names_spell_their_sizes() -> None:
    names = [case.name for case in (*problems.CASES, *cases.BENCH)]
    assert len(names) == len(set(names))
    assert {"m7168_k16384_l1_n1", "m7168_k16384_l1_n1_w4a16", "m7168_k16384_l1_n1_mxfp4"} <= {
        c.name for c in cases.BENCH
    }
    assert all(re.fullmatch(r"m\d+_k\d+_l\d+_n\d+(_w4a16|_mxfp4)?", case.name) for case in cases.BENCH)


def test_bytes_of_a_benchmark_case() -> None:
    """Half a byte per weight, a byte per 16 of them, and the vectors and results beside it."""
    case = next(case for case in cases.BENCH if case.name == "m7168_k16384_l1_n1")
    assert cases.bytes_moved(case) == 7168 * (8192 + 1024) + (8192 + 1024) + 7168 * 2
    assert cases.flops(case) == 2 * 7168 * 16384


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_every_code_with_every_scale(fmt: Any) -> None:
    """Row s of a holds all sixteen codes under scale s; identity columns pick one product each. NaN included."""
    block = BLOCK[fmt]
    codes = np.concatenate([np.arange(16), np.zeros(block - 16)]).astype(np.uint8)
    a = np.tile(codes[0::2] | codes[1::2] << 4, (256, 1)).astype(np.uint8)
    scales = np.arange(256, dtype=np.uint8)[:, np.newaxis]
    c = gemv(a, np.eye(16, block, dtype=np.float16), scales, out_dtype="float32", format=fmt)
    values = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    factors = scales.view(SCALE_DTYPE[fmt]).astype(np.float64)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(c, (factors * values).astype(np.float32))


def test_a_single_block_is_exact() -> None:
    """E2M1 products, their block sum and the product of two E4M3 scales fit float32: only the output rounds."""
    case = make("exact", m=300, n=16, k=16, out_dtype="float32", data="full")
    arguments = cases.inputs(case, seed=3)
    np.testing.assert_array_equal(
        batch_first_result(gemv(**arguments), arguments), expected(arguments).product.astype(np.float32)
    )


def test_scale_products_are_taken_in_float32() -> None:
    """2^127 * 2^127 is inf and 2^-127 * 2^-127 is 0 before alpha could bring them back; E4M3's 448 * 448 is neither."""
    ones = np.full((1, 16), 0x22, np.uint8)
    for code, alpha, wanted in ((254, 2.0**-126, np.inf), (0, 2.0**120, 0.0)):
        scale = np.full((1, 1), code, np.uint8)
        assert gemv(ones, ones, scale, scale, alpha=alpha, format="mxfp4", out_dtype="float32").item() == wanted
    scale = np.full((1, 2), 0x7E, np.uint8)
    assert gemv(ones, ones, scale, scale, alpha=2.0**-10).item() == 32 * 448 * 448 / 1024


@pytest.mark.parametrize("layout", ["linear", "128x4"])
def test_a_nan_scale_reaches_its_rows_and_no_others(layout: str) -> None:
    arguments = cases.inputs(make("nan", m=150, n=3, k=96, batches=2, scale_layout=layout), seed=1)
    scale_of_row_137 = (
        arguments["sfa"][137, 2, 1:] if layout == "linear" else flat_scale(arguments["sfa"], 137, 2, 6, 1)
    )
    scale_of_column_2 = arguments["sfb"][2, 5, :1] if layout == "linear" else flat_scale(arguments["sfb"], 2, 5, 6, 0)
    scale_of_row_137[...] = 0x7F
    scale_of_column_2[...] = 0xFF
    nan = np.zeros((150, 3, 2), bool)
    nan[137, :, 1] = True
    nan[:, 2, 0] = True
    np.testing.assert_array_equal(np.isnan(gemv(**arguments)), nan)


def flat_scale(scales: Array, i: int, j: int, columns: int, batch: int) -> Array:
    """One entry of 128x4 scales, as a writable view."""
    offset = ((i // 128) * -(-columns // 4) + j // 4) * 512 + (i % 32) * 16 + (i % 128 // 32) * 4 + j % 4
    one = scales[..., batch].reshape(-1)
    assert np.shares_memory(one, scales)
    return one[offset : offset + 1]


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00])
def test_weight_only_infinities_and_nan_follow_ieee(bits: int) -> None:
    """A zero weight times an infinite activation is NaN, even where a library would skip the zero."""
    codes = np.zeros((3, 32), np.uint8)
    codes[:, 5] = [0, 2, 10]
    b = np.ones((1, 32), np.float16)
    b[0, 5] = np.uint16(bits).view(np.float16)
    c = gemv(codes[:, 0::2] | codes[:, 1::2] << 4, b, np.full((3, 2), 0x38, np.uint8))[:, 0]
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(c, np.array([0, 1, -1], np.float16) * b[0, 5])


def test_padding_of_the_swizzled_layout_never_matters() -> None:
    arguments = cases.inputs(make("padding", m=130, n=2, k=80, scale_layout="128x4"), seed=5)
    first = gemv(**arguments)
    real = {name: unswizzle_scales(arguments[name], rows, 5) for name, rows in (("sfa", 130), ("sfb", 2))}
    for garbage in (0x00, 0x7E, 0xFF):
        for name, linear in real.items():
            padded = np.full_like(arguments[name], garbage)
            mask = swizzle_scales(np.ones_like(linear)) == 1
            padded[mask] = swizzle_scales(linear)[mask]
            arguments[name] = padded
        np.testing.assert_array_equal(gemv(**arguments), first)


def test_the_tail_of_a_partial_block_is_scaled_by_the_last_scale() -> None:
    """k = 18 has two scales; the second is for the last two elements."""
    a = np.full((1, 9), 0x22, np.uint8)
    b = np.ones((1, 18), np.float16)
    scales = np.array([[0x38, 0x50]], np.uint8)
    assert gemv(a, b, scales).item() == 16 * 1 + 2 * 8


# Layouts -------------------------------------------------------------------------------------------------------------

_CONTIGUOUS = make("layout", m=37, n=3, k=96, batches=3, batch="first", bias="batch", alpha="batch")


def test_batch_last_views_of_batch_first_memory_give_the_same_bits() -> None:
    """The competition's layout: [l, m, k/2] memory shown as [m, k/2, l]."""
    arguments = cases.inputs(_CONTIGUOUS, seed=2)
    shown: dict[str, Any] = {k: np.moveaxis(v, 0, -1) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
    first = gemv(**arguments)
    last = gemv(**{**shown, "batch_axis": -1})
    assert first.shape == (3, 37, 3)
    assert last.shape == (37, 3, 3)
    assert first.flags.c_contiguous
    assert last.flags.c_contiguous
    np.testing.assert_array_equal(np.moveaxis(last, -1, 0), first)


def test_batches_are_independent_calls() -> None:
    arguments = cases.inputs(_CONTIGUOUS, seed=2)
    whole = gemv(**arguments)
    for i in range(3):
        one = {k: v[i] if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
        np.testing.assert_array_equal(gemv(**one), whole[i])


def test_reversed_broadcast_and_padded_rows_are_read_in_place() -> None:
    arguments = cases.inputs(make("layout", m=20, n=2, k=64, batches=2, b_rows=128), seed=4)
    assert arguments["b"].strides[0] != arguments["b"].strides[2]
    plain = gemv(**arguments)
    backwards = {**arguments, "a": arguments["a"][::-1], "sfa": arguments["sfa"][::-1]}
    np.testing.assert_array_equal(gemv(**backwards), plain[::-1])
    one_b = {name: np.broadcast_to(arguments[name][..., :1], arguments[name].shape) for name in ("b", "sfb")}
    same_b = {name: np.ascontiguousarray(one_b[name][..., 0]) for name in one_b}
    second = {name: arguments[name][..., 1] for name in ("a", "sfa")}
    np.testing.assert_array_equal(gemv(**{**arguments, **one_b})[..., 1], gemv(**{**arguments, **same_b, **second}))


@given(
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 16), st.integers(1, 60), st.integers(1, 3)),
    fmt=st.sampled_from(["nvfp4", "mxfp4"]),
    b_dtype=st.sampled_from(["e2m1", "bfloat16"]),
    layout=st.sampled_from(["linear", "128x4"]),
    batch=st.sampled_from(["last", "first"]),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=60, deadline=None)
def test_strided_arrays_give_the_bits_of_contiguous_ones(
    sizes: tuple[int, int, int, int], fmt: str, b_dtype: str, layout: str, batch: str, seed: int
) -> None:
    m, n, half, batches = sizes
    case = make(
        "strides",
        m=m,
        n=n,
        k=2 * half,
        batches=batches,
        format=fmt,
        b_dtype=b_dtype,
        scale_layout=layout,
        batch=batch,
        strided=True,
        out_dtype="float32",
    )
    arguments = cases.inputs(case, seed)

    def contiguous(array: Array) -> Array:
        if batch == "first":
            return np.ascontiguousarray(array)
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, -1, 0)), 0, -1)

    copies: dict[str, Any] = {k: contiguous(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
    np.testing.assert_array_equal(gemv(**arguments), gemv(**copies))
    assert_rounds(batch_first_result(gemv(**copies), copies), expected(copies))


def test_flat_swizzled_scales_and_typed_scales_are_the_same_bytes() -> None:
    arguments = cases.inputs(make("flat", m=140, n=3, k=176, batches=2, scale_layout="128x4", batch="first"), seed=6)
    plain = gemv(**arguments)
    flat = {name: arguments[name].reshape(2, -1) for name in ("sfa", "sfb")}
    np.testing.assert_array_equal(gemv(**{**arguments, **flat}), plain)
    typed = {name: arguments[name].view(ml_dtypes.float8_e4m3fn) for name in ("sfa", "sfb")}
    np.testing.assert_array_equal(gemv(**{**arguments, **typed}), plain)


def test_walking_rows_in_small_blocks_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large matrices are decoded a few rows at a time; how many must not show."""
    for layout in ("linear", "128x4"):
        arguments = cases.inputs(make("blocks", m=300, n=2, k=64, scale_layout=layout), seed=9)
        whole = gemv(**arguments)
        with monkeypatch.context() as patched:
            patched.setattr(reference, "_BLOCK_ELEMENTS", 7 * 64)
            np.testing.assert_array_equal(gemv(**arguments), whole)


# Options -------------------------------------------------------------------------------------------------------------


def plain_arguments(**fields: Any) -> dict[str, Any]:
    """A small call whose arrays the test may change."""
    return cases.inputs(make("validation", **{"m": 8, "n": 2, "k": 64, "batch": "none", **fields}), seed=0)


def test_alpha_is_one_value_however_it_is_given() -> None:
    arguments = plain_arguments()
    value = np.float32(0.3)
    number = gemv(**arguments, alpha=0.3)
    for alpha in (value, np.array(value), np.array([value]), np.full(8, value)):
        np.testing.assert_array_equal(gemv(**arguments, alpha=alpha), number)
    assert np.isnan(gemv(**arguments, alpha=float("nan"))).all()
    np.testing.assert_array_equal(gemv(**arguments, alpha=1), gemv(**arguments))


def test_output_dtype_comes_from_the_option_then_from_c_then_float16() -> None:
    arguments = plain_arguments()
    del arguments["out_dtype"]
    assert gemv(**arguments).dtype == np.float16
    assert gemv(**arguments, out_dtype=np.float32).dtype == np.float32
    assert gemv(**arguments, out_dtype=np.dtype(ml_dtypes.bfloat16)).dtype == ml_dtypes.bfloat16
    c = np.empty((8, 2), np.float32)
    assert gemv(**arguments, c=c) is c


def test_a_strided_output_is_written_and_its_gaps_are_not() -> None:
    arguments = plain_arguments(batches=2, batch="last")
    larger = np.full((4, 8, 7), np.float16(77))
    c = larger[1::2, :, 1:5:2].transpose(1, 2, 0)
    assert gemv(**arguments, c=c) is c
    np.testing.assert_array_equal(c, gemv(**arguments))
    larger[1::2, :, 1:5:2] = 77
    assert (larger == 77).all()


def test_a_prepared_call_reads_its_arrays_anew_and_writes_the_same_output() -> None:
    arguments = plain_arguments()
    prepared = gemv.prepare(**arguments)
    first = prepared()
    once = first.copy()
    np.testing.assert_array_equal(once, gemv(**arguments))
    arguments["sfa"][...] += 8
    second = prepared(stream=None)
    assert np.shares_memory(first, second)
    np.testing.assert_array_equal(second, once * 2)


def test_repeated_calls_give_the_same_bits() -> None:
    arguments = cases.inputs(make("repeat", m=70, n=5, k=1056, out_dtype="float32"), seed=1)
    first = gemv(**arguments).tobytes()
    assert all(gemv(**arguments).tobytes() == first for _ in range(20))


def test_inputs_are_never_written() -> None:
    arguments = plain_arguments(alpha="rows", bias="rows")
    for value in arguments.values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    assert gemv(**arguments).shape == (8, 2)


# Bad input ------------------------------------------------------------------------------------------------------------


def read_only(shape: tuple[int, ...]) -> Array:
    array = np.zeros(shape, np.float16)
    array.flags.writeable = False
    return array


_BYTES = np.zeros((8, 64), np.uint8)

BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "rank of a": ("a", {"a": np.zeros(32, np.uint8)}),
    "rank of a, four": ("a", {"a": np.zeros((8, 32, 1, 1), np.uint8)}),
    "dtype of a": ("a", {"a": np.zeros((8, 32), np.int8)}),
    "unpacked a": ("a", {"a": np.zeros((8, 32), ml_dtypes.float4_e2m1fn)}),
    "stride of a": ("a", {"a": _BYTES[:, ::2]}),
    "a is no array": ("a", {"a": [[1, 2]]}),
    "rank of b": ("b", {"b": np.zeros(32, np.uint8)}),
    "k of b": ("b", {"b": np.zeros((2, 31), np.uint8)}),
    "k of a weight-only b": ("b", {"b": np.zeros((2, 32), np.float16), "sfb": None}),
    "n of b, zero": ("b", {"b": np.zeros((0, 32), np.uint8)}),
    "n of b, seventeen": ("b", {"b": np.zeros((17, 32), np.uint8)}),
    "dtype of b": ("b", {"b": np.zeros((2, 64), np.float32)}),
    "stride of b": ("b", {"b": np.zeros((2, 128), np.float16)[:, ::2], "sfb": None}),
    "b has a batch axis alone": ("b", {"b": np.zeros((2, 32, 1), np.uint8)}),
    "shape of sfa": ("sfa", {"sfa": np.zeros((8, 5), np.uint8)}),
    "rows of sfa": ("sfa", {"sfa": np.zeros((9, 4), np.uint8)}),
    "dtype of sfa": ("sfa", {"sfa": np.zeros((8, 4), np.float32)}),
    "sfa of the other format": ("sfa", {"sfa": np.zeros((8, 4), ml_dtypes.float8_e8m0fnu)}),
    "stride of sfa": ("sfa", {"sfa": _BYTES[:, :8:2]}),
    "linear sfa said to be 128x4": ("sfa", {"scale_layout": "128x4"}),
    "sfb of 128x4 alone": ("sfb", {"sfb": np.zeros((128, 4), np.uint8)}),
    "sfb missing": ("sfb", {"sfb": None}),
    "sfb with a float b": ("sfb", {"b": np.zeros((2, 64), np.float16)}),
    "shape of sfb": ("sfb", {"sfb": np.zeros((2, 3), np.uint8)}),
    "shape of alpha": ("alpha", {"alpha": np.ones(7, np.float32)}),
    "alpha per batch without one": ("alpha", {"alpha": np.ones((8, 1), np.float32)}),
    "dtype of alpha": ("alpha", {"alpha": np.ones(8, np.float64)}),
    "alpha past float32": ("alpha", {"alpha": 1e39}),
    "alpha is a bool": ("alpha", {"alpha": True}),
    "alpha is a word": ("alpha", {"alpha": "one"}),
    "shape of bias": ("bias", {"bias": np.ones(2, np.float16)}),
    "scalar bias": ("bias", {"bias": np.ones((), np.float16)}),
    "dtype of bias": ("bias", {"bias": np.ones(8, np.float32)}),
    "out_dtype": ("out_dtype", {"out_dtype": "float64"}),
    "out_dtype is no dtype": ("out_dtype", {"out_dtype": object()}),
    "format": ("format", {"format": "fp4"}),
    "scale_layout": ("scale_layout", {"scale_layout": "swizzled"}),
    "batch_axis": ("batch_axis", {"batch_axis": 1}),
    "shape of c": ("c", {"c": np.zeros((2, 8), np.float16)}),
    "dtype of c": ("c", {"c": np.zeros((8, 2), np.float32)}),
    "read-only c": ("c", {"c": read_only((8, 2))}),
    "c overlaps itself": ("c", {"c": np.lib.stride_tricks.as_strided(np.zeros(16, np.float16), (8, 2), (2, 2))}),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_names_the_argument(what: str) -> None:
    argument, change = BAD[what]
    arguments = {**plain_arguments(), **change}
    with pytest.raises(InputError) as caught:
        gemv(**arguments)
    assert caught.value.argument == argument
    assert caught.value.operator == "nvfp4_gemv"
    with pytest.raises(InputError):
        gemv.prepare(**arguments)


def test_misshapen_swizzled_scales_are_refused() -> None:
    arguments = plain_arguments(m=200, scale_layout="128x4")
    for sfa in (np.zeros((128, 4), np.uint8), np.zeros(256 * 4 + 1, np.uint8), np.zeros((256, 8), np.uint8)[:, :4]):
        with pytest.raises(InputError) as caught:
            gemv(**{**arguments, "sfa": sfa})
        assert caught.value.argument == "sfa"


@pytest.mark.parametrize("name", ["a", "b", "sfa", "sfb", "alpha", "bias"])
def test_an_output_on_an_inputs_memory_is_refused(name: str) -> None:
    arguments = plain_arguments(alpha="rows", bias="rows")
    memory = np.zeros(4096, np.uint8)
    shared = memory[: arguments[name].nbytes].view(arguments[name].dtype).reshape(arguments[name].shape)
    shared[...] = arguments[name]
    arguments[name] = shared
    with pytest.raises(InputError) as caught:
        gemv(**arguments, c=memory[:32].view(np.float16).reshape(8, 2))
    assert caught.value.argument == "c"
    assert name in caught.value.got
    free = memory[shared.nbytes :][:32].view(np.float16).reshape(8, 2)
    assert gemv(**arguments, c=free) is free


def test_a_refused_call_leaves_the_output_alone() -> None:
    c = np.full((8, 2), np.float16(5))
    with pytest.raises(InputError):
        gemv(**{**plain_arguments(), "bias": np.ones(3, np.float16)}, c=c)
    assert (c == 5).all()


def on_device(monkeypatch: pytest.MonkeyPatch, *elsewhere: str) -> None:
    """Make the validation see arguments of these names on a GPU, without one."""
    real, real_output = tensor.view, tensor.view_output

    def moved(seen: tensor.View, argument: str) -> tensor.View:
        if argument not in elsewhere:
            return seen
        device = tensor.Device("cuda", 0)
        return tensor.View(seen.ptr, seen.shape, seen.strides, seen.dtype, device, False, "cupy", seen.owner)

    monkeypatch.setattr(tensor, "view", lambda array, argument: moved(real(array, argument), argument))
    monkeypatch.setattr(tensor, "view_output", lambda array, argument: moved(real_output(array, argument), argument))


@pytest.mark.parametrize("name", ["b", "sfa", "sfb", "alpha", "bias", "c"])
def test_mixed_devices_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    arguments = {**plain_arguments(alpha="rows", bias="rows"), "c": np.empty((8, 2), np.float16)}
    on_device(monkeypatch, name)
    with pytest.raises(InputError) as caught:
        gemv(**arguments)
    assert caught.value.argument == name
    assert "cuda:0" in caught.value.got


def test_a_gpu_call_is_checked_before_anything_touches_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(monkeypatch, "a", "b", "sfa", "sfb", "c")
    monkeypatch.setattr(tensor, "launch_stream", lambda *arguments: pytest.fail("went on"))
    with pytest.raises(InputError):
        gemv(**{**plain_arguments(), "format": "fp4"})


_DTYPES = (
    np.uint8,
    np.int8,
    np.float16,
    np.float32,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e8m0fnu,
)


@st.composite
def any_array(draw: st.DrawFn) -> Array:
    """Arrays of any of the dtypes around here, of up to four axes, sliced, reversed, transposed or broadcast."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 4, 8, 32]), max_size=4)))
    array = np.zeros(shape, draw(st.sampled_from(_DTYPES)))
    for axis in range(array.ndim):
        step = draw(st.sampled_from([1, 1, 1, 2, -1]))
        array = array[(slice(None),) * axis + (slice(None, None, step),)]
    if array.ndim > 1 and draw(st.booleans()):
        array = array.T
    if draw(st.integers(0, 9)) == 0:
        array = np.broadcast_to(array, (2, *array.shape))
    return array


_ODD = st.one_of(
    any_array(),
    st.builds(Foreign, st.sampled_from([1, 2, 3, 10, 13]), st.just(99), host=any_array()),
    st.sampled_from([None, 1, -1, 0.5, "nvfp4", "128x4", "float32", (), {}, object(), np.float32(2)]),
)


@given(
    changes=st.dictionaries(
        st.sampled_from(
            ["a", "b", "sfa", "sfb", "alpha", "bias", "out_dtype", "format", "scale_layout", "batch_axis", "c"]
        ),
        _ODD,
        max_size=4,
    )
)
@settings(max_examples=400, deadline=None)
def test_whatever_comes_in_only_our_errors_come_out(changes: dict[str, Any]) -> None:
    try:
        c = gemv(**{**plain_arguments(), **changes})
    except CupymlaError:
        return
    assert c.ndim in (2, 3)


@pytest.mark.parametrize("alpha", ["1", [1.0], (1.0,)])
def test_alpha_may_be_a_number_or_an_array(alpha: object) -> None:
    a, scales = np.zeros((2, 32), np.uint8), np.zeros((2, 4), np.uint8)
    with pytest.raises(InputError) as raised:
        gemv(a, a, scales, scales, alpha=alpha)
    assert (raised.value.argument, raised.value.expected) == ("alpha", "None, a number or a float32 array")
