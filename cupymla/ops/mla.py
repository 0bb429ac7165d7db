"""What the sparse MLA operators share: the problem, what their arguments have to look like, and how results go back.

One token's key has d_qk channels (512 latent and, in d_qk 576, 64 rotary); its value is the first 512 of them. Terms
and masks follow DeepSeek-V3.2's sparse attention: each query attends to the `topk` rows of `kv` that its row of
`indices` names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from .. import tensor
from ..errors import InputError
from ..tensor import View
from ..tensor.types import NUMPY_DTYPES
from .arguments import Arguments, Choice, Flag, Integer, Number, option
from .checks import require_entries
from .dtypes import dtype_got

ViewsT = TypeVar("ViewsT")
ProblemT = TypeVar("ProblemT")
Array = npt.NDArray[Any]
Layout = Literal["rows", "lists", "free"]

D_V = 512
D_QK = (576, 512)
DTYPES = ("bfloat16", "float16")
ROW_ALIGNMENT_BYTES = 16
MAX_POSITION = 2**30
"""Bound of q_start, k_stride, s_q and topk, so that positions and entries, with a block to spare, fit 32 bits."""
MAX_KEYS = 2**31 - 1
SCALE_BITS = 126
"""Of the bound of |sm_scale|, so that sm_scale * log2(e) is finite in fp32."""

_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "int32": 4, "uint8": 1}


# The problem ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MaskOptions:
    """What every MLA operator has.

    Attributes:
        causal: whether keys past the query's own position are masked.
        q_start: position of query 0, for the causal limit.
        k_stride: positions per key, for the causal limit.
    """

    causal: bool = option(False, Flag())
    q_start: int = option(0, Integer(-MAX_POSITION, MAX_POSITION))
    k_stride: int = option(1, Integer(1, MAX_POSITION))


@dataclass(frozen=True, slots=True)
class SoftmaxOptions(MaskOptions):
    """What the operators with a softmax have.

    Attributes:
        sm_scale: factor of q.k in the softmax, None for d_qk ** -0.5.
        lse_base: "e" or "2", the base of the log-sum-exp that is returned or taken.
    """

    sm_scale: float | None = option(None, Number(SCALE_BITS, optional=True))
    lse_base: Literal["e", "2"] = option("e", Choice(("e", "2")))

    def scale(self, d_qk: int) -> float:
        """The factor of q.k."""
        return float(d_qk**-0.5) if self.sm_scale is None else self.sm_scale


OptionsT_co = TypeVar("OptionsT_co", bound=MaskOptions, covariant=True)
OptionsT = TypeVar("OptionsT", bound=MaskOptions)


@dataclass(frozen=True, slots=True)
class MlaProblem(Generic[OptionsT_co]):
    """One sparse MLA problem, without its addresses: what a plan and a compiled kernel may depend on.

    Strides are in elements, 0 for a batch axis that is not there.

    Attributes:
        batch: extent of the leading batch axis, None without one.
        s_q: query tokens (of each batch entry).
        s_kv: key/value tokens (of each batch entry).
        h_q: query heads.
        d_qk: channels of a query and of a key, 576 or 512.
        topk: entries per query.
        dtype: "bfloat16" or "float16", of q, kv and every array documented to share it.
        options: the operator's.
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
        entry_shape: [batch,] s_q, topk: the shape of the attention distribution.
    """

    batch: int | None
    s_q: int
    s_kv: int
    h_q: int
    d_qk: int
    topk: int
    dtype: str
    options: OptionsT_co
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
    entry_shape: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        queries = (self.s_q,) if self.batch is None else (self.batch, self.s_q)
        values = tuple(getattr(self, entry.name) for entry in fields(self) if entry.compare)
        # Asked for on every call of an operator, so they are worked out once.
        object.__setattr__(self, "query_shape", queries)
        object.__setattr__(self, "head_shape", (*queries, self.h_q))
        object.__setattr__(self, "out_shape", (*queries, self.h_q, self.d_v))
        object.__setattr__(self, "entry_shape", (*queries, self.topk))
        object.__setattr__(self, "_hash", hash(values))

    def __hash__(self) -> int:
        return self._hash


# Reading a problem ---------------------------------------------------------------------------------------------------


class Selection(Protocol):
    """The arrays that every MLA operator has."""

    q: View
    kv: View
    indices: View
    topk_length: View | None


def read_problem(views: Selection, attn_sink: View | None, options: OptionsT) -> MlaProblem[OptionsT]:
    """Check the arrays every MLA operator has, and name the problem they make.

    Raises InputError without an operator's name.

    Args:
        views: its arrays.
        attn_sink: the sink; None also for an operator that has none.
        options: its options.
    """
    q, kv, indices, topk_length = views.q, views.kv, views.indices, views.topk_length
    for view, argument in ((kv, "kv"), (indices, "indices"), (topk_length, "topk_length"), (attn_sink, "attn_sink")):
        if view is not None:
            _same_device(view, argument, q)
    problem = _checked(q, kv, indices, topk_length, attn_sink, options)
    _refuse_misaligned(q, kv, indices, topk_length, attn_sink)
    return problem


def _checked(
    q: View, kv: View, indices: View, topk_length: View | None, attn_sink: View | None, options: OptionsT
) -> MlaProblem[OptionsT]:
    batch, s_q, h_q, d_qk = _read_q(q)
    lead = () if batch is None else (batch,)
    prefix = "" if batch is None else f"batch = {batch}, "
    if kv.dtype != q.dtype:
        raise InputError("kv", f"dtype {q.dtype}, as q", kv.dtype)
    s_kv, kv_shape, kv_strides = _without_singleton(kv, "kv", lead, d_qk, f"[{prefix}s_kv, {d_qk}]")
    if s_kv > MAX_KEYS:
        raise InputError("kv", f"at most {MAX_KEYS} tokens", s_kv)
    _check_layout(kv_shape, kv_strides, 2, "kv", "rows")
    if indices.dtype != "int32":
        raise InputError("indices", "dtype int32", dtype_got(indices, "indices", ("int32",)))
    wanted = f"[{prefix}{s_q}, topk] with topk >= 1"
    rows, indices_shape, indices_strides = _without_singleton(indices, "indices", lead, None, wanted)
    topk = indices_shape[-1]
    if rows != s_q or topk < 1:
        raise InputError("indices", f"shape {wanted}", _show(indices.shape))
    if topk > MAX_POSITION:
        raise InputError("indices", f"at most {MAX_POSITION} entries", topk)
    _check_layout(indices_shape, indices_strides, 4, "indices", "lists")
    length_strides = (0, 0)
    if topk_length is not None:
        check_array(topk_length, "topk_length", (*lead, s_q), "int32", None, "free")
        length_strides = cast("tuple[int, int]", batched_strides(topk_length.strides, 2))
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
        options=options,
        has_topk_length=topk_length is not None,
        has_sink=attn_sink is not None,
        q_strides=cast("tuple[int, int, int]", batched_strides(q.strides, 4)[:3]),
        kv_strides=cast("tuple[int, int]", batched_strides(kv_strides, 3)[:2]),
        indices_strides=cast("tuple[int, int]", batched_strides(indices_strides, 3)[:2]),
        topk_length_strides=length_strides,
    )


def _read_q(q: View) -> tuple[int | None, int, int, int]:
    shape = q.shape
    if len(shape) not in (3, 4) or shape[-1] not in D_QK:
        raise InputError("q", "shape [s_q, h_q, d_qk] or [batch, s_q, h_q, d_qk], d_qk 576 or 512", _show(shape))
    if shape[-2] < 1:
        raise InputError("q", "at least one head, h_q >= 1 in [[batch,] s_q, h_q, d_qk]", f"h_q = 0 in {_show(shape)}")
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


def batched_strides(strides: tuple[int, ...] | None, axes: int) -> tuple[int, ...]:
    """Strides of so many axes, the batch axis's in front, 0 without one; zeros without an array."""
    if strides is None:
        return (0,) * axes
    return strides if len(strides) == axes else (0, *strides)


def set_strides(record: object, name: str, view: View | None, axes: Sequence[str], more: int = 0) -> None:
    """Set the fields `<name>_<axis>` of a parameter record: strides of an array's first axes, which as many `more`
    follow that have no field; zeros without an array."""
    strides = batched_strides(None if view is None else view.strides, len(axes) + more)
    for axis, stride in zip(axes, strides, strict=False):
        setattr(record, f"{name}_{axis}", stride)


def _refuse_misaligned(q: View, kv: View, indices: View, topk_length: View | None, attn_sink: View | None) -> None:
    _check_address(q, "q", ROW_ALIGNMENT_BYTES)
    _check_address(kv, "kv", ROW_ALIGNMENT_BYTES)
    for view, argument in ((indices, "indices"), (topk_length, "topk_length"), (attn_sink, "attn_sink")):
        if view is not None:
            _check_address(view, argument, 4)


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
    if view.dtype != dtype:
        raise InputError(argument, f"dtype {dtype}", dtype_got(view, argument, (dtype,)))
    _check_facts(view.shape, view.strides, dtype, argument, shape, layout)
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
    layout: Layout,
) -> None:
    """The part of `check_array` about shape and strides. What passed is remembered, what raises is not."""
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


def check_overlap(arguments: Arguments[ViewsT, Any], views: ViewsT) -> None:
    """Raise InputError when writing an output would change an input or another output."""
    taken: list[tuple[str, View, int, int]] = []
    for (argument, is_output), view in zip(arguments.roles, arguments.arrays(views), strict=True):
        if view is None:
            continue
        first, end = view.ptr, view.ptr + _reach(view.shape, view.strides, view.dtype)
        if is_output:
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


def lead_strides(view: View, problem: MlaProblem[MaskOptions]) -> tuple[int, int, int]:
    """Strides (batch, query, head), in elements, of an array of shape [[batch,] s_q, h_q, ...]; batch 0 without one."""
    return cast("tuple[int, int, int]", batched_strides(view.strides, view.ndim + (problem.batch is None))[:3])


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


def check_index_values(views: Selection, problem: MlaProblem[MaskOptions], stream: object) -> None:
    """Raise InputError naming the first index outside [-1, s_kv) among the entries within topk_length. Waits for
    `stream`, None for the current one, when the arrays are on a GPU."""
    indices, topk_length = views.indices, views.topk_length
    values = tensor.fetched(indices, stream)
    rows = values.reshape(*values.shape[:-2], values.shape[-1]) if _has_singleton(indices, topk_length) else values
    lengths = None if topk_length is None else tensor.fetched(topk_length, stream)
    require_entries(rows, lengths, problem.s_kv, "indices")


def _has_singleton(indices: View, topk_length: View | None) -> bool:
    return topk_length is not None and len(indices.shape) == len(topk_length.shape) + 2


def attributed(error: InputError, name: str) -> InputError:
    """The same error with the operator's name in it."""
    return InputError(error.argument, error.expected, error.got, name)


class Validation(Generic[ViewsT, OptionsT, ProblemT]):
    """The way of an operator's arguments to its problem: every check that a caller can meet."""

    def __init__(
        self,
        arguments: Arguments[ViewsT, OptionsT],
        problem: Callable[[ViewsT, MlaProblem[OptionsT], tuple[Any, ...]], ProblemT],
    ) -> None:
        """Set up.

        Args:
            arguments: the operator's.
            problem: makes the operator's problem of the shared one, once it has checked the operator's own inputs and
                its outputs, given in order, and put the latter into the views.
        """
        self._arguments = arguments
        self._problem = problem

    def read(self, *, check_indices: object = False, stream: object = None, **given: Any) -> tuple[ViewsT, ProblemT]:
        """Check the arguments of the public function, by name. Raises InputError."""
        arguments = self._arguments
        inputs, options, outputs = arguments.placed(given)
        try:
            views: Any = arguments.seen(inputs)
            shared = read_problem(views, getattr(views, "attn_sink", None), arguments.chosen(options))
            problem = self._problem(views, shared, outputs)
            if check_indices is not False and Flag()("check_indices", check_indices):
                check_index_values(views, shared, stream)
        except InputError as error:
            raise attributed(error, arguments.operator) from None
        return views, problem

    def look(self, views: Selection, problem: Any, stream: object) -> None:
        """Look at the values of indices. Raises InputError; see `check_index_values`."""
        try:
            check_index_values(views, getattr(problem, "shared", problem), stream)
        except InputError as error:
            raise attributed(error, self._arguments.operator) from None


def record_fields(problem: MlaProblem[MaskOptions]) -> dict[str, int]:
    """What the parameter records of all operators' kernels have, by name."""
    indices_batch, indices_query = problem.indices_strides
    length_batch, length_query = problem.topk_length_strides
    return {
        "indices_batch": indices_batch,
        "indices_query": indices_query,
        "topk_length_batch": length_batch,
        "topk_length_query": length_query,
        "q_start": problem.options.q_start,
        "k_stride": problem.options.k_stride,
        "s_q": problem.s_q,
        "s_kv": problem.s_kv,
        "h_q": problem.h_q,
        "topk": problem.topk,
        "causal": int(problem.options.causal),
    }


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


def by_reference(
    arguments: Arguments[Any, Any],
    reference: Callable[..., Any],
    wanted: Callable[[Any, Any], Sequence[tuple[tuple[int, ...], str] | None]],
) -> Callable[[Any, Any], Callable[[], Any]]:
    """What makes calls of an operator's NumPy reference ready, which takes arrays and options by name.

    Args:
        arguments: the operator's.
        reference: returns the results, or the only one, before they are rounded to their dtypes.
        wanted: the results' shapes and dtypes, of views and problem.
    """

    def ready(views: Any, problem: Any) -> Callable[[], Any]:
        like, *_ = arguments.arrays(views)
        assert like is not None
        outputs = [
            (CpuOutput(name, getattr(views, name), like), NUMPY_DTYPES[result[1]])
            for name, result in zip(arguments.results, wanted(views, problem))  # noqa: B905 - some are not wanted
            if result is not None
        ]

        def run() -> Any:
            made = reference(**arguments.by_name(views, getattr(problem, "options", problem)))
            values = made if isinstance(made, tuple) else (made,)
            with np.errstate(over="ignore", invalid="ignore"):
                written = [
                    output.write(value.astype(dtype)) for (output, dtype), value in zip(outputs, values, strict=True)
                ]
            return written[0] if len(written) == 1 else tuple(written)

        return run

    return ready
