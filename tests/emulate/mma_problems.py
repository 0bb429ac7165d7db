"""Products to try tcgen05.mma with: operands in their places, and what NumPy says that comes of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from device import Where, blank, run
from isa_oracle import (
    KIND_TYPES,
    Array,
    K,
    a_words,
    column_mask,
    expanded,
    instruction,
    multiply,
    place,
    put_a,
    put_metadata,
    put_scales,
    random_codes,
    random_matrix,
    result_places,
    results,
    with_start,
    zero_columns,
)
from ptx_kernels import mma, mma_ws

from cupymla_lab.emulate import Settings
from cupymla_lab.emulate.host.library import Model

B_START = 32768
A_COLUMN, A_SCALES, B_SCALES, METADATA = 256, 400, 440, 480


@dataclass(frozen=True)
class Case:
    """One product. Swizzle codes are the descriptor's; "t" says that the operand is transposed."""

    kind: str
    a: str
    b: str
    m: int
    n: int
    group: int = 1
    swizzle: int = 2
    a_in_tmem: bool = False
    transposed: tuple[bool, bool] = (False, False)
    d_f16: bool = False
    negated: tuple[bool, bool] = (False, False)
    accumulate: bool = False
    block: int = 0
    ue8m0: bool = True
    ids: tuple[int, int] = (0, 0)
    saturate: bool = False
    scale: int = 0
    disabled: int = 0
    shifted: bool = False
    sparse: bool = False
    selector: int = 0
    ws: bool = False
    mask: int = 0
    max_shift: int = 0
    seed: int = field(default=0, compare=False)

    def __str__(self) -> str:
        flags = ["ts" if self.a_in_tmem else "ss", f"g{self.group}", f"sw{self.swizzle}"]
        flags += [name for name, on in (("tA", self.transposed[0]), ("tB", self.transposed[1])) if on]
        flags += [name for name, on in (("f16", self.d_f16), ("acc", self.accumulate), ("sat", self.saturate)) if on]
        flags += [f"-{self.scale}"] if self.scale else []
        flags += [f"id{self.ids[0]}{self.ids[1]}"] if any(self.ids) else []
        flags += [f"b{self.block}", "ue8" if self.ue8m0 else "ue4"] if self.block else []
        flags += ["ashift"] if self.shifted else []
        flags += [f"sp{self.selector}"] if self.sparse else []
        flags += ["ws"] if self.ws else []
        flags += [f"mask{self.mask:x}"] if self.mask else []
        return f"{self.kind}-{self.a}-{self.b}-{self.m}x{self.n}-" + "-".join(flags)

    def operation(self, hints: tuple[str, ...] = ("",)) -> str:
        """Its PTX; of a weight-stationary product once for each hint."""
        if self.ws:
            return mma_ws(self.kind, self.a_in_tmem, hints, self.mask != 0, self.sparse)
        vector = ""
        if self.kind == "mxf4nvf4":
            vector = ".scale_vec::4X" if self.block == 16 else ".scale_vec::2X"
        options = self.scale, self.disabled, self.shifted, self.sparse
        return mma(self.kind, self.group, self.a_in_tmem, vector, *options)


def cases() -> list[Case]:
    """All of them; together they hold every row of the ISA's tables that the model has."""
    found = [
        Case(kind, a, b, 128, 32)
        for kind, types in KIND_TYPES.items()
        for a in types
        for b in types
        if kind[:2] != "mx" and not (kind == "f16" and a != b)
    ]
    # Shapes and layouts of D, A in either memory.
    for kind, a in (("f16", "bf16"), ("tf32", "tf32"), ("f8f6f4", "e5m2"), ("i8", "s8")):
        for group, m, n in (
            (1, 64, 8),
            (1, 64, 256),
            (1, 128, 16),
            (1, 128, 256),
            (2, 128, 64),
            (2, 256, 32),
            (2, 256, 256),
        ):
            for a_in_tmem in (False, True):
                found.append(Case(kind, a, a, m, n, group, a_in_tmem=a_in_tmem))
    # Every swizzle, K-major and transposed.
    for swizzle in (0, 6, 4, 2):
        for group, m in ((1, 64), (1, 128), (2, 256)):
            found.append(Case("f16", "f16", "f16", m, 64, group, swizzle))
            found.append(Case("f8f6f4", "e4m3", "e4m3", m, 128, group, swizzle))
            if swizzle != 2 or m != 64:
                found.append(Case("f16", "f16", "f16", m, 128, group, swizzle, transposed=(True, True)))
        found.append(Case("f8f6f4", "e2m1", "e3m2", 128, 64, 1, swizzle))
        found.append(Case("i8", "u8", "s8", 128, 128, 1, swizzle, transposed=(True, True)))
    found.append(Case("f16", "f16", "f16", 128, 64, 1, transposed=(False, True)))
    found.append(Case("f16", "f16", "f16", 128, 64, 1, transposed=(True, False)))
    found.append(Case("tf32", "tf32", "tf32", 128, 64, 1, 1, transposed=(True, True)))
    found.append(Case("f8f6f4", "e2m3", "e2m1", 128, 64, a_in_tmem=True))
    found.append(Case("f8f6f4", "e2m1", "e3m2", 128, 64, a_in_tmem=True))
    # Options.
    for scale in (0, 1, 15):
        found.append(Case("f16", "f16", "f16", 128, 32, accumulate=True, scale=scale))
    found.append(Case("tf32", "tf32", "tf32", 64, 32, accumulate=True, scale=3))
    found.append(Case("f16", "f16", "f16", 128, 32, d_f16=True, accumulate=True))
    found.append(Case("f8f6f4", "e4m3", "e4m3", 64, 32, d_f16=True))
    for negated in ((True, False), (False, True), (True, True)):
        found.append(Case("f16", "f16", "f16", 128, 16, negated=negated))
        found.append(Case("mxf8f6f4", "e4m3", "e5m2", 128, 16, negated=negated, block=32))
    found.append(Case("i8", "s8", "s8", 128, 32, accumulate=True, saturate=True))
    found.append(Case("i8", "u8", "u8", 128, 32, accumulate=True))
    found.append(Case("f16", "f16", "f16", 128, 32, disabled=0xFFFF0000FFFFFFFF00000001DEADBEEF))
    found.append(Case("f16", "f16", "f16", 256, 32, 2, disabled=(1 << 255) | 0xF << 120 | 5))
    for kind, a in (("f16", "f16"), ("tf32", "tf32"), ("f8f6f4", "e4m3"), ("i8", "s8")):
        for group, m in ((1, 128), (2, 128), (2, 256)):
            found.append(Case(kind, a, a, m, 64, group, a_in_tmem=True, shifted=True, accumulate=group == 1))
    # Block scaling: types, vector sizes, bytes of the factors, both groups.
    for a in KIND_TYPES["mxf8f6f4"]:
        found.append(Case("mxf8f6f4", a, "e4m3", 128, 64, block=32))
        found.append(Case("mxf8f6f4", "e5m2", a, 128, 64, block=32, a_in_tmem=True))
    for group, m, n in ((1, 128, 256), (2, 128, 64), (2, 256, 64), (2, 256, 256)):
        for ids in ((0, 0), (1, 3), (3, 2)):
            found.append(Case("mxf8f6f4", "e4m3", "e4m3", m, n, group, block=32, ids=ids))
        for ids in ((0, 0), (2, 0), (0, 2)):
            found.append(Case("mxf4", "e2m1", "e2m1", m, n, group, block=32, ids=ids))
            found.append(Case("mxf4nvf4", "e2m1", "e2m1", m, n, group, block=32, ids=ids))
        for ue8m0 in (False, True):
            found.append(Case("mxf4nvf4", "e2m1", "e2m1", m, n, group, block=16, ue8m0=ue8m0))
            found.append(Case("mxf4nvf4", "e2m1", "e2m1", m, n, group, block=16, ue8m0=ue8m0, a_in_tmem=True))
    return list(dict.fromkeys(found))


def stationary_cases() -> list[Case]:
    """Weight-stationary products: every kind, M, N and place of A, every pair of types, layout and option."""
    found = [
        Case(kind, a, a, m, n, a_in_tmem=a_in_tmem, ws=True)
        for kind, a in (("f16", "bf16"), ("tf32", "tf32"), ("f8f6f4", "e5m2"), ("i8", "s8"))
        for m in (32, 64, 128)
        for n in (64, 128, 256)
        for a_in_tmem in (False, True)
    ]
    for kind in ("f16", "tf32", "f8f6f4", "i8"):
        types = KIND_TYPES[kind]
        found += [Case(kind, a, b, 64, 64, ws=True) for a in types for b in types if kind != "f16" or a == b]
    # Transposed B under every swizzle; A as well where its M fills a row of the swizzle.
    for m in (32, 64, 128):
        for swizzle in (0, 6, 4, 2):
            found.append(Case("f16", "f16", "f16", m, 128, 1, swizzle, transposed=(False, True), ws=True))
            for kind, a, fits in (("f16", "bf16", m * 2), ("f8f6f4", "e4m3", m)):
                both = fits >= {0: 16, 6: 32, 4: 64, 2: 128}[swizzle]
                found.append(Case(kind, a, a, m, 256, 1, swizzle, transposed=(both, True), ws=True))
        found.append(Case("i8", "u8", "s8", m, 128, transposed=(False, True), ws=True))
        found.append(Case("f16", "f16", "f16", m, 64, a_in_tmem=True, transposed=(False, True), ws=True))
        found.append(Case("tf32", "tf32", "tf32", m, 64, 1, 1, transposed=(True, True), ws=True))
        found.append(Case("f16", "f16", "f16", m, 64, d_f16=True, accumulate=True, a_in_tmem=True, ws=True))
        found.append(Case("f8f6f4", "e4m3", "e2m1", m, 128, d_f16=True, ws=True))
        found.append(Case("f16", "bf16", "bf16", m, 256, accumulate=True, negated=(True, False), ws=True))
        found.append(Case("i8", "s8", "s8", m, 64, accumulate=True, saturate=True, ws=True))
        # Zero columns: parts of their own, a span that is longer than a part, and shifts.
        parts = column_mask((4, 3), (0, 1, 2, 1), (1, 1, 0, 0))
        found.append(Case("f16", "f16", "f16", m, 64, mask=parts, ws=True))
        found.append(Case("f8f6f4", "e4m3", "e4m3", m, 128, mask=column_mask((1, 256)), a_in_tmem=True, ws=True))
        found.append(Case("i8", "s8", "u8", m, 64, mask=column_mask((5, 2), any_zero=False), ws=True))
        shifted = column_mask((20, 1), shift=3)
        found.append(Case("f16", "f16", "f16", m, 64, mask=shifted, max_shift=8, ws=True))
        found.append(Case("f16", "bf16", "bf16", m, 64, transposed=(False, True), mask=shifted, max_shift=16, ws=True))
        most = column_mask((1, 1), shift=16 if m == 32 else 32, any_zero=False)
        found.append(Case("tf32", "tf32", "tf32", m, 128, 1, 6, mask=most, max_shift=32, ws=True))
    return list(dict.fromkeys(found))


def sparse_cases() -> list[Case]:
    """Sparse A: every kind, pair of types, place of A and selector, both groups; B transposed and in other layouts."""
    found = []
    for kind, a in (("f16", "bf16"), ("tf32", "tf32"), ("f8f6f4", "e5m2"), ("i8", "s8")):
        for group, m, n in ((1, 128, 16), (1, 128, 256), (2, 256, 64)):
            for a_in_tmem in (False, True):
                for selector in (0, 1) if kind in ("f16", "tf32") else (0,):
                    found.append(Case(kind, a, a, m, n, group, a_in_tmem=a_in_tmem, sparse=True, selector=selector))
        for swizzle in (0, 4):
            found.append(Case(kind, a, a, 128, 64, 1, swizzle, sparse=True))
    for kind in ("f8f6f4", "i8"):
        types = KIND_TYPES[kind]
        found += [Case(kind, a, b, 128, 64, sparse=True) for a in types for b in types]
    for swizzle in (0, 6, 4, 2):
        found.append(Case("f16", "f16", "f16", 128, 64, 1, swizzle, transposed=(True, True), sparse=True))
        found.append(Case("i8", "u8", "s8", 128, 128, 1, swizzle, transposed=(True, True), sparse=True))
    found.append(Case("tf32", "tf32", "tf32", 128, 64, 1, 1, transposed=(True, True), sparse=True))
    found.append(Case("f16", "f16", "f16", 128, 64, accumulate=True, scale=3, negated=(True, False), sparse=True))
    found.append(Case("f16", "f16", "f16", 128, 64, disabled=0xFFFF0000FFFF << 40, d_f16=True, sparse=True))
    found.append(Case("f16", "f16", "f16", 128, 64, a_in_tmem=True, shifted=True, sparse=True))
    found.append(Case("i8", "s8", "s8", 128, 64, accumulate=True, saturate=True, sparse=True))
    for kind, a in (("f16", "f16"), ("tf32", "tf32"), ("f8f6f4", "e4m3"), ("i8", "u8")):
        for m in (32, 64, 128):
            found.append(Case(kind, a, a, m, 64, sparse=True, ws=True))
            found.append(Case(kind, a, a, m, 128, a_in_tmem=True, sparse=True, ws=True))
            if kind in ("f16", "tf32"):
                found.append(Case(kind, a, a, m, 64, accumulate=True, sparse=True, selector=1, ws=True))
    return list(dict.fromkeys(found))


MASKED = Case("f16", "f16", "f16", 64, 128, a_in_tmem=True, mask=1 << 39, max_shift=8, ws=True)
HINTED = Case("f16", "f16", "f16", 64, 64, ws=True)
FILL, USE, LAST, DROP = (f".collector::b2::{use}" for use in ("fill", "use", "lastuse", "discard"))
HINTS = ((FILL, USE, USE, LAST), (FILL, DROP), (FILL, FILL, LAST), (DROP, FILL, "", LAST))
# The failure that follows, and what is added to B's descriptor each time.
BAD_HINTS = (
    (42, (USE,), 0),
    (42, (LAST,), 0),
    (42, (FILL, LAST, USE), 0),
    (42, (FILL, DROP, LAST), 0),
    (42, (FILL, FILL.replace("b2", "b1"), USE.replace("b2", "b3")), 0),
    (42, (FILL.replace("b2", "b0"), "", USE.replace("b2", "b0")), 0),  # no hint gives up b0
    (43, (FILL, USE), 64),
)

# Their sums are rounded where operands are any bits.
SAME_BITS = (
    Case("f16", "bf16", "bf16", 256, 256, 2, transposed=(False, True)),
    Case("f16", "bf16", "bf16", 128, 96, 2, a_in_tmem=True, accumulate=True, scale=3),
    Case("f16", "f16", "f16", 64, 24, swizzle=6, d_f16=True, accumulate=True),
    Case("tf32", "tf32", "tf32", 128, 48),
    Case("f8f6f4", "e4m3", "e5m2", 128, 256, transposed=(True, True)),
    Case("i8", "s8", "u8", 64, 32, accumulate=True, saturate=True),
    Case("mxf8f6f4", "e3m2", "e2m1", 128, 128, block=32, ids=(2, 1)),
    Case("mxf4nvf4", "e2m1", "e2m1", 128, 64, 2, block=16, ue8m0=False),
    Case("f16", "bf16", "bf16", 64, 256, a_in_tmem=True, accumulate=True, ws=True),
    Case("f16", "f16", "f16", 32, 64, swizzle=4, mask=column_mask((5, 3), shift=7), max_shift=8, ws=True),
    Case("f16", "f16", "f16", 64, 64, transposed=(False, True), mask=1 << 39 | 5 << 56, max_shift=32, ws=True),
    Case("f8f6f4", "e4m3", "e2m3", 32, 128, a_in_tmem=True, ws=True),
    Case("i8", "s8", "u8", 128, 64, mask=column_mask((9, 2), (4, 0, 0, 0), (1, 0, 0, 0)), ws=True),
    Case("tf32", "tf32", "tf32", 64, 64, ws=True),
    Case("f16", "bf16", "bf16", 256, 128, 2, a_in_tmem=True, accumulate=True, sparse=True, selector=1),
    Case("tf32", "tf32", "tf32", 128, 64, transposed=(True, True), swizzle=1, sparse=True),
    Case("f8f6f4", "e4m3", "e5m2", 128, 256, sparse=True),
    Case("f16", "bf16", "bf16", 32, 128, a_in_tmem=True, sparse=True, selector=1, ws=True),
)


@functools.cache
def among(group: int, model: Model) -> tuple[str, ...]:
    """The operations of all tests, to be compiled at once; with the model as PTX, of those that take it."""
    if model == "ptx":
        every = [case.operation() for case in SAME_BITS if case.group == group]
        return tuple(dict.fromkeys(every))
    tried = (*cases(), *stationary_cases(), *sparse_cases(), *SAME_BITS, MASKED)
    every = [case.operation() for case in tried if case.group == group]
    if group == 1:
        every += [HINTED.operation(hints) for hints in (*HINTS, *(("",) * len(h) for h in HINTS))]
        every += [HINTED.operation(hints) for _, hints, _ in BAD_HINTS]
    return tuple(dict.fromkeys(every))


class Problem:
    """A case with its numbers in place."""

    def __init__(self, case: Case) -> None:
        self.case = case
        rng = np.random.default_rng(case.seed)
        k, packed = K[case.kind], case.kind.startswith("mxf4")
        self.a = random_matrix(rng, case.a, case.m, k)
        shift = case.mask >> 56 & 63
        self.b = random_matrix(rng, case.b, case.n + (64 if shift else 0), k << case.sparse)
        self.smem, self.tmem = blank(case.group)
        group, a_descriptor, b_descriptor = case.group, 0, 0
        a_rows, b_rows = case.m // group, len(self.b) // group
        for cta in range(group):
            a_part, b_part = self.a[cta * a_rows :][:a_rows], self.b[cta * b_rows :][:b_rows]
            a_descriptor = place(self.smem[cta], 0, a_part, case.a, case.swizzle, case.transposed[0], packed)
            b_descriptor = place(self.smem[cta], B_START, b_part, case.b, case.swizzle, case.transposed[1], packed)
        first = with_start(a_descriptor, 0)
        if case.a_in_tmem:
            put_a(self.tmem, a_words(self.a, case.a, packed), group, case.m, A_COLUMN, case.ws)
            self.smem[:, :B_START] = 0xFF
            first = A_COLUMN
        self.scales = self._scales(rng) if case.block else None
        word = instruction(
            case.kind, case.m, case.n, case.a, case.b, a_transposed=case.transposed[0], b_transposed=case.transposed[1],
            d_f16=case.d_f16, negated=case.negated, ue8m0=case.ue8m0, ids=case.ids, saturate=case.saturate,
            max_shift=case.max_shift, sparse=case.sparse, selector=case.selector,
        )  # fmt: skip
        self.before = self._before(rng)
        if case.sparse:
            self.codes = random_codes(rng, case.kind, case.m)
            self.tmem[:, :, METADATA : METADATA + 2] = 0xFFFFFFFF
            for cta in range(group):
                codes = self.codes[128 * cta : 128 * cta + 128]
                put_metadata(self.tmem[cta], codes, case.kind, METADATA + case.selector)
        last = METADATA if case.sparse else case.mask if case.ws else A_SCALES | B_SCALES << 32
        self.arguments = [first, with_start(b_descriptor, B_START), word << 32, int(case.accumulate), last]

    def _scales(self, rng: np.random.Generator) -> tuple[Array, Array]:
        case = self.case
        blocks = K[case.kind] // case.block
        kind: Any = ml_dtypes.float8_e8m0fnu if case.ue8m0 else ml_dtypes.float8_e4m3fn
        made = []
        for rows, offset, first in ((case.m, A_SCALES, case.ids[0]), (case.n, B_SCALES, case.ids[1])):
            values = (2.0 ** rng.integers(-3, 4, (rows, blocks))).astype(kind)
            if not case.ue8m0:
                values = (rng.integers(1, 16, (rows, blocks)) * 0.25).astype(kind)
            made.append(values)
            for cta in range(case.group):
                self._put_scales(values.view(np.uint8), offset, first, cta)
        return made[0], made[1]

    def _put_scales(self, factors: Array, offset: int, first: int, cta: int) -> None:
        """A's are split over the pair's CTAs; B's lie in both, halved over the lanes where D's columns are."""
        case = self.case
        if offset == A_SCALES:
            rows = case.m // case.group
            put_scales(self.tmem, factors[cta * rows :][:rows], offset, first, cta)
        elif case.group == 2 and case.m == 128:
            half = case.n // 2
            for part in (0, 1):
                keep = self.tmem[cta].copy()
                put_scales(self.tmem, factors[part * half :][:half], offset, first, cta)
                lanes = slice(64, 128) if part == 0 else slice(0, 64)
                self.tmem[cta, lanes] = keep[lanes]
        else:
            put_scales(self.tmem, factors, offset, first, cta)

    def _before(self, rng: np.random.Generator) -> Array:
        """D before the product, the same number in every column that D may use."""
        case = self.case
        shape = (case.group, 128, case.n)
        if case.kind == "i8":
            words = rng.integers(2**31 - 2**19, 2**31, shape).astype(np.uint32)
        elif case.d_f16:
            words = rng.integers(-4, 5, shape).astype(np.float16).view(np.uint16).astype(np.uint32)
        else:
            words = rng.integers(-64, 65, shape).astype(np.float32).view(np.uint32)
        self.tmem[:, :, : case.n] = words
        return words

    def run(
        self, where: Where, settings: Settings | None = None, model: Model = "native", hints: tuple[str, ...] = ("",)
    ) -> Array:
        case = self.case
        operands = case.operation(hints), self.smem, self.tmem, self.arguments, case.group
        after, _ = run(*operands, settings=settings, where=where, model=model, among=among(case.group, model))
        return after

    def wanted(self) -> Array:
        """D as words: (CTAs, 128, 512), everything else as it was."""
        case = self.case
        shift = case.mask >> 56 & 63
        b = self.b[shift : shift + case.n].copy()
        b[zero_columns(case.mask, case.m, case.n)] = 0
        a = self.a
        if case.shifted:
            # The rows of each CTA move by one, the last one stays.
            parts = self.a.reshape(case.group, case.m // case.group, -1)
            a = np.concatenate([parts[:, 1:], parts[:, -1:]], axis=1).reshape(self.a.shape)
        if case.sparse:
            a = expanded(a, self.codes, case.kind)
        product = multiply(case.kind, a, b, self.scales, case.block)
        if case.negated[0] != case.negated[1]:
            product = -product
        before = results(self.tmem, case.group, case.m, case.n, 0, case.ws)
        if case.accumulate:
            product = product + _numbers(before, case) * 2.0**-case.scale
        words = _words(product, case)
        after: Array = self.tmem.copy()
        cta, lane, at = result_places(case.group, case.m, case.n, case.ws)
        lanes = np.array([[not case.disabled >> (128 * cta + lane) & 1 for lane in range(128)] for cta in (0, 1)])
        kept = lanes[cta, lane]
        after[cta[kept], lane[kept], at[kept]] = words[kept]
        return after


def _numbers(words: Array, case: Case) -> Array:
    if case.kind == "i8":
        return words.view(np.int32).astype(np.float64)
    if case.d_f16:
        return (words & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64)
    found: Array = words.view(np.float32).astype(np.float64)
    return found


def _words(values: Array, case: Case) -> Array:
    if case.kind == "i8":
        whole = values.astype(np.int64)
        if case.saturate:
            whole = np.clip(whole, -(2**31), 2**31 - 1)
        return (whole & 0xFFFFFFFF).astype(np.uint32)
    if case.d_f16:
        return values.astype(np.float16).view(np.uint16).astype(np.uint32)
    return values.astype(np.float32).view(np.uint32)
