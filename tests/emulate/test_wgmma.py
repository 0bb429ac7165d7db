"""wgmma on the host machine: products against NumPy, every rule about the registers and memory that one uses.

Operands are placed element by element as the ISA's figures say, by code of the tests' own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from conftest import HOST
from hopper_kit import element, run

from cupymla_lab.emulate import MODES, HostError
from cupymla_lab.emulate.settings import Mode

pytestmark = [HOST, pytest.mark.compile]

Array = npt.NDArray[Any]
FENCE, DONE = "fence.proxy.async.shared::cta;", "wgmma.wait_group.sync.aligned 0;"
DTYPES: dict[str, Any] = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2, "s8": np.int8, "u8": np.uint8,
}  # fmt: skip
A_AT, B_AT = 1024, 1024 + 32768  # in the tile, whose first byte lies at 1024 of the CTA's window
SHARED = 3 * 32768


@dataclass(frozen=True, slots=True)
class Form:
    """A product: columns, types, from where A comes, which operands lie transposed, bytes of the swizzle's row."""

    n: int
    d: str
    a: str
    b: str
    from_registers: bool = False
    transposed: tuple[bool, bool] = (False, False)
    span: int = 128
    negated: tuple[int, int] = (1, 1)

    @property
    def k(self) -> int:
        return 32 // int(np.dtype(DTYPES[self.a]).itemsize)

    def __str__(self) -> str:
        place = "registers" if self.from_registers else "memory"
        flags = "".join("t" if each else "n" for each in self.transposed)
        return f"n{self.n}-{self.d}-{self.a}-{self.b}-{place}-{flags}-{self.span}-{self.negated[0]}{self.negated[1]}"


def swizzled(address: int, span: int) -> int:
    """Within each pattern of eight rows pieces of 16 bytes change places; nothing does without a swizzle."""
    rows = {128: 7, 64: 3, 32: 1, 16: 0}[span]
    return address ^ (address >> 7 & rows) << 4


def place(matrix: Array, base: int, span: int, transposed: bool, smem: Array) -> int:
    """Put a `[rows, k]` matrix into memory; returns its descriptor. Tiles lie one behind the other."""
    rows, k = matrix.shape
    size, raw = matrix.dtype.itemsize, matrix.view(np.uint8).reshape(rows, k, -1)
    eights = 8 * span
    if not transposed:  # eight rows of 32 bytes to a tile of the swizzle; without one, 8x16 bytes, along K first
        stride, leading = (eights, 0) if span > 16 else (256, 128)
    else:  # K in rows of the swizzle, eight to a tile; tiles along the rows lie behind those along K
        stride, leading = (eights, 2 * eights) if span > 16 else (256, 128)
    for row in range(rows):
        for column in range(k):
            if not transposed:
                byte = column * size
                within = byte if span > 16 else byte // 16 * leading + byte % 16
                at = row // 8 * stride + row % 8 * span + within
            elif span > 16:
                wide = span // size
                at = row // wide * leading + column // 8 * stride + column % 8 * span + row % wide * size
            else:
                at = row // 8 * stride + column // 8 * leading + column % 8 * 16 + row % 8 * size
            at = swizzled(base + 1024 + at, span) - 1024
            smem[at : at + size] = raw[row, column]
    layout = {128: 1, 64: 2, 32: 3, 16: 0}[span]
    return (base + 1024) >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | layout << 62


def numbers(rng: Any, shape: tuple[int, int], kind: str) -> Array:
    """Numbers whose products sum up exactly, whatever the order."""
    if kind == "u8":
        return np.asarray(rng.integers(0, 256, shape, np.uint8))
    if kind == "s8":
        return np.asarray(rng.integers(-128, 128, shape, np.int8))
    return np.asarray(rng.integers(-4, 5, shape).astype(np.float32).astype(DTYPES[kind]))


def fragment(a: Array) -> Array:
    """A as four words of each of the 128 threads."""
    words = np.zeros((128, 4), np.uint32)
    per = 4 // a.dtype.itemsize
    for thread in range(128):
        for j in range(4):
            row = thread // 32 * 16 + thread % 32 // 4 + j % 2 * 8
            k = thread % 4 * per + j // 2 * 4 * per
            words[thread, j] = np.ascontiguousarray(a[row, k : k + per]).view(np.uint32)[0]
    return words


def of_accumulators(registers: Array, n: int) -> Array:
    """`[128, n / 2]` numbers as the matrix that they are parts of."""
    d = np.zeros((64, n), registers.dtype)
    for thread in range(128):
        for i in range(n // 2):
            row = thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8
            d[row, i // 4 * 8 + thread % 4 * 2 + i % 2] = registers[thread, i]
    return d


def multiplied(form: Form, mode: Mode, keeps: bool, times: int = 1) -> tuple[Array, Array]:
    """What the machine gives for some numbers, and what NumPy does."""
    rng = np.random.default_rng(form.n)
    a, b = numbers(rng, (64, form.k), form.a), numbers(rng, (form.n, form.k), form.b)
    smem = np.zeros(SHARED, np.uint8)
    words = np.zeros((128, 4), np.uint32)
    first = "{%r20, %r21, %r22, %r23}" if form.from_registers else "%d5"
    descriptor = 0
    if form.from_registers:
        words = fragment(a)
    else:
        descriptor = place(a, A_AT, form.span, form.transposed[0], smem)
    of_b = place(b, B_AT, form.span, form.transposed[1], smem)
    halves = form.d == "f16"
    count = form.n // 4 if halves else form.n // 2
    kind = "f" if form.d == "f32" else "r"
    begins = 24 if kind == "r" else 0
    registers = [f"%{kind}{begins + i}" for i in range(count)]
    out = np.zeros((128, count), np.uint32)
    initial = {"f32": "0f40400000", "f16": "0x42004200", "s32": "3"}[form.d]
    rest = [] if form.a in ("s8", "u8") else list(map(str, form.negated))
    if form.k == 16:
        rest += [str(int(each)) for each in (form.transposed[1:] if form.from_registers else form.transposed)]
    opcode = f"wgmma.mma_async.sync.aligned.m64n{form.n}k{form.k}.{form.d}.{form.a}.{form.b}"
    product = f"{opcode} {{{', '.join(registers)}}}, {first}, %d6, %p2{''.join(f', {each}' for each in rest)};"
    body = f"""
    .reg .b32 %w<2>;
    mov.u32 %r1, tile; mov.u32 %r2, %r0;
    FILL: shl.b32 %r3, %r2, 4; cvt.u64.u32 %d10, %r3; add.s64 %d10, %d10, %d0;
    ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%d10]; add.s32 %r3, %r3, %r1;
    st.shared.v4.u32 [%r3], {{%r4, %r5, %r6, %r7}}; add.s32 %r2, %r2, 128; setp.lt.u32 %p1, %r2, {SHARED // 16};
    @%p1 bra FILL; {FENCE} bar.sync 0; {element(16, 1)} ld.global.v4.u32 {{%r20, %r21, %r22, %r23}}, [%d10];
    mov.u64 %d5, {descriptor:#x}; mov.u64 %d6, {of_b:#x}; setp.ne.s32 %p2, {int(keeps)}, 0;
    {" ".join(f"mov.b32 {register}, {initial};" for register in registers)}
    wgmma.fence.sync.aligned; {product} setp.eq.s32 %p2, 0, 0; {product * (times - 1)}
    wgmma.commit_group.sync.aligned; {DONE} {element(4 * count, 2)}
    {" ".join(f"st.global.b32 [%d10+{4 * i}], {register};" for i, register in enumerate(registers))}"""
    run(body, smem, words, out, threads=128, readonly=2, shared=SHARED, mode=mode)
    sign = form.negated[0] * form.negated[1]
    exact = np.int64 if form.d == "s32" else np.float64
    wanted = sign * times * (a.astype(exact) @ b.astype(exact).T) + (3 if keeps else 0)
    if halves:
        made = of_accumulators(out.view(np.float16).reshape(128, -1), form.n)
        return made.astype(np.float64), wanted
    kind_of = np.int32 if form.d == "s32" else np.float32
    return of_accumulators(out.view(kind_of), form.n).astype(exact), wanted


FORMS = [
    Form(8, "f32", "f16", "f16"),
    Form(64, "f32", "bf16", "bf16", span=64),
    Form(256, "f32", "bf16", "bf16"),
    Form(24, "f32", "f16", "f16", span=32, negated=(-1, 1)),
    Form(16, "f32", "f16", "f16", span=16, negated=(-1, -1)),
    Form(64, "f32", "bf16", "bf16", transposed=(True, True)),
    Form(128, "f32", "f16", "f16", transposed=(False, True)),
    Form(64, "f32", "f16", "f16", transposed=(True, False), span=64),
    Form(32, "f32", "f16", "f16", transposed=(True, True), span=32),
    Form(16, "f32", "f16", "f16", transposed=(True, True), span=16),
    Form(64, "f32", "bf16", "bf16", from_registers=True, transposed=(False, True)),
    Form(32, "f16", "f16", "f16"),
    Form(64, "f16", "f16", "f16", from_registers=True),
    Form(16, "f32", "tf32", "tf32"),
    Form(16, "f32", "tf32", "tf32", from_registers=True, span=64),
    Form(8, "f32", "e4m3", "e4m3"),
    Form(64, "f32", "e4m3", "e4m3", from_registers=True),
    Form(128, "f32", "e4m3", "e5m2", span=64),
    Form(256, "f32", "e4m3", "e4m3"),
    Form(16, "f16", "e5m2", "e4m3", from_registers=True, negated=(1, -1)),
    Form(32, "s32", "s8", "s8"),
    Form(16, "s32", "u8", "s8", from_registers=True),
    Form(24, "s32", "s8", "u8", span=32),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_equal_numpys(form: Form) -> None:
    mode = MODES[FORMS.index(form) % len(MODES)]
    made, wanted = multiplied(form, mode, keeps=form.n % 16 == 0, times=3)
    np.testing.assert_array_equal(made, wanted)


# Registers and fences ----------------------------------------------------------------------------------------------

# One warpgroup multiplies 64x16 by 16x64, all ones, at 1024 and 9216 of the tile.
ONES = """mov.u32 %r1, tile; shl.b32 %r2, %r0, 6; add.s32 %r2, %r2, %r1; mov.u32 %r3, 0x3c003c00; mov.u32 %r4, 0;
FILL: st.shared.u32 [%r2], %r3; st.shared.u32 [%r2+8192], %r3; add.s32 %r2, %r2, 4; add.s32 %r4, %r4, 1;
    setp.lt.u32 %p1, %r4, 16; @%p1 bra FILL;
    {fence} bar.sync 0; shr.u32 %r5, %r1, 4; cvt.u64.u32 %d5, %r5; or.b64 %d5, %d5, 0x4000004000010000;
    add.s64 %d6, %d5, 512; mov.f32 %f0, 0f3F800000;"""
READY = ONES.format(fence=FENCE)
REGISTERS = ", ".join(f"%f{k}" for k in range(1, 33))
PRODUCT = f"wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {{{REGISTERS}}}, %d5, %d6, 0, 1, 1, 0, 0;"
GROUP = f"wgmma.fence.sync.aligned; {PRODUCT} wgmma.commit_group.sync.aligned;"
STORE = f"{element(4)} st.global.f32 [%d10], %f1;"


def sixteen(*parts: str, **options: Any) -> None:
    """Run it in each mode: the accumulators are 16."""
    for mode in MODES:
        out = np.zeros(128, np.float32)
        run("\n".join(parts) + STORE, out, threads=128, shared=16384, mode=mode, **options)
        assert (out == 16).all()


def refused(what: str, *parts: str, **options: Any) -> None:
    """It ends with that message in each mode."""
    for mode in MODES:
        with pytest.raises(HostError, match=what):
            run("\n".join(parts) + STORE, np.zeros(128, np.float32), threads=128, shared=16384, mode=mode, **options)


def test_products_of_a_warpgroup_wait_for_each_other() -> None:
    sixteen(READY, GROUP, DONE)
    sixteen(READY, GROUP, DONE, races="specified")
    refused(r"no fence\.proxy\.async", ONES.format(fence=""), GROUP, DONE)
    refused(r"is used before wgmma\.wait_group", READY, GROUP)
    refused(r"without a wgmma\.fence", READY, GROUP.replace("wgmma.fence.sync.aligned;", ""), DONE)
    # A product is the whole warpgroup's: the store may come before the last thread has issued it, or behind.
    early = "st.shared.u32 [%r2+-64], %r3;"
    read, wrote = "thread .* writes .* a wgmma of .* read or was still", "a wgmma of .* reads .* that thread .* wrote"
    race = f"race: ({read}|{wrote}) .*nothing orders the two"
    refused(race, READY, GROUP, early, DONE, races="hardware")
    # What the other warps' threads still wait for counts too; behind a barrier all have waited.
    refused(race, READY, GROUP, DONE, early, races="hardware")
    sixteen(READY, GROUP, DONE, "bar.sync 0;", early, races="specified")


def test_a_wait_leaves_the_newest_groups_alone() -> None:
    other = PRODUCT
    for k in range(32, 0, -1):
        other = other.replace(f"%f{k}" + ("}" if k == 32 else ","), f"%f{k + 40}" + ("}" if k == 32 else ","))
    assert "%f41, %f42" in other and "%f72}" in other
    both = f"{GROUP} {other} wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1;"
    sixteen(READY, both, "add.f32 %f100, %f1, %f2;", DONE)
    refused(r"is used before wgmma\.wait_group", READY, both, "add.f32 %f100, %f41, %f2;", DONE)
    # A group that is still open is not waited for.
    refused(r"is used before wgmma\.wait_group", READY, f"wgmma.fence.sync.aligned; {PRODUCT}", DONE)


def test_a_fence_lies_between_a_product_and_other_uses_of_its_registers() -> None:
    """ptxas puts a missing one there, or serialises, and says so."""
    fence = "wgmma.fence.sync.aligned;"
    for use in ("mov.f32 %f32, 0f00000000;", "add.f32 %f40, %f1, %f1;"):
        sixteen(READY, use, GROUP, DONE)
        sixteen(READY, GROUP.replace(fence, fence + use + fence), DONE)
        refused(
            r"registers that other instructions use behind the wgmma\.fence",
            READY,
            GROUP.replace(fence, fence + use),
            DONE,
        )
    # What the product does not use is free, and so is what an instruction does not do.
    sixteen(READY, GROUP.replace(fence, fence + "mov.f32 %f40, 0f00000000;"), DONE)
    sixteen(READY, "setp.ne.s32 %p4, 0, 0;", GROUP.replace(fence, fence + "@%p4 mov.f32 %f32, 0f00000000;"), DONE)
    refused(r"is used before", READY, "setp.eq.s32 %p4, 0, 0;", GROUP, "@%p4 mov.f32 %f32, 0f00000000;", DONE)
    # Behind a wait registers are ordinary ones, so the next product needs another fence.
    refused(r"without a wgmma\.fence", READY, GROUP, DONE, PRODUCT, "wgmma.commit_group.sync.aligned;", DONE)


def test_a_warpgroup_agrees_on_its_operands() -> None:
    some = GROUP.replace("%d6, 0, 1", "%d6, %p3, 1")
    sixteen(READY, "setp.gt.u32 %p3, %r0, 128;", some, DONE)
    refused("give different scale-d", READY, "setp.lt.u32 %p3, %r0, 64;", some, DONE)
    other = "setp.lt.u32 %p3, %r0, 64; @%p3 add.s64 %d6, %d6, 64;"
    refused("give different matrix descriptors", READY, other, GROUP, DONE)
    apart = f"setp.lt.u32 %p3, %r0, 64; @%p3 bra LOW; {GROUP} bra JOIN; LOW: {GROUP} JOIN:"
    refused(r"execute different wgmma\.mma_async", READY, apart, DONE)
    missing = f"setp.lt.u32 %p3, %r0, 96; @%p3 bra LOW; bra END; LOW: {GROUP} {DONE} END:"
    refused("deadlock: wgmma.wait_group for products that not all threads have issued", READY, missing)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("add.s64 %d6, %d6, 8;", "in a later row of the swizzle's 1024 bytes"),
        ("or.b64 %d6, %d6, 0x0010000000000000;", "has bits that mean nothing"),
        ("or.b64 %d6, %d6, 0x0002000000000000;", "has a base offset"),
        ("sub.s64 %d6, %d6, 0x0000002000000000;", "not multiples of 1024"),
        ("add.s64 %d6, %d6, 7;", "goes on past the 128 bytes of the swizzle's row"),
        ("add.s64 %d6, %d6, 512;", "which is outside"),
    ],
)
def test_descriptors_begin_where_the_swizzle_does(change: str, what: str) -> None:
    """64 to 1024 bytes behind is 32 to 64 in units of 16; up to 128 bytes, columns of a row, are allowed."""
    sixteen(READY, "add.s64 %d6, %d6, 2;", GROUP, DONE)
    refused(what, READY, change, GROUP, DONE)


def test_a_proxy_fence_covers_only_what_it_is_ordered_behind() -> None:
    """A fence of every thread before the others' writes are known, where that of the issuing thread must be behind."""
    for fence in (FENCE, "bar.sync 0;" + FENCE):
        sixteen(ONES.format(fence=fence), GROUP, DONE, races="specified")
    early = ONES.replace("{fence}", FENCE).replace(
        "bar.sync 0;", "bar.sync 0; st.shared.u32 [%r2+-4], %r3; bar.sync 0;"
    )
    refused(r"no fence\.proxy\.async", early.format(), GROUP, DONE, races="hardware")
    # The first thread alone fences, before it knows of the others' writes.
    alone = "setp.eq.s32 %p2, %r0, 0; @%p2 " + FENCE
    refused(r"no fence\.proxy\.async", ONES.format(fence=alone), GROUP, DONE, races="hardware")
    sixteen(
        ONES.format(fence="bar.sync 0; " + alone),
        GROUP.replace("wgmma.fence", "bar.sync 0; wgmma.fence"),
        DONE,
        races="specified",
    )
