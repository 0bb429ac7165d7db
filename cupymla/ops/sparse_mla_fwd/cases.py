"""Problems of sparse_mla_fwd; see `cupymla.ops.case`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import mla_cases
from ..case import Choice
from ..mla import D_V
from ..mla_cases import MlaCase, sized
from .spec import ARGUMENTS

OUTPUTS = ARGUMENTS.results
"""The output parameters, in the order in which the call returns them."""

CHOICES = {"sparse_mla_fwd": Choice("plan._ORDER_GAIN=1.0", further=(("order", "plan._ORDER_GAIN=-1.0"),))}


def _options(q: int, h: int, k: int, kv: int) -> tuple[MlaCase, ...]:
    """The options once more, where every query has several blocks of entries."""

    def case(suffix: str, d: int = 576, **options: Any) -> MlaCase:
        return sized(h, d, k, q, kv, f"_{suffix}", intent="parts", **options)

    return (
        case("lengths", lengths="hostile"),
        case("causal_lengths", causal=True, q_start=kv // 2, k_stride=2, lengths="hostile"),
        case("empty", selection="empty"),
        case("few_sink", d=512, selection="few", sink="infinite"),
        case("duplicates", selection="duplicates"),
        case("fp16_strided", dtype="float16", layout="strided", sink="finite"),
        case("batch", d=512, batch=2, lengths="hostile", layout="strided"),
        case("scale_negative_base2", sm_scale=-0.1, lse_base="2", sink="finite"),
        case("scale_zero", d=512, sm_scale=0.0, dtype="float16"),
    )


def _order() -> Iterator[MlaCase]:
    """Queries that take their rows in the order of tokens, where their entries are not shared by several CTAs."""

    def make(h: int, q: int, k: int, kv: int, d: int = 512, name: str = "", **traits: Any) -> MlaCase:
        return sized(h, d, k, q, kv, f"_order{name}", "order", **traits)

    # On a machine with few multiprocessors.
    yield make(5, 5, 130, 300, d=576, batch=2, lengths="hostile")
    yield make(65, 4, 70, 200, d=576, dtype="float16", layout="strided", sink="finite")
    yield make(7, 4, 65, 50, selection="duplicates", sink="infinite", name="_duplicates")
    yield make(20, 4, 400, 500, selection="few", lse_base="2", name="_few")
    yield make(16, 9, 65, 20, causal=True, k_stride=4, q_start=3, name="_causal_stride4")
    # On a GPU. The most entries, the most tokens; rows that do not all fit L2.
    yield make(128, 70, 130, 200, batch=2, lengths="hostile", layout="strided", name="_strided")
    yield make(65, 80, 130, 50, d=576, selection="duplicates", dtype="float16", name="_duplicates")
    yield make(24, 140, 400, 500, d=576, selection="empty", sink="finite", name="_empty")
    yield make(16, 140, 4096, 5000, selection="few", lengths="hostile", name="_few")
    yield make(9, 140, 257, 1 << 18)
    yield make(65, 140, 2048, 40000, d=576, causal=True, q_start=30000, lengths="hostile", name="_causal")


CASES: tuple[MlaCase, ...] = (
    *(*mla_cases.COMMON, *mla_cases.SCALES, *mla_cases.EXTREMES, *mla_cases.SINKS),
    # Few queries: the entries of each go to several CTAs on a GPU; one query's 32 blocks to as many as there are.
    *_options(3, 65, 500, 600),
    *_options(3, 24, 500, 600),
    sized(128, 576, 2048, 1, 3000, intent="parts"),
    # Two queries, as in EXTREMES: among many, two entries would tie for the whole softmax and rounding decide.
    sized(16, 576, 500, 2, 600, "_scale_huge", intent="parts", sm_scale=1e9),
    sized(16, 512, 2048, 2, 3000, "_few_lengths", intent="parts", selection="few", lengths="hostile"),
    # More pairs of a query and a block of heads than a GPU has multiprocessors: a CTA has all entries of a query.
    *_options(70, 65, 300, 400),
    *_options(140, 24, 300, 400),
    # So many that a CTA takes one query after another.
    sized(65, 576, 130, 280, 400, "_lengths", intent="parts", lengths="hostile"),
    sized(16, 576, 130, 540, 400, "_empty", intent="parts", selection="empty"),
    *_order(),
)

BENCH: tuple[MlaCase, ...] = (
    *(sized(128, 576, 2048, 4096, kv) for kv in (4096, 8192, 32768, 131072)),
    *(sized(64, 576, 2048, 4096, kv) for kv in (8192, 65536)),
    sized(64, 512, 512, 4096, 8192),
    sized(128, 512, 1024, 4096, 8192),
    *(sized(h, 576, 2048, 4096, 8192) for h in (32, 16)),
    *(sized(128, 576, 2048, q, 8192) for q in (1, 16, 128)),
    # Queries under way find each other's rows in L2.
    *(
        sized(h, 576, 2048, 4096, kv, "_sorted", selection="sorted")
        for h, kv in ((128, 32768), (128, 131072), (64, 65536))
    ),
    # Options, and sizes that divide nothing, beside the second row; what does not count should cost nothing.
    sized(128, 576, 2048, 4096, 8192, "_fp16", dtype="float16"),
    sized(128, 576, 2048, 4096, 8192, "_sink", sink="finite"),
    sized(128, 576, 2048, 4096, 8192, "_causal", causal=True, q_start=4096),
    sized(128, 576, 2048, 4096, 8192, "_lengths", lengths="hostile"),
    sized(128, 576, 2048, 4096, 8192, "_few", selection="few"),
    sized(128, 576, 2047, 4096, 8192),
    sized(80, 576, 2048, 4096, 8192),
)

DEMO = sized(128, 576, 2048, 2, 4096, intent="shapes", selection="full")
"""A problem of the timing cases' heads and entries, which takes the references a second or two."""


def inputs(case: MlaCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Fresh arguments of `sparse_mla_fwd`, by parameter name."""
    return mla_cases.forward_inputs(case, seed, xp)


def flops(case: MlaCase) -> float:
    """Both products, over every entry; of timing cases with options over those that count."""
    return mla_cases.entries_flops(case, case.d_qk + D_V)


def bytes_moved(case: MlaCase) -> float:
    """q, kv once and indices read; out, max_logits and lse written."""
    return mla_cases.selection_bytes(case) + mla_cases.head_bytes(case, 2 * (case.d_qk + D_V) + 8)
