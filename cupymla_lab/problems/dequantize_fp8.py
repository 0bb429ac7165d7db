"""Correctness cases of dequantize_fp8; see `cupymla.ops.case`."""

from __future__ import annotations

from cupymla.ops.mla_cache.cases_of.dequantize_fp8 import DequantizeCase, _case

CASES: tuple[DequantizeCase, ...] = (
    _case(3, 128),
    _case(300, 128, group=64),
    _case(7, 48, group=16),
    _case(4, 768, group=256),
    _case((2, 3, 2), 128),
    _case((), 128),
    _case(0, 128),
    _case(40, 256, "values", scales="any", group=32),
    _case(6, 128, "strides", padding=8),
    _case((3, 4), 128, "strides", padding=1),
)
