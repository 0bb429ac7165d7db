"""Problems of sparse_mla_fwd; see `cupymla.ops.case`."""

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

CHOICES = {"sparse_mla_fwd": Choice("plan._ORDER_GAIN=1.0", further=(("order", "plan._ORDER_GAIN=-1.0"),))}

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
