"""The relative-position functions: rel_shift and matrix_bd, their argument validation, NumPy references and
launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ... import driver, tensor
from ...tensor import View
from ..arguments import Arguments, Choice, Integer, NoOptions, option
from ..calls import Calls
from ..gpu import Launches, Results
from . import plan
from .bias import distances, extend, rows_at
from .checks import FLOATS, MAX_COUNT, Reader
from .launches import RelativeScores, ShiftParameters, SpreadParameters, elementwise
from .paging import HEAD_SIZES, key_counts
from .reference import Precision, shifted
from .run import Output, to_numpy
from .spec import EXTENSIONS, read_offset, read_pos_emb

Array = npt.NDArray[Any]

_BLOCK_ELEMENTS = 1 << 22


def shift(x: Array) -> Array:
    """y[..., i, j] = x[..., i, j + q_len - 1 - i], 0 where that column does not exist; [..., q_len, k_len]."""
    q_len, k_len = x.shape[-2:]
    rows = np.arange(q_len)[:, None]
    columns = np.arange(k_len)[None, :] + (q_len - 1 - rows)
    if not x.size:
        return np.zeros_like(x)
    moved = x[..., rows, np.minimum(columns, k_len - 1)]
    shifted_rows: Array = np.where(columns < k_len, moved, np.zeros((), x.dtype))
    return shifted_rows


def dense_bias(
    query: Array,
    pos_emb: Array,
    pos_bias_v: Array | None,
    context_lens: Array,
    *,
    max_context: int,
    rel_extend: str = "zero",
    precision: Precision = "float64",
) -> Array:
    """(q + v) . p[distance] as [num_seqs, num_heads, max_context], zero past each length.

    One matrix product per head of all distances, then a look-up by distance. precision="same" adds q + v in fp32,
    rounds the sum once to the query's dtype and accumulates in fp32; the result is in working precision, not rounded.
    """
    work = np.dtype(np.float64 if precision == "float64" else np.float32)
    operand = query.dtype if precision == "same" and query.dtype.itemsize == 2 else None
    num_seqs, num_heads, _ = query.shape
    extent = pos_emb.shape[0]
    counts = key_counts(context_lens, max_context, 1, None)
    moved = shifted(query, pos_bias_v, work, operand)
    result = np.zeros((num_seqs, num_heads, max_context), work)
    longest = int(counts.max(initial=0))
    if longest == 0:
        return result
    table = pos_emb[: min(extent, longest)].astype(work).transpose(1, 2, 0)
    positions = np.arange(longest)
    step = max(1, _BLOCK_ELEMENTS // (num_heads * longest))
    for start in range(0, num_seqs, step):
        part = slice(start, start + step)
        with np.errstate(all="ignore"):
            by_distance = (moved[part].transpose(1, 0, 2) @ table).transpose(1, 0, 2)
        distance = distances(counts[part], positions)
        rows = rows_at(distance, table.shape[2])
        block = extend(np.take_along_axis(by_distance, rows[:, None, :], axis=2), distance, extent, rel_extend)
        result[part, :, :longest] = np.where(distance[:, None, :] >= 0, block, 0)
    return result


# rel_shift -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ShiftViews:
    """The arrays of `rel_shift`."""

    x: View
    out: View | None = None


SHIFT = Arguments("rel_shift", ShiftViews, NoOptions, results=("out",))


def read_rel_shift(**given: Any) -> tuple[ShiftViews, None]:
    """Check arguments by name. Raises InputError."""
    (x,), _, (out,) = SHIFT.placed(given)
    reader = Reader(SHIFT.operator)
    seen = reader.look(x, "x", FLOATS)
    if not 2 <= len(seen.shape) <= 4:
        reader.reject("x", "rank 2 to 4, shape [..., q_len, k_len]", f"shape {list(seen.shape)}")
    target = None
    if out is not None:
        target = reader.array(out, "out", " ".join(map(str, seen.shape)), (seen.dtype,), output=True)
    reader.separate()
    return ShiftViews(seen, target), None


def _shift_wanted(views: ShiftViews, problem: None) -> Results:
    return ((views.x.shape, views.x.dtype),)


def _shift_on_cpu(views: ShiftViews, problem: None) -> Callable[[], Any]:
    array = tensor.to_numpy(views.x)
    result = Output(views.out, views.x, array.dtype)
    return lambda: result.write(shift(array))


class Shift(Launches):
    """`rel_shift` on a GPU: a binding; see `cupymla.ops.gpu`."""

    def __init__(self, views: ShiftViews, problem: None, results: Sequence[View], recorded: bool) -> None:
        x, leading = views.x, 4 - len(views.x.shape)
        self._record = ShiftParameters(
            extent=(*(1,) * leading, *x.shape),
            x_stride=(*(0,) * leading, *x.strides),
            out_stride=(*(0,) * leading, *results[0].strides),
        )
        source = plan.auxiliary("rel_shift", driver.arch_of(x.device).name, unit=x.itemsize)
        super().__init__(elementwise(source, x.device, self._record, x.size))

    def point(self, views: ShiftViews, results: Sequence[int], workspace: int) -> None:
        """Set every address."""
        self._record.x = views.x.ptr
        (self._record.out,) = results


REL_SHIFT = Calls(SHIFT, read_rel_shift, _shift_wanted, Shift, _shift_on_cpu)


# matrix_bd -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class BiasViews:
    """The arrays of `matrix_bd`."""

    query: View
    pos_emb: View
    context_lens: View
    pos_bias_v: View | None = None
    out: View | None = None


@dataclass(frozen=True, slots=True)
class BiasOptions:
    """The options of `matrix_bd`.

    Attributes:
        max_context: columns of the result.
        rel_extend: "zero" or "clamp".
        out_dtype: "float32" or the query's dtype.
    """

    max_context: int = option(MISSING, Integer(0, MAX_COUNT))
    rel_extend: Literal["zero", "clamp"] = option("zero", Choice(EXTENSIONS))
    out_dtype: Literal["float32", "float16", "bfloat16"] = option("float32", Choice(FLOATS))


BIAS = Arguments("matrix_bd", BiasViews, BiasOptions, results=("out",))


def read_matrix_bd(**given: Any) -> tuple[BiasViews, BiasOptions]:
    """Check arguments by name. Raises InputError."""
    (query, pos_emb, context_lens, pos_bias_v), values, (out,) = BIAS.placed(given)
    reader = Reader(BIAS.operator)
    options = reader.chosen(BIAS, *values)
    seen = reader.array(query, "query", "num_seqs num_heads head_size", FLOATS)
    if reader.sizes["head_size"] not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        reader.reject("query", f"head_size one of {sizes}", reader.sizes["head_size"])
    reader.check_rows_of_heads("query")
    reader.check_rows(seen, "query", alignment=16)
    table = read_pos_emb(reader, pos_emb, seen.dtype)
    offset = read_offset(reader, pos_bias_v, "pos_bias_v", seen.dtype)
    lens = reader.array(context_lens, "context_lens", "num_seqs", ("int32",))
    reader.sizes["max_context"] = options.max_context
    reader.option(Choice(tuple(dict.fromkeys(("float32", seen.dtype)))), "out_dtype", options.out_dtype)
    target = None
    if out is not None:
        target = reader.array(out, "out", "num_seqs num_heads max_context", (options.out_dtype,), output=True)
        reader.check_rows(target, "out")
    reader.separate()
    return BiasViews(seen, table, lens, offset, target), options


def _bias_wanted(views: BiasViews, options: BiasOptions) -> Results:
    return (((*views.query.shape[:2], options.max_context), options.out_dtype),)


def _bias_on_cpu(views: BiasViews, options: BiasOptions) -> Callable[[], Any]:
    query, table, lens = map(tensor.to_numpy, (views.query, views.pos_emb, views.context_lens))
    offset = to_numpy(views.pos_bias_v)
    dtype = query.dtype if options.out_dtype == views.query.dtype else np.dtype(np.float32)
    result = Output(views.out, views.query, dtype)
    columns, extension = options.max_context, options.rel_extend
    return lambda: result.write(dense_bias(query, table, offset, lens, max_context=columns, rel_extend=extension))


class DenseBias(Launches):
    """`matrix_bd` on a GPU: scores by distance into a workspace, then each column's distance looked up.

    A binding; see `cupymla.ops.gpu`.
    """

    def __init__(self, views: BiasViews, options: BiasOptions, results: Sequence[View], recorded: bool) -> None:
        query, extent = views.query, views.pos_emb.shape[0]
        num_seqs, num_heads, _ = query.shape
        width = min(extent, options.max_context)
        self.workspace_bytes = 4 * num_seqs * num_heads * width
        self._product = RelativeScores(query, views.pos_emb, views.pos_bias_v, width, query.device)
        strides = results[0].strides
        self._record = SpreadParameters(
            lens_seq=views.context_lens.strides[0],
            out_seq=strides[0],
            out_head=strides[1],
            num_seqs=num_seqs,
            num_heads=num_heads,
            width=width,
            max_context=options.max_context,
            extent=extent,
            clamp=int(options.rel_extend == "clamp"),
        )
        code = plan.QUERY_CODE[options.out_dtype]
        source = plan.auxiliary("spread_bias", driver.arch_of(query.device).name, query=code)
        elements, follows = num_seqs * num_heads * options.max_context, self._product.launcher is not None
        super().__init__(self._product.launcher, elementwise(source, query.device, self._record, elements, follows))

    def point(self, views: BiasViews, results: Sequence[int], workspace: int) -> None:
        """Set every address."""
        offset = None if views.pos_bias_v is None else views.pos_bias_v.ptr
        self._product.point(views.query.ptr, views.pos_emb.ptr, offset, workspace)
        self._record.scores, self._record.context_lens = workspace, views.context_lens.ptr
        (self._record.out,) = results


MATRIX_BD = Calls(BIAS, read_matrix_bd, _bias_wanted, DenseBias, _bias_on_cpu)
