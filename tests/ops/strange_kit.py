"""Problems of sparse_mla_bwd in which one of several neighbouring queries has a number that is not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cupymla.ops.mla_cases import sized
from cupymla.ops.sparse_mla_bwd import cases

WHERE = ("kv", "q", "dout", "out", "lse", "attn_sink", "empty")
"""Which array has it. "attn_sink": a sink of -inf where a query has no slot, so lse is -inf as well. "empty": a query
that has no slot, and NaN in every array of its own."""

STRANGE_QUERY, STRANGE_TOKEN = 2, 9
_TOKENS = 40


def strange_problem(where: str, heads: int) -> dict[str, Any]:
    """Arguments of five queries: one has what is not finite in an array, or names the row of kv that has it."""
    sink: Any = "finite" if where == "attn_sink" else "none"
    case = sized(
        heads, 512, 20, 5, _TOKENS, "_x", "joint", selection="full", wants_dist=True, sink=sink, dkv_dtype="float32"
    )
    made = cases.inputs(case, 4)
    given = {name: np.array(value) if isinstance(value, np.ndarray) else value for name, value in made.items()}
    indices = given["indices"]
    indices[indices == STRANGE_TOKEN] = STRANGE_TOKEN - 1
    if where == "kv":
        indices[STRANGE_QUERY, 3] = STRANGE_TOKEN
        given["kv"][STRANGE_TOKEN, 511] = np.nan
    elif where == "attn_sink":
        indices[STRANGE_QUERY] = -1
        given["lse"][STRANGE_QUERY] = -np.inf
        given["attn_sink"][0] = -np.inf
    elif where == "empty":
        indices[STRANGE_QUERY] = -1
        for name in ("q", "out", "dout", "lse"):
            given[name][STRANGE_QUERY] = np.nan
    else:
        given[where][STRANGE_QUERY].reshape(-1)[-1] = np.nan
    return given


def strange(array: npt.NDArray[Any], axes: tuple[int, ...]) -> set[int]:
    """Along the first axis, where there is something that is not finite."""
    return set(np.flatnonzero(~np.isfinite(array).all(axis=axes)).tolist())
