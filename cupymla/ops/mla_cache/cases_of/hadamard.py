"""Problems of hadamard; see `cupymla.ops.case`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...case import Case
from ..cases import ITEM_BYTES, VALUES
from .places import dtype_of, padded

OUTPUTS = ("out",)
"""The output parameter."""

EXACT = True

BOUND_BY_COPYING = True


@dataclass(frozen=True, slots=True, kw_only=True)
class HadamardCase(Case):
    """One problem.

    Attributes:
        rows: extents of the axes before the channels.
        channels: D.
        dtype: of x.
        values: what numbers are like, see `..cases.VALUES`.
        padding: channels behind each row that are not part of it.
    """

    rows: tuple[int, ...]
    channels: int
    dtype: str = "bfloat16"
    values: str = "normal"
    padding: int = 0


def _case(rows: int | tuple[int, ...], channels: int, intent: str = "shapes", **traits: Any) -> HadamardCase:
    extents = rows if isinstance(rows, tuple) else (rows,)
    made = HadamardCase(name="", intent=intent, rows=extents, channels=channels, **traits)
    words = ["t" + "x".join(map(str, extents)), f"d{channels}", *([made.values] if made.values != "normal" else [])]
    words += [made.dtype] if made.dtype != "bfloat16" else []
    words += [f"padded{made.padding}"] if made.padding else []
    return HadamardCase(name="_".join(words), intent=intent, rows=extents, channels=channels, **traits)


DEMO = _case(4096, 128)
"""A problem that takes the reference a second or less."""

BENCH: tuple[HadamardCase, ...] = tuple(
    _case(rows, channels, "speed")
    for rows, channels in ((32, 128), (4096, 128), (131072, 128), (524288, 128), (131072, 512))
)


def inputs(case: HadamardCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Fresh arguments of `hadamard`, by parameter name."""
    rng = xp.random.default_rng(seed)
    wide = VALUES[case.values](rng, xp, (*case.rows, case.channels))
    with np.errstate(over="ignore"):
        x = wide.astype(dtype_of(case.dtype))
    return {"x": padded(x, case.padding)}


def flops(case: HadamardCase) -> float:
    """A sum of every number for each doubling of the distance, and a product."""
    elements = float(np.prod((*case.rows, case.channels)))
    return elements * (case.channels.bit_length())


def bytes_moved(case: HadamardCase) -> float:
    """Every number read once and written once."""
    return 2.0 * ITEM_BYTES[case.dtype] * float(np.prod((*case.rows, case.channels)))
