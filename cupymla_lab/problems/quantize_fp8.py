"""Correctness cases of quantize_fp8; see `cupymla.ops.case`."""

from __future__ import annotations

from cupymla.ops.mla_cache.cases import QuantizeCase, _case

CASES: tuple[QuantizeCase, ...] = (
    _case(3, 128),
    _case(5, 512, scale_rule="pow2"),
    _case(300, 128, group=64),
    _case(7, 48, group=16),
    _case(4, 768, group=256),
    _case((2, 3, 2), 128),
    _case((), 128),
    _case(0, 128, "no_rows"),
    *(_case(9, 256, dtype=dtype, intent="dtypes", scale_rule=rule)
      for dtype in ("float32", "float16") for rule in ("amax", "pow2")),
    *(_case(5, 256, kind, "values", values=kind, dtype=dtype, group=32)
      for kind in ("non_finite", "subnormal", "wide", "ties") for dtype in ("float32", "bfloat16", "float16")),
    _case(5, 256, "non_finite", "values", values="non_finite", group=32, scale_rule="pow2"),
    _case(6, 128, "padded", "strides", padding=8),
    _case(6, 128, "odd", "strides", padding=1),
    _case((3, 4), 128, "odd", "strides", padding=3, dtype="float32"),
)  # fmt: skip
