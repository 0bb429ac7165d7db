"""Problems of sparse_mla_bwd in which one of several neighbouring queries has a number that is not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cupymla.ops.mla_cases import sized
from cupymla.ops.sparse_mla_bwd import cases

WHERE = ("kv", "q", "dout", "out", "lse", "attn_sink", "empty", "factor")
"""Which array has it. "attn_sink": a sink of -inf where a query has no entry, so lse is -inf as well. "empty": a query
that has no entry, and NaN in every array of its own. "factor": a query without an entry whose lse is so large that
making up for its rounding in units of log2 could take 2^143."""

NON_FINITE_QUERY, NON_FINITE_TOKEN = 2, 9
_TOKENS = 40


def non_finite_problem(where: str, heads: int, rows: tuple[int, str] | None = None) -> dict[str, Any]:
    """Arguments of five queries: one has what is not finite in an array, or names the row of kv that has it.

    `rows`: d_qk and dtype, by default 576 of float16 with more than 16 heads and 512 of bfloat16 with fewer.
    """
    sink: Any = "finite" if where == "attn_sink" else "none"
    d_qk, dtype = rows or ((576, "float16") if heads > 16 else (512, "bfloat16"))
    traits: dict[str, Any] = {"dkv_dtype": "float32", "wants_dist": True, "selection": "full", "sink": sink}
    traits["dtype"] = dtype
    case = sized(heads, d_qk, 20, 5, _TOKENS, "_x", "packed_queries", **traits)
    made = cases.inputs(case, 4)
    if where == "factor":
        made["sm_scale"] = 0.0721688
    given = {name: np.array(value) if isinstance(value, np.ndarray) else value for name, value in made.items()}
    indices = given["indices"]
    indices[indices == NON_FINITE_TOKEN] = NON_FINITE_TOKEN - 1
    if where == "kv":
        indices[NON_FINITE_QUERY, 3] = NON_FINITE_TOKEN
        given["kv"][NON_FINITE_TOKEN, 511] = np.nan
    elif where == "attn_sink":
        indices[NON_FINITE_QUERY] = -1
        given["lse"][NON_FINITE_QUERY] = -np.inf
        given["attn_sink"][0] = -np.inf
    elif where == "factor":
        indices[NON_FINITE_QUERY] = -1
        given["lse"][NON_FINITE_QUERY] = -1485911808.0
    elif where == "empty":
        indices[NON_FINITE_QUERY] = -1
        for name in ("q", "out", "dout", "lse"):
            given[name][NON_FINITE_QUERY] = np.nan
    else:
        given[where][NON_FINITE_QUERY].reshape(-1)[-1] = np.nan
    return given


def non_finite(array: npt.NDArray[Any], axes: tuple[int, ...]) -> set[int]:
    """Along the first axis, where there is something that is not finite."""
    return set(np.flatnonzero(~np.isfinite(array).all(axis=axes)).tolist())
