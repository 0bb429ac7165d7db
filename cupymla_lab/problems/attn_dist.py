"""Correctness cases of attn_dist; see `cupymla.ops.case`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cupymla.ops.mla_cases import MlaCase, sized

from . import mla


def _packed_queries() -> Iterator[MlaCase]:
    """Packed queries, up to 16 heads."""

    def make(name: str, q: int, h: int = 16, d: int = 576, k: int = 65, kv: int = 200, **traits: Any) -> MlaCase:
        return sized(h, d, k, q, kv, f"_packed_queries{name}", "packed_queries", **traits)

    # The last query group not full, lengths that differ within one, query groups without a row, several for a CTA.
    yield make("", 17, k=130, kv=400, batch=3, lengths="hostile")
    yield make("", 9, h=1, k=1, kv=1)
    yield make("", 3, h=7, d=512, dtype="float16", layout="strided")
    yield make("_empty", 19, selection="empty", lengths="hostile")
    yield make("_nothing", 16, selection="nothing")
    yield make("_few", 19, k=400, kv=500, selection="few")
    yield make("_duplicates", 11, selection="duplicates")
    yield make("_overlap90", 24, k=130, kv=300, selection="overlap90")
    yield make("_causal", 70, kv=70, causal=True)
    yield make("_causal_stride4", 33, kv=40, causal=True, k_stride=4, q_start=3)
    yield make("_base2", 10, lse_base="2", selection="empty")
    yield make("_l1", 12, selection="empty", normalize="l1")
    yield make("_l1", 21, d=512, k=300, kv=1000, normalize="l1", lengths="hostile", layout="strided", batch=2)
    # The most entries, the most tokens, neither a multiple of anything.
    yield make("", 8, d=512, k=2048, kv=16384, dtype="float16")
    yield make("", 11, h=5, k=2047, kv=3001, selection="empty")
    # As many queries as make an H200 choose this kernel by itself.
    yield make("_l1", 1100, h=9, k=700, kv=1500, normalize="l1", lengths="hostile", layout="strided")
    yield make("", 1060, k=2048, kv=4096)


CASES: tuple[MlaCase, ...] = (
    *mla.COMMON,
    *mla.SCALES,
    sized(16, 576, 65, 7, 200, "_l1", "options", normalize="l1", selection="empty"),
    sized(128, 512, 130, 4, 200, "_l1", "options", normalize="l1", lse_base="2", batch=2),
    # Rows of many blocks: one query in slices, several with lengths that end in any of them, rows summed by one CTA.
    sized(128, 576, 1000, 1, 1200, "_sliced", "shapes"),
    sized(64, 512, 700, 11, 900, "_sliced", "masks", lengths="hostile", layout="strided"),
    sized(192, 576, 700, 11, 900, "_l1", "options", normalize="l1", lengths="hostile"),
    sized(192, 576, 65, 3, 100, "_l1", "options", normalize="l1", lengths="hostile"),
    sized(16, 512, 1100, 3, 1200, "_l1_strided", "options", normalize="l1", layout="strided", dtype="float16"),
    # More queries than an H200 has multiprocessors: CTAs that take several.
    sized(16, 576, 130, 700, 400, "_grouped", "shapes", lengths="hostile", selection="empty"),
    sized(128, 512, 65, 560, 400, "_grouped", "shapes", selection="empty", normalize="l1"),
    *_packed_queries(),
)
