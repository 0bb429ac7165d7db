"""topk: the largest scores of each row, exact and reproducible."""

from __future__ import annotations

from typing import Any, Literal

from ..operator import operator
from .run import CALLS

__all__ = ["topk"]


@operator(CALLS)
def topk(
    scores: Any,
    topk: int,
    *,
    starts: Any = None,
    ends: Any = None,
    order: Literal["index", "score"] = "index",
    return_values: bool = False,
    indices: Any = None,
    count: Any = None,
    values: Any = None,
    stream: object = None,
) -> tuple[Any, ...]:
    """Select the largest scores of each row, exactly.

    The order is total: the larger score first, of equal ones the smaller index. -0.0 equals +0.0. NaN and -inf are
    never selected. So the result is one set, the same in every run.

    Args:
        scores: [T, L] float32, bfloat16 or float16, the last axis contiguous. Every array may have a leading batch
            axis; then all have it.
        topk: how many of each row, at least 1; it may be more than L.
        starts: [T] int32, the first visible column of each row, clamped to [0, L]; 0 by default.
        ends: [T] int32, the column after the last visible one, clamped to [0, L]; L by default. A row with
            starts >= ends is empty.
        order: "index": ids ascend. "score": scores descend, equal ones by ascending id.
        return_values: return the selected scores, too.
        indices: array to write, [T, topk] int32, the last axis contiguous.
        count: array to write, [T] int32.
        values: array to write, [T, topk] in the scores' dtype, the last axis contiguous; with return_values only.
        stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
            of the scores' framework by default. It means nothing on the CPU.

    Returns:
        (indices, count), or (indices, count, values), in the scores' framework. Ids are columns, 0 to L - 1; entries
        left over come last and hold -1, their values -inf. count says how many ids there are.

    Raises:
        InputError: an argument cannot be used as it is; nothing was computed or written.
        UnsupportedError: there is no kernel for this on the arrays' device.

    Source: the selection of DeepSeek-V3.2's lightning indexer (section 2.1); a threshold from a sample as in Floyd and
    Rivest, "Expected time bounds for selection", Communications of the ACM 18 (1975).
    """
    options = (topk, order, return_values)
    return CALLS((scores, starts, ends), options, (indices, count, values), False, stream)  # type: ignore[no-any-return]
