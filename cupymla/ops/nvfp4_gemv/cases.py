"""Problems for nvfp4_gemv: what the tests, the demo and the benchmarks run.

Hostile data is the default: all sixteen E2M1 codes in both nibbles, and NaN scale bytes in every place that a call must
not read (the padding of the 128x4 layout, the gaps between the rows of a strided array).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..case import Case, Choice
from .formats import MXFP4, NVFP4, named, padded

OUTPUTS = ("c",)
POISON = 0xFF
"""NaN as an E4M3 and as an E8M0 scale; the last code pair (-6, -6) among E2M1 bytes."""

_SCALE_CODES = {
    # E4M3: 2^-4 to 2^0, or everything finite. E8M0: 2^-4 to 2^1, or what keeps products well inside float32.
    (NVFP4.name, "plain"): (0x18, 0x39),
    (NVFP4.name, "full"): (0x00, 0x100),
    (NVFP4.name, "overflow"): (0x7C, 0x7F),
    (MXFP4.name, "plain"): (123, 129),
    (MXFP4.name, "full"): (97, 158),
    (MXFP4.name, "overflow"): (135, 137),
}
_OUT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class GemvCase(Case):
    """One call.

    Attributes:
        m: rows of a.
        n: rows of b.
        k: elements of a row, even.
        batches: l.
        format: "nvfp4" or "mxfp4".
        b_dtype: "e2m1", or "bfloat16" or "float16" in weight-only mode.
        scale_layout: "linear" or "128x4".
        out_dtype: label of c.
        alpha: "none", "number", "scalar" (a device value), "rows" or "batch" (`[m, l]`).
        bias: "none", "rows" or "batch".
        batch: where l is: "none" (then it is 1), "last" or "first"; the memory is `[l, rows, k]` always.
        data: which scales: "plain", "full" (every finite code), "overflow" (c leaves float16), "nan" (a few blocks of a
            and the last row of b) or "zero" (plain, with codes of +0 and -0 only).
        b_rows: rows of the array that b is the first n of; 0 for n.
        strided: arrays are parts of larger ones, at odd addresses.
        padded: a and b are parts of larger arrays, their rows at multiples of 16 bytes.
        words: rows of linear scales are at multiples of 4 bytes, and not of more.
    """

    m: int
    n: int
    k: int
    batches: int = 1
    format: str = "nvfp4"
    b_dtype: str = "e2m1"
    scale_layout: str = "linear"
    out_dtype: str = "float16"
    alpha: str = "none"
    bias: str = "none"
    batch: str = "last"
    data: str = "plain"
    b_rows: int = 0
    strided: bool = False
    padded: bool = False
    words: bool = False

    @property
    def scale_columns(self) -> int:
        """Scales per row."""
        return named(self.format).scale_columns(self.k)


def make(intent: str, tag: str = "", **fields: Any) -> GemvCase:
    """A case named after its sizes, its formats and the tag."""
    unnamed = GemvCase(name="", intent=intent, **fields)
    parts = [f"m{unnamed.m}_k{unnamed.k}_l{unnamed.batches}_n{unnamed.n}"]
    if unnamed.b_dtype != "e2m1":
        parts.append("w4a16" if unnamed.b_dtype == "bfloat16" else "w4a16h")
    if unnamed.format != "nvfp4":
        parts.append(unnamed.format)
    return GemvCase(name="_".join([*parts, *([tag] if tag else [])]), intent=intent, **fields)


CHOICES = {
    "nvfp4_gemv": Choice("model.MARGIN=1.0"),
    "nvfp4_gemv_tcgen05": Choice("model.MARGIN=-1e9", intents=("tensor",)),
}

_BENCH_SIZES = (
    (7168, 16384, 1, 1),
    (4096, 7168, 8, 1),
    (7168, 2048, 4, 1),
    (8192, 28672, 1, 1),
    (4096, 4096, 1, 1),
    *((8192, 28672, 1, n) for n in (2, 4, 8, 16)),
)

BENCH: tuple[GemvCase, ...] = tuple(
    make("speed", m=m, k=k, batches=batches, n=n, **operands)
    for operands in ({}, {"b_dtype": "bfloat16"}, {"format": "mxfp4"})
    for m, k, batches, n in _BENCH_SIZES
)

DEMO = make("shapes", m=2048, n=1, k=16384)
"""A problem of the timing cases' columns, which takes the references a second or two."""


def flops(case: GemvCase) -> int:
    """Multiplications and additions of the products."""
    return 2 * case.m * case.n * case.k * case.batches


def bytes_moved(case: GemvCase) -> int:
    """Every operand read once and c written once; the 128x4 layout's padding is not counted."""
    columns = case.scale_columns
    rows_of_a = case.m * (case.k // 2 + columns)
    rows_of_b = case.n * (case.k // 2 + columns if case.b_dtype == "e2m1" else 2 * case.k)
    out = case.m * case.n * _OUT_BYTES[case.out_dtype]
    per_row = {"rows": case.m, "batch": case.m * case.batches, "scalar": 1}
    extras = 4 * per_row.get(case.alpha, 0) + _OUT_BYTES[case.out_dtype] * per_row.get(case.bias, 0)
    return case.batches * (rows_of_a + rows_of_b + out) + extras


def inputs(case: GemvCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Fresh arguments of `nvfp4_gemv`, made with `xp.random.default_rng(seed)` in xp's memory."""
    maker = _Maker(case, seed, xp)
    found: dict[str, Any] = {
        "a": maker.codes(case.m),
        "b": maker.vectors(),
        "sfa": maker.scales(case.m, nan_rows=slice(3, None, 50)),
        "sfb": maker.scales(case.n, nan_rows=slice(case.n - 1, None)) if case.b_dtype == "e2m1" else None,
        "out_dtype": case.out_dtype,
        "format": case.format,
        "scale_layout": case.scale_layout,
        "batch_axis": 0 if case.batch == "first" else -1,
    }
    if case.alpha == "number":
        found["alpha"] = -0.3
    elif case.alpha != "none":
        found["alpha"] = maker.per_row(case.alpha, "float32")
    if case.bias != "none":
        found["bias"] = maker.per_row(case.bias, case.out_dtype)
    return found


class _Maker:
    """The arrays of one case."""

    def __init__(self, case: GemvCase, seed: int, xp: Any) -> None:
        self.case, self.xp = case, xp
        self.random = xp.random.default_rng(seed)

    def _bytes(self, shape: tuple[int, ...], low: int, high: int) -> Any:
        return self.random.integers(low, high, shape, dtype=self.xp.int32).astype(self.xp.uint8)

    def _floats(self, shape: tuple[int, ...], label: str) -> Any:
        values = self.random.standard_normal(shape, dtype=self.xp.float32)
        if label == "bfloat16":
            # The upper half of a float32 is a bfloat16, whether or not xp can cast to it.
            return (values.view(self.xp.uint32) >> 16).astype(self.xp.uint16).view(ml_dtypes.bfloat16)
        return values.astype(label)

    def _placed(self, array: Any) -> Any:
        """`[l, rows, columns]` in the caller's axis order, cut out of a poisoned array if the case is strided."""
        if self.case.strided:
            batches, rows, columns = array.shape
            larger = self.xp.empty((batches + 1, rows + 2, columns + 5), array.dtype)
            larger.view(self.xp.uint8)[...] = POISON
            larger[1:, 1:-1, 3:-2] = array
            array = larger[1:, 1:-1, 3:-2]
        if self.case.padded:
            array = self._widened(array, -(-array.shape[2] // 16) * 16 + 16)
        return self._in_order(array)

    def _widened(self, array: Any, columns: int) -> Any:
        """The array as part of a poisoned one with more columns."""
        larger = self.xp.full((*array.shape[:2], columns), POISON, array.dtype)
        larger[:, :, : array.shape[2]] = array
        return larger[:, :, : array.shape[2]]

    def _in_order(self, array: Any) -> Any:
        if self.case.batch == "none":
            return array[0]
        return array if self.case.batch == "first" else self.xp.moveaxis(array, 0, -1)

    def _rows(self, array: Any, n: int) -> Any:
        """The first n rows of an array in the caller's axis order."""
        return array[:, :n] if self.case.batch == "first" else array[:n]

    def codes(self, rows: int) -> Any:
        """E2M1 pairs."""
        shape = (self.case.batches, rows, self.case.k // 2)
        if self.case.data == "zero":
            return self._placed(self._bytes(shape, 0, 2) * 8 + self._bytes(shape, 0, 2) * 128)
        return self._placed(self._bytes(shape, 0, 256))

    def vectors(self) -> Any:
        """The array b."""
        case = self.case
        if case.b_dtype == "e2m1":
            return self._rows(self.codes(case.b_rows or case.n), case.n)
        return self._placed(self._floats((case.batches, case.n, case.k), case.b_dtype))

    def scales(self, rows: int, nan_rows: slice) -> Any:
        """Scale codes of a matrix; with NaN data, some of the last column of `nan_rows` in the last batch."""
        case = self.case
        kind = case.data if case.data in ("full", "overflow") else "plain"
        codes = self._bytes((case.batches, rows, case.scale_columns), *_SCALE_CODES[case.format, kind])
        if case.format == NVFP4.name:
            # The upper end of the full range is NaN: take its neighbour, the largest finite magnitude.
            codes -= (codes & 0x7F) == 0x7F
        if case.data == "nan":
            codes[-1:, nan_rows, -1:] = POISON
        if case.words:
            return self._in_order(self._widened(codes, codes.shape[2] + 4))
        if case.scale_layout == "linear":
            return self._placed(codes)
        all_rows, all_columns = padded(rows, case.scale_columns)
        whole = self.xp.full((case.batches, all_rows, all_columns), POISON, self.xp.uint8)
        whole[:, :rows, : case.scale_columns] = codes
        blocks = whole.reshape(case.batches, all_rows // 128, 4, 32, all_columns // 4, 4).transpose(0, 1, 4, 3, 2, 5)
        return self._in_order(self.xp.ascontiguousarray(blocks).reshape(case.batches, all_rows, all_columns))

    def per_row(self, kind: str, label: str) -> Any:
        """An alpha or bias of that kind."""
        case = self.case
        if kind == "scalar":
            return self._floats((1,), label)
        if kind == "rows":
            return self._floats((case.m,), label)
        return self._floats((case.batches, case.m) if case.batch == "first" else (case.m, case.batches), label)
