"""Correctness cases of indexer_k_quant_and_cache; see `cupymla.ops.case`."""

from __future__ import annotations

from cupymla.ops.mla_cache.cases_of.indexer_k_quant_and_cache import KeysCase, _case

CASES: tuple[KeysCase, ...] = (
    *(_case(70, page=page) for page in (1, 16, 64)),
    _case(41, page=3, scale_rule="pow2"),
    _case(0, "no_tokens"),
    _case(9, "no_blocks", blocks=0),
    *(_case(33, "", "dtypes", page=16, dtype=dtype) for dtype in ("float32", "float16")),
    *(_case(24, kind, "values", page=16, values=kind, dtype=dtype, scale_rule=rule)
      for kind in ("non_finite", "powers", "huge", "subnormal")
      for dtype, rule in (("bfloat16", "amax"), ("float32", "pow2"))),
    _case(90, "outside", "slots", page=16, blocks=6, outside=0.4, slots="int32"),
    _case(20, "all_outside", "slots", page=16, outside=1.0),
    _case(30, "gaps", "strides", page=16, gap=64, padding=8, four=True),
    _case(30, "gaps", "strides", page=3, gap=4, padding=1, dtype="float32"),
)  # fmt: skip
