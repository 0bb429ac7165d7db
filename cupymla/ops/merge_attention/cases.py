"""Problems of merge_attention; see `cupymla.ops.case`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..case import Case

OUTPUTS = ("out", "lse")
"""The output parameters, in the order in which the call returns them."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeCase(Case):
    """One problem.

    Attributes:
        parts: P.
        lead: extents between parts and heads.
        heads: h.
        d_v: channels of a head.
        dtype: of outs.
        sink: None, "normal", or "extreme": far above and below the scores, and both infinities.
        lse_base: the option.
        lses: "normal", "empty": many parts are, whose outs are NaN, and some rows have nothing else; "far": they differ
            by hundreds; "nan": some are.
        padding: channels of the array behind each head that are not part of it.
    """

    parts: int
    lead: tuple[int, ...]
    heads: int
    d_v: int = 512
    dtype: str = "bfloat16"
    sink: str | None = None
    lse_base: str = "e"
    lses: str = "normal"
    padding: int = 0


def _case(parts: int, lead: int | tuple[int, ...], heads: int, intent: str = "shapes", **traits: Any) -> MergeCase:
    rows = lead if isinstance(lead, tuple) else (lead,)
    made = MergeCase(name="", intent=intent, parts=parts, lead=rows, heads=heads, **traits)
    words = [f"p{parts}", "t" + "x".join(map(str, rows)), f"h{heads}", f"d{made.d_v}"]
    words += [made.dtype] if made.dtype != "bfloat16" else []
    words += [made.lses] if made.lses != "normal" else []
    words += ["sink" if made.sink == "normal" else f"{made.sink}_sink"] if made.sink else []
    words += ["base2"] if made.lse_base == "2" else []
    words += [f"padded{made.padding}"] if made.padding else []
    return MergeCase(name="_".join(words), intent=intent, parts=parts, lead=rows, heads=heads, **traits)


DEMO = _case(8, 32, 128, sink="normal")
"""A problem that takes the references a second or less."""

BENCH: tuple[MergeCase, ...] = tuple(
    _case(parts, rows, 128, "speed", sink="normal") for parts, rows in ((2, 32), (2, 4096), (8, 32), (8, 4096))
)


def _extreme(xp: Any, heads: int) -> Any:
    return xp.resize(xp.asarray([300, -300, np.inf, -np.inf, 0], dtype=np.float32), heads)


def inputs(case: MergeCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Fresh arguments of `merge_attention`, by parameter name."""
    import ml_dtypes

    rng = xp.random.default_rng(seed)
    heads = (case.parts, *case.lead, case.heads)
    wide = rng.standard_normal((*heads, case.d_v + case.padding), dtype=np.float32)
    lses = 3 * rng.standard_normal(heads, dtype=np.float32)
    if case.lses == "far":
        lses *= 100
    if case.lses == "nan":
        lses[rng.random(heads, dtype=np.float32) < 0.1] = np.nan
    if case.lses == "empty":
        empty = rng.random(heads, dtype=np.float32) < 0.4
        empty[..., :2] = True  # of these heads every part
        wide[empty] = np.nan
        lses[empty] = np.inf
        lses[0, ..., 1:2] = -np.inf
    outs = wide.astype(ml_dtypes.bfloat16 if case.dtype == "bfloat16" else case.dtype)[..., : case.d_v]
    arguments: dict[str, Any] = {"outs": outs, "lses": lses}
    if case.sink is not None:
        sink = rng.standard_normal(case.heads, dtype=np.float32)
        arguments["attn_sink"] = sink if case.sink == "normal" else _extreme(xp, case.heads)
    if case.lse_base != "e":
        arguments["lse_base"] = case.lse_base
    return arguments


def _elements(case: MergeCase) -> float:
    return float(np.prod((*case.lead, case.heads, case.d_v)))


def flops(case: MergeCase) -> float:
    """A product and a sum of every number."""
    return 2 * case.parts * _elements(case)


def bytes_moved(case: MergeCase) -> float:
    """Every part read once, results written."""
    per_head = (case.parts + 1) * (case.d_v * ITEM_BYTES[case.dtype] + 4)
    return _elements(case) / max(case.d_v, 1) * per_head
