"""Problems of indexer_bwd; see `cupymla.ops.case`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ..entry_lists import lists_by_token
from ..indexer_cases import NamedKeysCase, counts, finished, lists, named, scored
from .spec import ARGUMENTS

OUTPUTS = ARGUMENTS.results
"""The output parameters, in the order in which the call returns them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCase(NamedKeysCase):
    """One problem.

    Attributes:
        values: also "hostile" for keys, gradients and weights that hold NaN and infinities; "wide" for rows of very
            different magnitudes.
        deterministic, dk_dtype: options.
        given_lists: whether lists of entries by key are given.
    """

    defaults: ClassVar[dict[str, Any]] = NamedKeysCase.defaults | {"deterministic": False, "dk_dtype": None}

    deterministic: bool = False
    dk_dtype: str | None = None
    given_lists: bool = False


_case = partial(named, GradientCase)

DEMO = _case(8, 8192, 2048, 64)
"""A problem of the timing cases' heads and channels, which takes the references a second or two."""

BENCH: tuple[GradientCase, ...] = tuple(
    _case(4096, keys, 2048, heads, "det" if deterministic else "", "speed", deterministic=deterministic)
    for deterministic in (False, True)
    for heads in (64, 32)
    for keys in (8192, 32768)
)


def inputs(case: GradientCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Fresh arguments of `indexer_bwd`, by parameter name."""
    rng = np.random.default_rng(seed)
    q, k, weights = scored(case, rng)
    # As the loss leaves them: a softmax less a target, of rows that sum to nothing.
    gradients = rng.standard_normal((*case.row, case.topk), dtype=np.float32) / np.float32(max(1, case.topk))
    indices = lists(case, rng)
    if case.ids == "hostile":
        gradients[(indices < 0) | (indices >= case.keys)] = np.nan
    if case.values == "wide":
        powers = np.float32(2) ** rng.integers(-20, 21, case.row).astype(np.float32)
        gradients *= powers[..., None]
        weights *= np.float32(2) ** rng.integers(-20, 21, case.row).astype(np.float32)[..., None]
    elif case.values == "hostile":
        _spoil(q, k, weights, gradients, indices)
    arrays = {"q": q, "k": k, "weights": weights, "grad_logits": gradients, "indices": indices}
    arrays |= counts(case, rng)
    if case.given_lists:
        arrays["lists"] = lists_by_token(indices, case.keys, arrays.get("topk_length"))
    return finished(case, arrays, xp)


def _spoil(q: Any, k: Any, weights: Any, gradients: Any, indices: Any) -> None:
    """Put NaN and infinities into keys that the first half of the queries name, then one each into a gradient, into a
    weight and into a query of some others."""
    keys = k.shape[-2]
    for number, key in enumerate(range(0, keys // 3, 4)):
        k[..., key, number % k.shape[-1]] = (np.nan, np.inf, -np.inf)[number % 3]
    half = indices.shape[-2] // 2
    # The others keep away from these, so that it shows what each number reaches.
    named = indices[..., half:, :]
    named[named >= 0] = keys // 3 + named[named >= 0] % (keys - keys // 3)
    gradients[..., half, 0] = np.inf
    gradients[..., half, 1] = np.nan
    weights[..., half + 1, 0] = -np.inf
    q[..., half + 2 :, -1, 5] = np.inf


def flops(case: GradientCase) -> float:
    """The three products of all heads with the keys that are named."""
    return 3 * case.products


def bytes_moved(case: GradientCase) -> float:
    """q, weights, k, indices and gradients read, dq, dweights and dk written, each once."""
    rows = case.queries * (case.heads * (case.channels * 4 + 8) + case.topk * 8)
    key_bytes = 2 + (4 if case.dk_dtype == "float32" else 2)
    return float((case.batch or 1) * (rows + case.keys * case.channels * key_bytes))
