"""Problems of indexer_logits; see `cupymla.ops.case`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..case import Case, all_on, spread

OUTPUTS = ("logits",)
"""The output parameters, in the order in which the call returns them."""

_DTYPES: dict[str, Any] = {"fp8": ml_dtypes.float8_e4m3fn, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsCase(Case):
    """One problem.

    Attributes:
        queries: T.
        keys: L.
        heads: H.
        channels: D.
        dtype: of q and k, a key of `_DTYPES`.
        batch: extent of the batch axis, None without one.
        values: "normal"; "exact" for small integers, whose sums are exact; "plateau" for those with zeros in 99 of 100
            keys, whose scores are 0; "negative" for exact ones of which none is above 0; "hostile" for keys that hold
            NaN and, with 16 bits, infinities; "exact_hostile".
        scales: whether q_scale and k_scale are given.
        bf16_weights: whether weights are bf16.
        limits: None, or "windows" for starts and ends, many out of range or empty.
        strided: whether arrays have gaps.
        causal, q_start, k_stride, relu: the options.
    """

    queries: int
    keys: int
    heads: int = 64
    channels: int = 128
    dtype: str = "fp8"
    batch: int | None = None
    values: str = "normal"
    scales: bool = False
    bf16_weights: bool = False
    limits: str | None = None
    strided: bool = False
    causal: bool = False
    q_start: int = 0
    k_stride: int = 1
    relu: bool = True

    @property
    def exact(self) -> bool:
        """Whether scores are exact on every machine."""
        return self.values not in ("normal", "hostile")

    @property
    def lead(self) -> tuple[int, ...]:
        """The batch axis, as a tuple of one extent or of none."""
        return () if self.batch is None else (self.batch,)


def _case(
    queries: int, keys: int, heads: int = 64, name: str = "", intent: str = "shapes", **traits: Any
) -> LogitsCase:
    channels, dtype = traits.get("channels", 128), traits.get("dtype", "fp8")
    words = [f"{dtype}_h{heads}_d{channels}_t{queries}_l{keys}", *([name] if name else [])]
    sizes: dict[str, Any] = {"queries": queries, "keys": keys, "heads": heads}
    return LogitsCase(name="_".join(words), intent=intent, **sizes, **traits)


DEMO = _case(2, 8192, scales=True)
"""A problem of the timing cases' heads and channels, which takes the references a second or two."""

BENCH: tuple[LogitsCase, ...] = (
    *(_case(4096, keys, heads, intent="speed", scales=True) for heads in (64, 32) for keys in (4096, 32768, 131072)),
    *(
        _case(4096, keys, 64, "causal", "speed", scales=True, causal=True, q_start=keys - 4096)
        for keys in (4096, 32768)
    ),
    *(_case(4096, 32768, heads, intent="speed", dtype="bf16") for heads in (64, 32)),
)


def inputs(case: LogitsCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Fresh arguments of `indexer_logits`, by parameter name; fp8 as bytes."""
    rng = np.random.default_rng(seed)
    q = _draw(rng, (*case.lead, case.queries, case.heads, case.channels), case)
    k = _draw(rng, (*case.lead, case.keys, case.channels), case)
    if case.values == "plateau":
        k[..., rng.random(case.keys) < 0.99, :] = 0
    if case.values in ("hostile", "exact_hostile"):
        _spoil(rng, k)
    row = (*case.lead, case.queries)
    weights = rng.standard_normal((*row, case.heads)).astype(np.float32)
    if case.exact:
        weights = rng.integers(-8, 0 if case.values == "negative" else 9, weights.shape).astype(np.float32)
    arguments: dict[str, Any] = {"q": q, "k": k}
    arguments["weights"] = weights.astype(ml_dtypes.bfloat16) if case.bf16_weights else weights
    if case.scales:
        arguments["q_scale"] = np.exp2(rng.integers(-9, -3, weights.shape)).astype(np.float32)
        arguments["k_scale"] = np.exp2(rng.integers(-9, -3, (*case.lead, case.keys))).astype(np.float32)
        if not case.exact:
            for name in ("q_scale", "k_scale"):
                arguments[name] *= rng.uniform(0.5, 1, arguments[name].shape).astype(np.float32)
    if case.limits is not None:
        low, high = -case.keys // 4, case.keys * 5 // 4
        arguments["starts"] = rng.integers(low, high, row, dtype=np.int32)
        arguments["ends"] = rng.integers(low, high, row, dtype=np.int32)
    options = {"causal": False, "q_start": 0, "k_stride": 1, "relu": True}
    arguments |= {name: getattr(case, name) for name, default in options.items() if getattr(case, name) != default}
    if case.strided:
        arguments = {
            name: _spread(value) if isinstance(value, np.ndarray) else value for name, value in arguments.items()
        }
    return all_on(xp, arguments)


def _draw(rng: np.random.Generator, shape: tuple[int, ...], case: LogitsCase) -> Any:
    dtype = _DTYPES[case.dtype]
    if case.exact:
        made = rng.integers(-4, 5, shape).astype(np.float32)
    else:
        made = rng.standard_normal(shape, dtype=np.float32)
        if case.dtype == "fp8":
            made = np.clip(made * 60, -448, 448)
    narrow = made.astype(dtype)
    return narrow.view(np.uint8) if case.dtype == "fp8" else narrow


def _spoil(rng: np.random.Generator, k: Any) -> None:
    """Some keys get a NaN, others an infinity where there is one."""
    rows = k.reshape(-1, k.shape[-1])
    for row in range(0, len(rows), 5):
        channel = int(rng.integers(k.shape[-1]))
        if k.dtype == np.uint8:
            rows[row, channel] = 0x7F
        else:
            rows[row, channel] = (np.nan, np.inf, -np.inf)[row // 5 % 3]


def _spread(array: Any) -> Any:
    return spread(array, bool(array.ndim) and array.shape[-1] in (64, 128) and array.dtype.itemsize < 4)


def flops(case: LogitsCase) -> float:
    """The products of all heads with all keys; of causal masks, with those that are seen."""
    pairs = float(np.prod((*case.lead, case.queries, case.keys)))
    if case.causal and case.k_stride == 1 and case.intent == "speed":
        seen = np.clip(case.q_start + np.arange(case.queries) + 1, 0, case.keys)
        pairs = float(seen.sum()) * (case.batch or 1)
    return 2.0 * pairs * case.heads * case.channels


def bytes_moved(case: LogitsCase) -> float:
    """q, k and weights read, logits written."""
    entries = case.batch or 1
    item = 1 if case.dtype == "fp8" else 2
    rows = case.queries * case.heads * (case.channels * item + 4 + 4 * case.scales)
    return float(entries * (rows + case.keys * (case.channels * item + 4 * case.scales) + 4 * case.queries * case.keys))
