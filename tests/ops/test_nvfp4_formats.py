"""The 4-bit formats, their related functions on the CPU, and the 128x4 scale layout, against ml_dtypes and plain
formulas."""

from __future__ import annotations

from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupymla.errors import CupymlaError, InputError
from cupymla.ops.nvfp4_gemv import (
    dequantize_nvfp4,
    formats,
    nvfp4_gemv,
    quantize_nvfp4,
    reference,
    swizzle_scales,
    unswizzle_scales,
)

Array = npt.NDArray[Any]

Format = Literal["nvfp4", "mxfp4"]
FORMATS: tuple[Format, ...] = ("nvfp4", "mxfp4")
BLOCK = {"nvfp4": 16, "mxfp4": 32}
FLT_MAX = float(np.finfo(np.float32).max)


def bits_of(values: Array, dtype: Any) -> Array:
    """ml_dtypes' codes for float32 values."""
    with np.errstate(all="ignore"):
        codes: Array = values.astype(dtype).view(np.uint8)
    return codes


def interesting_floats() -> Array:
    """Every float16, every midpoint of E2M1 and E4M3 with both neighbours, and random float32 bit patterns."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    random = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32).view(np.float32)
    found = [halves, random]
    for table in (formats.E2M1[:8], formats.E4M3[:127]):
        middle = (table[1:] + table[:-1]) / np.float32(2)
        for direction in (-np.inf, np.inf):
            beside = np.nextafter(middle, np.float32(direction))
            found += [middle, -middle, beside, -beside]
    return np.concatenate(found)


# Tables and roundings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "dtype"),
    [
        (formats.E2M1, ml_dtypes.float4_e2m1fn),
        (formats.E4M3, ml_dtypes.float8_e4m3fn),
        (formats.E8M0, ml_dtypes.float8_e8m0fnu),
    ],
    ids=["e2m1", "e4m3", "e8m0"],
)
def test_tables_are_those_of_ml_dtypes(table: Array, dtype: Any) -> None:
    """All codes, the sign of zero and the places of NaN included."""
    wanted = np.arange(table.size, dtype=np.uint8).view(dtype).astype(np.float32)
    np.testing.assert_array_equal(table, wanted)
    numbers = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(table[numbers]), np.signbit(wanted[numbers]))
    assert not table.flags.writeable


def test_rounding_to_e2m1_is_that_of_ml_dtypes() -> None:
    values = interesting_floats()
    values = values[~np.isnan(values)]
    np.testing.assert_array_equal(formats.encode_e2m1(values), bits_of(values, ml_dtypes.float4_e2m1fn))


def test_rounding_to_e4m3_is_that_of_ml_dtypes_below_its_maximum_and_saturates_above() -> None:
    values = interesting_floats()
    inside = values[np.abs(values) <= 448]
    np.testing.assert_array_equal(formats.encode_e4m3(inside), bits_of(inside, ml_dtypes.float8_e4m3fn))
    above = np.array([449, 464, 465, 1e30, np.inf], np.float32)
    np.testing.assert_array_equal(formats.encode_e4m3(above), 0x7E)
    np.testing.assert_array_equal(formats.encode_e4m3(-above), 0xFE)


def test_nan_becomes_plus_six_as_an_element_and_nan_as_a_scale() -> None:
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001], np.uint32).view(np.float32)
    np.testing.assert_array_equal(formats.encode_e2m1(nans), 7)
    np.testing.assert_array_equal(formats.encode_e4m3(nans), 0x7F)
    np.testing.assert_array_equal(formats.encode_e8m0_amax(nans), 0xFF)


def test_mxfp4_scales_follow_the_exponent_field() -> None:
    """floor(log2 amax) - 2 is read off the float32's exponent field; it clamps at 2^-127."""
    values = np.abs(interesting_floats())
    values = values[np.isfinite(values)]
    field = (values.view(np.uint32) >> 23).astype(np.int64)
    np.testing.assert_array_equal(formats.encode_e8m0_amax(values), np.clip(field - 2, 0, 254))
    assert formats.encode_e8m0_amax(np.array([np.inf, 0], np.float32)).tolist() == [252, 0]


def test_pairs_keep_the_even_element_in_the_low_nibble() -> None:
    codes = np.arange(16, dtype=np.uint8)[np.newaxis]
    packed = formats.pack_pairs(codes)
    assert packed[0, :2].tolist() == [0x10, 0x32]
    np.testing.assert_array_equal(formats.decode_pairs(packed)[0], formats.E2M1)


# The 128x4 layout ----------------------------------------------------------------------------------------------------


@given(
    rows=st.integers(0, 300),
    columns=st.integers(0, 13),
    batches=st.integers(1, 3),
    batch_axis=st.sampled_from([-1, 0]),
    dtype=st.sampled_from([np.uint8, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu]),
)
@settings(max_examples=50, deadline=None)
def test_swizzling_is_the_documented_formula_and_unswizzling_its_inverse(
    rows: int, columns: int, batches: int, batch_axis: int, dtype: Any
) -> None:
    rng = np.random.default_rng(rows * 13 + columns)
    linear = rng.integers(1, 256, (batches, rows, columns), dtype=np.uint8)
    given_order = linear if batch_axis == 0 else np.moveaxis(linear, 0, -1)
    swizzled = swizzle_scales(given_order.view(dtype), batch_axis=batch_axis)
    assert swizzled.dtype == dtype
    batch_first = swizzled if batch_axis == 0 else np.moveaxis(swizzled, -1, 0)
    assert batch_first.shape == (batches, -(-rows // 128) * 128, -(-columns // 4) * 4)
    flat = batch_first.view(np.uint8).reshape(batches, -1)
    i, j = np.indices((rows, columns))
    offsets = ((i // 128) * -(-columns // 4) + j // 4) * 512 + (i % 32) * 16 + (i % 128 // 32) * 4 + j % 4
    np.testing.assert_array_equal(flat[:, offsets], linear)
    assert np.count_nonzero(flat) == linear.size
    for form in (swizzled, flat.view(dtype) if batch_axis == 0 else np.moveaxis(flat.view(dtype), 0, -1)):
        back = unswizzle_scales(form, rows, columns, batch_axis=batch_axis)
        np.testing.assert_array_equal(back.view(np.uint8), given_order)
        assert back.dtype == dtype


def test_swizzle_takes_parts_of_larger_arrays_and_writes_where_it_is_told() -> None:
    larger = np.random.default_rng(0).integers(0, 256, (300, 40), dtype=np.uint8)
    part = larger[3:203, 5:12]
    out = np.full((256, 8), 9, np.uint8)
    assert swizzle_scales(part, out=out) is out
    np.testing.assert_array_equal(out, swizzle_scales(np.ascontiguousarray(part)))
    flat = np.empty(256 * 8, np.uint8)
    swizzle_scales(part, out=flat)
    np.testing.assert_array_equal(flat, out.reshape(-1))
    back = np.zeros((210, 20), np.uint8)
    unswizzle_scales(flat, 200, 7, out=back[:200, 2:9])
    np.testing.assert_array_equal(back[:200, 2:9], part)
    assert not back[200:].any()
    assert not back[:, 9:].any()


# Quantising --------------------------------------------------------------------------------------------------------


def quantised_by_casts(x: Array, fmt: str, factor: float | None) -> tuple[Array, Array]:
    """The same recipe for one matrix, block after block, with ml_dtypes' casts and saturation by hand."""
    rows, k = x.shape
    codes = np.zeros((rows, k), np.uint8)
    scales = np.zeros((rows, -(-k // BLOCK[fmt])), np.uint8)
    values = x.astype(np.float32) if factor is None else x.astype(np.float32) * np.float32(factor)
    for row in range(rows):
        for j in range(scales.shape[1]):
            part = values[row, j * BLOCK[fmt] : (j + 1) * BLOCK[fmt]]
            amax = np.abs(part).max()
            if fmt == "nvfp4":
                scale = np.minimum(amax / np.float32(6), np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
            else:
                exponent = -127 if amax == 0 else max(int(np.floor(np.log2(np.float64(amax)))) - 2, -127)
                scale = np.float32(2.0**exponent).astype(ml_dtypes.float8_e8m0fnu)
            scales[row, j] = scale.view(np.uint8)
            divisor = scale.astype(np.float32)
            quotient = part / divisor if divisor else part * np.float32(0)
            codes[row, j * BLOCK[fmt] : (j + 1) * BLOCK[fmt]] = bits_of(quotient, ml_dtypes.float4_e2m1fn)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales


def wild(seed: int, shape: tuple[int, ...], spread: int) -> Array:
    """Normal values times powers of two from 2^-spread to 2^spread per row, with signed zeros among them."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(
        -spread, spread + 1, (shape[0],) + (1,) * (len(shape) - 1)
    )
    values[rng.random(shape) < 0.1] = -0.0
    return values.astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("fmt", "factor"), [("nvfp4", None), ("nvfp4", 1.0), ("nvfp4", 0.37), ("nvfp4", 300.0), ("mxfp4", None)]
)
def test_quantising_is_bit_exact_with_ml_dtypes_casts(fmt: Format, factor: float | None, dtype: Any) -> None:
    x = wild(1, (33, 90), 12).astype(dtype)
    packed, scales = quantize_nvfp4(x, format=fmt, global_scale=factor)
    wanted = quantised_by_casts(x, fmt, factor)
    np.testing.assert_array_equal(packed, wanted[0])
    np.testing.assert_array_equal(scales, wanted[1])


@given(seed=st.integers(0, 2**20), half=st.integers(1, 50), spread=st.integers(0, 20), use_amax=st.booleans())
@settings(max_examples=80, deadline=None)
def test_nvfp4_error_is_bounded_by_the_block_scale(seed: int, half: int, spread: int, use_amax: bool) -> None:
    """In units of the decoded scale s the error is at most 1: E2M1's widest gap is 2, and rounding s to E4M3 (relative
    2^-4 at most) lets amax pass 6 by less than 1/2. Where s is subnormal it is off by at most 2^-10, so amax passes 6 s
    by at most 6 * 2^-10. 2^-20 covers the float32 products and quotients.
    """
    x = wild(seed, (5, 2 * half), spread)
    if use_amax:
        packed, scales, factor = quantize_nvfp4(x, global_scale="amax")
    else:
        x = np.clip(x, -2688, 2688)
        factor = np.float32(1)
        packed, scales = quantize_nvfp4(x)
    back = dequantize_nvfp4(packed, scales, global_scale=factor)
    unit = np.repeat(scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64), 16, axis=1)[:, : 2 * half]
    allowed = np.maximum(unit, 6 * 2.0**-10) / float(factor) + 2.0**-20 * np.abs(x)
    assert (np.abs(back.astype(np.float64) - x) <= allowed).all()


@given(seed=st.integers(0, 2**20), half=st.integers(1, 50), spread=st.integers(0, 100))
@settings(max_examples=80, deadline=None)
def test_mxfp4_error_is_bounded_by_the_block_scale(seed: int, half: int, spread: int) -> None:
    """amax is in [4, 8) scales: half of E2M1's widest gap below 6, and up to 2 where it saturates."""
    x = wild(seed, (5, 2 * half), spread)
    packed, scales = quantize_nvfp4(x, format="mxfp4")
    back = dequantize_nvfp4(packed, scales, format="mxfp4")
    unit = np.repeat(scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64), 32, axis=1)[:, : 2 * half]
    saturated = np.abs(x) > 6 * unit
    assert (np.abs(back.astype(np.float64) - x) <= np.where(saturated, 2, 1) * unit).all()


@given(seed=st.integers(0, 2**20), half=st.integers(1, 40), fmt=st.sampled_from(FORMATS))
@settings(max_examples=60, deadline=None)
def test_quantising_representable_values_changes_nothing(seed: int, half: int, fmt: Format) -> None:
    """Blocks that hold a 6 (or -6) under a normal scale come back bit for bit, -0 included."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (4, 2 * half), dtype=np.uint8)
    codes[:, :: BLOCK[fmt]] = rng.choice([7, 15], codes[:, :: BLOCK[fmt]].shape)
    packed = formats.pack_pairs(codes)
    low, high = (0x08, 0x7F) if fmt == "nvfp4" else (2, 250)
    scales = rng.integers(low, high, (4, -(-2 * half // BLOCK[fmt])), dtype=np.uint8)
    values = dequantize_nvfp4(packed, scales, format=fmt)
    again = quantize_nvfp4(values, format=fmt)
    np.testing.assert_array_equal(again[0], packed)
    np.testing.assert_array_equal(again[1], scales)


@pytest.mark.parametrize("amax", [1.0, 2688.0, 3e-39, FLT_MAX, 0.0])
def test_the_global_scale_is_2688_over_the_largest_finite_magnitude(amax: float) -> None:
    x = np.zeros((3, 32), np.float32)
    x[1, 7], x[2, 0], x[2, 20] = -amax, np.nan, np.inf
    packed, scales, factor = quantize_nvfp4(x, global_scale="amax")
    with np.errstate(all="ignore"):
        wanted = np.float32(1) if amax == 0 else min(np.float32(2688) / np.float32(amax), np.float32(FLT_MAX))
    assert factor.dtype == np.float32
    assert factor.shape == ()
    assert factor == wanted
    if np.float32(amax) * wanted > 2687:
        assert scales[1, 0] == 0x7E
    back = dequantize_nvfp4(packed, scales, global_scale=factor)
    # A scale of 448 is exact; where the factor had to be clamped, the block's scale rounds by 2^-4 at most.
    np.testing.assert_allclose(back[1, 7], x[1, 7], rtol=2.0**-22 if factor < FLT_MAX else 2.0**-4)
    assert np.isnan(back[2, :16]).all()
    assert np.isfinite(back[2, 16:]).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_nan_spoils_its_block_and_infinity_saturates(fmt: Format) -> None:
    block = BLOCK[fmt]
    x = np.ones((1, 3 * block), np.float32)
    x[0, 3], x[0, block + 1], x[0, 2 * block] = np.nan, -np.inf, 2
    packed, scales = quantize_nvfp4(x, format=fmt)
    assert (packed[0, : block // 2] == 0x77).all()
    assert scales[0].tolist() == ([0x7F, 0x7E, 0x2B] if fmt == "nvfp4" else [0xFF, 252, 126])
    back = dequantize_nvfp4(packed, scales, format=fmt)
    assert np.isnan(back[0, :block]).all()
    assert back[0, block + 1] == -6 * (448 if fmt == "nvfp4" else 2.0**125)
    assert (back[0, block + 2 : 2 * block] == 0).all()


def test_blocks_too_small_for_a_scale_become_signed_zeros() -> None:
    x = np.tile(np.array([1e-5, -1e-5], np.float32), (1, 8))
    packed, scales = quantize_nvfp4(x)
    assert scales.item() == 0
    assert (packed == 0x80).all()
    assert not dequantize_nvfp4(packed, scales).any()


# Forms of the arguments of related functions
# --------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize("batch_axis", [-1, 0])
def test_batches_layouts_and_given_outputs_hold_the_same_codes(
    layout: Literal["linear", "128x4"], batch_axis: int
) -> None:
    x = wild(3, (3, 140, 80), 3)
    shown = x if batch_axis == 0 else np.moveaxis(x, 0, -1)
    options: dict[str, Any] = {"scale_layout": layout, "batch_axis": batch_axis, "global_scale": 2.0}
    packed, scales = quantize_nvfp4(shown, **options)
    given_packed, given_scales = np.empty_like(packed), np.empty_like(scales)
    found = quantize_nvfp4(shown, packed=given_packed, scales=given_scales, **options)
    assert found[0] is given_packed
    assert found[1] is given_scales
    np.testing.assert_array_equal(given_packed, packed)
    np.testing.assert_array_equal(given_scales, scales)
    back = dequantize_nvfp4(packed, scales, **options)
    out = np.empty_like(back, dtype=ml_dtypes.bfloat16)
    assert dequantize_nvfp4(packed, scales, out=out, **options) is out
    np.testing.assert_array_equal(out, back.astype(ml_dtypes.bfloat16))
    for i in range(3):
        one_packed, one_scales = quantize_nvfp4(x[i], scale_layout=layout, global_scale=np.float32(2))
        pick = i if batch_axis == 0 else (..., i)
        np.testing.assert_array_equal(packed[pick], one_packed)
        np.testing.assert_array_equal(scales[pick], one_scales)
        np.testing.assert_array_equal(
            back[pick],
            dequantize_nvfp4(one_packed, one_scales, scale_layout=layout, global_scale=np.array([2], np.float32)),
        )


@pytest.mark.parametrize("batch_axis", [-1, 0])
@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_what_quantize_gives_gemv_takes(fmt: str, layout: str, batch_axis: int) -> None:
    """Every form of quantised operands feeds the product, which equals that of the dequantised ones."""
    x, y = (np.random.default_rng(s).standard_normal((2, rows, 96)).astype(np.float32) for s, rows in ((0, 50), (1, 3)))
    options: dict[str, Any] = {"format": fmt, "scale_layout": layout, "batch_axis": batch_axis}
    (a, sfa), (b, sfb) = (quantize_nvfp4(v if batch_axis == 0 else np.moveaxis(v, 0, -1), **options) for v in (x, y))
    c = nvfp4_gemv(a, b, sfa, sfb, out_dtype="float32", **options)
    left, right = (dequantize_nvfp4(p, s, **options).astype(np.float64) for p, s in ((a, sfa), (b, sfb)))
    equation = "lmk,lnk->lmn" if batch_axis == 0 else "mkl,nkl->mnl"
    # Terms are below 36 times two scales below 1 each: 96 float32 additions of them stay within 2^-10.
    np.testing.assert_allclose(c, np.einsum(equation, left, right), atol=2.0**-10, rtol=0)


def related_calls(batch_axis: int) -> dict[str, tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Companions with arrays and options, batched and with the batch axis where it is asked for."""
    x = wild(7, (2, 9, 48), 2)
    shown = x if batch_axis == 0 else np.moveaxis(x, 0, -1)
    both: dict[str, Any] = {"batch_axis": batch_axis}
    packed, scales = quantize_nvfp4(shown, **both)
    swizzled, rest = swizzle_scales(scales, **both), {"rows": 9, "columns": 3, **both}
    halves = {"out_dtype": "bfloat16", **both}
    return {
        "amax": (quantize_nvfp4, {"x": shown.copy(order="K")}, {"global_scale": "amax", **both}),
        "128x4": (quantize_nvfp4, {"x": shown.copy(order="K")}, {"scale_layout": "128x4", **both}),
        "dequantize": (dequantize_nvfp4, {"packed": packed, "scales": scales}, halves),
        "swizzle": (swizzle_scales, {"scales": scales}, both),
        "unswizzle": (unswizzle_scales, {"swizzled": swizzled}, rest),
    }


def tuple_of(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def bytes_of(results: Any) -> list[bytes]:
    """Of NumPy's, JAX's or torch's arrays; torch shows NumPy no bfloat16."""
    wide = (one.float() if hasattr(one, "float") else one for one in tuple_of(results))
    return [np.asarray(one).astype(np.float32).tobytes() for one in wide]


@pytest.mark.parametrize("batch_axis", [-1, 0])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("name", list(related_calls(0)))
def test_a_prepared_related_function_writes_its_arrays_again(name: str, framework: str, batch_axis: int) -> None:
    """Of what its inputs hold by then."""
    function, arrays, options = related_calls(batch_axis)[name]
    first = next(iter(arrays))
    memory = arrays[first]
    other = np.flip(memory, 1).copy(order="K")
    before, after = (bytes_of(function(**{**arrays, first: one}, **options)) for one in (memory, other))
    assert before[0] != after[0]
    if framework == "torch":
        torch = pytest.importorskip("torch")
        arrays = {key: torch.from_numpy(array) for key, array in arrays.items()}
    prepared = function.prepare(**arrays, **options)
    results = tuple_of(prepared())
    assert bytes_of(results) == before
    memory[...] = other
    again = tuple_of(prepared())
    assert all(new is old for new, old in zip(again, results, strict=True))
    assert bytes_of(results) == after


@pytest.mark.parametrize("name", list(related_calls(0)))
def test_a_prepared_related_function_leaves_results_that_jax_has(name: str) -> None:
    jnp = pytest.importorskip("jax.numpy")
    function, arrays, options = related_calls(0)[name]
    prepared = function.prepare(**{key: jnp.asarray(array) for key, array in arrays.items()}, **options)
    results, again = tuple_of(prepared()), tuple_of(prepared())
    assert bytes_of(results) == bytes_of(again) == bytes_of(function(**arrays, **options))
    for one, other in zip(results, again, strict=True):
        assert one.unsafe_buffer_pointer() != other.unsafe_buffer_pointer()


def test_walking_rows_in_small_blocks_gives_the_same_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    x = wild(5, (40, 64), 5)
    packed, scales, factor = quantize_nvfp4(x, global_scale="amax")
    values = dequantize_nvfp4(packed, scales)
    monkeypatch.setattr(reference, "_BLOCK_ELEMENTS", 3 * 64)
    again = quantize_nvfp4(x, global_scale="amax")
    np.testing.assert_array_equal(again[0], packed)
    np.testing.assert_array_equal(again[1], scales)
    assert again[2] == factor
    np.testing.assert_array_equal(dequantize_nvfp4(packed, scales), values)


def test_empty_matrices_have_empty_codes() -> None:
    for shape in ((0, 32), (4, 0)):
        packed, scales, factor = quantize_nvfp4(np.zeros(shape, np.float32), global_scale="amax")
        assert packed.shape == (shape[0], shape[1] // 2)
        assert scales.shape == (shape[0], shape[1] // 16)
        assert factor == 1
        assert dequantize_nvfp4(packed, scales).shape == shape


_X = np.zeros((4, 32), np.float32)
_PACKED, _SCALES = np.zeros((4, 16), np.uint8), np.zeros((4, 2), np.uint8)
_FROZEN = np.zeros((4, 32), np.float32)
_FROZEN.flags.writeable = False

BAD: dict[str, tuple[Any, str, tuple[Any, ...], dict[str, Any]]] = {
    "odd k": (quantize_nvfp4, "x", (np.zeros((4, 31), np.float32),), {}),
    "rank of x": (quantize_nvfp4, "x", (np.zeros(32, np.float32),), {}),
    "dtype of x": (quantize_nvfp4, "x", (np.zeros((4, 32)),), {}),
    "stride of x": (quantize_nvfp4, "x", (np.zeros((32, 4), np.float32).T,), {}),
    "negative global scale": (quantize_nvfp4, "global_scale", (_X,), {"global_scale": -1.0}),
    "infinite global scale": (quantize_nvfp4, "global_scale", (_X,), {"global_scale": float("inf")}),
    "NaN global scale": (quantize_nvfp4, "global_scale", (_X,), {"global_scale": float("nan")}),
    "unknown global scale": (quantize_nvfp4, "global_scale", (_X,), {"global_scale": "max"}),
    "global scale per row": (quantize_nvfp4, "global_scale", (_X,), {"global_scale": np.ones(4, np.float32)}),
    "global scale of MXFP4": (quantize_nvfp4, "global_scale", (_X,), {"global_scale": 1.0, "format": "mxfp4"}),
    "format": (quantize_nvfp4, "format", (_X,), {"format": "int4"}),
    "layout": (quantize_nvfp4, "scale_layout", (_X,), {"scale_layout": "64x4"}),
    "batch axis": (quantize_nvfp4, "batch_axis", (_X,), {"batch_axis": 2}),
    "shape of packed": (quantize_nvfp4, "packed", (_X,), {"packed": np.zeros((4, 32), np.uint8)}),
    "dtype of packed": (quantize_nvfp4, "packed", (_X,), {"packed": np.zeros((4, 16), np.int32)}),
    "shape of scales": (quantize_nvfp4, "scales", (_X,), {"scales": np.zeros((4, 4), np.uint8)}),
    "packed on x": (quantize_nvfp4, "packed", (_X,), {"packed": _X.view(np.uint8).reshape(-1)[:64].reshape(4, 16)}),
    "amax when dequantising": (dequantize_nvfp4, "global_scale", (_PACKED, _SCALES), {"global_scale": "amax"}),
    "rank of packed": (dequantize_nvfp4, "packed", (_PACKED[0], _SCALES), {}),
    "scales to dequantise": (dequantize_nvfp4, "scales", (_PACKED, _SCALES[:3]), {}),
    "scales of the other format": (dequantize_nvfp4, "scales", (_PACKED, _SCALES), {"format": "mxfp4"}),
    "out_dtype": (dequantize_nvfp4, "out_dtype", (_PACKED, _SCALES), {"out_dtype": "int8"}),
    "dtype of out": (dequantize_nvfp4, "out", (_PACKED, _SCALES), {"out": _X, "out_dtype": "float16"}),
    "read-only out": (dequantize_nvfp4, "out", (_PACKED, _SCALES), {"out": _FROZEN}),
    "rank of linear scales": (swizzle_scales, "scales", (_SCALES[0],), {}),
    "dtype of linear scales": (swizzle_scales, "scales", (_X,), {}),
    "shape of swizzled out": (swizzle_scales, "out", (_SCALES,), {"out": np.zeros((4, 4), np.uint8)}),
    "dtype of swizzled out": (swizzle_scales, "out", (_SCALES,), {"out": np.zeros((128, 4), ml_dtypes.float8_e4m3fn)}),
    "shape of swizzled": (unswizzle_scales, "swizzled", (np.zeros((128, 4), np.uint8), 129, 4), {}),
    "stride of swizzled": (unswizzle_scales, "swizzled", (np.zeros((128, 8), np.uint8)[:, ::2], 128, 4), {}),
    "rows": (unswizzle_scales, "rows", (np.zeros((128, 4), np.uint8), -1, 4), {}),
    "columns": (unswizzle_scales, "columns", (np.zeros((128, 4), np.uint8), 128, 4.0), {}),
    "shape of linear out": (unswizzle_scales, "out", (np.zeros((128, 4), np.uint8), 4, 2), {"out": _SCALES.T}),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_names_the_argument_and_the_function(what: str) -> None:
    function, argument, positional, options = BAD[what]
    with pytest.raises(InputError) as caught:
        function(*positional, **options)
    assert caught.value.argument == argument
    assert caught.value.operator == function.__name__


def test_a_batch_axis_in_front_is_told_of_the_option_for_it() -> None:
    with pytest.raises(InputError) as caught:
        quantize_nvfp4(np.zeros((2, 4, 32), np.float32))
    assert "batch_axis=0" in caught.value.expected
    assert quantize_nvfp4(np.zeros((2, 4, 32), np.float32), batch_axis=0)[0].shape == (2, 4, 16)
    with pytest.raises(InputError) as caught:
        quantize_nvfp4(np.zeros((32, 4), np.float32).T)
    assert "batch_axis" not in caught.value.expected


def test_a_word_for_the_global_scale_is_answered_with_all_that_it_may_be() -> None:
    x = np.zeros((4, 32), np.float32)
    with pytest.raises(InputError) as caught:
        quantize_nvfp4(x, global_scale="max")
    assert (caught.value.expected, caught.value.got) == ("None, 'amax', a number or a float32 array", "'max'")
    with pytest.raises(InputError) as caught:
        dequantize_nvfp4(*quantize_nvfp4(x), global_scale="amax")
    assert (caught.value.expected, caught.value.got) == ("None, a number or a float32 array", "'amax'")


@pytest.mark.parametrize(("batch_axis", "flat"), [(-1, "[bytes = 12288, l]"), (0, "[l, bytes = 12288]")])
def test_a_matrix_of_other_blocks_is_not_taken_for_a_batch(batch_axis: int, flat: str) -> None:
    """It was told to have an l, which nobody gave it, of as many entries as it has columns."""
    with pytest.raises(InputError) as caught:
        unswizzle_scales(np.zeros((256, 32), np.uint8), 300, 32, batch_axis=batch_axis)
    assert caught.value.expected == f"128x4 scales of shape [rows = 384, columns = 32] or {flat}"


def odd_values() -> tuple[Any, ...]:
    """Fresh each time, for a call may write to any of the arrays."""
    x, packed, scales = np.zeros((4, 32), np.float32), np.zeros((4, 16), np.uint8), np.zeros((4, 2), np.uint8)
    more = (np.zeros((2, 4, 32), np.float16), np.zeros((4, 2, 3), np.uint8), np.zeros((128, 4), np.uint8))
    small = (np.zeros((), np.float32), np.zeros(0, np.uint8), np.zeros((3, 0), np.float32))
    views = (x[:, ::2], x[::-1], x.T, np.broadcast_to(np.float32(1), (4, 32)))
    return (None, True, -1, 0.5, 3, "amax", "128x4", "mxfp4", (), object(), x, packed, scales, *more, *small, *views)


@given(data=st.data())
@settings(max_examples=500, deadline=None)
def test_whatever_comes_in_only_our_errors_come_out(data: st.DataObject) -> None:
    function, required, options = data.draw(
        st.sampled_from(
            [
                (quantize_nvfp4, 1, ("global_scale", "format", "scale_layout", "batch_axis", "packed", "scales")),
                (dequantize_nvfp4, 2, ("global_scale", "format", "scale_layout", "batch_axis", "out_dtype", "out")),
                (swizzle_scales, 1, ("batch_axis", "out")),
                (unswizzle_scales, 3, ("batch_axis", "out")),
            ]
        )
    )
    values = odd_values()
    odd = st.sampled_from(range(len(values)))
    positional = [values[data.draw(odd)] for _ in range(required)]
    chosen = data.draw(st.dictionaries(st.sampled_from(options), odd, max_size=3))
    named = {name: values[i] for name, i in chosen.items()}
    call: Any = function
    try:
        call(*positional, **named)
    except CupymlaError:
        return
