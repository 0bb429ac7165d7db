"""Problems of sparse_mla_bwd_phase1; see `cupymla.ops.case`."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import mla_cases
from ..mla import D_V
from ..mla_cases import MlaCase, sized
from .spec import ARGUMENTS

OUTPUTS = ARGUMENTS.results
"""The output parameters, in the order in which the call returns them."""

BENCH: tuple[MlaCase, ...] = (sized(128, 576, 2048, 1024, 8192), sized(128, 512, 2048, 1024, 8192))

DEMO = sized(128, 576, 2048, 2, 8192, intent="shapes", selection="full")
"""A problem of the timing cases' heads and entries, which takes the references a second or two."""


def inputs(case: MlaCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Fresh arguments of `sparse_mla_bwd_phase1`, by parameter name."""
    taken = {*ARGUMENTS.inputs, *ARGUMENTS.options}
    return {name: value for name, value in mla_cases.backward_inputs(case, seed, xp).items() if name in taken}


def flops(case: MlaCase) -> float:
    """The product with the keys, over every entry, and delta's."""
    return mla_cases.entries_flops(case, case.d_qk) + 2.0 * case.queries * case.h_q * D_V


def bytes_moved(case: MlaCase) -> float:
    """q, kv once, out, dout and indices read; p and delta written."""
    return mla_cases.selection_bytes(case) + mla_cases.head_bytes(case, 2 * case.d_qk + 4 * D_V + 4 * case.topk + 4)
