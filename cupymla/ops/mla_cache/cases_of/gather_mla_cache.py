"""Problems of gather_mla_cache; see `cupymla.ops.case`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...case import Case, spread
from ..latents import FORMATS, LatentFormat
from .places import PAGE, blocks_for, dtype_of, random_blocks, slots_of, tables_of

OUTPUTS = ("kv",)
"""The output parameter."""

EXACT = True

BOUND_BY_COPYING = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherCase(Case):
    """One problem.

    Attributes:
        form: the cache format.
        rows: how many slots there are, or rows of requests.
        d_qk: channels of a row.
        page, blocks: of the cache.
        by: "slots", "tables", or "hostile": tables that name blocks which the cache does not have.
        outside: share of slots that the cache does not have.
        slots: their dtype.
        gap: bytes between blocks.
        four: whether the cache has an axis of one head.
        apart: whether there are gaps between slots.
    """

    form: str
    rows: int
    d_qk: int
    page: int = PAGE
    blocks: int = 1
    by: str = "slots"
    outside: float = 0.0
    slots: str = "int64"
    gap: int = 0
    four: bool = False
    apart: bool = False

    @property
    def layout(self) -> LatentFormat:
        """Of the cache."""
        return FORMATS[self.form]


def _case(form: str, rows: int, name: str = "", intent: str = "shapes", **traits: Any) -> GatherCase:
    known = form if form == "bf16" else f"{form}_fp8"
    traits = {"blocks": blocks_for(rows, traits.get("page", PAGE)), "d_qk": FORMATS[known].d_qk[0], **traits}
    made = GatherCase(name="", intent=intent, form=known, rows=rows, **traits)
    words = [form, f"t{rows}", *([f"page{made.page}"] if made.page != PAGE else [])]
    words += [word for word in (made.by if made.by != "slots" else "", name) if word]
    return GatherCase(name="_".join(words), intent=intent, form=known, rows=rows, **traits)


CASES: tuple[GatherCase, ...] = (
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

DEMO = _case("v32", 2048, "demo")
"""A problem that takes the reference a second or less."""

BENCH: tuple[GatherCase, ...] = (
    *(
        _case(form, rows, intent="speed")
        for form in ("bf16", "v32", "v4")
        for rows in (32, 4096, 131072, 524288)
    ),
    _case("v32", 131072, intent="speed", by="tables"),
)  # fmt: skip
"""32 slots are anywhere; more are those of whole pages, in any order."""


def inputs(case: GatherCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Fresh arguments of `gather_mla_cache`, by parameter name; the cache holds any bytes, any scale among them."""
    rng = xp.random.default_rng(seed)
    layout = case.layout
    cache = random_blocks(rng, xp, case.blocks, case.page, layout.token_bytes(case.d_qk), case.gap, case.four)
    arguments = {"cache": cache if layout.codes else cache.view(dtype_of("bfloat16")), "cache_format": case.form}
    if case.by != "slots":
        return arguments | tables_of(rng, xp, case.rows, case.blocks, case.page, case.by == "hostile")
    slots = slots_of(rng, xp, case.rows, case.blocks, case.page, case.outside, case.slots)
    return arguments | {"slots": spread(slots, False) if case.apart else slots}


def flops(case: GatherCase) -> float:
    """A product of every number."""
    return float(case.rows * case.d_qk)


def bytes_moved(case: GatherCase) -> float:
    """Every row and slot read once, every row written."""
    slot = np.dtype(case.slots).itemsize if case.by == "slots" else 0
    return float(case.rows * (case.layout.token_bytes(case.d_qk) + slot + 2 * case.d_qk))
