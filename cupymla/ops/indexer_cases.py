"""Problems of the operators that train the lightning indexer at the keys which it selected: traits and arrays that they
share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import ml_dtypes
import numpy as np

from .case import Case, all_on, spread

_DTYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}

_FREE = ("weights", "topk_length", "lse")
"""Arrays that need not be contiguous along their last axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedKeysCase(Case):
    """One problem.

    Attributes:
        queries: T.
        keys: L.
        topk: entries of a row.
        heads: H.
        channels: D.
        dtype: of q and k, "bf16" or "fp16".
        batch: extent of the batch axis, None without one.
        ids: "random"; "same" for one key alone; "hostile" with many that name no key, and the extremes of int32; "none"
            for -1 alone.
        values: "normal"; "zeros" for keys whose products are exactly zero; others as the operator has them.
        lengths: whether topk_length is given, some of it out of range.
        bf16_weights: whether weights are bf16.
        strided: whether arrays have gaps.
        causal, q_start, k_stride, relu: options.
        defaults: of the options.
    """

    defaults: ClassVar[dict[str, Any]] = {"causal": False, "q_start": 0, "k_stride": 1, "relu": True}

    queries: int
    keys: int
    topk: int
    heads: int = 64
    channels: int = 128
    dtype: str = "bf16"
    batch: int | None = None
    ids: str = "random"
    values: str = "normal"
    lengths: bool = False
    bf16_weights: bool = False
    strided: bool = False
    causal: bool = False
    q_start: int = 0
    k_stride: int = 1
    relu: bool = True

    @property
    def lead(self) -> tuple[int, ...]:
        """The batch axis, as a tuple of one extent or of none."""
        return () if self.batch is None else (self.batch,)

    @property
    def row(self) -> tuple[int, ...]:
        """Shape of what there is for each query."""
        return (*self.lead, self.queries)

    @property
    def options(self) -> dict[str, Any]:
        """The options that are not left at their defaults."""
        return {name: getattr(self, name) for name, value in self.defaults.items() if getattr(self, name) != value}

    @property
    def products(self) -> float:
        """Operations of one product of all heads with the keys that are named."""
        return 2.0 * float(np.prod((*self.row, self.topk))) * self.heads * self.channels


CaseT = TypeVar("CaseT", bound=NamedKeysCase)


def named(
    kind: type[CaseT],
    queries: int,
    keys: int,
    topk: int,
    heads: int,
    name: str = "",
    intent: str = "shapes",
    **traits: Any,
) -> CaseT:
    """A case of a kind that is named by its sizes."""
    channels, dtype = traits.get("channels", 128), traits.get("dtype", "bf16")
    words = [f"{dtype}_h{heads}_d{channels}_t{queries}_l{keys}_k{topk}", *([name] if name else [])]
    sizes: dict[str, Any] = {"queries": queries, "keys": keys, "topk": topk, "heads": heads}
    return kind(name="_".join(words), intent=intent, **sizes, **traits)


def scored(case: NamedKeysCase, rng: np.random.Generator) -> tuple[Any, Any, Any]:
    """q, k, and weights in float32."""
    dtype = _DTYPES[case.dtype]
    q = rng.standard_normal((*case.row, case.heads, case.channels), dtype=np.float32).astype(dtype)
    k = rng.standard_normal((*case.lead, case.keys, case.channels), dtype=np.float32).astype(dtype)
    weights = rng.standard_normal((*case.row, case.heads)).astype(np.float32)
    # As the model's factors leave them: scores of a few units.
    weights *= np.float32((case.heads * case.channels) ** -0.5)
    if case.values == "zeros":
        k[..., ::2, :] = 0
    return q, k, weights


def lists(case: NamedKeysCase, rng: np.random.Generator) -> Any:
    """The keys that rows name."""
    entries = (*case.row, case.topk)
    indices = rng.integers(0, max(1, case.keys), entries, dtype=np.int32)
    if case.ids == "none" or not case.keys:
        indices[:] = -1
    elif case.ids == "same":
        indices[:] = case.keys - 1
    elif case.ids == "hostile":
        bad = np.array([-1, -2, case.keys, case.keys + 5, 2**31 - 1, -(2**31)], np.int32)
        wrong = rng.random(entries) < 0.5
        indices = np.where(wrong, bad[rng.integers(0, len(bad), entries)], indices).astype(np.int32)
        indices[:1] = -1
    return indices


def counts(case: NamedKeysCase, rng: np.random.Generator) -> dict[str, Any]:
    """topk_length by its name, where it is given."""
    if not case.lengths:
        return {}
    return {"topk_length": rng.integers(-3, case.topk + 4, case.row, dtype=np.int32)}


def finished(case: NamedKeysCase, arrays: dict[str, Any], xp: Any) -> dict[str, Any]:
    """Arguments of a call, of its arrays by name, weights in float32 among them: on `xp`, in the case's layout."""
    arguments = dict(arrays)
    if case.bf16_weights:
        arguments["weights"] = arguments["weights"].astype(ml_dtypes.bfloat16)
    if case.strided:
        arguments = {name: spread(array, name not in _FREE) for name, array in arguments.items()}
    return all_on(xp, arguments | case.options)
