"""Problems of indexer_loss; see `cupymla.ops.case`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..case import Case, all_on, spread

OUTPUTS = ("loss", "grad_logits")
"""The output parameters, in the order in which the call returns them."""

_DTYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}


_ROWS = ("q", "k", "indices", "target")
"""What is contiguous along its last axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCase(Case):
    """One problem.

    Attributes:
        queries: T.
        keys: L.
        topk: entries of a row.
        heads: H.
        channels: D.
        dtype: of q and k, a key of `_DTYPES`.
        batch: extent of the batch axis, None without one.
        ids: "random"; "hostile" with many that name no key, and the extremes of int32; "none" for -1 alone.
        values: "normal"; "zeros" for keys that score exactly zero; "hostile" for keys that hold NaN and infinities.
        target: "raw" sums, "l1" for rows of sum 1, "holes" where most are zero and some rows are.
        lengths: whether topk_length is given, some of it out of range.
        given_lse: whether lse is given.
        bf16_weights: whether weights are bf16.
        strided: whether arrays have gaps.
        causal, q_start, k_stride, relu: the options.
    """

    queries: int
    keys: int
    topk: int
    heads: int = 64
    channels: int = 128
    dtype: str = "bf16"
    batch: int | None = None
    ids: str = "random"
    values: str = "normal"
    target: str = "raw"
    lengths: bool = False
    given_lse: bool = False
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


def _case(
    queries: int, keys: int, topk: int, heads: int, name: str = "", intent: str = "shapes", **traits: Any
) -> LossCase:
    channels, dtype = traits.get("channels", 128), traits.get("dtype", "bf16")
    words = [f"{dtype}_h{heads}_d{channels}_t{queries}_l{keys}_k{topk}", *([name] if name else [])]
    sizes: dict[str, Any] = {"queries": queries, "keys": keys, "topk": topk, "heads": heads}
    return LossCase(name="_".join(words), intent=intent, **sizes, **traits)


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
    dtype, row = _DTYPES[case.dtype], (*case.lead, case.queries)
    q = rng.standard_normal((*row, case.heads, case.channels), dtype=np.float32).astype(dtype)
    k = rng.standard_normal((*case.lead, case.keys, case.channels), dtype=np.float32).astype(dtype)
    weights = rng.standard_normal((*row, case.heads)).astype(np.float32)
    # As the model's factors leave them: scores of a few units.
    weights *= np.float32((case.heads * case.channels) ** -0.5)
    if case.values == "zeros":
        k[..., ::2, :] = 0
    elif case.values == "hostile":
        for number, place in enumerate(np.ndindex(k.shape[:-1])):
            if number % 9 == 0:
                k[place][number % case.channels] = (np.nan, np.inf, -np.inf)[number // 9 % 3]
    entries = (*row, case.topk)
    indices = rng.integers(0, max(1, case.keys), entries, dtype=np.int32)
    if case.ids == "none" or not case.keys:
        indices[:] = -1
    elif case.ids == "hostile":
        bad = np.array([-1, -2, case.keys, case.keys + 5, 2**31 - 1, -(2**31)], np.int32)
        wrong = rng.random(entries) < 0.5
        indices = np.where(wrong, bad[rng.integers(0, len(bad), entries)], indices).astype(np.int32)
        indices[:1] = -1
    target = rng.standard_exponential(entries, dtype=np.float32)
    if case.target == "l1":
        target /= target.sum(axis=-1, keepdims=True)
    elif case.target == "holes":
        target *= rng.random(entries) < 0.1
        target[::3] = 0
    weights_given = weights.astype(ml_dtypes.bfloat16) if case.bf16_weights else weights
    arguments: dict[str, Any] = {"q": q, "k": k, "weights": weights_given, "indices": indices, "target": target}
    if case.lengths:
        arguments["topk_length"] = rng.integers(-3, case.topk + 4, row, dtype=np.int32)
    if case.given_lse:
        arguments["lse"] = rng.uniform(4, 6, row).astype(np.float32)
    options = {"causal": False, "q_start": 0, "k_stride": 1, "relu": True}
    arguments |= {name: getattr(case, name) for name, default in options.items() if getattr(case, name) != default}
    if case.strided:
        arguments = {
            name: spread(value, name in _ROWS) if isinstance(value, np.ndarray) else value
            for name, value in arguments.items()
        }
    return all_on(xp, arguments)


def flops(case: LossCase) -> float:
    """The products of all heads with the keys that are named."""
    entries = float(np.prod((*case.lead, case.queries, case.topk)))
    return 2.0 * entries * case.heads * case.channels


def bytes_moved(case: LossCase) -> float:
    """q, weights, k, indices and target read, the gradient and the loss written, each once."""
    rows = case.queries * (case.heads * (case.channels * 2 + 4) + case.topk * 12 + 4)
    return float((case.batch or 1) * (rows + case.keys * case.channels * 2))
