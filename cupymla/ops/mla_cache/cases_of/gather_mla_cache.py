"""Problems of gather_mla_cache; see `cupymla.ops.case`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..latents import FORMATS, LatentFormat
from .places import PAGE, GatherCase, blocks_for, dtype_of, places_of, random_blocks, words_of

OUTPUTS = ("kv",)
"""The output parameter."""

EXACT = True

BOUND_BY_COPYING = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentGatherCase(GatherCase):
    """One problem.

    Attributes:
        form: the cache format.
        d_qk: channels of a row.
    """

    form: str
    d_qk: int

    @property
    def layout(self) -> LatentFormat:
        """Of the cache."""
        return FORMATS[self.form]


def _case(form: str, rows: int, name: str = "", intent: str = "shapes", **traits: Any) -> LatentGatherCase:
    known = form if form == "bf16" else f"{form}_fp8"
    traits = {"blocks": blocks_for(rows, traits.get("page", PAGE)), "d_qk": FORMATS[known].d_qk[0], **traits}
    made = LatentGatherCase(name="", intent=intent, form=known, rows=rows, **traits)
    return replace(made, name=words_of(made, f"{form}_t{rows}", "" if made.by == "slots" else made.by, name))


DEMO = _case("v32", 2048, "demo")
"""A problem that takes the reference a second or less."""

BENCH: tuple[LatentGatherCase, ...] = (
    *(
        _case(form, rows, intent="speed")
        for form in ("bf16", "v32", "v4")
        for rows in (32, 4096, 131072, 524288)
    ),
    _case("v32", 131072, intent="speed", by="tables"),
)  # fmt: skip
"""32 slots are anywhere; more are those of whole pages, in any order."""


def inputs(case: LatentGatherCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Fresh arguments of `gather_mla_cache`, by parameter name; the cache holds any bytes, any scale among them."""
    rng = xp.random.default_rng(seed)
    layout = case.layout
    cache = random_blocks(rng, xp, case, layout.token_bytes(case.d_qk))
    arguments = {"cache": cache if layout.codes else cache.view(dtype_of("bfloat16")), "cache_format": case.form}
    return arguments | places_of(rng, xp, case)


def flops(case: LatentGatherCase) -> float:
    """A product of every number."""
    return float(case.rows * case.d_qk)


def bytes_moved(case: LatentGatherCase) -> float:
    """Every row and slot read once, every row written."""
    return float(case.rows * (case.layout.token_bytes(case.d_qk) + case.slot_bytes + 2 * case.d_qk))
