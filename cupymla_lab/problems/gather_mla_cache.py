"""Correctness cases of gather_mla_cache; see `cupymla.ops.case`."""

from __future__ import annotations

from cupymla.ops.mla_cache.cases_of.gather_mla_cache import LatentGatherCase, _case

CASES: tuple[LatentGatherCase, ...] = (
    *(_case(form, 70, page=page) for form in ("bf16", "v32", "v4") for page in (1, 16, 64)),
    _case("bf16", 40, "latents_alone", page=16, d_qk=512),
    _case("v32", 0, "no_rows"),
    _case("v4", 9, "no_blocks", blocks=0),
    *(_case(form, 90, "outside", "slots", page=16, blocks=6, outside=0.4, slots=dtype)
      for form, dtype in (("bf16", "int32"), ("v32", "int64"), ("v4", "int32"))),
    _case("v32", 20, "all_outside", "slots", page=16, outside=1.0),
    *(_case(form, 75, "", "tables", page=page, by=by)
      for form in ("bf16", "v32", "v4") for page, by in ((1, "tables"), (16, "hostile"))),
    _case("bf16", 30, "gaps", "strides", page=16, gap=64, four=True),
    _case("v32", 30, "gaps", "strides", page=1, gap=16, four=True, apart=True),
    _case("v4", 30, "gaps", "strides", page=3, gap=8),
)  # fmt: skip
