"""Argument validation of indexer_logits: every check a caller can meet, and the problem that is left when they all
pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import kind
from ...tensor import Device, View
from ..arguments import Arguments, Flag, option
from ..indexer_validation import FP8, Validation
from ..mla import MaskOptions

OPERATOR = "indexer_logits"
DTYPES = ("float8_e4m3fn", "bfloat16", "float16")
MAX_KEYS = 2**31 - 128
"""Kernels count keys in 32 bits, and a last tile of 128 reaches beyond them."""


@dataclass(slots=True)
class ScoredViews:
    """The arrays that are scored, seen; None where one was left out."""

    q: View
    k: View
    weights: View
    q_scale: View | None = None
    k_scale: View | None = None
    starts: View | None = None
    ends: View | None = None


@dataclass(slots=True)
class Views(ScoredViews):
    """The arrays, seen."""

    logits: View | None = None


@dataclass(frozen=True, slots=True)
class Options(MaskOptions):
    """The options: those of every operator with a causal mask, and its own.

    Attributes:
        relu: whether products below zero count as zero.
    """

    relu: bool = option(True, Flag())


ARGUMENTS = Arguments(OPERATOR, Views, Options, results=("logits",))


@dataclass(frozen=True, slots=True)
class Problem:
    """All that a plan may depend on.

    Attributes:
        lead: the batch axis, as a tuple of one extent or of none.
        queries: T, of each batch entry.
        keys: L, of each batch entry.
        heads: H.
        channels: D.
        dtype: of q and k: "float8_e4m3fn", also of bytes, "bfloat16" or "float16".
        masked: whether some query may not see all keys.
        options: the options.
        device: where every array is.
    """

    lead: tuple[int, ...]
    queries: int
    keys: int
    heads: int
    channels: int
    dtype: str
    masked: bool
    options: Options
    device: Device

    @property
    def batch(self) -> int:
        """Batch entries; 1 without a batch axis."""
        return self.lead[0] if self.lead else 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the logits."""
        return (*self.lead, self.queries, self.keys)


def read(
    q: Any,
    k: Any,
    weights: Any,
    *,
    q_scale: Any = None,
    k_scale: Any = None,
    starts: Any = None,
    ends: Any = None,
    causal: Any = False,
    q_start: Any = 0,
    k_stride: Any = 1,
    relu: Any = True,
    logits: Any = None,
) -> tuple[Views, Problem]:
    """Check a call. Raises InputError."""
    validation = Validation(OPERATOR)
    scored = read_scored(validation, q, k, weights, q_scale, k_scale, starts, ends)
    views = Views(
        **scored.arrays, logits=validation.shaped(logits, "logits", scored.shape, ("float32",), "lists", output=True)
    )
    options = validation.chosen(ARGUMENTS, causal, q_start, k_stride, relu)
    validation.separate()
    return views, scored.problem(options)


@dataclass(frozen=True, slots=True)
class Scored:
    """What is scored, seen.

    Attributes:
        arrays: by name.
        lead, queries, keys, heads, channels, dtype: as of `Problem`.
    """

    arrays: dict[str, Any]
    lead: tuple[int, ...]
    queries: int
    keys: int
    heads: int
    channels: int
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the logits."""
        return (*self.lead, self.queries, self.keys)

    def problem(self, options: Options) -> Problem:
        """The problem of scoring it."""
        limits = self.arrays["starts"], self.arrays["ends"]
        return Problem(
            lead=self.lead,
            queries=self.queries,
            keys=self.keys,
            heads=self.heads,
            channels=self.channels,
            dtype=self.dtype,
            masked=options.causal or any(limit is not None for limit in limits),
            options=options,
            device=self.arrays["q"].device,
        )


def read_scored(
    validation: Validation, q: Any, k: Any, weights: Any, q_scale: Any, k_scale: Any, starts: Any, ends: Any
) -> Scored:
    """Check the arrays that every operator of this family takes. Raises InputError."""
    q_seen = validation.view(q, "q", (*DTYPES, "uint8"))
    lead = validation.rank(q_seen, "q", "[T, H, D]", 3)
    heads, channels = validation.index_heads(q_seen, "[T, H, D]")
    validation.check_layout(q_seen, "q", "rows")
    queries = validation.extent(q_seen, "q", -3, "queries")
    narrow = q_seen.dtype in FP8
    k_seen, keys = validation.index_keys(k, lead, channels, FP8 if narrow else (q_seen.dtype,), MAX_KEYS)
    if not narrow:
        for argument, given in (("q_scale", q_scale), ("k_scale", k_scale)):
            if given is not None:
                raise validation.error(argument, f"None with {q_seen.dtype} q and k", kind(given))
    row = (*lead, queries)
    arrays = {
        "q": q_seen,
        "k": k_seen,
        "weights": validation.given(weights, "weights", (*row, heads), ("float32", "bfloat16")),
        "q_scale": validation.shaped(q_scale, "q_scale", (*row, heads), ("float32",)),
        "k_scale": validation.shaped(k_scale, "k_scale", (*lead, keys), ("float32",)),
        "starts": validation.shaped(starts, "starts", row, ("int32",)),
        "ends": validation.shaped(ends, "ends", row, ("int32",)),
    }
    return Scored(arrays, lead, queries, keys, heads, channels, FP8[0] if narrow else q_seen.dtype)
