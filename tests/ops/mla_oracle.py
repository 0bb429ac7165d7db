"""Sparse MLA attention written a second time, for tests: dense over all keys that any query names, float64.

Gradients are by torch's autograd.

Nothing that is computed here is shared with the package. The entries that count are found one by one in plain Python; a
token named by m of them enters the dense softmax with weight m.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

torch: Any = pytest.importorskip("torch", reason="the oracle's gradients are torch's")

Array = npt.NDArray[Any]
D_V = 512
WITHOUT_EFFECT = frozenset({"out", "lse", "lse_base", "deterministic", "lists", "dkv_dtype", "attn_dist", "normalize"})
"""Arguments that change nothing of an `Oracle`: what the forward gave, units, and how and what else is written."""


MOST_FLOPS = 5e9

_BLOCK = 1 << 20

_SCORES = 1 << 23
"""Of so many dense scores at a time autograd keeps its some ten arrays."""


@dataclass(frozen=True)
class Oracle:
    """Everything the operators give, float64, with a batch axis where the arguments have one.

    dist is per entry and without the sink, but with attn_dist_sink; p is unscaled. The gradients are those of
    sum(out * dout).
    """

    out: Array
    max_logits: Array
    lse: Array
    dq: Array
    dkv: Array
    d_sink: Array
    p: Array
    delta: Array
    dist: Array
    valid: Array


def counts_entry(
    t: int, entry: int, query: int, s_kv: int, length: int | None, causal: bool, q_start: int, k_stride: int
) -> bool:
    """Whether one entry counts, from the definition."""
    if not 0 <= t < s_kv or (length is not None and entry >= length):
        return False
    return not causal or t <= math.trunc(Fraction(q_start + query + 1 - k_stride, k_stride))


def valid_mask(
    indices: Array, s_kv: int, topk_length: Array | None, causal: bool, q_start: int, k_stride: int
) -> Array:
    """[s_q, topk] of one batch entry."""
    valid = np.zeros(indices.shape, bool)
    for query, row in enumerate(indices.tolist()):
        length = None if topk_length is None else int(topk_length[query])
        for entry, t in enumerate(row):
            valid[query, entry] = counts_entry(t, entry, query, s_kv, length, causal, q_start, k_stride)
    return valid


def solve(
    q: Array,
    kv: Array,
    indices: Array,
    dout: Array | None = None,
    *,
    sm_scale: float | None = None,
    topk_length: Array | None = None,
    attn_sink: Array | None = None,
    causal: bool = False,
    q_start: int = 0,
    k_stride: int = 1,
    attn_dist_sink: bool = False,
    **others: Any,
) -> Oracle:
    """All results for arguments as the public functions take them; lse in natural units."""
    unknown = sorted(others.keys() - WITHOUT_EFFECT)
    assert not unknown, f"the oracle knows nothing of {', '.join(unknown)}"
    has_batch = q.ndim == 4
    if not has_batch:
        q, kv, indices = q[None], kv[None], indices[None]
        dout = None if dout is None else dout[None]
        topk_length = None if topk_length is None else topk_length[None]
    kv = kv[:, :, 0] if kv.ndim == 4 else kv
    indices = indices[:, :, 0] if indices.ndim == 4 else indices
    dout = np.ones((*q.shape[:3], D_V)) if dout is None else dout
    parts = []
    for entry in range(q.shape[0]):
        lengths = None if topk_length is None else topk_length[entry]
        valid = valid_mask(indices[entry], kv.shape[1], lengths, causal, q_start, k_stride)
        step = max(1, _SCORES // max(1, q.shape[2] * kv.shape[1]))
        some = [slice(first, first + step) for first in range(0, max(1, q.shape[1]), step)]
        dkv = np.zeros(kv[entry].shape)
        options = (attn_sink, sm_scale, attn_dist_sink)
        blocks = [
            _solve_one(q[entry, s], kv[entry], indices[entry, s], valid[s], dout[entry, s], *options, dkv) for s in some
        ]
        parts.append(_queries_joined(blocks, dkv))
    if not has_batch:
        return parts[0]
    if not parts:
        return _empty(q, kv, indices)
    joined = {name: np.stack([getattr(part, name) for part in parts]) for name in Oracle.__dataclass_fields__}
    joined["d_sink"] = joined["d_sink"].sum(axis=0)
    return Oracle(**joined)


def _queries_joined(blocks: list[Oracle], dkv: Array) -> Oracle:
    """One batch entry of all its queries, which have all added to dkv; d_sink is summed here."""
    found = {name: [getattr(block, name) for block in blocks] for name in Oracle.__dataclass_fields__ if name != "dkv"}
    joined = {n: np.sum(each, axis=0) if n == "d_sink" else np.concatenate(each) for n, each in found.items()}
    return Oracle(**joined, dkv=dkv)


def _empty(q: Array, kv: Array, indices: Array) -> Oracle:
    heads, entries = np.zeros(q.shape[:3]), np.zeros((*q.shape[:2], indices.shape[-1]))
    out, p = np.zeros((*q.shape[:3], D_V)), np.zeros((*q.shape[:3], indices.shape[-1]))
    d_sink = np.zeros(q.shape[2])
    return Oracle(out, heads, heads, np.zeros(q.shape), np.zeros(kv.shape), d_sink, p, heads, entries, entries > 0)


def _solve_one(
    q: Array,
    kv: Array,
    indices: Array,
    valid: Array,
    dout: Array,
    attn_sink: Array | None,
    sm_scale: float | None,
    attn_dist_sink: bool,
    dkv: Array,
) -> Oracle:
    """Of some queries; their part of dkv, of all tokens, is added in place: a long context has no room for many."""
    s_q, heads, d_qk = q.shape
    multiplicity = np.zeros((s_q, kv.shape[0]))
    for query, entry in np.argwhere(valid):
        multiplicity[query, indices[query, entry]] += 1
    named = np.flatnonzero(multiplicity.any(axis=0))
    scale = 1 / math.sqrt(d_qk) if sm_scale is None else sm_scale
    rows = np.flatnonzero(multiplicity.any(axis=1))
    column_of = np.full(kv.shape[0], -1)
    column_of[named] = np.arange(len(named))
    tq = torch.tensor(q.astype(np.float64), requires_grad=True)
    tkv = torch.tensor(kv[named].astype(np.float64), requires_grad=True)
    sink = torch.zeros(heads, dtype=torch.float64) if attn_sink is None else torch.tensor(attn_sink.astype(np.float64))
    finite = torch.where(torch.isinf(sink), 0.0, sink).requires_grad_()

    raw = torch.einsum("shd,td->sht", tq[rows], tkv)
    logits = raw * scale + torch.log(torch.tensor(multiplicity[np.ix_(rows, named)]))[:, None, :]
    lse = torch.logsumexp(logits, dim=-1)
    plain = torch.softmax(logits, dim=-1)
    column = finite[None, :, None].expand(len(rows), heads, 1)
    shared = torch.softmax(torch.cat([logits, column], dim=-1), dim=-1)[..., :-1]
    none = torch.full_like(sink, attn_sink is None, dtype=torch.bool) | (sink == -math.inf)
    weights = torch.where(none[None, :, None], plain, shared)
    weights = torch.where((sink == math.inf)[None, :, None], 0.0, weights)
    out = torch.einsum("sht,td->shd", weights, tkv[:, :D_V])
    (out * torch.tensor(dout[rows].astype(np.float64))).sum().backward()

    full_out = np.zeros((s_q, heads, D_V))
    full_out[rows] = out.detach().numpy()
    full_lse, highest = np.full((s_q, heads), np.inf), np.full((s_q, heads), -np.inf)
    full_lse[rows] = lse.detach().numpy()
    raw_rows = raw.detach().numpy()
    p = np.full((s_q, heads, indices.shape[1]), -np.inf)
    dist = np.zeros(indices.shape)
    for row, query in enumerate(rows):
        columns = column_of[indices[query, valid[query]]]
        p[query][:, valid[query]] = raw_rows[row][:, columns]
        scores = scale * raw_rows[row][:, columns]
        highest[query] = scores.max(axis=-1)
        each_head = np.exp(scores - full_lse[query][:, None])
        if attn_dist_sink and attn_sink is not None:
            each_head /= 1 + np.exp(attn_sink.astype(np.float64) - full_lse[query])[:, None]
        dist[query, valid[query]] = each_head.sum(axis=0)
    assert tq.grad is not None and tkv.grad is not None
    dkv[named] += tkv.grad.numpy()
    d_sink = np.zeros(heads) if finite.grad is None else finite.grad.numpy()
    delta = (full_out * dout.astype(np.float64)).sum(axis=-1)
    return Oracle(full_out, highest, full_lse, tq.grad.numpy(), dkv, d_sink, p, delta, dist, valid)


FLOAT64_ROUNDING = 2.0**-31
"""Sums of up to 2**16 terms round by 2**-37 of their terms; scores up to 2**6 enter an exponential."""


def assert_close(name: str, got: Array, expected: Array, tolerance: float = FLOAT64_ROUNDING) -> None:
    """Equal NaN and infinities, and finite elements within `tolerance` of the largest one (at least of 1)."""
    assert got.shape == expected.shape, f"{name}: shape {got.shape}, expected {expected.shape}"
    error, scale = 0.0, 1.0
    for x, y in _blocks(got, expected):
        for special in (np.isnan, np.isposinf, np.isneginf):
            np.testing.assert_array_equal(special(x), special(y), err_msg=f"{name}: {special.__name__}")
        finite = np.isfinite(y)
        error = max(error, np.abs(x[finite] - y[finite]).max(initial=0.0))
        scale = max(scale, np.abs(y[finite]).max(initial=0.0))
    assert error <= tolerance * scale, f"{name}: off by {error:.3g}, largest element {scale:.3g}"


def unlike(x: Array, y: Array) -> float:
    """1 - 2<x,y> / (<x,x> + <y,y>) over finite elements."""
    apart = total = 0.0
    for got, expected in _blocks(x, y):
        finite = np.isfinite(expected)
        a, b = got[finite], expected[finite]
        apart, total = apart + float((a - b) @ (a - b)), total + float(a @ a + b @ b)
    return 0.0 if total == 0 else apart / total


def _blocks(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """The same elements of each in float64, some at a time, so that large arrays are not copied whole."""
    flat = [array.reshape(-1) for array in arrays]
    for first in range(0, flat[0].size, _BLOCK):
        yield tuple(array[first : first + _BLOCK].astype(np.float64) for array in flat)
