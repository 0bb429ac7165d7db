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

CASES: tuple[LossCase, ...] = (
    *(_case(3, 300, 200, heads) for heads in (64, 32, 16, 128)),
    *(_case(3, 90, 65, heads, channels=64, dtype="fp16") for heads in (64, 32, 16, 128)),
    *(_case(6, 90, 63, heads, "filled") for heads in (1, 20, 33, 100)),
    _case(2, 700, 641, 16, "stages", channels=64),
    _case(2, 40, 1, 16, "one"),
    _case(3, 300, 130, 16, "l1", "targets", target="l1"),
    _case(9, 300, 130, 16, "holes", "targets", target="holes"),
    _case(3, 300, 130, 16, "lse", "options", given_lse=True),
    _case(3, 300, 130, 16, "no_relu", "options", relu=False),
    _case(3, 300, 130, 16, "bf16_weights", "options", bf16_weights=True),
    _case(7, 300, 130, 16, "lengths", "masks", lengths=True),
    _case(20, 19, 33, 16, "causal", "masks", causal=True),
    _case(9, 40, 70, 16, "causal_stride4", "masks", causal=True, q_start=-3, k_stride=4, lengths=True),
    _case(5, 60, 150, 16, "hostile_ids", "ids", ids="hostile"),
    _case(3, 60, 70, 16, "no_ids", "ids", ids="none"),
    _case(3, 100, 90, 16, "zeros", "values", values="zeros"),
    _case(6, 50, 20, 20, "hostile", "values", values="hostile", dtype="fp16", channels=64),
    _case(3, 100, 90, 16, "batch_strided", "strides", batch=2, strided=True, lengths=True, given_lse=True),
    _case(0, 100, 8, 16, "no_queries"),
    _case(3, 0, 8, 16, "no_keys"),
    _case(3, 100, 0, 16, "no_entries"),
)

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
