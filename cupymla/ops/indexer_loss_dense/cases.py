"""Problems of indexer_loss_dense; see `cupymla.ops.case`."""

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
_ROWS = ("q", "k", "mla_q", "mla_kv")
"""Arrays whose last axis is contiguous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseCase(Case):
    """One problem.

    Attributes:
        queries: T.
        keys: L.
        heads: H.
        channels: D.
        mla_heads: Hq.
        mla_channels: of an MLA head.
        dtype: of q, k, mla_q and mla_kv, a key of `_DTYPES`.
        batch: extent of the batch axis, None without one.
        values: "normal"; "zeros" for keys whose products are exactly zero; "hostile" for NaN and infinities in some
            keys, queries, latents and weights.
        limits: None, or "windows" for starts and ends, many out of range or empty; "apart" for windows of queries that
            do not meet those of others.
        given_lse, slopes: whether mla_lse, and grad_loss, are given.
        bf16_weights: whether weights are bf16.
        strided: whether arrays have gaps.
        causal, q_start, k_stride, relu, sm_scale, lse_base, dk_dtype: the options.
    """

    queries: int
    keys: int
    heads: int = 64
    channels: int = 128
    mla_heads: int = 128
    mla_channels: int = 576
    dtype: str = "bf16"
    batch: int | None = None
    values: str = "normal"
    limits: str | None = None
    given_lse: bool = False
    slopes: bool = False
    bf16_weights: bool = False
    strided: bool = False
    causal: bool = False
    q_start: int = 0
    k_stride: int = 1
    relu: bool = True
    sm_scale: float | None = None
    lse_base: str = "e"
    dk_dtype: str | None = None

    @property
    def lead(self) -> tuple[int, ...]:
        """The batch axis, as a tuple of one extent or of none."""
        return () if self.batch is None else (self.batch,)

    @property
    def row(self) -> tuple[int, ...]:
        """Shape of what there is for each query."""
        return (*self.lead, self.queries)


def _case(
    queries: int, keys: int, heads: int, mla_heads: int, name: str = "", intent: str = "shapes", **traits: Any
) -> DenseCase:
    channels, latent, dtype = (
        traits.get(trait, default) for trait, default in (("channels", 128), ("mla_channels", 576), ("dtype", "bf16"))
    )
    sizes: dict[str, Any] = {"queries": queries, "keys": keys, "heads": heads, "mla_heads": mla_heads}
    words = [f"{dtype}_h{heads}_d{channels}_q{mla_heads}_d{latent}_t{queries}_l{keys}", *([name] if name else [])]
    return DenseCase(name="_".join(words), intent=intent, **sizes, **traits)


DEMO = _case(2, 1024, 64, 128)
"""A problem of the timing cases' heads and channels, which takes the references a second or two."""

BENCH: tuple[DenseCase, ...] = (
    _case(4096, 4096, 64, 64, intent="speed"),
    *(_case(4096, 8192, heads, 128, "lse", "speed", given_lse=True) for heads in (64, 32)),
    _case(4096, 8192, 64, 128, intent="speed"),
    _case(4096, 32768, 64, 128, "lse", "speed", given_lse=True),
    _case(4096, 8192, 32, 64, "lse", "speed", given_lse=True),
    _case(4096, 8192, 64, 128, "lse_causal", "speed", given_lse=True, causal=True, q_start=4096),
)


def inputs(case: DenseCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Fresh arguments of `indexer_loss_dense`, by parameter name."""
    rng = np.random.default_rng(seed)
    dtype = _DTYPES[case.dtype]

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape, dtype=np.float32).astype(dtype)

    arrays: dict[str, Any] = {
        "q": normal(*case.row, case.heads, case.channels),
        "k": normal(*case.lead, case.keys, case.channels),
        # As the model's factors leave them: scores of a few units.
        "weights": rng.standard_normal((*case.row, case.heads), np.float32)
        * np.float32((case.heads * case.channels) ** -0.5),
        "mla_q": normal(*case.row, case.mla_heads, case.mla_channels),
        "mla_kv": normal(*case.lead, case.keys, case.mla_channels),
    }
    if case.values == "zeros":
        arrays["k"][..., ::2, :] = 0
    if case.given_lse:
        arrays["mla_lse"] = rng.uniform(4, 6, (*case.row, case.mla_heads)).astype(np.float32)
    if case.limits is not None:
        arrays["starts"], arrays["ends"] = _limits(case, rng)
    if case.slopes:
        arrays["grad_loss"] = rng.standard_normal(case.row, np.float32)
    if case.values == "hostile":
        _spoil(arrays)
    if case.bf16_weights:
        arrays["weights"] = arrays["weights"].astype(ml_dtypes.bfloat16)
    if case.strided:
        arrays = {name: spread(array, name in _ROWS) for name, array in arrays.items()}
    defaults = {name: DenseCase.__dataclass_fields__[name].default for name in ARGUMENTS.options}
    options = {name: getattr(case, name) for name in defaults if getattr(case, name) != defaults[name]}
    return all_on(xp, arrays | options)


def _limits(case: DenseCase, rng: np.random.Generator) -> tuple[Any, Any]:
    if case.limits == "windows":
        low, high = -case.keys // 4, case.keys * 5 // 4
        return (rng.integers(low, high, case.row, dtype=np.int32) for _ in range(2))  # type: ignore[return-value]
    # A third of the queries sees a third of the keys each, the last of them one key fewer; every fifth query none.
    number = np.arange(case.queries, dtype=np.int32)
    third = case.keys // 3
    starts = number % 3 * third
    ends = starts + third - number % 2
    ends[::5] = 0
    return np.broadcast_to(starts, case.row).copy(), np.broadcast_to(ends, case.row).copy()


def _spoil(arrays: dict[str, Any]) -> None:
    """Put NaN and infinities into keys and latents of the first third, one of them where it ends, and into queries,
    weights and MLA queries of some that see the second one. Who sees the last third stays whole."""
    third = arrays["k"].shape[-2] // 3
    for name in ("k", "mla_kv"):
        for number, key in enumerate((third - 1, third // 2)):
            arrays[name][..., key, number] = (np.nan, np.inf)[number]
    # Queries 1, 4, 7, ... see the second third.
    arrays["q"][..., 1, 0, 5] = np.nan
    arrays["q"][..., 4, -1, 6] = -np.inf
    arrays["weights"][..., 7, 0] = np.inf
    arrays["mla_q"][..., 13, 0, 0] = np.nan
    # Query 0 sees nothing.
    for name, axes in (("q", 2), ("weights", 1), ("mla_q", 2)):
        arrays[name][(..., 0, *(slice(None),) * axes)] = np.nan


def _pairs(case: DenseCase) -> float:
    """Queries and keys that meet; of causal masks, those that are seen."""
    pairs = float(np.prod((*case.row, case.keys)))
    if case.causal and case.k_stride == 1 and case.intent == "speed":
        seen = np.clip(case.q_start + np.arange(case.queries) + 1, 0, case.keys)
        pairs = float(seen.sum()) * (case.batch or 1)
    return pairs


def flops(case: DenseCase) -> float:
    """Products of MLA heads, twice where their log-sum-exps are not given, and four of index heads: for the sum of
    scores' exponentials, once more, for dq and for dk."""
    teacher = (1 if case.given_lse else 2) * case.mla_heads * case.mla_channels
    return 2.0 * _pairs(case) * (teacher + 4 * case.heads * case.channels)


def bytes_moved(case: DenseCase) -> float:
    """Every argument read and every result written once."""
    rows = case.queries * (
        case.heads * (case.channels * 4 + 8) + case.mla_heads * (case.mla_channels * 2 + 4 * case.given_lse) + 4
    )
    keys = case.keys * (case.channels * (4 if case.dk_dtype is None else 6) + case.mla_channels * 2)
    return float((case.batch or 1) * (rows + keys))
