"""Correctness cases of concat_and_cache_mla; see `cupymla.ops.case`."""

from __future__ import annotations

from cupymla.ops.mla_cache.cases_of.concat_and_cache_mla import ConcatCase, _case

CASES: tuple[ConcatCase, ...] = (
    *(_case(form, 70, page=page) for form in ("bf16", "v32", "v4") for page in (1, 16, 64)),
    _case("v32", 41, page=3, scale_rule="pow2"),
    _case("v4", 41, page=3, scale_rule="pow2"),
    _case("bf16", 30, "latents_alone", rope=False, page=16),
    _case("v32", 0, "no_tokens"),
    _case("v4", 9, "no_blocks", blocks=0),
    *(_case(form, 33, "", "dtypes", page=16, dtype=dtype)
      for form in ("bf16", "v32", "v4") for dtype in ("float32", "float16")),
    _case("v32", 33, "", "dtypes", page=16, dtype="float16", scale_rule="pow2"),
    _case("v32", 33, "amax", "options", page=16, scale_rule="amax"),
    *(_case(form, 24, kind, "values", page=16, values=kind, dtype=dtype)
      for kind in ("non_finite", "powers", "huge", "subnormal")
      for form, dtype in (("v32", "bfloat16"), ("v4", "float16"), ("bf16", "float32"))),
    *(_case("v32", 24, kind, "values", page=16, values=kind, dtype="float32", scale_rule="pow2")
      for kind in ("non_finite", "powers", "huge", "wide")),
    *(_case(form, 90, "outside", "slots", page=16, blocks=6, outside=0.4, slots=dtype)
      for form, dtype in (("bf16", "int32"), ("v32", "int64"), ("v4", "int32"))),
    _case("v32", 20, "all_outside", "slots", page=16, outside=1.0),
    _case("bf16", 30, "gaps", "strides", page=16, gap=64, padding=8, four=True),
    _case("v32", 30, "gaps", "strides", page=1, gap=16, padding=1, four=True),
    _case("v4", 30, "gaps", "strides", page=3, gap=8, padding=3, dtype="float32"),
)  # fmt: skip
