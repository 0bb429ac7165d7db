"""KV as one matrix of rows, for the TMA gathers of Blackwell kernels (cuda/common/sm100/topk_gather.cuh).

A gather names rows of a two-dimensional map. Tokens of all batch entries become rows of one by counting in units of the
greatest common divisor of both strides; such rows may overlap, which a tensor map allows.
Source: PTX ISA, "Tensor copies, tile::gather4 mode"; CUDA Driver API, cuTensorMapEncodeTiled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import UnsupportedError
from ..tensormap import TileMap
from .mla import MaskOptions, MlaProblem

MAX_ROWS = 2**31
"""Row numbers are signed 32-bit coordinates."""

_BOX_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class KvRows:
    """How tokens lie among the rows of the map.

    Attributes:
        token_rows: rows from one token to the next.
        batch_rows: rows from one batch entry to the next.
        rows: all rows of the map, at least one.
        row_bytes: from one row to the next.
        columns: channels of a row.
        dtype: of KV.
    """

    token_rows: int
    batch_rows: int
    rows: int
    row_bytes: int
    columns: int
    dtype: str

    def tiles(self, ptr: int) -> TileMap:
        """The map: boxes of one row x 64 channels with the 128-byte swizzle."""
        return TileMap(ptr, self.dtype, (self.columns, self.rows), (self.row_bytes,), (_BOX_COLUMNS, 1))


def kv_rows(problem: MlaProblem[MaskOptions], operator: str) -> KvRows:
    """How a problem's KV is one matrix. Raises UnsupportedError when its rows are too many to number."""
    batch, tokens = max(1 if problem.batch is None else problem.batch, 1), max(problem.s_kv, 1)
    batch_bytes = 2 * problem.kv_strides[0] if batch > 1 else 0
    token_bytes = 2 * problem.kv_strides[1] if tokens > 1 else 0
    unit = math.gcd(batch_bytes, token_bytes) or 2 * problem.d_qk
    token_rows, batch_rows = token_bytes // unit, batch_bytes // unit
    rows = (tokens - 1) * token_rows + (batch - 1) * batch_rows + 1
    if rows > MAX_ROWS:
        raise UnsupportedError(
            f"{operator} on kv of {rows} rows of {unit} bytes",
            "a GPU that gathers by 32-bit row numbers",
            f"at most {MAX_ROWS} rows of the greatest common divisor of kv's strides",
        )
    return KvRows(token_rows, batch_rows, rows, unit, problem.d_qk, problem.dtype)
