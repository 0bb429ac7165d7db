"""Arithmetic that sm_100 adds, against ml_dtypes and NumPy."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from device import Kernel, Memory, Where
from isa_oracle import Array
from ptx_kernels import one_of

from cupymla.launch import Geometry
from cupymla_lab.emulate import Settings
from cupymla_lab.ptx.approximation import APPROXIMATIONS, Approximation, strayed

pytestmark = pytest.mark.compile

THREADS = 128
NUMBERS = np.array(
    [
        *(0.0, -0.0, 0.24, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 6.0, 7.0, 28.0, 448.0, 464.0, 500.0, 6e4),
        *(1e9, 2.0**-9, 2.0**-10, 3 * 2.0**-11, 1e-30, np.inf, np.nan),
    ],
    np.float32,
)


NARROW: dict[str, Any] = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
PACKED = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
TF32 = [("rn", ""), ("rn", ".relu"), ("rz", ""), ("rz", ".relu"), ("rna", "")]


def operations() -> Iterator[tuple[str, str]]:
    """Names of operations and their PTX: %r0 to %r3 hold the thread's row of inputs, the result is %r8 and %r9.

    %f0 to %f3 are the inputs as floats, %d0 and %d1 as pairs, %h0 and %b0 narrow temporaries.
    """
    for kind, narrow in (("e2m1", "b0"), ("e2m3", "h0"), ("e3m2", "h0")):
        bits = 8 if narrow == "b0" else 16
        yield f"narrow {kind}", f"cvt.rn.satfinite.{kind}x2.f32 %{narrow}, %f0, %f1; cvt.u32.u{bits} %r8, %{narrow};"
        yield f"widen {kind}", f"cvt.u{bits}.u32 %{narrow}, %r0; cvt.rn.f16x2.{kind}x2 %r8, %{narrow};"
    scales = "cvt.rp.satfinite.ue8m0x2.f32 %h0, %f0, %f1; cvt.u32.u16 %r8, %h0; cvt.rn.bf16x2.ue8m0x2 %r9, %h0;"
    yield "scale factors", scales
    four = "{%f0, %f1, %f2, %f3}"
    rounded = f"cvt.rs.satfinite.e2m1x4.f32 %h0, {four}, 0; cvt.rs.satfinite.e2m1x4.f32 %h1, {four}, -1;"
    yield "stochastic e2m1", rounded + "cvt.u32.u16 %r8, %h0; cvt.u32.u16 %r9, %h1;"
    for kind in ("e4m3", "e5m2"):
        rounded = f"cvt.rs.satfinite.{kind}x4.f32 %r8, {four}, 0; cvt.rs.satfinite.{kind}x4.f32 %r9, {four}, -1;"
        yield f"stochastic {kind}", rounded
    for name in PACKED:
        yield f"packed {name}", f"{name}.rn.f32x2 %d2, %d0, %d1; mov.b64 {{%r8, %r9}}, %d2;"
    yield "packed fma", "fma.rn.f32x2 %d2, %d0, %d1, %d1; mov.b64 {%r8, %r9}, %d2;"
    extremes = "max.f32 %f0, %f0, %f1, %f2; mov.b32 %r8, %f0; min.abs.f32 %f1, %f1, %f2, %f3; mov.b32 %r9, %f1;"
    yield "extremes of three", extremes
    yield "exp2", "ex2.approx.ftz.f32 %f0, %f0; mov.b32 %r8, %f0; ex2.approx.ftz.f32 %f1, %f1; mov.b32 %r9, %f1;"
    yield "pairs of narrow floats", "cvt.rn.bf16x2.f32 %r8, %f0, %f1; cvt.rn.f16x2.f32 %r9, %f0, %f1;"
    yield "reciprocal", "rcp.rn.f32 %f0, %f0; mov.b32 %r8, %f0;"
    yield "mixed precision", "cvt.rn.f16.f32 %h0, %f0; add.f32.f16 %f1, %h0, %f1; mov.b32 %r8, %f1;"
    redux = "redux.sync.max.f32 %f0, %f0, -1; mov.b32 %r8, %f0; redux.sync.min.abs.NaN.f32 %f1, %f1, -1;"
    yield "reductions over a warp", redux + "mov.b32 %r9, %f1;"
    moved = "and.b32 %n, %n, -2; ld.param.b64 %in, [p_in]; mad.wide.u32 %in, %n, 16, %in;"
    moved += "ld.global.v8.b32 {%r0, %r1, %r2, %r3, %r4, %r5, %r6, %r7}, [%in]; mov.b32 %r8, %r0; mov.b32 %r9, %r7;"
    yield "moves of 32 bytes", moved
    high = "mov.b32 {%h0, %h1}, %r0; mul.hi.u16 %h0, %h0, %h1; cvt.u32.u16 %r8, %h0;"
    yield "high halves", high + "mov.b32 {%h0, %h1}, %r1; mul.hi.s16 %h0, %h0, -13107; cvt.u32.u16 %r9, %h0;"
    for rounding, relu in TF32:
        for saturates in ("", ".satfinite"):
            yield f"tf32 {rounding}{saturates}{relu}", f"cvt.{rounding}{saturates}{relu}.tf32.f32 %r8, %f0;"
    yield "arrivals that drop out", DROPPED


# The first phase takes 130 arrivals, of which two drop out, so the second one takes 128.
DROPPED = """
    .shared .align 8 .b8 barrier[8];
    .reg .pred %first, %done; .reg .b32 %b; .reg .b64 %state;
    mov.u32 %b, barrier;
    setp.eq.u32 %first, %n, 0;
    @%first mbarrier.init.shared::cta.b64 [%b], 130;
    bar.sync 0;
    @!%first bra together;
    mbarrier.arrive_drop.shared::cta.b64 %state, [%b], 2;
    mbarrier.pending_count.b64 %r8, %state;
together:
    bar.sync 0;
    mbarrier.arrive.shared::cta.b64 _, [%b];
one:
    mbarrier.try_wait.parity.shared::cta.b64 %done, [%b], 0;
    @!%done bra one;
    mbarrier.arrive.shared::cta.b64 _, [%b];
two:
    mbarrier.try_wait.parity.shared::cta.b64 %done, [%b], 1;
    @!%done bra two;
    mov.b32 %r9, 1;
"""


@functools.cache
def kernel(where: Where) -> tuple[Kernel, list[str]]:
    """One kernel of all operations, and their names in its order."""
    texts = dict(operations())
    text = f"""
.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 p_in, .param .u64 p_out, .param .u32 p_which)
{{
    .reg .b32 %r<10>, %n, %which; .reg .f32 %f<4>; .reg .b64 %d<4>, %in, %out; .reg .b16 %h<2>; .reg .b8 %b<4>;
    ld.param.b64 %in, [p_in];
    ld.param.b64 %out, [p_out];
    ld.param.b32 %which, [p_which];
    mov.u32 %n, %tid.x;
    mad.wide.u32 %in, %n, 16, %in;
    mad.wide.u32 %out, %n, 8, %out;
    ld.global.v4.b32 {{%r0, %r1, %r2, %r3}}, [%in];
    mov.b32 %f0, %r0; mov.b32 %f1, %r1; mov.b32 %f2, %r2; mov.b32 %f3, %r3;
    mov.b64 %d0, {{%r0, %r1}}; mov.b64 %d1, {{%r2, %r3}};
    mov.b32 %r8, 0; mov.b32 %r9, 0;
    {one_of(list(texts.values()), "%which")}
    st.global.v2.b32 [%out], {{%r8, %r9}};
    ret;
}}
"""
    return Kernel(text, "arithmetic.ptx", where, THREADS), list(texts)


def evaluate(operation: str, inputs: Array, where: Where, approximation: Approximation = "exact") -> Array:
    """Runs an operation per thread.

    Args:
        operation: its name in `operations`.
        inputs: (128, 4) words.
        where: on which machine.
        approximation: where in its error ex2.approx lies, on the host.

    Returns:
        (128, 2) words.
    """
    loaded, names = kernel(where)
    source, target = Memory(inputs.astype(np.uint32), where), Memory(np.zeros((THREADS, 2), np.uint32), where)
    parameters: list[Any] = [source.parameter, target.parameter, ctypes.c_uint32(names.index(operation))]
    loaded.launch(Geometry((1, 1, 1), THREADS, 0), parameters, Settings(approximation=approximation))
    return target.read()


def floats(seed: int = 0) -> Array:
    """(128, 4) floats: the awkward ones above in both signs, then random ones of many sizes."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((THREADS, 4)).astype(np.float32) * 2.0 ** rng.integers(-12, 10, (THREADS, 4))
    both = np.concatenate([NUMBERS, -NUMBERS])
    flat = values.astype(np.float32).reshape(-1)
    flat[: 2 * both.size : 2] = both
    return flat.reshape(THREADS, 4)


def words(values: Array) -> Array:
    return np.ascontiguousarray(values).view(np.uint32)


LARGEST = {"e2m1": 6.0, "e2m3": 7.5, "e3m2": 28.0, "e4m3": 448.0, "e5m2": 57344.0}


def narrowed(values: Array, kind: str) -> Array:
    """Rounded to nearest even and saturated; NaN becomes the largest number where a type has no NaN."""
    clipped = np.clip(values, -LARGEST[kind], LARGEST[kind])
    found = clipped.astype(NARROW[kind]).view(np.uint8).astype(np.uint32)
    missing = {"e2m1": 0x7, "e2m3": 0x1F, "e3m2": 0x1F, "e4m3": 0x7F, "e5m2": 0x7F}[kind]
    return np.where(np.isnan(values), missing, found).astype(np.uint32)


@pytest.mark.parametrize("kind", ["e2m1", "e2m3", "e3m2"])
def test_narrowing(kind: str, where: Where) -> None:
    values = floats()
    bits = 4 if kind == "e2m1" else 8
    wanted = narrowed(values[:, 0], kind) << bits | narrowed(values[:, 1], kind)
    np.testing.assert_array_equal(evaluate(f"narrow {kind}", words(values), where)[:, 0], wanted)


@pytest.mark.parametrize("kind", ["e2m1", "e2m3", "e3m2"])
def test_widening(kind: str, where: Where) -> None:
    count = {"e2m1": 16, "e2m3": 64, "e3m2": 64}[kind]
    codes = np.arange(THREADS, dtype=np.uint32) % count
    low, bits = (codes * 7 + 3) % count, 4 if kind == "e2m1" else 8
    inputs = np.zeros((THREADS, 4), np.uint32)
    inputs[:, 0] = codes << bits | low
    found = evaluate(f"widen {kind}", inputs, where)[:, 0]
    halves = [part.astype(np.uint8).view(NARROW[kind]).astype(np.float16).view(np.uint16) for part in (low, codes)]
    np.testing.assert_array_equal(found, halves[0] | halves[1].astype(np.uint32) << 16)


def test_scale_factors(where: Where) -> None:
    """ue8m0 holds powers of two: rounding up gives the next one, towards zero the one before."""
    values = floats(1)
    found = evaluate("scale factors", words(values), where)

    def up(value: float) -> int:
        size = abs(float(value))
        if np.isnan(size):
            return 0xFF
        if size == 0 or size < 2.0**-127:
            return 0
        return 0xFE if np.isinf(size) else min(int(np.ceil(np.log2(size))) + 127, 0xFE)

    codes = np.array([[up(a), up(b)] for a, b in values[:, :2]], np.uint32)
    np.testing.assert_array_equal(found[:, 0], codes[:, 0] << 8 | codes[:, 1])
    numbers = np.where(codes == 0xFF, np.nan, 2.0 ** (codes.astype(np.float64) - 127)).astype(ml_dtypes.bfloat16)
    wide = numbers.view(np.uint16).astype(np.uint32)
    is_nan = codes == 0xFF
    expected = np.where(is_nan, 0x7FFF, wide)
    np.testing.assert_array_equal(found[:, 1], expected[:, 0] << 16 | expected[:, 1])


@pytest.mark.parametrize("kind", ["e2m1", "e4m3", "e5m2"])
def test_stochastic_rounding_brackets_the_number(kind: str, where: Where) -> None:
    """With all random bits off it rounds down in magnitude, with all on it reaches the next number at most."""
    values = np.abs(np.nan_to_num(floats(2), nan=1.0, posinf=1.0, neginf=1.0)) % LARGEST[kind]
    found = evaluate(f"stochastic {kind}", words(values.astype(np.float32)), where)
    bits = 4 if kind == "e2m1" else 8
    for index in range(4):
        shift, mask = bits * (3 - index), (1 << bits) - 1
        codes = [(found[:, i] >> shift & mask).astype(np.uint8) for i in (0, 1)]
        low, high = (code.view(NARROW[kind]).astype(np.float64) for code in codes)
        assert (low <= values[:, index]).all() and (codes[1] - codes[0] <= 1).all()
        assert (high >= low).all()


@pytest.mark.parametrize("name", PACKED)
def test_packed_pairs(name: str, where: Where) -> None:
    values = np.nan_to_num(floats(3), nan=2.0, posinf=3.0, neginf=-3.0).astype(np.float32)
    found = evaluate(f"packed {name}", words(values), where)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(found.view(np.float32), PACKED[name](values[:, :2], values[:, 2:]))


def test_fused_pairs_round_once(where: Where) -> None:
    values = np.nan_to_num(floats(4), nan=2.0, posinf=3.0, neginf=-3.0).astype(np.float32)
    found = evaluate("packed fma", words(values), where)
    wide = values.astype(np.longdouble)
    wanted = np.stack([wide[:, 0] * wide[:, 2] + wide[:, 2], wide[:, 1] * wide[:, 3] + wide[:, 3]], 1)
    np.testing.assert_array_equal(found.view(np.float32), wanted.astype(np.float32))


def test_extremes_of_three(where: Where) -> None:
    values = np.nan_to_num(floats(5), nan=2.0).astype(np.float32)
    found = evaluate("extremes of three", words(values), where).view(np.float32)
    np.testing.assert_array_equal(found[:, 0], values[:, :3].max(axis=1))
    np.testing.assert_array_equal(found[:, 1], np.abs(values[:, 1:]).min(axis=1))


def test_powers_of_two(where: Where) -> None:
    """To 2 ulp; results that are no normal numbers become 0 (PTX ISA, "ex2", .ftz)."""
    values = floats()
    values[-1] = -149.0, -126.0, -126.5, 200.0
    got = evaluate("exp2", words(values), where)[:, 0].view(np.float32)
    wanted = np.exp2(values[:, 0].astype(np.float64))
    normal = ~(wanted < np.finfo(np.float32).tiny)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(got[normal], wanted[normal].astype(np.float32), rtol=2.0**-22)
    assert np.all(got[~normal] == 0) and not normal.all()


@pytest.mark.parametrize("approximation", APPROXIMATIONS[1:])
def test_powers_of_two_stray_as_the_interpreters_do(approximation: Approximation) -> None:
    values = floats(3)
    values[-1] = -149.0, -126.0, -125.0, 127.9999999
    exact, got = (evaluate("exp2", words(values), "host", how).view(np.float32) for how in ("exact", approximation))
    np.testing.assert_array_equal(got, strayed(values[:, :2].copy(), exact, approximation))
    steps = (words(got).astype(np.int64) - words(exact))[np.isfinite(exact) & (exact > 1e-37) & (values[:, :2] != 0)]
    wanted = {"above": {2}, "below": {-2}, "scattered": {-2, -1, 0, 1, 2}}
    assert set(steps.tolist()) == wanted[approximation]


def test_pairs_of_narrow_floats(where: Where) -> None:
    """The first source goes to the upper half."""
    values = np.nan_to_num(floats(7), nan=1.5).astype(np.float32)
    got = evaluate("pairs of narrow floats", words(values), where)[:, :2].copy()
    with np.errstate(over="ignore"):
        for column, dtype in ((0, ml_dtypes.bfloat16), (1, np.float16)):
            halves = got[:, column].copy().view(np.uint16).reshape(-1, 2)
            wanted = values[:, 1::-1].astype(dtype)
            np.testing.assert_array_equal(halves, np.ascontiguousarray(wanted).view(np.uint16))


def test_reciprocals(where: Where) -> None:
    values = floats(8)
    got = evaluate("reciprocal", words(values), where)[:, 0].view(np.float32)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(got, np.float32(1) / values[:, 0])


def test_mixed_precision(where: Where) -> None:
    values = np.nan_to_num(floats(6), nan=2.0, posinf=3.0, neginf=-3.0).astype(np.float32) % 1000
    found = evaluate("mixed precision", words(values), where)[:, 0].view(np.float32)
    np.testing.assert_array_equal(found, values[:, 0].astype(np.float16).astype(np.float32) + values[:, 1])


def test_reductions_over_a_warp(where: Where) -> None:
    values = floats(7)
    found = evaluate("reductions over a warp", words(values), where).view(np.float32)
    for warp in range(THREADS // 32):
        rows = slice(32 * warp, 32 * warp + 32)
        np.testing.assert_array_equal(found[rows, 0], np.full(32, np.nanmax(values[rows, 0])))
        np.testing.assert_array_equal(found[rows, 1], np.full(32, np.abs(values[rows, 1]).min()))


def test_moves_of_32_bytes(where: Where) -> None:
    inputs = np.arange(THREADS * 4, dtype=np.uint32).reshape(THREADS, 4)
    found = evaluate("moves of 32 bytes", inputs, where)
    even = np.arange(THREADS) // 2 * 2
    np.testing.assert_array_equal(found, np.stack([inputs[even, 0], inputs[even + 1, 3]], 1))


def test_high_halves_of_16_bit_products(where: Where) -> None:
    values = np.random.default_rng(6).integers(0, 2**32, (THREADS, 4), np.uint32)
    found = evaluate("high halves", values, where)
    halves = values.view(np.uint16).reshape(THREADS, 8)
    np.testing.assert_array_equal(found[:, 0], halves[:, 0].astype(np.uint32) * halves[:, 1] >> 16)
    signed = halves[:, 2].view(np.int16).astype(np.int32) * -13107 >> 16
    np.testing.assert_array_equal(found[:, 1], signed.astype(np.uint16))


@pytest.mark.parametrize("saturates", ["", ".satfinite"])
@pytest.mark.parametrize(("rounding", "relu"), TF32)
def test_to_tf32(rounding: str, saturates: str, relu: str, where: Where) -> None:
    """13 bits fewer; sm_90 has .satfinite with rna only, sm_100 with the others as well."""
    values = floats(3)
    values[:8, 0] = [
        3.4e38,
        -3.4e38,
        3.3999e38,
        np.finfo(np.float32).max,
        -np.inf,
        np.inf,
        1 + 2.0**-11,
        1 + 3 * 2.0**-11,
    ]
    bits = words(values[:, 0])
    # Sign and magnitude apart: rounding is of the magnitude.
    magnitude = (bits & 0x7FFFFFFF).astype(np.uint64)
    step = magnitude >> 13
    rest = magnitude & 0x1FFF
    up = {"rz": 0 * rest, "rna": rest >= 0x1000, "rn": (rest > 0x1000) | ((rest == 0x1000) & (step & 1 == 1))}[rounding]
    wanted = (step + up.astype(np.uint64)) << 13
    wanted = np.minimum(wanted, 0x7F7FE000 if saturates else 0x7F800000).astype(np.uint32) | (bits & 0x80000000)
    if relu:
        wanted = np.where(bits & 0x80000000, 0, wanted)
    found = evaluate(f"tf32 {rounding}{saturates}{relu}", words(values), where)[:, 0]
    numbers = ~np.isnan(values[:, 0])
    np.testing.assert_array_equal(found[numbers], wanted[numbers])
    assert np.isnan(found.view(np.float32)[~numbers]).all()


def test_arrivals_that_drop_out(where: Where) -> None:
    found = evaluate("arrivals that drop out", np.zeros((THREADS, 4), np.uint32), where)
    assert found[0, 0] == 130 and (found[:, 1] == 1).all()
