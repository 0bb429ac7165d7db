"""Problems of indexer_bwd; see `cupymla.ops.case`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..case import Case, all_on, spread
from .spec import ARGUMENTS

OUTPUTS = ARGUMENTS.results
"""The output parameters, in the order in which the call returns them."""

_DTYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}

_ROWS = ("q", "k", "grad_logits", "indices")
"""What is contiguous along its last axis."""

_DEFAULTS = {
    "causal": False,
    "q_start": 0,
    "k_stride": 1,
    "relu": True,
    "deterministic": False,
    "dk_dtype": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCase(Case):
    """One problem.

    Attributes:
        queries: T.
        keys: L.
        topk: entries of a row.
        heads: H.
        channels: D.
        dtype: of q and k, a key of `_DTYPES`.
        batch: extent of the batch axis, None without one.
        ids: "random"; "same" for one key alone; "hostile" with many that name no key, and the extremes of int32; "none"
            for -1 alone.
        values: "normal"; "zeros" for keys whose products are exactly zero; "hostile" for keys, gradients and weights
            that hold NaN and infinities; "wide" for rows of very different magnitudes.
        lengths: whether topk_length is given, some of it out of range.
        bf16_weights: whether weights are bf16.
        strided: whether arrays have gaps.
        causal, q_start, k_stride, relu, deterministic, dk_dtype: the options.
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
    lengths: bool = False
    bf16_weights: bool = False
    strided: bool = False
    causal: bool = False
    q_start: int = 0
    k_stride: int = 1
    relu: bool = True
    deterministic: bool = False
    dk_dtype: str | None = None

    @property
    def lead(self) -> tuple[int, ...]:
        """The batch axis, as a tuple of one extent or of none."""
        return () if self.batch is None else (self.batch,)

    @property
    def options(self) -> dict[str, Any]:
        """The options that are not left at their defaults."""
        return {name: getattr(self, name) for name, value in _DEFAULTS.items() if getattr(self, name) != value}


def _case(
    queries: int, keys: int, topk: int, heads: int, name: str = "", intent: str = "shapes", **traits: Any
) -> GradientCase:
    channels, dtype = traits.get("channels", 128), traits.get("dtype", "bf16")
    words = [f"{dtype}_h{heads}_d{channels}_t{queries}_l{keys}_k{topk}", *([name] if name else [])]
    sizes: dict[str, Any] = {"queries": queries, "keys": keys, "topk": topk, "heads": heads}
    return GradientCase(name="_".join(words), intent=intent, **sizes, **traits)


def _shapes(name: str, **traits: Any) -> tuple[GradientCase, ...]:
    return (
        *(_case(3, 300, 200, heads, name, **traits) for heads in (64, 32, 16, 128)),
        *(_case(3, 90, 65, heads, name, channels=64, dtype="fp16", **traits) for heads in (64, 32, 16, 128)),
    )


CASES: tuple[GradientCase, ...] = (
    *_shapes(""),
    *_shapes("det", deterministic=True),
    *(_case(6, 90, 63, heads, "filled") for heads in (1, 20, 33, 100)),
    _case(2, 700, 641, 16, "stages", channels=64),
    _case(2, 40, 1, 16, "one"),
    *(_case(2, 200, 128, 16, "tile" + "_det" * det, deterministic=det) for det in (False, True)),
    _case(3, 300, 130, 16, "fp32", "options", dk_dtype="float32"),
    _case(3, 300, 130, 16, "fp32_det", "options", dk_dtype="float32", deterministic=True, dtype="fp16"),
    _case(3, 300, 130, 16, "no_relu", "options", relu=False),
    _case(3, 300, 130, 16, "no_relu_fp16", "options", relu=False, dtype="fp16", deterministic=True),
    _case(3, 300, 130, 16, "bf16_weights", "options", bf16_weights=True),
    _case(7, 300, 130, 16, "lengths", "masks", lengths=True),
    _case(20, 19, 33, 16, "causal", "masks", causal=True),
    _case(9, 40, 70, 16, "causal_stride4", "masks", causal=True, q_start=-3, k_stride=4, lengths=True),
    _case(5, 60, 150, 16, "hostile_ids", "ids", ids="hostile"),
    _case(5, 60, 150, 66, "hostile_ids_det", "ids", ids="hostile", deterministic=True),
    _case(3, 60, 70, 16, "no_ids", "ids", ids="none", values="hostile"),
    _case(6, 60, 130, 16, "same_det", "ids", ids="same", deterministic=True),
    _case(3, 100, 90, 16, "zeros", "values", values="zeros"),
    _case(6, 50, 20, 20, "hostile", "values", values="hostile", dtype="fp16", channels=64),
    _case(6, 50, 20, 16, "hostile_det", "values", values="hostile", deterministic=True),
    _case(6, 200, 100, 16, "wide", "values", values="wide", dtype="fp16", deterministic=True),
    _case(3, 100, 90, 16, "batch_strided", "strides", batch=2, strided=True, lengths=True),
    _case(3, 100, 90, 16, "batch_strided_det", "strides", batch=2, strided=True, lengths=True, deterministic=True),
    _case(0, 100, 8, 16, "no_queries"),
    _case(3, 0, 8, 16, "no_keys"),
    _case(3, 100, 0, 16, "no_entries", deterministic=True),
)

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
    dtype, row = _DTYPES[case.dtype], (*case.lead, case.queries)
    q = rng.standard_normal((*row, case.heads, case.channels), dtype=np.float32).astype(dtype)
    k = rng.standard_normal((*case.lead, case.keys, case.channels), dtype=np.float32).astype(dtype)
    weights = rng.standard_normal((*row, case.heads)).astype(np.float32)
    # As the model's factors leave them: scores of a few units.
    weights *= np.float32((case.heads * case.channels) ** -0.5)
    entries = (*row, case.topk)
    # As the loss leaves them: a softmax less a target, of rows that sum to nothing.
    gradients = rng.standard_normal(entries, dtype=np.float32) / np.float32(max(1, case.topk))
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
        gradients[wrong] = np.nan
    if case.values == "zeros":
        k[..., ::2, :] = 0
    elif case.values == "wide":
        powers = np.float32(2) ** rng.integers(-20, 21, row).astype(np.float32)
        gradients *= powers[..., None]
        weights *= np.float32(2) ** rng.integers(-20, 21, row).astype(np.float32)[..., None]
    elif case.values == "hostile":
        _spoil(q, k, weights, gradients, indices)
    weights_given = weights.astype(ml_dtypes.bfloat16) if case.bf16_weights else weights
    arguments: dict[str, Any] = {"q": q, "k": k, "weights": weights_given, "grad_logits": gradients, "indices": indices}
    if case.lengths:
        arguments["topk_length"] = rng.integers(-3, case.topk + 4, row, dtype=np.int32)
    arguments |= case.options
    if case.strided:
        arguments = {
            name: spread(value, name in _ROWS) if isinstance(value, np.ndarray) else value
            for name, value in arguments.items()
        }
    return all_on(xp, arguments)


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
    entries = float(np.prod((*case.lead, case.queries, case.topk)))
    return 6.0 * entries * case.heads * case.channels


def bytes_moved(case: GradientCase) -> float:
    """q, weights, k, indices and gradients read, dq, dweights and dk written, each once."""
    rows = case.queries * (case.heads * (case.channels * 4 + 8) + case.topk * 8)
    key_bytes = 2 + (4 if case.dk_dtype == "float32" else 2)
    return float((case.batch or 1) * (rows + case.keys * case.channels * key_bytes))
