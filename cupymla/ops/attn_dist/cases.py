"""Problems of attn_dist; see `cupymla.ops.case`."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import mla_cases
from ..mla_cases import MlaCase, sized
from .spec import ARGUMENTS

OUTPUTS = ARGUMENTS.results
"""The output parameters, in the order in which the call returns them."""

CASES: tuple[MlaCase, ...] = (
    *mla_cases.COMMON,
    *mla_cases.SCALES,
    sized(16, 576, 65, 7, 200, "_l1", "options", normalize="l1", selection="empty"),
    sized(128, 512, 130, 4, 200, "_l1", "options", normalize="l1", lse_base="2", batch=2),
    # Rows of many blocks: one query in slices, several with lengths that end in any of them, rows summed by one CTA.
    sized(128, 576, 1000, 1, 1200, "_sliced", "shapes"),
    sized(64, 512, 700, 11, 900, "_sliced", "masks", lengths="hostile", layout="strided"),
    sized(192, 576, 700, 11, 900, "_l1", "options", normalize="l1", lengths="hostile"),
    sized(16, 512, 1100, 3, 1200, "_l1_strided", "options", normalize="l1", layout="strided", dtype="float16"),
    # More queries than an H200 has multiprocessors: CTAs that take several.
    sized(16, 576, 130, 700, 400, "_grouped", "shapes", lengths="hostile", selection="empty"),
    sized(128, 512, 65, 560, 400, "_grouped", "shapes", selection="empty", normalize="l1"),
    # Neighbouring queries that take their rows together: the last bunch not full, lengths that differ within one, the
    # most slots, the most tokens; as many queries as make an H200 choose it.
    sized(16, 576, 130, 17, 400, "_joint", "masks", lengths="hostile", batch=3),
    sized(5, 576, 2048, 11, 3000, "_joint", "shapes", selection="empty"),
    sized(16, 512, 300, 21, 1000, "_joint_l1", "options", normalize="l1", lengths="hostile", layout="strided", batch=2),
    sized(16, 512, 2048, 8, 16384, "_joint", "shapes", dtype="float16"),
    sized(9, 576, 700, 1100, 1500, "_joint_l1", "options", normalize="l1", lengths="hostile", layout="strided"),
    sized(16, 576, 2048, 1060, 16384, "_joint", "shapes"),
)

BENCH: tuple[MlaCase, ...] = (
    *(sized(128, 576, 2048, 4096, kv) for kv in (4096, 8192, 32768)),
    *(sized(64, 576, 2048, 4096, kv) for kv in (4096, 8192, 32768)),
    sized(16, 576, 2048, 4096, 8192),
    sized(16, 576, 2048, 4096, 8192, "_overlap90", selection="overlap90"),
)


def inputs(case: MlaCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Fresh arguments of `attn_dist`, by parameter name."""
    return mla_cases.dist_inputs(case, seed, xp)


def flops(case: MlaCase) -> float:
    """The product with the keys, over every slot."""
    return mla_cases.slots_flops(case, case.d_qk)


def bytes_moved(case: MlaCase) -> float:
    """q, kv once, indices and lse read; dist written."""
    return (
        mla_cases.selection_bytes(case) + mla_cases.head_bytes(case, 2 * case.d_qk + 4) + 4 * case.queries * case.topk
    )
