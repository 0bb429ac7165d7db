"""fp8 codes and scales on the CPU, against the formats' definitions worked out by hand; and what is refused."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupymla
from cupymla.errors import InputError
from cupymla.ops.mla_cache import formats

# E4M3 by its definition: four exponent bits with a bias of 7, three mantissa bits, no infinity.
MAGNITUDES = np.array(
    [
        (code % 8) * 2.0**-9 if code < 8 else (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7)
        for code in range(0x7F)
    ]
)  # fmt: skip


def nearest(value: float) -> int:
    """The E4M3 code of a float: to nearest, ties to the even code, saturated."""
    if np.isnan(value):
        return 0x7F
    distance = np.abs(MAGNITUDES - min(abs(value), 448.0))
    near = np.flatnonzero(distance == distance.min())
    code = int(near[0] if len(near) == 1 or near[0] % 2 == 0 else near[1])
    return code | (0x80 if np.signbit(value) else 0)


def floats(bits: int) -> np.ndarray[Any, Any]:
    return np.array([bits], np.uint32).view(np.float32)


@given(st.integers(0, 2**32 - 1))
def test_any_float_has_the_nearest_code(bits: int) -> None:
    value = floats(bits)
    assert formats.encoded(value).view(np.uint8)[0] == nearest(float(value[0]))


def test_codes_midpoints_and_their_neighbours() -> None:
    """Every code, every tie, and what lies just beside each."""
    exact = MAGNITUDES.astype(np.float32)
    values = np.concatenate([exact, (exact[1:] + exact[:-1]) / np.float32(2)])
    values = np.concatenate([np.nextafter(values, np.float32(-1)), values, np.nextafter(values, np.float32(1e9))])
    for signed in (values, -values):
        wanted = [nearest(float(value)) for value in signed]
        assert formats.encoded(signed).view(np.uint8).tolist() == wanted


@given(st.integers(0, 2**32 - 1))
def test_scales_follow_the_table(bits: int) -> None:
    """max(amax, 1e-4) / 448, or the least power of two that is not below it."""
    value = floats(bits)
    x = np.zeros((1, 16), np.float32)
    x[0, 5] = value[0]
    _, (plain,) = cupymla.quantize_fp8(x, group=16)
    _, (power,) = cupymla.quantize_fp8(x, group=16, scale_rule="pow2")
    amax = np.float32(0) if np.isnan(value[0]) else min(np.abs(value[0]), np.finfo(np.float32).max)
    assert plain[0] == np.float32(max(amax, np.float32(1e-4))) / np.float32(448)
    mantissa, _ = np.frexp(power[0])
    assert mantissa == 0.5 and power[0] / 2 < plain[0] <= power[0]


ROWS = st.lists(st.floats(width=16, allow_nan=True, allow_infinity=True), min_size=32, max_size=32)


@given(ROWS, st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]), st.sampled_from(["amax", "pow2"]))
def test_quantising_is_a_division_and_a_rounding(row: list[float], dtype: Any, rule: Any) -> None:
    x = np.array(row, np.float32).astype(dtype).reshape(1, 32)
    codes, scales = cupymla.quantize_fp8(x, group=16, scale_rule=rule)
    largest = float(ml_dtypes.finfo(dtype).max)
    for channel, value in enumerate(x[0].astype(np.float32)):
        finite = value if np.isnan(value) else np.float32(np.clip(value, -largest, largest))
        quotient = np.float32(finite) / scales[0, channel // 16]
        assert codes.view(np.uint8)[0, channel] == nearest(float(quotient))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_an_infinity_is_the_largest_number(dtype: Any) -> None:
    x = np.zeros((1, 16), dtype)
    x[0, :3] = [np.inf, -np.inf, np.nan]
    codes, scales = cupymla.quantize_fp8(x, group=16)
    assert codes.view(np.uint8)[0].tolist() == [0x7E, 0xFE, 0x7F] + [0] * 13
    assert scales[0, 0] == np.float32(float(ml_dtypes.finfo(dtype).max)) / np.float32(448)


def test_dequantised_codes_are_products() -> None:
    """All codes with scales of every kind; a product is rounded to fp32, then to bfloat16."""
    codes = np.arange(256, dtype=np.uint8).reshape(1, 256).repeat(6, 0)
    scales = np.array([1, 0.3, 2.0**-140, 3e38, np.inf, np.nan], np.float32)[:, None]
    made = cupymla.dequantize_fp8(codes, scales, group=256)
    signed = np.concatenate([MAGNITUDES, [np.nan], -MAGNITUDES, [np.nan]]).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = (signed * scales).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(made.astype(np.float32), wanted.astype(np.float32))
    assert (np.signbit(made) == np.signbit(wanted))[~np.isnan(wanted)].all()


@pytest.mark.parametrize("rule", ["amax", "pow2"])
def test_there_and_back_is_close(rule: Any) -> None:
    """Half a unit of three mantissa bits, or of the least normal code; one more rounding to bfloat16."""
    x = np.random.default_rng(0).standard_normal((2, 5, 256)).astype(np.float32)
    codes, scales = cupymla.quantize_fp8(x, scale_rule=rule)
    back = cupymla.dequantize_fp8(codes, scales).astype(np.float32)
    bound = np.maximum(np.abs(x) * 2.0**-4, np.repeat(scales, 128, axis=-1) * 2.0**-10) * (1 + 2.0**-3)
    assert (np.abs(back - x) <= bound).all()


def test_arrays_that_are_given_are_written_and_returned() -> None:
    x = np.random.default_rng(1).standard_normal((3, 4, 64)).astype(np.float32)
    want = cupymla.quantize_fp8(x, group=32)
    wide = np.zeros((3, 4, 70), np.uint8)
    columns = np.zeros((2, 4, 3), np.float32).transpose(2, 1, 0)
    codes, scales = cupymla.quantize_fp8(x, group=32, codes=wide[..., :64], scales=columns)
    assert np.shares_memory(codes, wide) and codes.dtype == np.uint8 and scales is columns
    np.testing.assert_array_equal(codes, want[0].view(np.uint8))
    np.testing.assert_array_equal(scales, want[1])
    out = np.zeros((3, 4, 64), ml_dtypes.bfloat16)
    assert cupymla.dequantize_fp8(codes, scales, group=32, out=out) is out
    np.testing.assert_array_equal(out, cupymla.dequantize_fp8(*want, group=32))


X, CODES, SCALES = np.zeros((4, 128), np.float32), np.zeros((4, 128), np.uint8), np.zeros((4, 1), np.float32)
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("quantize_fp8", {"x": X.astype(np.float64)}, "'x': expected dtype float32"),
    ("quantize_fp8", {"x": X[:, ::2]}, "'x': expected a contiguous last axis"),
    ("quantize_fp8", {"x": np.zeros((1, 1, 1, 1, 128), np.float32)}, "'x': expected shape"),
    ("quantize_fp8", {"x": np.float32(1)}, "'x'"),
    ("quantize_fp8", {"x": X[:, :96]}, "'x': expected D a multiple of group 128"),
    ("quantize_fp8", {"x": X, "group": 48}, "'group': expected a power of two from 16 to 256"),
    ("quantize_fp8", {"x": X, "group": 8}, "'group'"),
    ("quantize_fp8", {"x": X, "group": 512}, "'group'"),
    ("quantize_fp8", {"x": X, "group": 64.0}, "'group'"),
    ("quantize_fp8", {"x": X, "scale_rule": "max"}, "'scale_rule': expected 'amax' or 'pow2'"),
    ("quantize_fp8", {"x": X, "codes": CODES[:2]}, "'codes': expected shape"),
    ("quantize_fp8", {"x": X, "codes": CODES.view(np.int8)}, "'codes': expected dtype float8_e4m3fn or uint8"),
    ("quantize_fp8", {"x": X, "scales": np.zeros((4, 2), np.float32)}, "'scales': expected shape"),
    ("quantize_fp8", {"x": X, "codes": X.view(np.uint8)[:, :128]}, "'codes': expected memory of its own"),
    ("dequantize_fp8", {"codes": CODES, "scales": None}, "'scales': expected an array"),
    ("dequantize_fp8", {"codes": CODES, "scales": SCALES[:3]}, "'scales': expected shape"),
    ("dequantize_fp8", {"codes": CODES, "scales": SCALES.astype(np.float16)}, "'scales': expected dtype float32"),
    ("dequantize_fp8", {"codes": X, "scales": SCALES}, "'codes': expected dtype float8_e4m3fn or uint8"),
    ("dequantize_fp8", {"codes": CODES, "scales": SCALES, "group": 0}, "'group'"),
    ("dequantize_fp8", {"codes": CODES, "scales": SCALES, "out": X}, "'out': expected dtype bfloat16"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), BAD)
def test_what_cannot_be_used_is_refused(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"{name}: argument {message}"):
        getattr(cupymla, name)(**arguments)


# Caches of indexer keys ----------------------------------------------------------------------------------------------


def written(cache: Any, slot: int) -> tuple[bytes, bytes]:
    """The codes and the scale of a slot, read off the bytes as DeepGEMM lays them out."""
    blocks, page = cache.shape[:2]
    block = cache.reshape(blocks, -1)[slot // page]
    place = slot % page
    return block[place * 128 :][:128].tobytes(), block[page * 128 + place * 4 :][:4].tobytes()


@pytest.mark.parametrize("shape", [(3, 4, 132), (3, 4, 1, 132), (5, 1, 132), (1, 64, 132)])
@pytest.mark.parametrize("rule", ["amax", "pow2"])
@pytest.mark.parametrize("indices", [np.int32, np.int64])
def test_a_written_slot_holds_codes_then_scales(shape: tuple[int, ...], rule: Any, indices: Any) -> None:
    rng = np.random.default_rng(0)
    k = rng.standard_normal((6, 128)).astype(ml_dtypes.bfloat16)
    cache = rng.integers(0, 256, shape, np.uint8)
    before = cache.copy()
    last = shape[0] * shape[1] - 1
    slots = np.array([2, -1, last, last + 1, 0, -(2**31)], indices)
    assert cupymla.indexer_k_quant_and_cache(k, cache, slots, scale_rule=rule) is cache
    codes, scales = cupymla.quantize_fp8(k, scale_rule=rule)
    for slot in range(last + 1):
        token = slots.tolist().index(slot) if slot in slots else None
        if token is None:
            assert written(cache, slot) == written(before, slot)
        else:
            assert written(cache, slot) == (codes[token].tobytes(), scales[token].tobytes())


def test_blocks_may_have_gaps() -> None:
    """What lies between them is not touched, by the writer or by the reader."""
    memory = np.full((3, 2 * 132 + 8), 7, np.uint8)
    cache = np.lib.stride_tricks.as_strided(memory, (3, 2, 132), (memory.strides[0], 132, 1))
    k = np.random.default_rng(0).standard_normal((6, 128)).astype(np.float32)
    cupymla.indexer_k_quant_and_cache(k, cache, np.arange(6))
    assert (memory[:, 264:] == 7).all()
    codes, scales = cupymla.gather_indexer_cache(cache, np.arange(6))
    want = cupymla.quantize_fp8(k)
    np.testing.assert_array_equal(codes.view(np.uint8), want[0].view(np.uint8))
    np.testing.assert_array_equal(scales, want[1][:, 0])


def filled(blocks: int, page: int) -> tuple[Any, Any, Any]:
    """A cache of which every slot is written, and what is there."""
    k = np.random.default_rng(blocks).standard_normal((blocks * page, 128)).astype(np.float32)
    cache = np.zeros((blocks, page, 132), np.uint8)
    cupymla.indexer_k_quant_and_cache(k, cache, np.arange(blocks * page, dtype=np.int32))
    codes, scales = cupymla.quantize_fp8(k)
    return cache, codes.view(np.uint8), scales[:, 0]


@given(st.lists(st.integers(-3, 30), max_size=20))
def test_gathered_slots_are_what_was_written(slots: list[int]) -> None:
    cache, codes, scales = filled(5, 4)
    k, k_scale = cupymla.gather_indexer_cache(cache, np.array(slots, np.int64))
    assert k.dtype == ml_dtypes.float8_e4m3fn and k.shape == (len(slots), 128)
    for row, slot in enumerate(slots):
        there = 0 <= slot < 20
        assert k.view(np.uint8)[row].tolist() == (codes[slot].tolist() if there else [0] * 128)
        assert k_scale[row] == (scales[slot] if there else 0)


@given(
    st.lists(st.integers(0, 9), max_size=4),
    st.integers(0, 30),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_gathered_requests_lie_behind_each_other(lens: list[int], rows: int, width: int, random: Any) -> None:
    """Each request by a loop over its positions, as far as there are rows."""
    cache, codes, scales = filled(5, 3)
    tables = np.array([[random.randint(-2, 6) for _ in range(width)] for _ in lens], np.int32)
    tables = tables.reshape(len(lens), width)
    cu_lens = np.cumsum([0, *lens], dtype=np.int32)
    k, k_scale = cupymla.gather_indexer_cache(cache, block_tables=tables, cu_lens=cu_lens, rows=rows)
    wanted, factors = np.zeros((rows, 128), np.uint8), np.zeros(rows, np.float32)
    row = 0
    for request, length in enumerate(lens):
        for position in range(length):
            column = position // 3
            if row < rows and column < width and 0 <= tables[request, column] < 5:
                slot = tables[request, column] * 3 + position % 3
                wanted[row], factors[row] = codes[slot], scales[slot]
            row += 1
    np.testing.assert_array_equal(k.view(np.uint8), wanted)
    np.testing.assert_array_equal(k_scale, factors)


def test_lengths_out_of_range_are_clamped() -> None:
    cache, codes, scales = filled(5, 3)
    tables = np.array([[1], [2]], np.int32)
    lens = np.array([-7, 2, 2**31 - 1], np.int32)
    k, k_scale = cupymla.gather_indexer_cache(cache, block_tables=tables, cu_lens=lens, rows=7)
    slots = [3, 4, 6, 7, 8]  # the second request goes on past its table
    np.testing.assert_array_equal(k.view(np.uint8)[:5], codes[slots])
    np.testing.assert_array_equal(k_scale, [*scales[slots], 0, 0])
    assert not k.view(np.uint8)[5:].any()


def test_any_lengths_and_tables_are_safe() -> None:
    cache, *_ = filled(5, 3)
    rng = np.random.default_rng(0)
    for _ in range(20):
        lens = rng.integers(-(2**31), 2**31, 4, dtype=np.int32)
        tables = rng.integers(-(2**31), 2**31, (3, 2), dtype=np.int32)
        k, k_scale = cupymla.gather_indexer_cache(cache, block_tables=tables, cu_lens=lens, rows=9)
        assert not k.view(np.uint8).any() and not k_scale.any()


CACHE, KEYS, SLOTS = np.zeros((3, 2, 132), np.uint8), np.zeros((4, 128), np.float32), np.zeros(4, np.int32)
TABLES, LENS = np.zeros((2, 2), np.int32), np.array([0, 2, 3], np.int32)
ODD = np.lib.stride_tricks.as_strided(np.zeros(900, np.uint8), (3, 2, 132), (266, 132, 1))
WRITTEN = {"k": KEYS, "cache": CACHE, "slot_mapping": SLOTS}
REQUESTS = {"cache": CACHE, "block_tables": TABLES, "cu_lens": LENS, "rows": 4}
WRITER, READER = "indexer_k_quant_and_cache", "gather_indexer_cache"
BAD_PAGES: list[tuple[str, dict[str, Any], str]] = [
    (WRITER, {**WRITTEN, "k": KEYS[:, :64]}, r"'k': expected shape \[T, 128\]"),
    (WRITER, {**WRITTEN, "k": KEYS.astype(int)}, "'k': expected dtype"),
    (WRITER, {**WRITTEN, "cache": CACHE[..., :128]}, "'cache': expected shape"),
    (WRITER, {**WRITTEN, "cache": CACHE[:, :0]}, "'cache': expected shape"),
    (WRITER, {**WRITTEN, "cache": CACHE[:, :, None].repeat(2, 2)}, "'cache': expected shape"),
    (WRITER, {**WRITTEN, "cache": CACHE.view(np.int8)}, "'cache': expected dtype"),
    (WRITER, {**WRITTEN, "cache": np.zeros((3, 2, 264), np.uint8)[..., :132]}, "'cache': expected blocks"),
    (WRITER, {**WRITTEN, "cache": ODD}, "'cache': expected a distance of blocks"),
    (WRITER, {**WRITTEN, "cache": np.zeros(900, np.uint8)[1:793].reshape(3, 2, 132)}, "'cache': expected an address"),
    (WRITER, {**WRITTEN, "slot_mapping": SLOTS[:3]}, r"'slot_mapping': expected shape \[4\]"),
    (WRITER, {**WRITTEN, "slot_mapping": None}, "'slot_mapping': expected an array"),
    (WRITER, {**WRITTEN, "slot_mapping": SLOTS.astype(np.int16)}, "'slot_mapping': expected dtype"),
    (
        WRITER,
        {**WRITTEN, "slot_mapping": SLOTS + 6, "check_indices": True},
        r"'slot_mapping': expected -1 to 5, got 6 at \[0\]",
    ),
    (WRITER, {**WRITTEN, "slot_mapping": SLOTS - 2, "check_indices": True}, "'slot_mapping': expected -1 to 5"),
    (READER, {"cache": CACHE}, "'slots': expected an array"),
    (READER, {"cache": CACHE, "slots": SLOTS, "rows": 4}, "'rows': expected None with slots"),
    (READER, {"cache": CACHE, "slots": SLOTS, "cu_lens": LENS}, "'cu_lens': expected None with slots"),
    (READER, {"cache": CACHE, "slots": SLOTS + 6, "check_indices": True}, "'slots': expected -1 to 5"),
    (READER, {**REQUESTS, "rows": None}, "'rows': expected how many"),
    (READER, {**REQUESTS, "rows": -1}, "'rows': expected an integer"),
    (READER, {**REQUESTS, "rows": True}, "'rows': expected an integer"),
    (READER, {**REQUESTS, "cu_lens": LENS[:2]}, r"'cu_lens': expected shape \[3\]"),
    (READER, {**REQUESTS, "cu_lens": None}, "'cu_lens': expected an array"),
    (READER, {**REQUESTS, "block_tables": TABLES.astype(np.int64)}, "'block_tables': expected dtype int32"),
    (
        READER,
        {**REQUESTS, "cu_lens": LENS + 2, "check_indices": True},
        r"'cu_lens': expected numbers from 0 to rows 4 that do not fall, got 5 at \[2\]",
    ),
    (READER, {**REQUESTS, "cu_lens": -LENS, "check_indices": True}, "'cu_lens': expected numbers"),
    (
        READER,
        {**REQUESTS, "block_tables": TABLES + 3, "check_indices": True},
        r"'block_tables': expected -1 to 2, got 3 at \[0, 0\]",
    ),
    (READER, {**REQUESTS, "k": np.zeros((3, 128), np.uint8)}, "'k': expected shape"),
    (READER, {**REQUESTS, "k_scale": np.zeros(4)}, "'k_scale': expected dtype"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), BAD_PAGES)
def test_what_no_page_takes_is_refused(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"{name}: argument {message}"):
        getattr(cupymla, name)(**arguments)


def test_indices_that_are_fine_pass_the_check() -> None:
    """Blocks behind the lengths are not looked at."""
    tables = np.array([[0, 99], [2, -7]], np.int32)
    cupymla.gather_indexer_cache(CACHE, block_tables=tables, cu_lens=LENS, rows=4, check_indices=True)
    cupymla.gather_indexer_cache(CACHE, SLOTS - 1, check_indices=True)
    cupymla.indexer_k_quant_and_cache(KEYS, CACHE.copy(), SLOTS - 1, check_indices=True)


# hadamard ------------------------------------------------------------------------------------------------------------


def signs(channels: int) -> np.ndarray[Any, Any]:
    """(-1)^popcount(i & j)."""
    return np.array([[1 - 2 * ((i & j).bit_count() % 2) for j in range(channels)] for i in range(channels)], np.float64)


@pytest.mark.parametrize("channels", [8, 16, 64, 128, 512])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_rotated_rows_are_products_with_the_matrix(channels: int, dtype: Any) -> None:
    """Half a unit of the dtype, and what fp32 sums of log2(channels) steps lose."""
    x = np.random.default_rng(channels).standard_normal((3, 2, channels)).astype(dtype)
    made = cupymla.hadamard(x)
    assert made.dtype == x.dtype
    exact = x.astype(np.float64) @ signs(channels) * channels**-0.5
    size = np.abs(x.astype(np.float64)) @ np.ones((channels, channels)) * channels**-0.5
    bound = np.abs(exact) * float(ml_dtypes.finfo(dtype).eps) / 2 + size * (np.log2(channels) + 2) * 2.0**-24
    assert (np.abs(made.astype(np.float64) - exact) <= bound * (1 + 1e-6)).all()


@given(st.integers(3, 9), st.integers(0, 2**32 - 1))
def test_integers_are_rotated_exactly(log2: int, seed: int) -> None:
    """Up to the factor, whose square times itself is the number of channels; twice gives the row again."""
    channels = 2**log2
    x = np.random.default_rng(seed).integers(-8, 9, (2, channels)).astype(np.float32)
    sums = x.astype(np.float64) @ signs(channels)
    np.testing.assert_array_equal(cupymla.hadamard(x), sums.astype(np.float32) * np.float32(channels**-0.5))
    np.testing.assert_allclose(cupymla.hadamard(cupymla.hadamard(x)), x, atol=1e-4)


def test_a_nan_reaches_its_row_alone() -> None:
    x = np.ones((3, 64), np.float32)
    x[1, 5] = np.nan
    made = cupymla.hadamard(x)
    assert np.isnan(made[1]).all() and np.isfinite(made[[0, 2]]).all()


@pytest.mark.parametrize("channels", [0, 1, 4, 96, 16384])
def test_other_numbers_of_channels_are_refused(channels: int) -> None:
    with pytest.raises(InputError, match="hadamard: argument 'x': expected D a power of two from 8 to 8192"):
        cupymla.hadamard(np.zeros((2, channels), np.float32))
    with pytest.raises(InputError, match="hadamard: argument 'out': expected dtype float32"):
        cupymla.hadamard(np.zeros((2, 64), np.float32), out=np.zeros((2, 64), np.float16))


def test_pages_that_no_kernel_can_count_are_refused_also_of_an_empty_cache() -> None:
    cache = np.zeros((0, 2**32, 132), np.uint8)
    with pytest.raises(InputError, match="'cache': expected up to"):
        cupymla.gather_indexer_cache(cache, np.zeros(3, np.int32))


def test_rows_that_no_kernel_can_count_are_refused() -> None:
    """Of strides 0: no such memory is there."""
    codes = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (0, 2**31 + 128), (0, 1))
    with pytest.raises(InputError, match="'codes': expected 0 to 2147483647 channels"):
        cupymla.dequantize_fp8(codes, np.zeros((0, 2**24 + 1), np.float32))
