"""Problems of concat_and_cache_mla; see `cupymla.ops.case`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..cases import ITEM_BYTES
from ..latent_spec import CONCAT, ROPE
from ..latents import FORMATS, LatentFormat
from .places import PAGE, WriteCase, blocks_for, dtype_of, numbers, random_blocks, slots_of, words_of

OUTPUTS = ("cache",)
"""What the call returns."""

UPDATES = CONCAT.updates

EXACT = True

BOUND_BY_COPYING = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcatCase(WriteCase):
    """One problem.

    Attributes:
        form: the cache format.
        rope: whether there is a k_pe.
        scale_rule: the option.
    """

    form: str
    rope: bool = True
    scale_rule: str | None = None

    @property
    def layout(self) -> LatentFormat:
        """Of the cache."""
        return FORMATS[self.form]

    @property
    def channels(self) -> int:
        """Of kv_c."""
        return self.layout.codes or min(self.layout.d_qk)

    @property
    def width(self) -> int:
        """Channels of a token, the rotary part included."""
        return self.channels + (ROPE if self.rope else 0)


def _case(form: str, tokens: int, name: str = "", intent: str = "shapes", **traits: Any) -> ConcatCase:
    known = form if form == "bf16" else f"{form}_fp8"
    traits = {"blocks": blocks_for(tokens, traits.get("page", PAGE)), **traits}
    made = ConcatCase(name="", intent=intent, form=known, tokens=tokens, **traits)
    dtype = "" if made.dtype == "bfloat16" else made.dtype
    return replace(made, name=words_of(made, f"{form}_t{tokens}", name, dtype, made.scale_rule or ""))


DEMO = _case("v32", 2048, "demo")
"""A problem that takes the reference a second or less."""

BENCH: tuple[ConcatCase, ...] = tuple(
    _case(form, tokens, intent="speed") for form in ("bf16", "v32", "v4") for tokens in (32, 4096, 131072, 524288)
)
"""Of 32 tokens each has a slot of its own anywhere, as in decoding; more fill whole pages, in any order."""


def inputs(case: ConcatCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Fresh arguments of `concat_and_cache_mla`, by parameter name; the cache holds any bytes."""
    rng = xp.random.default_rng(seed)
    layout = case.layout
    kv_c = numbers(rng, xp, case.tokens, case.channels, case.values, case.dtype, case.padding)
    k_pe = numbers(rng, xp, case.tokens, ROPE, case.values, case.dtype, case.padding) if case.rope else None
    cache = random_blocks(rng, xp, case, layout.token_bytes(case.width))
    arguments: dict[str, Any] = {
        "kv_c": kv_c,
        "k_pe": k_pe,
        "cache": cache if layout.codes else cache.view(dtype_of("bfloat16")),
        "slot_mapping": slots_of(rng, xp, case, case.tokens),
        "cache_format": case.form,
    }
    if case.scale_rule is not None:
        arguments["scale_rule"] = case.scale_rule
    return arguments


def flops(case: ConcatCase) -> float:
    """A comparison and a division of every number; 0 where there is nothing to write to."""
    return 2.0 * case.tokens * case.width * (case.blocks > 0)


def bytes_moved(case: ConcatCase) -> float:
    """Every number and every slot read once, every row written."""
    read = case.width * ITEM_BYTES[case.dtype] + case.slot_bytes
    return float(case.tokens * (read + case.layout.token_bytes(case.width)))
