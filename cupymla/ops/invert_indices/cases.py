"""Problems of invert_indices; see `cupymla.ops.case`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..case import Case
from .spec import ARGUMENTS

OUTPUTS = ARGUMENTS.results
"""The output parameters, in the order in which the call returns them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InvertCase(Case):
    """One problem.

    Attributes:
        s_q: queries.
        s_kv: tokens.
        topk: entries of a query.
        batch: extent of the batch axis, None without one.
        ids: "distinct": a query names no token twice, in ascending order; "random"; "skewed": the lower the token the
            more often; "few": three tokens, again and again; "same": one token alone; "hostile": many that are no
            token, and the extremes of int32; "none".
        lengths: whether topk_length is given, some of it out of range.
        layout: "contiguous"; "padded": an element behind each row, so that rows begin at any multiple of 4 bytes;
            "strided": batch entries and queries with gaps, lengths with gaps; "singleton": with the axis of extent 1.
    """

    s_q: int
    s_kv: int
    topk: int
    batch: int | None = None
    ids: str = "random"
    lengths: bool = False
    layout: str = "contiguous"

    @property
    def row(self) -> tuple[int, ...]:
        """Shape of what there is for each query."""
        return (self.s_q,) if self.batch is None else (self.batch, self.s_q)


def _case(s_q: int, s_kv: int, topk: int, name: str = "", intent: str = "shapes", **traits: Any) -> InvertCase:
    words = [f"q{s_q}_kv{s_kv}_k{topk}", *([name] if name else [])]
    return InvertCase(name="_".join(words), intent=intent, s_q=s_q, s_kv=s_kv, topk=topk, **traits)


DEMO = _case(256, 8192, 2048, ids="distinct")
"""A problem of the timing cases' tokens and entries, which takes the references a second or less."""

BENCH: tuple[InvertCase, ...] = tuple(
    _case(4096, s_kv, 2048, intent="speed", ids="distinct") for s_kv in (8192, 32768, 131072)
)


def _ids(case: InvertCase, rng: Any, xp: Any) -> Any:
    shape = (*case.row, case.topk)
    if case.ids == "distinct":
        # One of each of topk parts of the tokens, as many as each other but for one.
        firsts = xp.arange(case.topk + 1) * case.s_kv // case.topk
        drawn = rng.random(shape, dtype=np.float32) * (firsts[1:] - firsts[:-1])
        return xp.minimum(firsts[:-1] + drawn.astype(np.int64), firsts[1:] - 1).astype(np.int32)
    if case.ids == "none" or not case.s_kv:
        return xp.full(shape, -1, dtype=np.int32)
    if case.ids == "same":
        return xp.full(shape, case.s_kv - 1, dtype=np.int32)
    if case.ids == "skewed":
        return (rng.random(shape, dtype=np.float32) ** 4 * case.s_kv).astype(np.int32)
    most = 3 if case.ids == "few" else case.s_kv
    indices = rng.integers(0, min(most, case.s_kv), shape, dtype=np.int32)
    if case.ids == "hostile":
        bad = xp.asarray([-1, -2, case.s_kv, case.s_kv + 5, 2**31 - 1, -(2**31)], dtype=np.int32)
        wrong = rng.random(shape, dtype=np.float32) < 0.5
        indices = xp.where(wrong, bad[rng.integers(0, len(bad), shape)], indices)
    return indices


def inputs(case: InvertCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Fresh arguments of `invert_indices`, by parameter name."""
    rng = xp.random.default_rng(seed)
    indices = _ids(case, rng, xp)
    lengths = rng.integers(-3, case.topk + 4, case.row, dtype=np.int32) if case.lengths else None
    # Gaps hold a token, which would be counted if it was read.
    if case.layout == "padded":
        indices = _within((*case.row, case.topk + 1), indices, xp)
    elif case.layout == "strided":
        indices = _within((*case.row[:-1], case.s_q + 1, case.topk + 7), indices, xp)
        lengths = None if lengths is None else _within((*case.row, 3), lengths[..., None], xp)[..., 0]
    elif case.layout == "singleton":
        indices = indices[..., None, :]
    arguments: dict[str, Any] = {"indices": indices, "s_kv": case.s_kv}
    if lengths is not None:
        arguments["topk_length"] = lengths
    return arguments


def _within(shape: tuple[int, ...], array: Any, xp: Any) -> Any:
    """The array at the beginning of each axis of a larger one of zeros."""
    wide = xp.zeros(shape, dtype=np.int32)
    part = wide[tuple(slice(extent) for extent in array.shape)]
    part[...] = array
    return part


def _entries(case: InvertCase) -> float:
    return float(np.prod((*case.row, case.topk)))


def flops(case: InvertCase) -> float:
    """A count of every entry."""
    return _entries(case)


def bytes_moved(case: InvertCase) -> float:
    """Every index read once, lists written."""
    lengths = float(np.prod(case.row)) if case.lengths else 0.0
    return 4 * (2 * _entries(case) + lengths + (case.batch or 1) * (case.s_kv + 1))
