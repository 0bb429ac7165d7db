"""Instructions of kernels for Hopper and before against independent statements of what they do, many to a kernel."""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from conftest import HOST
from hopper_kit import element, run

from cupymla_lab.ptx.approximation import Approximation, strayed

pytestmark = [HOST, pytest.mark.compile]

INTEGERS = np.array(
    [0, 1, 2, 3, 31, 32, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0x12345678, 0xDEADBEEF], np.uint32
)
PAIRS = np.array([(a, b) for a in INTEGERS for b in INTEGERS], np.uint32)[:128]
A, B = np.ascontiguousarray(PAIRS[:, 0]), np.ascontiguousarray(PAIRS[:, 1])


def signed(x: int) -> int:
    return x - 2**32 if x >= 2**31 else x


def toward_zero(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


BINARY: dict[str, Callable[[int, int], int | None]] = {
    "add.s32": lambda a, b: a + b,
    "sub.s32": lambda a, b: a - b,
    "mul.lo.s32": lambda a, b: a * b,
    "mul.hi.u32": lambda a, b: (a * b) >> 32,
    "mul.hi.s32": lambda a, b: (signed(a) * signed(b)) >> 32,
    "div.u32": lambda a, b: a // b if b else None,
    "rem.u32": lambda a, b: a % b if b else None,
    "div.s32": lambda a, b: toward_zero(signed(a), signed(b)) if b else None,
    "rem.s32": lambda a, b: signed(a) - signed(b) * toward_zero(signed(a), signed(b)) if b else None,
    "min.s32": lambda a, b: min(signed(a), signed(b)),
    "max.u32": max,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b if b < 32 else 0,
    "shr.u32": lambda a, b: a >> b if b < 32 else 0,
    "shr.s32": lambda a, b: signed(a) >> min(b, 31),
}


def test_integer_arithmetic() -> None:
    out = np.zeros((len(BINARY), len(A)), np.uint32)
    lines = [f"{element(4, 0)} ld.global.u32 %r1, [%d10]; {element(4, 1)} ld.global.u32 %r2, [%d10]; {element(4, 2)}"]
    for k, opcode in enumerate(BINARY):
        lines.append(f"{opcode} %r3, %r1, %r2; st.global.u32 [%d10+{4 * k * len(A)}], %r3;")
    run("\n".join(lines), A, B, out, threads=len(A), readonly=2)
    for row, (opcode, stated) in zip(out.tolist(), BINARY.items(), strict=True):
        for a, b, got in zip(A.tolist(), B.tolist(), row, strict=True):
            expected = stated(a, b)
            assert expected is None or got == expected % 2**32, (opcode, hex(a), hex(b))


UNARY: dict[str, Callable[[int], int]] = {
    "popc.b32": lambda a: bin(a).count("1"),
    "clz.b32": lambda a: 32 - a.bit_length(),
    "brev.b32": lambda a: int(f"{a:032b}"[::-1], 2),
    "bfind.u32": lambda a: a.bit_length() - 1,
    "bfind.shiftamt.u32": lambda a: 32 - a.bit_length() if a else -1,
    "not.b32": lambda a: ~a,
    "neg.s32": lambda a: -a,
    "abs.s32": lambda a: abs(signed(a)),
}
FIELDS = [(start, length) for start in (0, 5, 31, 40) for length in (0, 1, 7, 32, 40)]


def test_bits_of_one_word() -> None:
    """Functions of a word, and fields of it: the sign is a field's last bit, or bit 31 where it reaches past that."""
    count = len(INTEGERS)
    out = np.zeros((len(UNARY) + 3 * len(FIELDS), count), np.uint32)
    lines = [f"{element(4, 0)} ld.global.u32 %r1, [%d10]; {element(4, 1)}"]
    made = [f"{opcode} %r3, %r1;" for opcode in UNARY]
    for start, length in FIELDS:
        made += [f"bfe.{kind}32 %r3, %r1, {start}, {length};" for kind in "us"]
        made.append(f"bfi.b32 %r3, %r1, 0xAAAAAAAA, {start}, {length};")
    lines += [f"{each} st.global.u32 [%d10+{4 * k * count}], %r3;" for k, each in enumerate(made)]
    run("\n".join(lines), INTEGERS, out, threads=count, readonly=1)
    for row, (opcode, stated) in zip(out.tolist(), UNARY.items(), strict=False):
        assert row == [stated(a) % 2**32 for a in INTEGERS.tolist()], opcode
    for k, (start, length) in enumerate(FIELDS):
        plain, extended, inserted = out[len(UNARY) + 3 * k :][:3].tolist()
        mask = 2 ** max(0, min(length, 32 - start)) - 1
        for place, a in enumerate(INTEGERS.tolist()):
            field = (a >> start) & mask
            sign = length > 0 and a >> min(start + length - 1, 31) & 1
            assert plain[place] == field
            assert extended[place] == (field | (~mask if sign else 0)) % 2**32, (start, length, hex(a))
            assert inserted[place] == (0xAAAAAAAA & ~(mask << start) | (a & mask) << start) % 2**32


def test_permute_and_funnel() -> None:
    out = np.zeros((3, 32), np.uint32)
    body = f"""mov.u32 %r1, 0x33221100; mov.u32 %r2, 0xF7665544; prmt.b32 %r3, %r1, %r2, 0xF071;
    shf.r.wrap.b32 %r4, %r1, %r2, 8; lop3.b32 %r5, %r1, %r2, %r0, 0x96;
    {element(4)} st.global.u32 [%d10], %r3; st.global.u32 [%d10+128], %r4; st.global.u32 [%d10+256], %r5;"""
    run(body, out)
    assert out[0, 0] == 0xFF00F711
    assert out[1, 0] == 0x44332211
    assert out[2].tolist() == [0x33221100 ^ 0xF7665544 ^ lane for lane in range(32)]


FLOATS = np.array([0.0, -0.0, 1.5, -2.5, 1e-40, 3e38, np.inf, -np.inf, np.nan, 0.1, 2.0**31, -(2.0**31)], np.float32)


def test_comparisons_with_nan_and_conversions_that_saturate() -> None:
    """Ordered comparisons are false beside a NaN, unordered ones true."""
    names = ["eq", "ne", "lt", "ge", "equ", "neu", "ltu", "geu", "num", "nan"]
    modes = ["rzi", "rni", "rmi"]
    out = np.zeros((len(names) + len(modes), len(FLOATS)), np.int32)
    lines = [f"{element(4, 0)} ld.global.f32 %f1, [%d10]; {element(4, 1)}"]
    made = [f"setp.{name}.f32 %p1, %f1, 0f3F800000; selp.u32 %r1, 1, 0, %p1;" for name in names]
    made += [f"cvt.{mode}.s32.f32 %r1, %f1;" for mode in modes]
    lines += [f"{each} st.global.u32 [%d10+{4 * k * len(FLOATS)}], %r1;" for k, each in enumerate(made)]
    run("\n".join(lines), FLOATS, out, threads=len(FLOATS), readonly=1)
    for k, x in enumerate(FLOATS.tolist()):
        nan = math.isnan(x)
        expected = [x == 1, x != 1 and not nan, x < 1, x >= 1, x == 1 or nan, x != 1, x < 1 or nan, x >= 1 or nan]
        assert out[:10, k].tolist() == [int(e) for e in [*expected, not nan, nan]], x
    low, high = -(2**31), 2**31 - 1
    assert out[10].tolist() == [0, 0, 1, -2, 0, high, high, low, 0, 0, high, low]
    assert out[11].tolist() == [0, 0, 2, -2, 0, high, high, low, 0, 0, high, low]
    assert out[12].tolist() == [0, 0, 1, -3, 0, high, high, low, 0, 0, high, low]


def test_a_nan_beside_a_number_is_passed_over() -> None:
    """Also one that would signal, as the largest magnitude of bits of any kind meets them; `.NaN` gives NaN."""
    words = np.array([0x7FC00000, 0x7F800001, 0xFFA00000, 0x3F800000], np.uint32)
    made = [f"{opcode}.f32 %f3, {pair};" for opcode in ("max", "min", "max.NaN") for pair in ("%f1, %f2", "%f2, %f1")]
    out = np.zeros((len(made), len(words)), np.float32)
    lines = [f"{element(4, 0)} ld.global.f32 %f1, [%d10]; mov.f32 %f2, 0f40400000; {element(4, 1)}"]
    lines += [f"{each} st.global.f32 [%d10+{4 * k * len(words)}], %f3;" for k, each in enumerate(made)]
    run("\n".join(lines), words, out, threads=len(words), readonly=1)
    expected = [[3, 3, 3, 3]] * 2 + [[3, 3, 3, 1]] * 2 + [[np.nan, np.nan, np.nan, 3]] * 2
    np.testing.assert_array_equal(out, expected)


def test_packed_conversions() -> None:
    values = np.array([[1.0, -3.140625], [500.0, -1e9], [0.001, 7.0]], np.float32)
    out = np.zeros((4, 3), np.uint32)
    body = f"""{element(8, 0)} ld.global.v2.f32 {{%f1, %f2}}, [%d10]; cvt.rn.bf16x2.f32 %r1, %f2, %f1;
    cvt.rn.f16x2.f32 %r2, %f2, %f1; cvt.rn.satfinite.e4m3x2.f32 %h1, %f2, %f1; cvt.rn.f16x2.e4m3x2 %r3, %h1;
    cvt.u32.u16 %r4, %h1; {element(4, 1)} st.global.u32 [%d10], %r1; st.global.u32 [%d10+12], %r2;
    st.global.u32 [%d10+24], %r3; st.global.u32 [%d10+36], %r4;"""
    run(body, values, out, threads=3, readonly=1)
    with np.errstate(over="ignore"):
        assert out[0].tobytes() == values.astype(ml_dtypes.bfloat16).tobytes()
        assert out[1].tobytes() == values.astype(np.float16).tobytes()
    codes = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    assert out[3].astype(np.uint16).tobytes() == codes.tobytes()
    assert out[2].tobytes() == codes.astype(np.float16).tobytes()


SHUFFLES: list[tuple[str, int, int, Callable[[int], int]]] = [
    ("bfly", 5, 31, lambda lane: lane ^ 5),
    ("bfly", 8, 0x181F, lambda lane: lane ^ 8 if lane & 8 else lane),  # past the segment, but not before it
    ("up", 3, 0, lambda lane: lane - 3 if lane >= 3 else lane),
    ("up", 3, 0x1800, lambda lane: lane - 3 if lane % 8 >= 3 else lane),
    ("down", 3, 31, lambda lane: lane + 3 if lane + 3 < 32 else lane),
    ("down", 3, 0x181F, lambda lane: lane + 3 if lane % 8 + 3 < 8 else lane),
    ("idx", 9, 31, lambda lane: 9),
    ("idx", 1, 0x181F, lambda lane: lane // 8 * 8 + 1),
]


def test_shuffles_stay_in_their_segments() -> None:
    """Also what the predicate says: whether the lane that is named lies in the segment."""
    out = np.zeros((2 * len(SHUFFLES), 64), np.uint32)
    lines = [element(4)]
    for k, (mode, by, limit, _) in enumerate(SHUFFLES):
        lines.append(f"shfl.sync.{mode}.b32 %r1|%p1, %r0, {by}, {limit}, 0xffffffff; selp.u32 %r2, 1, 0, %p1;")
        lines.append(f"st.global.u32 [%d10+{512 * k}], %r1; st.global.u32 [%d10+{512 * k + 256}], %r2;")
    run("\n".join(lines), out, threads=64)
    for k, (mode, by, limit, source) in enumerate(SHUFFLES):
        assert out[2 * k].tolist() == [lane // 32 * 32 + source(lane % 32) for lane in range(64)], (mode, by, limit)
        inside = [int(mode == "idx" or source(lane % 32) != lane % 32) for lane in range(64)]
        assert out[2 * k + 1].tolist() == inside, (mode, by, limit)


def test_divergence_and_votes() -> None:
    """Lanes that took different ways meet again, and a vote waits for them."""
    out = np.zeros(32, np.uint32)
    body = f"""and.b32 %r1, %r0, 1; setp.eq.s32 %p1, %r1, 0; mov.u32 %r2, 100;
    @%p1 bra EVEN; add.s32 %r2, %r2, %r0; bra JOIN;
EVEN: mul.lo.s32 %r2, %r2, %r0;
JOIN: setp.gt.u32 %p2, %r2, 110; vote.sync.ballot.b32 %r3, %p2, 0xffffffff; xor.b32 %r2, %r2, %r3;
    {element(4)} st.global.u32 [%d10], %r2;"""
    run(body, out)
    values = [100 * k if k % 2 == 0 else 100 + k for k in range(32)]
    ballot = sum(1 << k for k, v in enumerate(values) if v > 110)
    assert out.tolist() == [v ^ ballot for v in values]


def test_registers_that_were_never_written_hold_ones() -> None:
    """Where a guard or a branch kept a lane from it, and where an instruction writes what it reads; not where each use
    comes behind a write."""
    out = np.zeros((5, 32), np.uint32)
    stores = [f"st.global.u32 [%d10+{128 * k}], %r{k + 1};" for k in range(5)]
    body = f"""and.b32 %r10, %r0, 1; setp.eq.s32 %p1, %r10, 0; {element(4)}
    @%p1 mov.u32 %r1, 7; add.s32 %r3, %r3, 1; mov.u32 %r4, 11; add.s32 %r5, %r4, %r0;
    {stores[0]} {" ".join(stores[2:])} @%p1 bra JOIN; mov.u32 %r2, 5; add.s32 %r2, %r2, 4;
JOIN: {stores[1]}"""
    run(body, out)
    even, ones = np.arange(32) % 2 == 0, 0xFFFFFFFF
    wanted = [np.where(even, 7, ones), np.where(even, ones, 9), 0 * even, 11 + 0 * even, 11 + np.arange(32)]
    np.testing.assert_array_equal(out, np.array(wanted, np.uint32))


def test_atomics_return_each_value_once_and_vectors_add_each_element() -> None:
    counter, out, sums = np.zeros(1, np.uint32), np.zeros(64, np.uint32), np.arange(4, dtype=np.float32)
    body = f"""atom.add.acq_rel.gpu.global.u32 %r1, [%d0], 3; {element(4, 1)} st.global.u32 [%d10], %r1;
    red.relaxed.gpu.global.add.v4.f32 [%d2], {{0f3F800000, 0f40000000, 0f40400000, 0f40800000}};"""
    run(body, counter, out, sums, threads=64)
    assert counter[0] == 192
    assert sorted(out.tolist()) == list(range(0, 192, 3))
    np.testing.assert_array_equal(sums, np.arange(4) + 64 * np.arange(1, 5))


def test_matrix_product_of_a_warp() -> None:
    """mma.m16n8k16 between ldmatrix and the accumulators' layout, against a plain product."""
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((16, 16)).astype(np.float16), rng.standard_normal((8, 16)).astype(np.float16)
    out = np.zeros((16, 8), np.float32)
    body = f"""mov.u32 %r1, tile; {element(16, 0)} ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%d10];
    shl.b32 %r2, %r0, 4; add.s32 %r2, %r2, %r1; st.shared.v4.u32 [%r2], {{%r4, %r5, %r6, %r7}};
    setp.lt.u32 %p1, %r0, 16; {element(16, 1)} @%p1 ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%d10];
    @%p1 st.shared.v4.u32 [%r2+512], {{%r4, %r5, %r6, %r7}}; bar.warp.sync 0xffffffff;
    and.b32 %r8, %r0, 15; shl.b32 %r8, %r8, 5; shr.u32 %r9, %r0, 4; shl.b32 %r9, %r9, 4;
    add.s32 %r8, %r8, %r9; add.s32 %r8, %r8, %r1;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r8];
    and.b32 %r8, %r0, 7; shl.b32 %r8, %r8, 5; and.b32 %r9, %r0, 8; shl.b32 %r9, %r9, 1;
    add.s32 %r8, %r8, %r9; add.s32 %r8, %r8, %r1;
    ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{%r14, %r15}}, [%r8+512];
    mov.f32 %f0, 0f00000000; mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{%f1, %f2, %f3, %f4}},
      {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{%f0, %f0, %f0, %f0}};
    shr.u32 %r16, %r0, 2; and.b32 %r17, %r0, 3; shl.b32 %r16, %r16, 5; shl.b32 %r17, %r17, 3;
    add.s32 %r16, %r16, %r17; cvt.u64.u32 %d11, %r16; add.s64 %d11, %d11, %d2;
    st.global.v2.f32 [%d11], {{%f1, %f2}}; st.global.v2.f32 [%d11+256], {{%f3, %f4}};"""
    run(body, a, b, out, readonly=2, races="specified")
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(out, expected, rtol=2.0**-23, atol=1e-30)


def test_product_of_bytes_and_a_matrix_turned_over() -> None:
    """mma.m16n8k32 of signed bytes on top of given sums, against a plain product; movmatrix, of the lanes' numbers."""
    rng = np.random.default_rng(1)
    a, b = rng.integers(-128, 128, (16, 32), np.int8), rng.integers(-128, 128, (8, 32), np.int8)
    out, turned = np.zeros((16, 8), np.int32), np.zeros(32, np.uint32)
    # Row g of each begins at byte 32 g, and lane 4 g + t reads from byte 4 t of it on.
    body = f"""shr.u32 %r1, %r0, 2; and.b32 %r2, %r0, 3; shl.b32 %r3, %r1, 5; shl.b32 %r4, %r2, 2;
    add.s32 %r3, %r3, %r4; cvt.u64.u32 %d10, %r3; add.s64 %d11, %d10, %d0; add.s64 %d12, %d10, %d1;
    ld.global.u32 %r4, [%d11]; ld.global.u32 %r5, [%d11+256]; ld.global.u32 %r6, [%d11+16];
    ld.global.u32 %r7, [%d11+272]; ld.global.u32 %r8, [%d12]; ld.global.u32 %r9, [%d12+16]; mov.u32 %r10, 1000;
    mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {{%r11, %r12, %r13, %r14}}, {{%r4, %r5, %r6, %r7}}, {{%r8, %r9}},
      {{%r10, %r10, %r10, %r10}};
    shl.b32 %r3, %r1, 5; shl.b32 %r4, %r2, 3; add.s32 %r3, %r3, %r4; cvt.u64.u32 %d10, %r3; add.s64 %d10, %d10, %d2;
    st.global.v2.u32 [%d10], {{%r11, %r12}}; st.global.v2.u32 [%d10+256], {{%r13, %r14}};
    shl.b32 %r15, %r0, 1; add.s32 %r16, %r15, 1; shl.b32 %r16, %r16, 16; or.b32 %r15, %r15, %r16;
    movmatrix.sync.aligned.m8n8.trans.b16 %r17, %r15; {element(4, 3)} st.global.u32 [%d10], %r17;"""
    run(body, a, b, out, turned, readonly=2)
    np.testing.assert_array_equal(out, a.astype(np.int32) @ b.astype(np.int32).T + 1000)
    np.testing.assert_array_equal(turned.view(np.uint16).reshape(8, 8), np.arange(64).reshape(8, 8).T)


EX2 = f"""{element(4)} {element(4, 1, "%d11")}
    ld.global.f32 %f0, [%d10]; ex2.approx.ftz.f32 %f1, %f0; st.global.f32 [%d11], %f1;"""


@pytest.mark.parametrize(("approximation", "steps"), [("exact", {0}), ("above", {2}), ("below", {-2})])
def test_powers_of_two_stray_where_they_are_told_to(approximation: Approximation, steps: set[int]) -> None:
    """All but those that the ISA states, 2**0 among them where subnormal numbers are flushed to it."""
    exponents = np.array([*np.linspace(-20, 20, 26), 1e-40, -1e-40, 0.0, np.inf, -np.inf, np.nan], np.float32)
    out = np.zeros(32, np.float32)
    run(EX2, exponents, out, readonly=1, approximation=approximation)
    exact = np.exp2(exponents.astype(np.float64)).astype(np.float32)
    assert set((out.view(np.int32) - exact.view(np.int32))[:26].tolist()) == steps
    np.testing.assert_array_equal(out[26:], exact[26:])


def test_scattered_powers_of_two_depend_on_the_argument_alone() -> None:
    exponents = np.random.default_rng(1).uniform(-30, 30, 1024).astype(np.float32)
    exact, out = np.exp2(exponents.astype(np.float64)).astype(np.float32), np.zeros(1024, np.float32)
    run(EX2, exponents, out, threads=1024, readonly=1, approximation="scattered")
    steps, counts = np.unique(out.view(np.int32) - exact.view(np.int32), return_counts=True)
    assert steps.tolist() == [-2, -1, 0, 1, 2] and counts.min() > 1024 / 5 * 0.7
    np.testing.assert_array_equal(out, strayed(exponents, exact, "scattered"))
