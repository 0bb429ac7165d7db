"""invert_indices: for each token, which entries of the queries name it."""

from __future__ import annotations

from typing import Any

from ..operator import operator
from .run import CALLS

__all__ = ["invert_indices"]


@operator(CALLS)
def invert_indices(
    indices: Any,
    s_kv: int,
    *,
    topk_length: Any = None,
    lists: Any = None,
    workspace: Any = None,
    stream: object = None,
) -> Any:
    """List by token which top-k entries of the queries name it.

    Entry number query * topk + place names token t where indices[query, place] = t, 0 <= t < s_kv and
    place < topk_length[query]. With offsets = lists[: s_kv + 1] and entries = lists[s_kv + 1 :], the entries of token t
    are entries[offsets[t] : offsets[t + 1]], in ascending order, so that results have the same bits every run.

    Args:
        indices: [s_q, topk] or [s_q, 1, topk] int32, topk >= 1, the last axis contiguous; what is outside [0, s_kv)
            names no token. A leading batch axis is allowed: every array then has it, and batch entries have lists of
            their own. [n, 1, topk] is n queries, unless topk_length is [n, 1].
        s_kv: how many tokens there are. Together with the entries there are up to 2^31 - 1025.
        topk_length: [s_q] int32, entries of each query that count, clamped to [0, topk]; topk by default.
        lists: array to write, [s_kv + 1 + s_q * topk] int32, the last axis contiguous.
        workspace: memory to work in, [n] uint8, contiguous, at an address that is a multiple of 16 bytes, n at least
            `invert_indices.workspace_bytes(...)` of the same arguments; what it holds means nothing, before and after.
            Calls that may run at the same time need one each. By default it comes from the allocator of the framework
            of indices.
        stream: CUDA stream: an address, or an object with `__cuda_stream__`, `.ptr` or `.cuda_stream`; the current one
            of the framework of indices by default. It means nothing on the CPU.

    Returns:
        lists, in the framework of indices. offsets[0] is 0, offsets[s_kv] the number of valid entries, behind which
        entries are -1.

    Raises:
        InputError: an argument cannot be used as it is; nothing was computed or written.
        UnsupportedError: there is no kernel for this on the arrays' device.

    Source: D. E. Knuth, "The Art of Computer Programming", volume 3, section 5.2: sorting by counting.
    """
    return CALLS((indices, topk_length), (s_kv,), (lists, workspace), False, stream)
