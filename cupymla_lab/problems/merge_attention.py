"""Correctness cases of merge_attention; see `cupymla.ops.case`."""

from __future__ import annotations

from cupymla.ops.merge_attention.cases import MergeCase, _case

CASES: tuple[MergeCase, ...] = (
    _case(2, 3, 5, d_v=64),
    _case(1, (2, 3), 3, d_v=8, sink="normal"),
    _case(8, (), 7, d_v=24),
    _case(19, 2, 3, d_v=128, lse_base="2"),
    _case(3, 0, 4, d_v=16),
    _case(4, 33, 128, "many", d_v=64, lses="empty", sink="normal"),
    *(_case(3, 5, 4, "dtypes", d_v=40, dtype=dtype, lses="empty") for dtype in ("float16", "float32")),
    _case(4, 9, 6, "values", d_v=32, lses="empty", lse_base="2"),
    _case(4, 9, 6, "values", d_v=32, lses="far", sink="normal", lse_base="2"),
    _case(4, 9, 6, "values", d_v=32, lses="nan", sink="normal"),
    _case(4, 9, 8, "values", d_v=32, lses="empty", sink="extreme"),
    _case(3, (2, 3), 4, "strides", d_v=32, padding=8),
    _case(3, (2, 3), 4, "strides", d_v=32, padding=1, dtype="float32"),
)
