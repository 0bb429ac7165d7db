"""Argument validation of merge_attention: every check a caller can meet, and the problem that is left when they all
pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ...tensor import Device, View
from ..arguments import Arguments, Choice, option
from ..indexer_validation import Validation

OPERATOR = "merge_attention"
DTYPES = ("float32", "bfloat16", "float16")
"""Of outs; the place of a dtype is its FloatType in cuda/mla_cache/sm80/floats.cuh."""

CHANNELS = 8
"""Of a thread; `kChannels` in cuda/mla_cache/sm80/floats.cuh."""

MAX_LEAD = 2


@dataclass(slots=True)
class Views:
    """The arrays, seen; None where one was left out."""

    outs: View
    lses: View
    attn_sink: View | None = None
    out: View | None = None
    lse: View | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """The options.

    Attributes:
        lse_base: "e" or "2".
    """

    lse_base: Literal["e", "2"] = option("e", Choice(("e", "2")))


ARGUMENTS = Arguments(OPERATOR, Views, Options, results=("out", "lse"))


@dataclass(frozen=True, slots=True)
class Problem:
    """All that a plan may depend on.

    Attributes:
        parts: P.
        lead: extents of the axes between parts and heads.
        heads: h.
        d_v: channels of a head.
        dtype: of outs.
        options: the options.
        device: where every array is.
    """

    parts: int
    lead: tuple[int, ...]
    heads: int
    d_v: int
    dtype: str
    options: Options
    device: Device

    @property
    def results(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Shape and dtype of out and lse."""
        heads = (*self.lead, self.heads)
        return ((*heads, self.d_v), self.dtype), (heads, "float32")


def read(
    outs: Any, lses: Any, *, attn_sink: Any = None, lse_base: Any = "e", out: Any = None, lse: Any = None
) -> tuple[Views, Problem]:
    """Check a call. Raises InputError."""
    validation = Validation(OPERATOR)
    seen = validation.view(outs, "outs", DTYPES)
    options = validation.chosen(ARGUMENTS, lse_base)
    if not 3 <= seen.ndim <= 3 + MAX_LEAD:
        expected = f"shape [P, ..., h, d_v] with up to {MAX_LEAD} axes between P and h"
        raise validation.error("outs", expected, list(seen.shape))
    parts = validation.extent(seen, "outs", 0, "parts, P in [P, ..., h, d_v]", least=1)
    heads = validation.extent(seen, "outs", -2, "heads, h in [P, ..., h, d_v]")
    d_v = validation.extent(seen, "outs", -1, "channels, d_v in [P, ..., h, d_v]")
    if d_v % CHANNELS:
        raise validation.error("outs", f"d_v a multiple of {CHANNELS} in shape [P, ..., h, d_v]", d_v)
    for axis in range(1, seen.ndim - 2):
        validation.extent(seen, "outs", axis, "rows")
    validation.check_layout(seen, "outs", "lists")
    problem = Problem(parts, seen.shape[1:-2], heads, d_v, seen.dtype, options, seen.device)
    (out_shape, _), (lse_shape, _) = problem.results
    views = Views(
        outs=seen,
        lses=validation.given(lses, "lses", seen.shape[:-1], ("float32",)),
        attn_sink=validation.shaped(attn_sink, "attn_sink", (heads,), ("float32",)),
        out=validation.shaped(out, "out", out_shape, (seen.dtype,), "lists", output=True),
        lse=validation.shaped(lse, "lse", lse_shape, ("float32",), output=True),
    )
    validation.separate()
    return views, problem
