"""Problems of dequantize_fp8; see `cupymla.ops.case`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...case import Case
from .places import padded

OUTPUTS = ("out",)
"""The output parameter."""

EXACT = True

BOUND_BY_COPYING = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DequantizeCase(Case):
    """One problem; codes are any bytes.

    Attributes:
        rows: extents of the axes before the channels.
        channels: D.
        group: the option.
        scales: "normal", or "any" float32: NaN, infinities and subnormal numbers among them.
        padding: codes behind each row that are not part of it.
    """

    rows: tuple[int, ...]
    channels: int
    group: int = 128
    scales: str = "normal"
    padding: int = 0


def _case(rows: int | tuple[int, ...], channels: int, intent: str = "shapes", **traits: Any) -> DequantizeCase:
    extents = rows if isinstance(rows, tuple) else (rows,)
    made = DequantizeCase(name="", intent=intent, rows=extents, channels=channels, **traits)
    words = ["t" + "x".join(map(str, extents)), f"d{channels}", *([f"g{made.group}"] if made.group != 128 else [])]
    words += [f"{made.scales}_scales"] if made.scales != "normal" else []
    words += [f"padded{made.padding}"] if made.padding else []
    return DequantizeCase(name="_".join(words), intent=intent, rows=extents, channels=channels, **traits)


DEMO = _case(4096, 512)
"""A problem that takes the reference a second or less."""

BENCH: tuple[DequantizeCase, ...] = tuple(
    _case(rows, channels, "speed")
    for rows, channels in ((32, 128), (4096, 128), (131072, 128), (524288, 128), (131072, 512))
)


def inputs(case: DequantizeCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Fresh arguments of `dequantize_fp8`, by parameter name."""
    rng = xp.random.default_rng(seed)
    codes = rng.integers(0, 256, (*case.rows, case.channels)).astype(np.uint8)
    shape = (*case.rows, case.channels // case.group)
    scales = rng.standard_normal(shape, dtype=np.float32)
    if case.scales == "any":
        scales = rng.integers(0, 2**32, shape).astype(np.uint32).view(np.float32)
    arguments: dict[str, Any] = {"codes": padded(codes, case.padding), "scales": scales}
    if case.group != 128:
        arguments["group"] = case.group
    return arguments


def flops(case: DequantizeCase) -> float:
    """A product of every number."""
    return float(np.prod((*case.rows, case.channels)))


def bytes_moved(case: DequantizeCase) -> float:
    """Every code and scale read once, every number written."""
    elements = float(np.prod((*case.rows, case.channels)))
    return elements * 3 + elements / case.group * 4
