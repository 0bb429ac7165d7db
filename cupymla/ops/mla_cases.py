"""Problems for the MLA operators, as data, and the arrays they stand for.

Correctness cases are hostile by default: a fifth of the entries hold invalid indices, INT_MIN and INT_MAX among them,
and every row of kv that no valid entry names holds NaN or Inf. Timing cases are drawn on the device they run on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .. import tensor
from .case import Case, on
from .entry_lists import lists_by_token
from .mla import D_V, SoftmaxOptions
from .mla_reference import Selection, batched, causal_limit, numpy_dtype, select

Array = npt.NDArray[Any]

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
_DRAW_BYTES = 1 << 28

FEW = 40
"""Of so many entries one is valid, where few are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaCase(Case):
    """One sparse MLA problem; sizes as the operators' parameters of the same names.

    Attributes:
        lengths: topk_length: "none", or "hostile": random ones, INT_MIN, 0, topk + 1 and INT_MAX among them; of timing
            cases from 0 to topk.
        sink: "none", "finite", or "infinite": finite ones, +inf and -inf among them.
        selection: what indices hold. "hostile": distinct tokens, a fifth of the entries invalid. "full": distinct
            tokens. "duplicates": three tokens, again and again. "empty": as hostile, but every third query has no
            valid entry, nor has the last one. "nothing": no query has a valid entry. "few": one entry in forty is
            valid.
            "overlap90": full, and neighbouring queries share nine tenths of their tokens. "sorted": full, in the order
            of tokens.
        layout: "contiguous", "strided" (every stride that may be free is, with NaN in the gaps) or "singleton" (the
            optional axes of extent 1 are there).
        wants_dist: whether sparse_mla_bwd is given an array for the distribution.
        wants_lists: whether it is given lists of entries by token.
        options: of the operator, those that are not left out.
    """

    s_q: int
    s_kv: int
    h_q: int
    topk: int
    d_qk: int = 576
    batch: int | None = None
    dtype: str = "bfloat16"
    lengths: Literal["none", "hostile"] = "none"
    sink: Literal["none", "finite", "infinite"] = "none"
    selection: Literal["hostile", "full", "duplicates", "empty", "nothing", "few", "overlap90", "sorted"] = "hostile"
    layout: Literal["contiguous", "strided", "singleton"] = "contiguous"
    wants_dist: bool = False
    wants_lists: bool = False
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def queries(self) -> int:
        """Query tokens in all."""
        return self.s_q * (1 if self.batch is None else self.batch)

    @property
    def lead(self) -> tuple[int, ...]:
        """The batch axis, if there is one."""
        return () if self.batch is None else (self.batch,)

    @property
    def counting(self) -> float:
        """Which share of its entries counts in a timing case, on average."""
        share = 1.0 / FEW if self.selection == "few" else 1.0
        if self.lengths != "none":
            share /= 2
        options = self.softmax
        if options.causal and self.s_kv:
            # Entries are random tokens, of which those up to a query's limit count.
            limits = causal_limit(options.q_start + np.arange(self.s_q), options.k_stride) + 1
            share *= float(np.clip(limits, 0, self.s_kv).mean()) / self.s_kv
        return share

    @property
    def softmax(self) -> SoftmaxOptions:
        """Those options that decide about entries, scores and lse, the ones left out as well."""
        names = {entry.name for entry in fields(SoftmaxOptions)}
        return SoftmaxOptions(**{name: value for name, value in self.options.items() if name in names})


_TRAITS = frozenset(entry.name for entry in fields(MlaCase)) - {"options"}


def sized(h: int, d: int, k: int, q: int, kv: int, suffix: str = "", intent: str = "speed", **others: Any) -> MlaCase:
    """A case named after its sizes. Timing cases have no invalid entry unless they say so.

    `others` are attributes of `MlaCase` and, by their own names, options of the operator.
    """
    traits = {name: value for name, value in others.items() if name in _TRAITS}
    options = {name: value for name, value in others.items() if name not in _TRAITS}
    if intent == "speed":
        traits.setdefault("selection", "full")
    name = f"h{h}_d{d}_k{k}_q{q}_kv{kv}{suffix}"
    return MlaCase(name=name, intent=intent, h_q=h, d_qk=d, topk=k, s_q=q, s_kv=kv, options=options, **traits)


# Arrays ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Arrays:
    """A correctness case in NumPy memory, contiguous, without singleton axes."""

    q: Array
    kv: Array
    indices: Array
    topk_length: Array | None
    attn_sink: Array | None


def forward_inputs(case: MlaCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Arguments of sparse_mla_fwd."""
    if case.intent == "speed":
        return _drawn(case, seed, xp) | dict(case.options) | _even_sink(case, xp)
    arrays = _hostile(case, np.random.default_rng(seed))
    return _first(case, arrays, xp) | dict(case.options) | _sink(case, arrays, xp)


def backward_inputs(case: MlaCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Arguments of sparse_mla_bwd; out and lse are the forward's."""
    extra: dict[str, Any] = dict(case.options)
    if case.wants_dist:
        extra["attn_dist"] = xp.full((*case.lead, case.s_q, case.topk), np.nan, dtype=np.float32)
    if case.intent == "speed":
        rows = _drawn(case, seed, xp, ("out", "dout", "lse")) | extra | _even_sink(case, xp)
        return rows | _lists(case, tensor.fetched(tensor.view(rows["indices"], "indices")), None, xp)
    generator = np.random.default_rng(seed)
    arrays = _hostile(case, generator)
    out, lse = _forward(case, arrays)
    rows = _first(case, arrays, xp) | _sink(case, arrays, xp)
    rows |= {"out": _rows(case, out, xp), "dout": _rows(case, _normal(case, generator, D_V), xp)}
    return rows | {"lse": _free(case, lse, xp)} | extra | _lists(case, arrays.indices, arrays.topk_length, xp)


def _lists(case: MlaCase, indices: Array, topk_length: Array | None, xp: Any) -> dict[str, Any]:
    """Lists of all entries by token, where they are wanted."""
    if not case.wants_lists:
        return {}
    lists = lists_by_token(indices, case.s_kv, topk_length)
    if case.layout == "strided" and case.batch is not None:
        lists = np.concatenate((lists, np.full_like(lists[..., :3], -1)), -1)
    made: Any = on(xp, lists)
    return {"lists": made[..., : case.s_kv + 1 + case.s_q * case.topk]}


def dist_inputs(case: MlaCase, seed: int, xp: Any = np) -> dict[str, Any]:
    """Arguments of attn_dist; lse is the forward's."""
    if case.intent == "speed":
        return _drawn(case, seed, xp, ("lse",)) | dict(case.options)
    arrays = _hostile(case, np.random.default_rng(seed))
    return _first(case, arrays, xp) | dict(case.options) | {"lse": _free(case, _forward(case, arrays)[1], xp)}


def _first(case: MlaCase, arrays: _Arrays, xp: Any) -> dict[str, Any]:
    kv, indices = _rows(case, arrays.kv, xp), _rows(case, arrays.indices, xp)
    if case.layout == "singleton":
        kv, indices = kv[..., None, :], indices[..., None, :]
    first = {"q": _rows(case, arrays.q, xp), "kv": kv, "indices": indices}
    return first if arrays.topk_length is None else first | {"topk_length": _free(case, arrays.topk_length, xp)}


def _sink(case: MlaCase, arrays: _Arrays, xp: Any) -> dict[str, Any]:
    return {} if arrays.attn_sink is None else {"attn_sink": _free(case, arrays.attn_sink, xp)}


# Hostile arrays -------------------------------------------------------------------------------------------------------


def _normal(case: MlaCase, generator: np.random.Generator, channels: int) -> Array:
    shape = (*case.lead, case.s_q, case.h_q, channels)
    values: Array = generator.standard_normal(shape, dtype=np.float32).astype(numpy_dtype(case.dtype))
    return values


def _hostile(case: MlaCase, generator: np.random.Generator) -> _Arrays:
    shape = (*case.lead, case.s_q, case.topk)
    indices = _indices(case, generator, shape)
    lengths = _lengths(case, generator) if case.lengths == "hostile" else None
    kv = generator.standard_normal((*case.lead, case.s_kv, case.d_qk), dtype=np.float32)
    kv = kv.astype(numpy_dtype(case.dtype))
    sink = None
    if case.sink != "none":
        sink = generator.normal(math.log(case.topk), 1, case.h_q).astype(np.float32)
        if case.sink == "infinite":
            sink[::3], sink[1::3] = np.inf, -np.inf
    arrays = _Arrays(_normal(case, generator, case.d_qk), kv, indices, lengths, sink)
    keys, selection = _select(case, arrays)
    for entry in range(keys.shape[0]):
        unnamed = np.ones(case.s_kv, bool)
        unnamed[selection.indices[entry][selection.valid(entry, slice(0, case.s_q))]] = False
        poison = np.where(np.arange(case.s_kv) % 2 == 0, np.nan, np.inf).astype(kv.dtype)
        keys[entry, unnamed] = poison[unnamed, None]
    return arrays


def _select(case: MlaCase, arrays: _Arrays) -> tuple[Array, Selection]:
    masks = case.softmax
    lengths, has_batch = arrays.topk_length, case.batch is not None
    return select(arrays.kv, arrays.indices, has_batch, lengths, masks.causal, masks.q_start, masks.k_stride)


def _indices(case: MlaCase, generator: np.random.Generator, shape: tuple[int, ...]) -> Array:
    if case.selection == "overlap90":
        windows: Array = _overlapping(generator.permutation(case.s_kv), case.s_q, case.topk, np)
        return windows
    rows = math.prod(shape[:-1])
    if case.s_kv >= case.topk:
        chosen = np.argsort(generator.random((rows, case.s_kv)), axis=-1)[:, : case.topk]
    else:
        chosen = generator.integers(0, max(case.s_kv, 1), (rows, case.topk))
    if case.selection == "duplicates":
        chosen = chosen[:, :1] + generator.integers(0, 3, (rows, case.topk))
        chosen = np.minimum(chosen, case.s_kv - 1)
    if case.selection == "sorted":
        chosen = np.sort(chosen, axis=-1)
    shares = {"full": 0.0, "sorted": 0.0, "nothing": 1.1, "few": 1 - 1 / FEW}
    spoiled = generator.random((rows, case.topk)) < shares.get(case.selection, 0.2)
    if case.selection == "empty":
        spoiled[::3] = True
        spoiled[-1:] = True
    invalid = np.array([INT_MIN, INT_MAX, -1, -2, case.s_kv, case.s_kv + 1], np.int64)
    chosen = np.where(spoiled, invalid[generator.integers(0, len(invalid), (rows, case.topk))], chosen)
    return chosen.reshape(shape).astype(np.int32)


def _lengths(case: MlaCase, generator: np.random.Generator) -> Array:
    lengths = generator.integers(0, case.topk + 1, (*case.lead, case.s_q))
    extremes = (0, INT_MAX, INT_MIN, case.topk + 1, 1, -1)[: case.s_q]
    lengths[..., : len(extremes)] = extremes
    return lengths.astype(np.int32)


def _forward(case: MlaCase, arrays: _Arrays) -> tuple[Array, Array]:
    """What the forward gives, one query at a time: out in the case's dtype, lse fp32 in the case's base."""
    keys, selection = _select(case, arrays)
    scale = case.softmax.scale(case.d_qk)
    q = batched(arrays.q, 4)
    out = np.zeros((*q.shape[:3], D_V))
    lse = np.full(q.shape[:3], np.inf)
    for entry in range(keys.shape[0]):
        valid = selection.valid(entry, slice(0, case.s_q))
        for s in np.flatnonzero(valid.any(axis=-1)):
            rows = keys[entry, selection.indices[entry, s, valid[s]]].astype(np.float64)
            scores = scale * q[entry, s].astype(np.float64) @ rows.T
            lse[entry, s] = np.logaddexp.reduce(scores, axis=-1)
            norm = lse[entry, s] if arrays.attn_sink is None else np.logaddexp(lse[entry, s], arrays.attn_sink)
            out[entry, s] = np.exp(scores - norm[:, None]) @ rows[:, :D_V]
    lse = lse / math.log(2) if case.softmax.lse_base == "2" else lse
    shape = (*case.lead, case.s_q, case.h_q)
    return out.reshape(*shape, D_V).astype(arrays.q.dtype), lse.reshape(shape).astype(np.float32)


# Layouts --------------------------------------------------------------------------------------------------------------


def _poisoned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return np.full(shape, INT_MAX if dtype.kind == "i" else np.nan, dtype)


def _rows(case: MlaCase, array: Array, xp: Any) -> Any:
    """The array in the case's layout, its last axis contiguous: strided ones have room for more of every axis."""
    if case.layout != "strided":
        return on(xp, array)
    # 16 elements are a multiple of 16 bytes in every dtype, so only indices get strides that are not.
    more = [extent + 3 for extent in array.shape[:-1]] + [array.shape[-1] + (5 if array.dtype.kind == "i" else 16)]
    memory = _poisoned(tuple(more), array.dtype)
    place = tuple(slice(0, extent) for extent in array.shape)
    memory[place] = array
    return on(xp, memory)[place]


def _free(case: MlaCase, array: Array, xp: Any) -> Any:
    """The array in the case's layout: strided ones have their axes in reverse order and every other element unused."""
    if case.layout != "strided":
        return on(xp, array)
    turned = array.T
    memory = _poisoned((*turned.shape[:-1], 2 * turned.shape[-1]), array.dtype)
    memory[..., ::2] = turned
    return on(xp, memory)[..., ::2].T


# Timing arrays --------------------------------------------------------------------------------------------------------


def _drawn(case: MlaCase, seed: int, xp: Any, extra: tuple[str, ...] = ()) -> dict[str, Any]:
    """Arguments of a timing case, drawn where they are used, without a batch axis; lse is about what the forward
    gives."""
    generator = xp.random.default_rng(seed)
    dtype = numpy_dtype(case.dtype)

    def normal(*shape: int) -> Any:
        return generator.standard_normal(shape, dtype=np.float32).astype(dtype)

    arrays = {"q": normal(case.s_q, case.h_q, case.d_qk), "kv": normal(case.s_kv, case.d_qk)}
    arrays["indices"] = _drawn_indices(case, generator, xp)
    makers: dict[str, Callable[[], Any]] = {
        "out": lambda: normal(case.s_q, case.h_q, D_V),
        "dout": lambda: normal(case.s_q, case.h_q, D_V),
        "lse": lambda: xp.full((case.s_q, case.h_q), math.log(case.topk) + 0.5, dtype=np.float32),
    }
    if case.lengths != "none":
        arrays["topk_length"] = (generator.random(case.s_q, dtype=np.float32) * (case.topk + 1)).astype(np.int32)
    return arrays | {name: makers[name]() for name in extra}


def _even_sink(case: MlaCase, xp: Any) -> dict[str, Any]:
    return {} if case.sink == "none" else {"attn_sink": xp.linspace(-1.0, 1.0, case.h_q, dtype=np.float32)}


def _drawn_indices(case: MlaCase, generator: Any, xp: Any) -> Any:
    """Distinct random tokens for each query, in random order but where they are wanted sorted."""
    if case.selection == "overlap90":
        permutation = xp.argsort(generator.random(case.s_kv, dtype=np.float32))
        return _overlapping(permutation, case.s_q, case.topk, xp)
    indices = xp.empty((case.s_q, case.topk), np.int32)
    step = max(1, _DRAW_BYTES // (12 * case.s_kv))
    for first in range(0, case.s_q, step):
        keys = generator.random((min(step, case.s_q - first), case.s_kv), dtype=np.float32)
        drawn = xp.argsort(keys, axis=-1)[:, : case.topk]
        if case.selection == "few":
            drawn = xp.where(generator.random(drawn.shape, dtype=np.float32) < 1 / FEW, drawn, -1)
        indices[first : first + step] = xp.sort(drawn, axis=-1) if case.selection == "sorted" else drawn
    return indices


def _overlapping(permutation: Any, s_q: int, topk: int, xp: Any) -> Any:
    """A window of topk tokens that slides over a permutation of all by a tenth of itself per query."""
    first = xp.arange(s_q, dtype=np.int64)[:, None] * math.ceil(topk / 10)
    return permutation[(first + xp.arange(topk, dtype=np.int64)) % len(permutation)].astype(np.int32)


# Counts ---------------------------------------------------------------------------------------------------------------


def entries_flops(case: MlaCase, channels: int) -> float:
    """Arithmetic of `channels` multiply-adds for every entry and head, valid or not, as published numbers count it; of
    timing cases that leave entries out for those that count."""
    share = case.counting if case.intent == "speed" else 1.0
    return 2.0 * case.queries * case.topk * case.h_q * channels * share


def selection_bytes(case: MlaCase) -> float:
    """Least traffic of reading kv rows once each, as many as can be named, and the indices."""
    tokens = min(case.s_kv * (1 if case.batch is None else case.batch), case.queries * case.topk)
    return float(tokens * case.d_qk * 2 + case.queries * case.topk * 4)


def head_bytes(case: MlaCase, per_head: int) -> float:
    """Traffic of `per_head` bytes for every query and head."""
    return float(case.queries * case.h_q * per_head)
