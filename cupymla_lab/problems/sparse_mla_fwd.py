"""Correctness cases of sparse_mla_fwd; see `cupymla.ops.case`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cupymla.ops.mla_cases import MlaCase, sized

from . import mla


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
    *(*mla.COMMON, *mla.SCALES, *mla.EXTREMES, *mla.SINKS),
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
