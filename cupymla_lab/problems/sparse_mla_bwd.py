"""Correctness cases of sparse_mla_bwd; see `cupymla.ops.case`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cupymla.ops.mla_cases import MlaCase, sized

from . import mla


def _packed_queries() -> Iterator[MlaCase]:
    """Packed queries: four of up to 16 heads, two of up to 32."""

    def make(name: str, q: int, h: int = 16, d: int = 576, k: int = 65, kv: int = 200, **traits: Any) -> MlaCase:
        return sized(h, d, k, q, kv, f"_packed_queries{name}", "packed_queries", **traits)

    # The last query group not full, lengths that differ within one, query groups without a row.
    yield make("", 9, k=130, kv=400, batch=3, lengths="hostile")
    yield make("_sink", 5, h=1, k=1, kv=1, selection="full", sink="finite")
    yield make("", 3, h=7, d=512, dtype="float16", layout="strided")
    yield make("", 5, h=32, k=130, kv=150)
    yield make("", 6, h=17, d=512, dtype="float16", layout="strided", batch=2, lengths="hostile")
    yield make("_empty", 9, selection="empty", lengths="hostile")
    yield make("_nothing", 8, selection="nothing")
    yield make("_few", 7, k=400, kv=500, selection="few")
    yield make("_duplicates", 7, selection="duplicates")
    yield make("_overlap90", 8, k=130, kv=300, selection="overlap90")
    yield make("_causal", 18, kv=20, causal=True)
    yield make("_causal_stride4", 13, kv=20, causal=True, k_stride=4, q_start=3)
    yield make("_base2_sink", 10, lse_base="2", selection="empty", sink="infinite")
    yield make("_sink", 7, h=20, selection="empty", sink="finite")
    yield make("_fp32_dist_sink", 6, selection="empty", sink="finite", wants_dist=True, dkv_dtype="float32")
    yield make("_dist_duplicates", 5, h=32, d=512, selection="duplicates", wants_dist=True)
    yield make("_dist", 6, k=130, kv=300, batch=2, lengths="hostile", layout="strided", wants_dist=True)
    # The most entries, the most tokens; as many queries as make an H200 choose this kernel by itself.
    yield make("", 4, d=512, k=2048, kv=131072, h=3)
    yield make("_dist", 3, k=4096, kv=5001, h=30, wants_dist=True)
    yield make("_dist", 1400, k=257, kv=500, wants_dist=True, lengths="hostile", sink="finite")


def _stored() -> Iterator[MlaCase]:
    """Deterministic, up to 64 heads: rows are stored, packed. Of packed queries, too."""

    def make(name: str, h: int, q: int, d: int = 576, k: int = 65, kv: int = 200, **traits: Any) -> MlaCase:
        return sized(h, d, k, q, kv, f"_stored{name}", "stored", deterministic=True, **traits)

    yield make("", 64, 4, k=130)
    yield make("", 33, 4, d=512, k=70, kv=90, dtype="float16", layout="strided", batch=2, lengths="hostile")
    yield make("_dist_sink_duplicates", 50, 3, kv=40, selection="duplicates", sink="finite", wants_dist=True)
    # More entries for a token than are sorted at a time; without a sink dq would be what rounding leaves.
    yield make("_sink_duplicates", 64, 1, d=512, k=1100, kv=1, selection="duplicates", sink="finite")
    yield make("_nothing", 5, 3, kv=40, selection="nothing")
    # The caller's lists; with those of a token in several pieces, and with entries that the mask hides.
    yield make("_lists", 64, 4, k=130, wants_lists=True)
    yield make("_lists_duplicates", 40, 2, d=512, k=700, kv=1, selection="duplicates", sink="finite", wants_lists=True)
    masked: dict[str, Any] = {"causal": True, "k_stride": 4, "q_start": 3, "batch": 2, "lengths": "hostile"}
    yield make("_lists_causal_stride4", 20, 13, d=512, kv=20, layout="strided", wants_lists=True, **masked)

    def packed(name: str, h: int, q: int, d: int = 576, k: int = 65, kv: int = 200, **traits: Any) -> MlaCase:
        return sized(h, d, k, q, kv, f"_stored_queries{name}", "stored_queries", deterministic=True, **traits)

    yield packed("", 16, 9, k=130, kv=400, batch=3, lengths="hostile")
    yield packed("_sink", 1, 5, k=1, kv=1, selection="full", sink="finite")
    yield packed("", 32, 5, k=130, kv=150, dtype="float16", layout="strided")
    yield packed("_dist_duplicates", 17, 5, d=512, kv=90, selection="duplicates", wants_dist=True)
    yield packed("_duplicates", 16, 7, k=130, kv=50, selection="duplicates")
    yield packed("_lists", 16, 5, d=512, kv=90, wants_lists=True)
    yield packed("_few", 16, 7, d=512, k=400, kv=500, selection="few")
    yield packed("_causal_stride4", 16, 13, kv=20, causal=True, k_stride=4, q_start=3)
    # The most tokens; as many queries as make an H200 choose packed ones by itself.
    yield packed("", 3, 4, d=512, k=2048, kv=131072)
    yield packed("_dist", 16, 1400, k=257, kv=500, wants_dist=True, lengths="hostile", sink="finite")


def _order() -> Iterator[MlaCase]:
    """Queries that take their rows in the order of tokens."""

    def make(h: int, q: int, k: int, kv: int, d: int = 512, name: str = "", **traits: Any) -> MlaCase:
        return sized(h, d, k, q, kv, f"_order{name}", "order", **traits)

    yield make(3, 5, 130, 300, d=576, batch=2, lengths="hostile", wants_dist=True, name="_dist")
    yield make(65, 3, 70, 200, d=576, dtype="float16", layout="strided", wants_dist=True, name="_dist")
    # Two head blocks of a cluster.
    yield make(130, 2, 70, 200, lengths="hostile", sink="finite", wants_dist=True, name="_dist_sink")
    yield make(7, 4, 65, 50, selection="duplicates", sink="infinite", wants_dist=True, name="_dist_sink_duplicates")
    yield make(66, 4, 130, 50, selection="duplicates", name="_duplicates")
    yield make(66, 3, 70, 100, dkv_dtype="float32", layout="strided", name="_fp32")
    yield make(2, 3, 65, 40, selection="nothing", wants_dist=True, name="_dist_nothing")
    yield make(9, 4, 400, 500, selection="few", dkv_dtype="float32", name="_fp32_few")
    yield make(16, 9, 65, 20, causal=True, k_stride=4, q_start=3, wants_dist=True, name="_dist_causal_stride4")
    # The most entries, the most tokens; as many queries at a time as an H200's multiprocessors.
    yield make(1, 1, 8192, 300, selection="few", wants_dist=True, name="_dist_few")
    yield make(1, 1, 65, 1 << 18, dkv_dtype="float32", name="_fp32")
    yield make(2, 140, 600, 30000, wants_dist=True, name="_dist")


def _two_phase() -> Iterator[MlaCase]:
    """65 to 128 heads, whose P and dS come first, and dQ and dKV from them."""

    def make(h: int, q: int, k: int, kv: int, d: int = 576, name: str = "", **traits: Any) -> MlaCase:
        return sized(h, d, k, q, kv, f"_two_phase{name}", "two_phase", **traits)

    # Both consumers of the first stage more than once, and the last key tile, or its second block, not full.
    yield make(128, 3, 700, 900)
    yield make(128, 3, 513, 600, d=512, dtype="float16", layout="strided")
    yield make(100, 4, 390, 500, batch=2, lengths="hostile", sink="finite", wants_dist=True, name="_dist_sink")
    yield make(65, 5, 64, 80, d=512, lengths="hostile")
    yield make(128, 2, 1, 1, selection="full", sink="infinite")
    yield make(66, 4, 130, 50, selection="duplicates", wants_dist=True, name="_dist_duplicates")
    yield make(127, 3, 260, 300, selection="few", dkv_dtype="float32", layout="strided", name="_fp32_few")
    yield make(80, 3, 200, 300, selection="nothing", wants_dist=True, name="_dist_nothing")
    yield make(72, 9, 140, 150, selection="empty", lengths="hostile", lse_base="2", sink="infinite", name="_empty")
    yield make(96, 20, 66, 70, causal=True, k_stride=4, q_start=3, name="_causal_stride4")
    yield make(128, 4, 330, 400, deterministic=True, selection="duplicates", name="_det_duplicates")
    yield make(
        70, 5, 270, 300, d=512, batch=2, lengths="hostile", deterministic=True, wants_dist=True, name="_det_dist"
    )
    yield make(65, 3, 150, 200, dtype="float16", deterministic=True, selection="few", name="_det_few")
    yield make(68, 5, 150, 200, deterministic=True, wants_lists=True, lengths="hostile", name="_det_lists")
    # The benchmark's entries.
    yield make(128, 20, 2048, 3000)


def _columns_outermost() -> Iterator[MlaCase]:
    """In two phases, whose gradients are made of all queries for some columns first, then for the next."""

    def make(h: int, q: int, k: int, kv: int, d: int = 576, name: str = "", **traits: Any) -> MlaCase:
        return sized(h, d, k, q, kv, f"_columns_outermost{name}", "columns_outermost", **traits)

    yield make(128, 5, 300, 400)
    yield make(90, 4, 150, 200, d=512, batch=2, lengths="hostile", sink="finite", wants_dist=True, name="_dist_sink")
    yield make(66, 9, 70, 90, dtype="float16", layout="strided", selection="duplicates", name="_duplicates")
    yield make(70, 4, 130, 150, dkv_dtype="float32", selection="few", name="_fp32_few")
    # CTAs of several waves.
    yield make(128, 150, 130, 1000, d=512)


def _columns_outermost_in_order() -> Iterator[MlaCase]:
    """The same, of queries that take their rows in the order of tokens."""

    def make(h: int, q: int, k: int, kv: int, d: int = 576, name: str = "", **traits: Any) -> MlaCase:
        return sized(h, d, k, q, kv, f"_columns_outermost_in_order{name}", "columns_outermost_in_order", **traits)

    yield make(128, 4, 300, 400, selection="duplicates", name="_duplicates")
    yield make(80, 3, 200, 300, batch=2, lengths="hostile", sink="finite", wants_dist=True, name="_dist_sink")
    yield make(65, 3, 70, 200, d=512, dtype="float16", layout="strided", wants_dist=True, name="_dist")
    yield make(100, 5, 400, 500, selection="few", dkv_dtype="float32", name="_fp32_few")


def _sink_lse() -> Iterator[MlaCase]:
    """The sink has its part in the distribution."""

    def make(h: int, q: int, k: int, kv: int, d: int = 576, name: str = "", **traits: Any) -> MlaCase:
        traits = {"sink": "finite", "wants_dist": True, "attn_dist_sink": True} | traits
        return sized(h, d, k, q, kv, f"_sink_lse{name}", "sink_lse", **traits)

    yield make(16, 6, 65, 200, selection="empty")
    yield make(3, 5, 70, 90, d=512, dtype="float16", layout="strided", batch=2, lengths="hostile", sink="infinite")
    yield make(66, 4, 130, 150, lse_base="2", selection="duplicates", sink="infinite", name="_base2")
    yield make(130, 3, 65, 70, d=512, causal=True, q_start=60, selection="empty", name="_causal")
    yield make(20, 4, 65, 50, deterministic=True, selection="few", name="_det")
    yield make(70, 3, 65, 50, deterministic=True, selection="nothing", name="_det_nothing")
    # The most of a query's heads and entries.
    yield make(192, 2, 2048, 3000, selection="few")


CASES: tuple[MlaCase, ...] = (
    *mla.COMMON,
    *mla.SCALES,
    *mla.SINKS,
    # Those of COMMON with a stride are too large for a machine without a GPU.
    sized(16, 576, 65, 24, 40, "_causal_stride4_start", "masks", causal=True, k_stride=4, q_start=30),
    sized(16, 576, 65, 24, 40, "_causal_stride4", "masks", causal=True, k_stride=4),
    sized(16, 576, 65, 24, 40, "_causal_stride4_before", "masks", causal=True, k_stride=4, q_start=-9),
    sized(16, 576, 65, 6, 200, "_dist", "options", wants_dist=True, selection="empty"),
    sized(128, 512, 130, 4, 200, "_dist_sink", "options", wants_dist=True, sink="infinite"),
    sized(16, 576, 65, 6, 200, "_fp32", "options", dkv_dtype="float32"),
    sized(128, 576, 65, 4, 100, "_fp32", "options", dkv_dtype="float32"),
    sized(64, 576, 130, 4, 200, "_fp32_singleton", "options", dkv_dtype="float32", layout="singleton"),
    sized(16, 576, 65, 6, 200, "_det", "options", deterministic=True),
    sized(16, 576, 65, 5, 20, "_det_duplicates", "options", deterministic=True, selection="duplicates"),
    sized(128, 576, 130, 6, 50, "_det_duplicates", "options", deterministic=True, selection="duplicates"),
    # More heads than a 2-CTA cluster takes at a time; more entries for a token than are sorted at a time.
    sized(192, 576, 65, 2, 100, "_det_dist", "options", deterministic=True, wants_dist=True, sink="finite"),
    sized(16, 512, 1300, 4, 3, "_det_duplicates", "options", deterministic=True, selection="duplicates"),
    sized(130, 512, 65, 9, 20, "_det_lists_causal", "options", deterministic=True, wants_lists=True, causal=True),
    sized(64, 576, 65, 5, 90, "_det_fp32", "options", deterministic=True, dkv_dtype="float32"),
    *_packed_queries(),
    *_stored(),
    *_order(),
    *_two_phase(),
    *_columns_outermost(),
    *_columns_outermost_in_order(),
    *_sink_lse(),
)
