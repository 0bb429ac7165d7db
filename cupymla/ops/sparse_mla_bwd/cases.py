"""Problems of sparse_mla_bwd; see `cupymla.ops.case`."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import mla_cases
from ..case import Choice
from ..mla import D_V
from ..mla_cases import MlaCase, sized
from .spec import ARGUMENTS

OUTPUTS = ARGUMENTS.results
"""The output parameters, in the order in which the call returns them."""

WRITTEN = ARGUMENTS.written
"""What a call writes beside them, an argument of the cases that ask for it."""

CHOICES = {
    "sparse_mla_bwd": Choice(
        (
            "paths.packed_queries._MARGIN=0.0",
            "paths.two_phase._WHEN='never'",
            "paths.fixed_order.PACKS_ROWS_OF_SINGLE=False",
        ),
        further=(
            ("order", "paths.token_order._ORDER_GAIN=-1.0"),
            ("two_phase", "paths.two_phase._WHEN='always'"),
            ("columns_outermost", "paths.two_phase._WHEN='always'"),
            ("columns_outermost", "paths.two_phase._ALL_COLUMNS_BYTES=-1.0"),
            ("columns_outermost_in_order", "paths.two_phase._WHEN='always'"),
            ("columns_outermost_in_order", "paths.two_phase._ALL_COLUMNS_BYTES=-1.0"),
            ("columns_outermost_in_order", "paths.token_order._ORDER_GAIN=-1.0"),
        ),
        beside=("sparse_mla_bwd_sink_lse",),
    ),
    "sparse_mla_bwd_packed": Choice("paths.packed_queries._MARGIN=1e9", intents=("packed_queries",)),
    "sparse_mla_bwd_stored": Choice(
        "paths.packed_queries._MARGIN=0.0",
        intents=("stored", "stored_queries"),
        further=(("stored_queries", "paths.packed_queries._MARGIN=1e9"),),
    ),
    "sparse_mla_bwd_sink_lse": Choice(
        (), intents=("sink_lse",), beside=("sparse_mla_bwd", "sparse_mla_bwd_packed", "sparse_mla_bwd_stored")
    ),
}

BENCH: tuple[MlaCase, ...] = (
    *(sized(128, 576, 2048, 4096, kv) for kv in (4096, 8192, 32768, 131072)),
    *(sized(64, 576, 2048, 4096, kv) for kv in (4096, 8192, 32768)),
    sized(128, 512, 1024, 4096, 8192),
    *(sized(h, 576, 2048, 4096, 8192) for h in (32, 16)),
    *(sized(128, 576, 2048, 4096, kv, "_overlap90", selection="overlap90") for kv in (8192, 32768)),
    *(sized(128, 576, 2048, 4096, kv, "_det", deterministic=True) for kv in (8192, 32768)),
    *(sized(h, 576, 2048, 4096, 8192, "_det", deterministic=True) for h in (64, 32, 16)),
    sized(64, 576, 2048, 4096, 32768, "_det", deterministic=True),
    *(sized(h, 576, 2048, 4096, 8192, "_det_lists", deterministic=True, wants_lists=True) for h in (128, 64)),
    sized(16, 576, 2048, 4096, 8192, "_overlap90", selection="overlap90"),
    *(sized(h, 576, 2048, 4096, 8192, "_dist", wants_dist=True) for h in (128, 16)),
    sized(128, 576, 2048, 4096, 32768, "_dist", wants_dist=True),
    sized(128, 576, 2048, 4096, 8192, "_dist_sink", wants_dist=True, sink="finite", attn_dist_sink=True),
)

DEMO = sized(128, 576, 2048, 1, 4096, intent="shapes", selection="full")
"""A problem of the timing cases' heads and entries, which takes the references a second or two."""


def inputs(case: MlaCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Fresh arguments of `sparse_mla_bwd`, by parameter name; attn_dist, where asked for, is an array of NaN."""
    return mla_cases.backward_inputs(case, seed, xp)


def most_ctas(case: MlaCase) -> int:
    """Of a launch, where these are many: `sum` has one for each row of kv."""
    return case.s_kv * (case.batch or 1) if case.options.get("deterministic") else 0


def flops(case: MlaCase) -> float:
    """All five products, over every entry."""
    return mla_cases.entries_flops(case, 3 * case.d_qk + 2 * D_V)


def bytes_moved(case: MlaCase) -> float:
    """q, kv once, out, dout, lse and indices read; dq and dkv written."""
    item = 4 if case.options.get("dkv_dtype") == "float32" else 2
    written = case.s_kv * (1 if case.batch is None else case.batch) * case.d_qk * item
    written += case.queries * case.topk * 4 if case.wants_dist else 0
    return mla_cases.selection_bytes(case) + mla_cases.head_bytes(case, 4 * (case.d_qk + D_V) + 4) + written
