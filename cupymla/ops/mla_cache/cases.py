"""Problems of quantize_fp8; see `cupymla.ops.case`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..case import Case

OUTPUTS = ("codes", "scales")
"""The output parameters, in the order in which the call returns them."""

EXACT = True

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeCase(Case):
    """One problem.

    Attributes:
        rows: extents of the axes before the channels.
        channels: D.
        group: the option.
        scale_rule: the option.
        dtype: of x.
        values: what they are like, see `VALUES`.
        padding: channels of the array behind each row that are not part of it.
    """

    rows: tuple[int, ...]
    channels: int
    group: int = 128
    scale_rule: str = "amax"
    dtype: str = "bfloat16"
    values: str = "normal"
    padding: int = 0


def _case(rows: int | tuple[int, ...], channels: int, name: str = "", intent: str = "shapes", **traits: Any) -> Any:
    extents = rows if isinstance(rows, tuple) else (rows,)
    made = QuantizeCase(name="", intent=intent, rows=extents, channels=channels, **traits)
    words = ["t" + "x".join(map(str, extents)), f"d{channels}"]
    words += [f"g{made.group}"] if made.group != 128 else []
    words += [word for word in (name, made.dtype) if word not in ("", "bfloat16")]
    words += ["pow2"] if made.scale_rule == "pow2" else []
    return QuantizeCase(name="_".join(words), intent=intent, rows=extents, channels=channels, **traits)


DEMO = _case(4096, 512)
"""A problem that takes the reference a second or less."""

BENCH: tuple[QuantizeCase, ...] = (
    *(_case(tokens, 128, intent="speed") for tokens in (32, 4096, 131072, 524288)),
    _case(131072, 512, intent="speed"),
    _case(131072, 512, intent="speed", scale_rule="pow2"),
)


def _normal(rng: Any, xp: Any, shape: tuple[int, ...]) -> Any:
    return rng.standard_normal(shape, dtype=np.float32)


def _non_finite(rng: Any, xp: Any, shape: tuple[int, ...]) -> Any:
    """Infinities and NaN among numbers, groups of nothing but NaN, of zeros of both signs."""
    x = rng.standard_normal(shape, dtype=np.float32)
    kind = rng.random(shape, dtype=np.float32)
    x[kind < 0.01] = np.inf
    x[(kind > 0.01) & (kind < 0.02)] = -np.inf
    x[(kind > 0.1) & (kind < 0.2)] = np.nan
    x[0, :32] = np.nan
    x[1, :32] = np.where(x[1, :32] < 0, np.float32(-0.0), np.float32(0))
    x[2, :32] = rng.standard_normal(32, dtype=np.float32)
    return x


def _subnormal(rng: Any, xp: Any, shape: tuple[int, ...]) -> Any:
    """Groups below the least amax, whose codes are subnormal or zero."""
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(1e-6)


def _wide(rng: Any, xp: Any, shape: tuple[int, ...]) -> Any:
    """Numbers of many magnitudes in a group, past what float16 holds."""
    return rng.standard_normal(shape, dtype=np.float32) * xp.exp(6 * rng.standard_normal(shape, dtype=np.float32))


def _ties(rng: Any, xp: Any, shape: tuple[int, ...]) -> Any:
    """Halfway between two codes, with a scale of 1: every group has a 448."""
    x = rng.integers(0, 256, shape).astype(np.float32) / np.float32(16) * np.float32(0.125)
    x[..., ::16] = 448
    return x


VALUES = {"normal": _normal, "non_finite": _non_finite, "subnormal": _subnormal, "wide": _wide, "ties": _ties}


def inputs(case: QuantizeCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Fresh arguments of `quantize_fp8`, by parameter name."""
    import ml_dtypes

    rng = xp.random.default_rng(seed)
    wide = VALUES[case.values](rng, xp, (*case.rows, case.channels + case.padding))
    with np.errstate(over="ignore"):
        x = wide.astype(ml_dtypes.bfloat16 if case.dtype == "bfloat16" else case.dtype)
    arguments: dict[str, Any] = {"x": x[..., : case.channels]}
    if case.group != 128:
        arguments["group"] = case.group
    if case.scale_rule != "amax":
        arguments["scale_rule"] = case.scale_rule
    return arguments


def flops(case: QuantizeCase) -> float:
    """A comparison and a division of every number."""
    return 2.0 * float(np.prod((*case.rows, case.channels)))


def bytes_moved(case: QuantizeCase) -> float:
    """Every number read once, codes and scales written."""
    elements = float(np.prod((*case.rows, case.channels)))
    return elements * (ITEM_BYTES[case.dtype] + 1) + elements / case.group * 4
