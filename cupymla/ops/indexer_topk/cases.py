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


_ALL: dict[str, Any] = {"return_values": True, "return_lse": True}

CASES: tuple[IndexerTopkCase, ...] = (
    _case(3, 200, 20, scales=True),
    _case(3, 200, 20, heads=64, return_values=True),
    _case(2, 70, 30, dtype="bf16", return_values=True, return_lse=True),
    _case(2, 70, 30, dtype="fp16", channels=64, return_values=True, return_lse=True),
    _case(2, 40, 60, "short", return_values=True, return_lse=True),
    _case(0, 100, 5, "no_queries", return_values=True, return_lse=True),
    _case(3, 0, 5, "no_keys", return_values=True, return_lse=True),
    _case(3, 130, 9, "lse2", "options", return_values=True, return_lse=True, lse_base="2"),
    _case(3, 130, 9, "no_relu", "options", relu=False, return_values=True),
    _case(3, 130, 9, "bf16_weights", "options", bf16_weights=True),
    _case(20, 19, 8, "causal", "masks", causal=True, return_values=True, return_lse=True),
    _case(9, 140, 30, "causal", "masks", causal=True, q_start=130, heads=32),
    _case(
        30, 9, 4, "causal_stride4", "masks", causal=True, q_start=-3, k_stride=4, return_values=True, return_lse=True
    ),
    _case(11, 270, 40, "windows", "masks", limits="windows", return_values=True, return_lse=True),
    _case(11, 270, 40, "windows_causal", "masks", limits="windows", causal=True, q_start=200, dtype="bf16"),
    _case(3, 8300, 300, "shared", heads=8, channels=64, return_values=True, return_lse=True),
    _case(3, 130, 20, "batch", "batch", batch=2, limits="windows", scales=True, return_values=True, return_lse=True),
    _case(
        3, 70, 20, "batch_strided", "strides", batch=2, dtype="bf16", strided=True, return_values=True, return_lse=True
    ),
)

DEMO = _case(32, 4096, 512, heads=32, scales=True)
"""A problem which takes the references a second or two."""

LARGE: tuple[IndexerTopkCase, ...] = (
    _case(300, 200001, 2048, "chunks", "large", heads=32, return_values=True, return_lse=True),
    _case(300, 200001, 2048, "chunks_causal", "large", heads=32, causal=True, q_start=199701),
    _case(3000, 3001, 2048, "causal", "large", heads=64, causal=True, return_values=True),
    _case(300, 30001, 2048, "causal", "large", heads=8, causal=True, q_start=29701, **_ALL),
    _case(50, 40000, 2048, "causal", "large", heads=8, causal=True, q_start=39950, **_ALL),
    _case(200, 9000, 1000, "batch", "large", batch=30, limits="windows", return_values=True, return_lse=True),
)
"""For a GPU alone: rows that are scored in several parts."""

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
