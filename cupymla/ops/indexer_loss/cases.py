"""Problems of indexer_loss; see `cupymla.ops.case`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..indexer_cases import NamedKeysCase, counts, finished, lists, named, scored

OUTPUTS = ("loss", "grad_logits")
"""The output parameters, in the order in which the call returns them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCase(NamedKeysCase):
    """One problem.

    Attributes:
        values: also "hostile" for keys that hold NaN and infinities.
        target: "raw" sums, "l1" for rows of sum 1, "holes" where most are zero and some rows are.
        given_lse: whether lse is given.
    """

    target: str = "raw"
    given_lse: bool = False


_case = partial(named, LossCase)

DEMO = _case(8, 8192, 2048, 64)
"""A problem of the timing cases' heads and channels, which takes the references a second or two."""

BENCH: tuple[LossCase, ...] = tuple(
    _case(4096, keys, 2048, heads, intent="speed") for heads in (64, 32) for keys in (8192, 32768)
)


def inputs(case: LossCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Fresh arguments of `indexer_loss`, by parameter name."""
    rng = np.random.default_rng(seed)
    q, k, weights = scored(case, rng)
    if case.values == "hostile":
        for number, place in enumerate(np.ndindex(k.shape[:-1])):
            if number % 9 == 0:
                k[place][number % case.channels] = (np.nan, np.inf, -np.inf)[number // 9 % 3]
    indices = lists(case, rng)
    target = rng.standard_exponential(indices.shape, dtype=np.float32)
    if case.target == "l1":
        target /= target.sum(axis=-1, keepdims=True)
    elif case.target == "holes":
        target *= rng.random(indices.shape) < 0.1
        target[::3] = 0
    arrays = {"q": q, "k": k, "weights": weights, "indices": indices, "target": target} | counts(case, rng)
    if case.given_lse:
        arrays["lse"] = rng.uniform(4, 6, case.row).astype(np.float32)
    return finished(case, arrays, xp)


def flops(case: LossCase) -> float:
    """The products of all heads with the keys that are named."""
    return case.products


def bytes_moved(case: LossCase) -> float:
    """q, weights, k, indices and target read, the gradient and the loss written, each once."""
    rows = case.queries * (case.heads * (case.channels * 2 + 4) + case.topk * 12 + 4)
    return float((case.batch or 1) * (rows + case.keys * case.channels * 2))
