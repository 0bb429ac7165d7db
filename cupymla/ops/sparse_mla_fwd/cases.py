"""Problems of sparse_mla_fwd; see `cupymla.ops.case`."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import mla_cases
from ..mla import D_V
from ..mla_cases import MlaCase, sized

OUTPUTS = ("out", "max_logits", "lse")
"""The output parameters, in the order in which the call returns them."""

CASES: tuple[MlaCase, ...] = (*mla_cases.COMMON, *mla_cases.SCALES, *mla_cases.EXTREMES, *mla_cases.SINKS)

BENCH: tuple[MlaCase, ...] = (
    *(sized(128, 576, 2048, 4096, kv) for kv in (4096, 8192, 32768, 131072)),
    *(sized(64, 576, 2048, 4096, kv) for kv in (8192, 65536)),
    sized(64, 512, 512, 4096, 8192),
    sized(128, 512, 1024, 4096, 8192),
    *(sized(h, 576, 2048, 4096, 8192) for h in (32, 16)),
    *(sized(128, 576, 2048, q, 8192) for q in (1, 16, 128)),
)


def inputs(case: MlaCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Fresh arguments of `sparse_mla_fwd`, by parameter name."""
    return mla_cases.forward_inputs(case, seed, xp)


def flops(case: MlaCase) -> float:
    """Both products, over every slot."""
    return mla_cases.slots_flops(case, case.d_qk + D_V)


def bytes_moved(case: MlaCase) -> float:
    """q, kv once and indices read; out, max_logits and lse written."""
    return mla_cases.selection_bytes(case) + mla_cases.head_bytes(case, 2 * (case.d_qk + D_V) + 8)
