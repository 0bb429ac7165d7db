"""Problems of attn_dist; see `cupymla.ops.case`."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import mla_cases
from ..case import Choice
from ..mla_cases import MlaCase, sized
from .spec import ARGUMENTS

OUTPUTS = ARGUMENTS.results
"""The output parameters, in the order in which the call returns them."""

CHOICES = {
    "attn_dist": Choice("plan._MARGIN=0.0"),
    "attn_dist_packed": Choice("plan._MARGIN=1e9", intents=("packed_queries",)),
}

BENCH: tuple[MlaCase, ...] = (
    *(sized(128, 576, 2048, 4096, kv) for kv in (4096, 8192, 32768)),
    *(sized(64, 576, 2048, 4096, kv) for kv in (4096, 8192, 32768)),
    sized(16, 576, 2048, 4096, 8192),
    sized(16, 576, 2048, 4096, 8192, "_overlap90", selection="overlap90"),
)

DEMO = sized(128, 576, 2048, 2, 4096, intent="shapes", selection="full")
"""A problem of the timing cases' heads and entries, which takes the references a second or two."""


def inputs(case: MlaCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Fresh arguments of `attn_dist`, by parameter name."""
    return mla_cases.dist_inputs(case, seed, xp)


def flops(case: MlaCase) -> float:
    """The product with the keys, over every entry."""
    return mla_cases.entries_flops(case, case.d_qk)


def bytes_moved(case: MlaCase) -> float:
    """q, kv once, indices and lse read; dist written."""
    return (
        mla_cases.selection_bytes(case) + mla_cases.head_bytes(case, 2 * case.d_qk + 4) + 4 * case.queries * case.topk
    )
