"""Problems of indexer_k_quant_and_cache; see `cupymla.ops.case`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..cases import ITEM_BYTES
from ..formats import INDEXER_FP8
from ..paged_spec import WRITE
from .places import PAGE, WriteCase, blocks_for, numbers, random_blocks, slots_of, words_of

OUTPUTS = ("cache",)
"""What the call returns."""

UPDATES = WRITE.updates

EXACT = True

BOUND_BY_COPYING = True


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysCase(WriteCase):
    """One problem.

    Attributes:
        scale_rule: the option.
    """

    scale_rule: str = "amax"


def _case(tokens: int, name: str = "", intent: str = "shapes", **traits: Any) -> KeysCase:
    traits = {"blocks": blocks_for(tokens, traits.get("page", PAGE)), **traits}
    made = KeysCase(name="", intent=intent, tokens=tokens, **traits)
    dtype = "" if made.dtype == "bfloat16" else made.dtype
    rule = "" if made.scale_rule == "amax" else made.scale_rule
    return replace(made, name=words_of(made, f"t{tokens}", name, dtype, rule))


DEMO = _case(4096, "demo")
"""A problem that takes the reference a second or less."""

BENCH: tuple[KeysCase, ...] = tuple(_case(tokens, intent="speed") for tokens in (32, 4096, 131072, 524288))
"""Of 32 tokens each has a slot of its own anywhere, as in decoding; more fill whole pages, in any order."""


def inputs(case: KeysCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Fresh arguments of `indexer_k_quant_and_cache`, by parameter name; the cache holds any bytes."""
    rng = xp.random.default_rng(seed)
    arguments: dict[str, Any] = {
        "k": numbers(rng, xp, case.tokens, INDEXER_FP8.channels, case.values, case.dtype, case.padding),
        "cache": random_blocks(rng, xp, case, INDEXER_FP8.token_bytes),
        "slot_mapping": slots_of(rng, xp, case, case.tokens),
    }
    if case.scale_rule != "amax":
        arguments["scale_rule"] = case.scale_rule
    return arguments


def flops(case: KeysCase) -> float:
    """A comparison and a division of every number; 0 where there is nothing to write to."""
    return 2.0 * case.tokens * INDEXER_FP8.channels * (case.blocks > 0)


def bytes_moved(case: KeysCase) -> float:
    """Every number and every slot read once, every row written."""
    written = INDEXER_FP8.channels * ITEM_BYTES[case.dtype]
    return float(case.tokens * (written + case.slot_bytes + INDEXER_FP8.token_bytes))
