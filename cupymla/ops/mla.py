"""What the sparse MLA operators share: the problem, what their arguments have to look like, and how results go back.

One token's key has d_qk channels (512 latent and, in d_qk 576, 64 rotary); its value is the first 512 of them. Terms
and masks follow DeepSeek-V3.2's sparse attention: each query attends to the `topk` rows of `kv` that its row of
`indices` names.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, ParamSpec, TypeVar, cast

import numpy as np
import numpy.typing as npt

from .. import tensor
from ..errors import InputError, shown
from ..tensor import View
from .operator import Operator, Prepared
from .operator import operator as make_operator

P = ParamSpec("P")
R = TypeVar("R")
Array = npt.NDArray[Any]
LseBase = Literal["e", "2"]
Layout = Literal["rows", "lists", "free"]

D_V = 512
D_QK = (576, 512)
DTYPES = ("bfloat16", "float16")
ROW_ALIGNMENT_BYTES = 16
MAX_POSITION = 2**30
"""Bound of q_start, k_stride, s_q and topk, so that positions and slots, with a block to spare, fit 32 bits."""
MAX_KEYS = 2**31 - 1
MAX_SCALE = 2.0**126
"""Bound of |sm_scale|, so that sm_scale * log2(e) is finite in fp32."""

_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "int32": 4, "uint8": 1}


@dataclass(frozen=True, slots=True)
class MlaProblem:
    """One sparse MLA problem, without its addresses: what a plan and a compiled kernel may depend on.

    Strides are in elements, 0 for a batch axis that is not there.

    Attributes:
        batch: extent of the leading batch axis, None without one.
        s_q: query tokens (of each batch entry).
        s_kv: key/value tokens (of each batch entry).
        h_q: query heads.
        d_qk: channels of a query and of a key, 576 or 512.
        topk: slots per query.
        dtype: "bfloat16" or "float16", of q, kv and every array documented to share it.
        sm_scale: factor of q.k in the softmax.
        causal: whether keys past the query's own position are masked.
        q_start: position of query 0, for the causal limit.
        k_stride: positions per key, for the causal limit.
        lse_base: "e" or "2", the base of the log-sum-exp that is returned or taken.
        has_topk_length: whether rows of indices have their own lengths.
        has_sink: whether there is an attention sink.
        q_strides: (batch, query, head).
        kv_strides: (batch, token).
        indices_strides: (batch, query).
        topk_length_strides: (batch, query), zeros without topk_length.
        d_v: channels of a value, always 512.
        query_shape: [batch,] s_q.
        head_shape: [batch,] s_q, h_q: the shape of lse, max_logits and delta.
        out_shape: [batch,] s_q, h_q, 512.
    """

    batch: int | None
    s_q: int
    s_kv: int
    h_q: int
    d_qk: int
    topk: int
    dtype: str
    sm_scale: float
    causal: bool
    q_start: int
    k_stride: int
    lse_base: LseBase
    has_topk_length: bool
    has_sink: bool
    q_strides: tuple[int, int, int]
    kv_strides: tuple[int, int]
    indices_strides: tuple[int, int]
    topk_length_strides: tuple[int, int]
    d_v: int = D_V
    query_shape: tuple[int, ...] = field(init=False, repr=False, compare=False)
    head_shape: tuple[int, ...] = field(init=False, repr=False, compare=False)
    out_shape: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        queries = (self.s_q,) if self.batch is None else (self.batch, self.s_q)
        values = tuple(getattr(self, entry.name) for entry in fields(self) if entry.compare)
        # Asked for on every call of an operator, so they are worked out once.
        object.__setattr__(self, "query_shape", queries)
        object.__setattr__(self, "head_shape", (*queries, self.h_q))
        object.__setattr__(self, "out_shape", (*queries, self.h_q, self.d_v))
        object.__setattr__(self, "_hash", hash(values))

    def __hash__(self) -> int:
        return self._hash


class _ProblemMemo:
    """Problems already checked, by the facts they were checked on. Bounded: it is emptied when full."""

    def __init__(self, limit: int) -> None:
        self._known: dict[object, MlaProblem] = {}
        self._limit = limit
        self._lock = threading.Lock()
        self.get = self._known.get

    def put(self, facts: object, problem: MlaProblem) -> None:
        with self._lock:
            if len(self._known) >= self._limit:
                self._known.clear()
            self._known[facts] = problem


_memo = _ProblemMemo(4096)


# Reading a problem ---------------------------------------------------------------------------------------------------


def read_problem(
    q: View,
    kv: View,
    indices: View,
    topk_length: View | None,
    attn_sink: View | None,
    sm_scale: object = None,
    causal: object = False,
    q_start: object = 0,
    k_stride: object = 1,
    lse_base: object = "e",
) -> MlaProblem:
    """Check the arguments every MLA operator has and name the problem they make.

    Facts that passed once are remembered, so a repeated call pays for one dictionary lookup. Raises InputError without
    an operator's name; see `attributed`.
    """
    if causal is not False and causal is not True:
        causal = flag("causal", causal)
    if type(q_start) is not int or not -MAX_POSITION <= q_start <= MAX_POSITION:
        q_start = _integer("q_start", q_start, -MAX_POSITION, MAX_POSITION)
    if type(k_stride) is not int or not 1 <= k_stride <= MAX_POSITION:
        k_stride = _integer("k_stride", k_stride, 1, MAX_POSITION)
    if sm_scale is not None and (type(sm_scale) is not float or not -MAX_SCALE <= sm_scale <= MAX_SCALE):
        sm_scale = _scale(sm_scale)
    if type(lse_base) is not str or lse_base not in ("e", "2"):
        lse_base = choice("lse_base", lse_base, ("e", "2"))
    device = q.device
    if kv.device is not device:
        _same_device(kv, "kv", q)
    if indices.device is not device:
        _same_device(indices, "indices", q)
    facts: tuple[object, ...] = (
        (q.shape, q.strides, q.dtype, kv.shape, kv.strides, kv.dtype, indices.shape, indices.strides, indices.dtype),
        (sm_scale, causal, q_start, k_stride, lse_base),
    )
    addresses = q.ptr | kv.ptr
    words = indices.ptr
    if topk_length is not None:
        if topk_length.device is not device:
            _same_device(topk_length, "topk_length", q)
        facts = (*facts, "topk_length", topk_length.shape, topk_length.strides, topk_length.dtype)
        words |= topk_length.ptr
    if attn_sink is not None:
        if attn_sink.device is not device:
            _same_device(attn_sink, "attn_sink", q)
        facts = (*facts, "attn_sink", attn_sink.shape, attn_sink.strides, attn_sink.dtype)
        words |= attn_sink.ptr
    problem = _memo.get(facts)
    if problem is None:
        base = cast(LseBase, lse_base)
        problem = _checked(q, kv, indices, topk_length, attn_sink, sm_scale, causal, q_start, k_stride, base)
        _memo.put(facts, problem)
    if addresses & 15 or words & 3:
        _refuse_misaligned(q, kv, indices, topk_length, attn_sink)
    return problem


def _checked(
    q: View,
    kv: View,
    indices: View,
    topk_length: View | None,
    attn_sink: View | None,
    sm_scale: float | None,
    causal: bool,
    q_start: int,
    k_stride: int,
    lse_base: LseBase,
) -> MlaProblem:
    batch, s_q, h_q, d_qk = _read_q(q)
    lead = () if batch is None else (batch,)
    prefix = "" if batch is None else "batch, "
    if kv.dtype != q.dtype:
        raise InputError("kv", f"dtype {q.dtype}, as q", kv.dtype)
    s_kv, kv_shape, kv_strides = _without_singleton(kv, "kv", lead, d_qk, f"[{prefix}s_kv, {d_qk}]")
    if s_kv > MAX_KEYS:
        raise InputError("kv", f"at most {MAX_KEYS} tokens", s_kv)
    _check_layout(kv_shape, kv_strides, 2, "kv", "rows")
    if indices.dtype != "int32":
        raise InputError("indices", "dtype int32", indices.dtype)
    wanted = f"[{prefix}{s_q}, topk] with topk >= 1"
    rows, indices_shape, indices_strides = _without_singleton(indices, "indices", lead, None, wanted)
    topk = indices_shape[-1]
    if rows != s_q or topk < 1:
        raise InputError("indices", f"shape {wanted}", _show(indices.shape))
    if topk > MAX_POSITION:
        raise InputError("indices", f"at most {MAX_POSITION} slots", topk)
    _check_layout(indices_shape, indices_strides, 4, "indices", "lists")
    length_strides = (0, 0)
    if topk_length is not None:
        check_array(topk_length, "topk_length", (*lead, s_q), "int32", None, "free")
        length_strides = cast("tuple[int, int]", _batched(topk_length.strides, batch))
    if attn_sink is not None:
        check_array(attn_sink, "attn_sink", (h_q,), "float32", None, "free")
    return MlaProblem(
        batch=batch,
        s_q=s_q,
        s_kv=s_kv,
        h_q=h_q,
        d_qk=d_qk,
        topk=topk,
        dtype=q.dtype,
        sm_scale=d_qk**-0.5 if sm_scale is None else sm_scale,
        causal=causal,
        q_start=q_start,
        k_stride=k_stride,
        lse_base=lse_base,
        has_topk_length=topk_length is not None,
        has_sink=attn_sink is not None,
        q_strides=cast("tuple[int, int, int]", _batched(q.strides, batch)[:3]),
        kv_strides=cast("tuple[int, int]", _batched(kv_strides, batch)[:2]),
        indices_strides=cast("tuple[int, int]", _batched(indices_strides, batch)[:2]),
        topk_length_strides=length_strides,
    )


def _read_q(q: View) -> tuple[int | None, int, int, int]:
    shape = q.shape
    if len(shape) not in (3, 4) or shape[-1] not in D_QK or shape[-2] < 1:
        raise InputError("q", "shape [s_q, h_q, d_qk] or [batch, s_q, h_q, d_qk], d_qk 576 or 512", _show(shape))
    if q.dtype not in DTYPES:
        raise InputError("q", "dtype bfloat16 or float16", q.dtype)
    if shape[-3] > MAX_POSITION:
        raise InputError("q", f"at most {MAX_POSITION} queries", shape[-3])
    _check_layout(shape, q.strides, 2, "q", "rows")
    return shape[0] if len(shape) == 4 else None, shape[-3], shape[-2], shape[-1]


def _without_singleton(
    view: View, argument: str, lead: tuple[int, ...], last: int | None, wanted: str
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Rows, shape and strides of [*lead, rows, last] or [*lead, rows, 1, last], the axis of extent 1 taken out."""
    shape, strides = view.shape, view.strides
    if len(shape) == len(lead) + 3 and shape[-2] == 1:
        shape, strides = (*shape[:-2], shape[-1]), (*strides[:-2], strides[-1])
    if len(shape) != len(lead) + 2 or shape[: len(lead)] != lead or (last is not None and shape[-1] != last):
        raise InputError(argument, f"shape {wanted}", _show(view.shape))
    return shape[-2], shape, strides


def _batched(strides: tuple[int, ...], batch: int | None) -> tuple[int, ...]:
    """Strides with the batch axis's in front, 0 without one."""
    return strides if batch is not None else (0, *strides)


def _refuse_misaligned(q: View, kv: View, indices: View, topk_length: View | None, attn_sink: View | None) -> None:
    _check_address(q, "q", ROW_ALIGNMENT_BYTES)
    _check_address(kv, "kv", ROW_ALIGNMENT_BYTES)
    for view, argument in ((indices, "indices"), (topk_length, "topk_length"), (attn_sink, "attn_sink")):
        if view is not None:
            _check_address(view, argument, 4)


# Options -------------------------------------------------------------------------------------------------------------


def flag(argument: str, value: object) -> bool:
    """A bool, NumPy's included. Raises InputError."""
    if not isinstance(value, bool | np.bool_):
        raise InputError(argument, "True or False", shown(value))
    return bool(value)


def _integer(argument: str, value: object, low: int, high: int) -> int:
    expected = f"an integer from {low} to {high}"
    if isinstance(value, bool | np.bool_):
        raise InputError(argument, expected, shown(value))
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except Exception:
        raise InputError(argument, expected, shown(value)) from None
    if not low <= number <= high:
        raise InputError(argument, expected, number)
    return number


def _scale(value: object) -> float:
    expected = "a finite number, |sm_scale| <= 2**126"
    if isinstance(value, bool | np.bool_ | str | bytes):
        raise InputError("sm_scale", expected, shown(value))
    try:
        number = float(value)  # type: ignore[arg-type]
    except Exception:
        raise InputError("sm_scale", expected, shown(value)) from None
    if not abs(number) <= MAX_SCALE:
        raise InputError("sm_scale", expected, number)
    return number


def choice(argument: str, value: object, allowed: tuple[str | None, ...]) -> str | None:
    """One of a few words, None among them when `allowed` has it. Raises InputError."""
    # A subclass of str may compare as it likes; its characters are what counts.
    wanted = str.__str__(value) if isinstance(value, str) else value
    if wanted is None or isinstance(wanted, str):
        for word in allowed:
            if wanted == word:
                return word
    raise InputError(argument, " or ".join(repr(word) for word in allowed), shown(value))


# Arrays --------------------------------------------------------------------------------------------------------------


def check_array(
    view: View, argument: str, shape: tuple[int, ...], dtype: str, like: View | None, layout: Layout
) -> None:
    """Check an array whose shape and dtype are known.

    Args:
        view: the array.
        argument: its parameter's name, for the error.
        shape: what it has to be.
        dtype: what it has to be.
        like: the view of q, on whose device it has to be; None when that is known.
        layout: "rows": the last axis contiguous, other strides multiples of 16 bytes, a 16-byte address. "lists": the
            last axis contiguous. "free": any strides. No stride may be negative.

    Raises InputError without an operator's name.
    """
    _check_facts(view.shape, view.strides, view.dtype, argument, shape, dtype, layout)
    if like is not None and view.device is not like.device:
        _same_device(view, argument, like)
    alignment = ROW_ALIGNMENT_BYTES if layout == "rows" else _ITEM_BYTES[dtype]
    if view.ptr % alignment:
        _check_address(view, argument, alignment)


@functools.lru_cache(maxsize=1024)
def _check_facts(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: str,
    argument: str,
    wanted_shape: tuple[int, ...],
    wanted_dtype: str,
    layout: Layout,
) -> None:
    """The part of `check_array` that depends on no address. What passed is remembered, what raises is not."""
    if dtype != wanted_dtype:
        raise InputError(argument, f"dtype {wanted_dtype}", dtype)
    if shape != wanted_shape:
        raise InputError(argument, f"shape {_show(wanted_shape)}", _show(shape))
    _check_layout(shape, strides, _ITEM_BYTES[dtype], argument, layout)


def check_output(
    array: object, argument: str, shape: tuple[int, ...], dtype: str, like: View, layout: Layout
) -> View | None:
    """Look at an output the caller provides, None when there is none. As `check_array`; it must also be writable."""
    if array is None:
        return None
    view = tensor.view_output(array, argument)
    check_array(view, argument, shape, dtype, like, layout)
    return view


def check_overlap(outputs: Sequence[tuple[str, View | None]], inputs: Sequence[tuple[str, View | None]]) -> None:
    """Raise InputError when writing an output would change an input or another output."""
    taken = [
        (name, view, view.ptr, view.ptr + _reach(view.shape, view.strides, view.dtype))
        for name, view in inputs
        if view is not None
    ]
    for argument, view in outputs:
        if view is None:
            continue
        first, end = view.ptr, view.ptr + _reach(view.shape, view.strides, view.dtype)
        for other, seen, low, high in taken:
            # Byte ranges tell most arrays apart; only where they meet does the search for a common element pay.
            if first < high and low < end and tensor.overlap(view, seen):
                raise InputError(argument, "memory of its own", f"memory that overlaps argument '{other}'")
        taken.append((argument, view, first, end))


@functools.lru_cache(maxsize=1024)
def _reach(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> int:
    """Bytes from a view's address to the end of its last element; strides are not negative."""
    if 0 in shape:
        return 0
    elements = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    return elements * _ITEM_BYTES[dtype]


def lead_strides(view: View, problem: MlaProblem) -> tuple[int, int, int]:
    """Strides (batch, query, head), in elements, of an array of shape [[batch,] s_q, h_q, ...]; batch 0 without one."""
    return cast("tuple[int, int, int]", _batched(view.strides, problem.batch)[:3])


def _check_layout(
    shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int, argument: str, layout: Layout
) -> None:
    if 0 in shape:
        return
    if layout != "free" and strides[-1] != 1 and shape[-1] > 1:
        raise InputError(argument, "a contiguous last axis", f"strides {_show(strides)}")
    for extent, stride in zip(shape[:-1] if layout != "free" else shape, strides, strict=False):
        if extent <= 1:
            continue
        if stride < 0:
            raise InputError(argument, "strides that are not negative", f"strides {_show(strides)}")
        if layout == "rows" and stride * item_bytes % ROW_ALIGNMENT_BYTES:
            expected = f"strides of a multiple of {ROW_ALIGNMENT_BYTES} bytes"
            raise InputError(argument, expected, f"strides {_show(strides)} of {item_bytes}-byte elements")


def _check_address(view: View, argument: str, alignment: int) -> None:
    if view.ptr % alignment:
        raise InputError(argument, f"an address that is a multiple of {alignment} bytes", hex(view.ptr))


def _same_device(view: View, argument: str, q: View) -> None:
    if view.device != q.device:
        raise InputError(argument, f"an array on {q.device}, as q", f"an array on {view.device}")


def _show(numbers: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, numbers)) + "]"


def check_index_values(indices: View, topk_length: View | None, s_kv: int, stream: object = None) -> None:
    """What `check_indices=True` asks for. Raises InputError naming the first index outside [-1, s_kv) among the slots
    within topk_length. Waits for `stream`, the current one by default, when the arrays are on a GPU."""
    values = tensor.fetched(indices, stream)
    rows = values.reshape(*values.shape[:-2], values.shape[-1]) if _has_singleton(indices, topk_length) else values
    wrong = (rows < -1) | (rows >= s_kv)
    if topk_length is not None:
        wrong &= np.arange(rows.shape[-1]) < tensor.fetched(topk_length, stream)[..., None]
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise InputError("indices", f"values from -1 to {s_kv - 1}", f"{int(rows[place])} at {_show(place)}")


def _has_singleton(indices: View, topk_length: View | None) -> bool:
    return topk_length is not None and len(indices.shape) == len(topk_length.shape) + 2


def attributed(error: InputError, name: str) -> InputError:
    """The same error with the operator's name in it."""
    return InputError(error.argument, error.expected, error.got, name)


def public(
    prepare: Callable[..., Prepared[R]], workspace_bytes: Callable[..., int] | None = None
) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Decorator that makes a public call the `Operator` whose prepared form `prepare` makes."""

    def joined(call: Callable[P, R]) -> Operator[P, R]:
        return make_operator(call, prepare, workspace_bytes)

    return joined


# Results on the CPU --------------------------------------------------------------------------------------------------


class CpuOutput:
    """One output of a CPU call: the caller's array, or one made by the first run and written again by later ones.

    Later runs of a caller's immutable framework (JAX) make a new array each time.
    """

    def __init__(self, argument: str, provided: View | None, like: View) -> None:
        self._argument = argument
        self._provided = provided
        self._like = like
        self._made: object = None

    def write(self, value: Array) -> Any:
        """Store a result that already has the documented shape and dtype; returns the caller's array."""
        if self._provided is not None:
            tensor.to_numpy(self._provided)[...] = value
            return self._provided.owner
        if self._made is None or self._like.framework == "jax":
            self._made = tensor.from_numpy(value, like=self._like)
        else:
            tensor.to_numpy(tensor.view_output(self._made, self._argument))[...] = value
        return self._made
