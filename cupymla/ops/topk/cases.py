"""Problems of topk; see `cupymla.ops.case`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..case import Case

OUTPUTS = ("indices", "count", "values")
"""The output parameters, in the order in which the call returns them."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class TopkCase(Case):
    """One problem.

    Attributes:
        rows: T.
        columns: L.
        topk: entries of each row.
        scores: what they are like, see `SCORES`.
        dtype: of the scores.
        batch: extent of the batch axis, None without one.
        limits: None, or "windows" for starts and ends, many out of range or empty.
        order: the option.
        return_values: the option.
        padding: columns of the array behind each row that are not part of it.
    """

    rows: int
    columns: int
    topk: int
    scores: str = "normal"
    dtype: str = "float32"
    batch: int | None = None
    limits: str | None = None
    order: str = "index"
    return_values: bool = False
    padding: int = 0

    @property
    def lead(self) -> tuple[int, ...]:
        """The batch axis, as a tuple of one extent or of none."""
        return () if self.batch is None else (self.batch,)


def _case(rows: int, columns: int, topk: int, name: str = "", intent: str = "shapes", **traits: Any) -> TopkCase:
    made = TopkCase(name="", intent=intent, rows=rows, columns=columns, topk=topk, **traits)
    words = [f"t{rows}_l{columns}_k{topk}", *(w for w in (name, made.dtype) if w not in ("", "float32"))]
    words += [made.order] if made.order != "index" else []
    return TopkCase(name="_".join(words), intent=intent, rows=rows, columns=columns, topk=topk, **traits)


DEMO = _case(64, 32768, 2048)
"""A problem of the timing cases' columns, which takes the references a second or two."""

BENCH: tuple[TopkCase, ...] = (
    *(_case(4096, columns, 2048, intent="speed") for columns in (4096, 32768, 131072)),
    *(_case(rows, 131072, 2048, intent="speed") for rows in (1, 8, 128)),
)


def _normal(rng: Any, xp: Any, shape: tuple[int, ...], topk: int) -> Any:
    return rng.standard_normal(shape, dtype=np.float32)


def _plateau(rng: Any, xp: Any, shape: tuple[int, ...], topk: int) -> Any:
    """What a ReLU leaves: zeros of both signs, and a few numbers above, fewer than wanted."""
    x = rng.standard_normal(shape, dtype=np.float32)
    zeros = xp.where(x < 0, np.float32(-0.0), np.float32(0.0))
    return xp.where(rng.random(shape, dtype=np.float32) < 0.5 * topk / shape[-1], xp.abs(x), zeros)


def _equal(rng: Any, xp: Any, shape: tuple[int, ...], topk: int) -> Any:
    return xp.full(shape, np.float32(-3.25))


def _close(rng: Any, xp: Any, shape: tuple[int, ...], topk: int) -> Any:
    """Numbers that have 16 leading bits in common."""
    return 1 + rng.random(shape, dtype=np.float32) * np.float32(2**-8)


def _close_large(rng: Any, xp: Any, shape: tuple[int, ...], topk: int) -> Any:
    return 1000 + rng.random(shape, dtype=np.float32) * np.float32(2**-4)


def _bucket(rng: Any, xp: Any, shape: tuple[int, ...], topk: int) -> Any:
    """Equals, but for a hundred."""
    x = xp.full(shape, np.float32(7))
    x[..., :: max(1, shape[-1] // 100)] = rng.standard_normal(x[..., :: max(1, shape[-1] // 100)].shape) * 9
    return x


def _nan(rng: Any, xp: Any, shape: tuple[int, ...], topk: int) -> Any:
    x = rng.standard_normal(shape, dtype=np.float32)
    kind = rng.random(shape, dtype=np.float32)
    x[kind < 0.2] = np.nan
    x[(kind > 0.2) & (kind < 0.5)] = -np.inf
    x[kind > 0.999] = np.inf
    return x


def _few_numbers(rng: Any, xp: Any, shape: tuple[int, ...], topk: int) -> Any:
    x = rng.standard_normal(shape, dtype=np.float32)
    x[rng.random(shape, dtype=np.float32) < 0.98] = np.nan
    return x


def _nothing(rng: Any, xp: Any, shape: tuple[int, ...], topk: int) -> Any:
    return xp.where(rng.random(shape, dtype=np.float32) < 0.5, np.float32(np.nan), np.float32(-np.inf))


def _ascending(rng: Any, xp: Any, shape: tuple[int, ...], topk: int) -> Any:
    return xp.sort(rng.standard_normal(shape, dtype=np.float32), axis=-1)


def _descending(rng: Any, xp: Any, shape: tuple[int, ...], topk: int) -> Any:
    return -_ascending(rng, xp, shape, topk)


def _periodic(rng: Any, xp: Any, shape: tuple[int, ...], topk: int) -> Any:
    """What a sample at equal distances may miss."""
    return xp.where(xp.arange(shape[-1]) % 16 == 3, rng.standard_normal(shape, dtype=np.float32), np.float32(-9))


def _outliers(rng: Any, xp: Any, shape: tuple[int, ...], topk: int) -> Any:
    x = rng.standard_normal(shape, dtype=np.float32)
    x[..., ::999] *= np.float32(1e30)
    return x


def _geometric(rng: Any, xp: Any, shape: tuple[int, ...], topk: int) -> Any:
    """Numbers of all magnitudes, of which no bins of equal width tell many apart."""
    exponents = rng.random(shape, dtype=np.float32) * np.float32(250) - np.float32(125)
    return xp.exp2(exponents) * xp.where(rng.random(shape, dtype=np.float32) < 0.5, np.float32(-1), np.float32(1))


def _negative_plateau(rng: Any, xp: Any, shape: tuple[int, ...], topk: int) -> Any:
    """Half zeros and nothing above: whoever looks at a few columns has the same largest one."""
    return xp.minimum(rng.standard_normal(shape, dtype=np.float32), np.float32(0))


def _two_values(rng: Any, xp: Any, shape: tuple[int, ...], topk: int) -> Any:
    return (rng.random(shape, dtype=np.float32) < 0.5).astype(np.float32)


SCORES: dict[str, Callable[[Any, Any, tuple[int, ...], int], Any]] = {
    "normal": _normal,
    "plateau": _plateau,
    "equal": _equal,
    "close": _close,
    "close_large": _close_large,
    "bucket": _bucket,
    "nan": _nan,
    "few_numbers": _few_numbers,
    "nothing": _nothing,
    "ascending": _ascending,
    "descending": _descending,
    "periodic": _periodic,
    "outliers": _outliers,
    "geometric": _geometric,
    "negative_plateau": _negative_plateau,
    "two_values": _two_values,
}


def inputs(case: TopkCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Fresh arguments of `topk`, by parameter name."""
    import ml_dtypes

    rng = xp.random.default_rng(seed)
    row = (*case.lead, case.rows)
    wide = SCORES[case.scores](rng, xp, (*row, case.columns + case.padding), case.topk)
    with np.errstate(over="ignore"):
        scores = wide.astype(ml_dtypes.bfloat16 if case.dtype == "bfloat16" else case.dtype)
    arguments: dict[str, Any] = {"scores": scores[..., : case.columns], "topk": case.topk}
    if case.limits is not None:
        low, high = -case.columns // 4, case.columns * 5 // 4
        arguments["starts"] = rng.integers(low, high, row, dtype=np.int32)
        arguments["ends"] = rng.integers(low, high, row, dtype=np.int32)
    if case.order != "index":
        arguments["order"] = case.order
    if case.return_values:
        arguments["return_values"] = True
    return arguments


def flops(case: TopkCase) -> float:
    """A comparison of every score."""
    return float(np.prod((*case.lead, case.rows, case.columns)))


def bytes_moved(case: TopkCase) -> float:
    """Every score read once, results written."""
    rows = float(np.prod((*case.lead, case.rows)))
    values = ITEM_BYTES[case.dtype] if case.return_values else 0
    return rows * (case.columns * ITEM_BYTES[case.dtype] + case.topk * (4 + values) + 4)
