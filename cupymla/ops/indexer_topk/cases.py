"""Problems of indexer_topk: those of `indexer_logits`, with a selection; see `cupymla.ops.case`.

Values are small integers, whose scores are exact on every machine, so that there is one right selection. What is wanted
is wanted in the order of `OUTPUTS`: no lse without values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..case import Case
from ..indexer_logits import cases as scoring
from ..indexer_logits.cases import LogitsCase

OUTPUTS = ("indices", "count", "values", "lse")
"""The output parameters, in the order in which the call returns them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerTopkCase(Case):
    """One problem.

    Attributes:
        scored: the scores' problem.
        topk, return_values, return_lse, lse_base: the options.
    """

    scored: LogitsCase
    topk: int
    return_values: bool = False
    return_lse: bool = False
    lse_base: str = "e"

    @property
    def dtype(self) -> str:
        """Of q and keys: the benchmark's ceiling is that of these products."""
        return self.scored.dtype


def _case(queries: int, keys: int, topk: int, name: str = "", intent: str = "shapes", **traits: Any) -> IndexerTopkCase:
    own = {n: traits.pop(n) for n in ("return_values", "return_lse", "lse_base") if n in traits}
    heads, channels = traits.pop("heads", 16), traits.get("channels", 128)
    values = {} if intent == "speed" else {"values": "exact"}
    scored = LogitsCase(name="", intent=intent, queries=queries, keys=keys, heads=heads, **{**values, **traits})
    size = f"_h{heads}{'' if channels == 128 else f'_d{channels}'}_t{queries}_l{keys}_k{topk}"
    words = [f"{scored.dtype}{size}", *([name] if name else [])]
    return IndexerTopkCase(name="_".join(words), intent=intent, scored=scored, topk=topk, **own)


DEMO = _case(32, 4096, 512, heads=32, scales=True)
"""A problem which takes the references a second or two."""

BENCH: tuple[IndexerTopkCase, ...] = tuple(
    _case(4096, keys, 2048, "causal", "speed", heads=64, scales=True, causal=True, q_start=keys - 4096)
    for keys in (4096, 32768, 131072)
)


def inputs(case: IndexerTopkCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Fresh arguments of `indexer_topk`, by parameter name; fp8 as bytes."""
    arguments = scoring.inputs(case.scored, seed, xp)
    arguments["topk"] = case.topk
    options = {"return_values": False, "return_lse": False, "lse_base": "e"}
    return arguments | {name: getattr(case, name) for name, usual in options.items() if getattr(case, name) != usual}


def scored_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `indexer_logits` among the inputs of a call."""
    own = ("topk", "return_values", "return_lse", "lse_base")
    return {name: value for name, value in arguments.items() if name not in own}


def flops(case: IndexerTopkCase) -> float:
    """The products of all heads with all keys; of causal masks, with those that are seen."""
    return scoring.flops(case.scored)


def bytes_moved(case: IndexerTopkCase) -> float:
    """q, k and weights read, results written."""
    scored = case.scored
    rows = float((scored.batch or 1) * scored.queries)
    written = case.topk * (4 + 4 * case.return_values) + 4 + 4 * case.return_lse
    return scoring.bytes_moved(scored) - 4 * rows * scored.keys + rows * written
