"""Correctness cases of hadamard; see `cupymla.ops.case`."""

from __future__ import annotations

from cupymla.ops.mla_cache.cases_of.hadamard import HadamardCase, _case

CASES: tuple[HadamardCase, ...] = (
    *(_case(5, channels) for channels in (8, 64, 128, 256, 512, 1024, 8192)),
    _case((2, 3, 2), 128),
    _case((), 128),
    _case(0, 128),
    *(_case(9, 256, "dtypes", dtype=dtype) for dtype in ("float32", "float16")),
    *(_case(9, 128, "values", values=kind, dtype=dtype)
      for kind, dtype in (("non_finite", "bfloat16"), ("wide", "float16"), ("wide", "float32"))),
    _case(6, 128, "strides", padding=8),
    _case((3, 4), 512, "strides", padding=1),
)  # fmt: skip
