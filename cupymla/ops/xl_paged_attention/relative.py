"""The relative-position companions: rel_shift and matrix_bd, their doors, NumPy references and launches."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ... import driver, tensor
from ...tensor import Allocation, View
from ..gpu import KernelCall, Launches, OutputArrays
from ..operator import CpuCall, Prepared
from . import plan
from .bias import distances, extend, rows_at
from .checks import FLOATS, Reader
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


def read_rel_shift(x: Any, *, out: Any, stream: object = None) -> Prepared[Any]:
    """Check the arguments: a call that binds nothing yet; see the public function."""
    operator = "rel_shift"
    reader = Reader(operator)
    seen = reader.look(x, "x")
    reader.check_dtype(seen, "x", FLOATS)
    if not 2 <= len(seen.shape) <= 4:
        reader.reject("x", "rank 2 to 4, shape [..., q_len, k_len]", f"shape {list(seen.shape)}")
    target = None
    if out is not None:
        target = reader.array(out, "out", " ".join(map(str, seen.shape)), (seen.dtype,), output=True)
    reader.check_outputs_apart()
    if seen.device.kind == "cuda":
        return _shift_on_gpu(seen, target, stream)
    array = tensor.to_numpy(seen)
    result = Output(target, seen, array.dtype)
    return CpuCall(lambda: result.write(shift(array)))


def _shift_on_gpu(x: View, target: View | None, stream: object) -> KernelCall[Any]:
    def outputs(own: int | None) -> OutputArrays:
        return OutputArrays(x, [(x.shape, x.dtype)], (target,), own)

    def bind(arrays: OutputArrays, _: int) -> tuple[Launches, None]:
        leading = 4 - len(x.shape)
        parameters = ShiftParameters(
            x=x.ptr,
            out=arrays.pointers[0],
            extent=(*(1,) * leading, *x.shape),
            x_stride=(*(0,) * leading, *x.strides),
            out_stride=(*(0,) * leading, *arrays.views[0].strides),
        )
        source = plan.companion("rel_shift", driver.arch_of(x.device).name, unit=x.itemsize)
        return Launches(elementwise(source, x.device, parameters, x.size)), None

    return KernelCall([x] if target is None else [x, target], stream, outputs, bind, _single)


def _single(arrays: OutputArrays) -> Any:
    return arrays.finish()[0]


def _matrix_bd_on_gpu(
    query: View,
    pos_emb: View,
    pos_bias_v: View | None,
    lens: View,
    columns: int,
    rel_extend: str,
    label: str,
    target: View | None,
    stream: object,
) -> KernelCall[Any]:
    """Scores by distance into a workspace, then each column's distance looked up."""
    num_seqs, num_heads, _ = query.shape
    extent = pos_emb.shape[0]
    width = min(extent, columns)

    def outputs(own: int | None) -> OutputArrays:
        return OutputArrays(query, [((num_seqs, num_heads, columns), label)], (target,), own)

    def bind(arrays: OutputArrays, pointer: int) -> tuple[Launches, Allocation]:
        scores = tensor.allocate(query, (num_seqs, num_heads, width), "float32", pointer)
        product = RelativeScores(query, pos_emb, pos_bias_v, width, query.device)
        product.point(query.ptr, pos_emb.ptr, None if pos_bias_v is None else pos_bias_v.ptr, scores.ptr)
        strides = arrays.views[0].strides
        parameters = SpreadParameters(
            scores=scores.ptr,
            context_lens=lens.ptr,
            out=arrays.pointers[0],
            lens_seq=lens.strides[0],
            out_seq=strides[0],
            out_head=strides[1],
            num_seqs=num_seqs,
            num_heads=num_heads,
            width=width,
            max_context=columns,
            extent=extent,
            clamp=int(rel_extend == "clamp"),
        )
        source = plan.companion("spread_bias", driver.arch_of(query.device).name, query=plan.QUERY_CODE[label])
        elements, follows = num_seqs * num_heads * columns, product.launcher is not None
        spread = elementwise(source, query.device, parameters, elements, follows)
        return Launches(product.launcher, spread), scores

    given = [seen for seen in (query, pos_emb, pos_bias_v, lens, target) if seen is not None]
    return KernelCall(given, stream, outputs, bind, _single)


def read_matrix_bd(
    query: Any,
    pos_emb: Any,
    pos_bias_v: Any,
    *,
    context_lens: Any,
    max_context: object,
    rel_extend: object,
    out_dtype: object,
    out: Any,
    stream: object = None,
) -> Prepared[Any]:
    """Check the arguments: a call that binds nothing yet; see the public function."""
    operator = "matrix_bd"
    reader = Reader(operator)
    seen = reader.array(query, "query", "num_seqs num_heads head_size", FLOATS)
    if reader.sizes["head_size"] not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        reader.reject("query", f"head_size one of {sizes}", reader.sizes["head_size"])
    reader.check_rows_of_heads("query")
    reader.check_rows(seen, "query", alignment=16)
    table = read_pos_emb(reader, pos_emb, seen.dtype)
    offset = read_offset(reader, pos_bias_v, "pos_bias_v", seen.dtype)
    lens = reader.array(context_lens, "context_lens", "num_seqs", ("int32",))
    columns = reader.sizes["max_context"] = reader.size(max_context, "max_context")
    extension = reader.choice(rel_extend, "rel_extend", EXTENSIONS)
    label = reader.choice(out_dtype, "out_dtype", tuple(dict.fromkeys(("float32", seen.dtype))))
    target = None
    if out is not None:
        target = reader.array(out, "out", "num_seqs num_heads max_context", (label,), output=True)
        reader.check_rows(target, "out")
    reader.check_outputs_apart()
    if seen.device.kind == "cuda":
        return _matrix_bd_on_gpu(seen, table, offset, lens, columns, extension, label, target, stream)
    arrays = tensor.to_numpy(seen), tensor.to_numpy(table), to_numpy(offset), tensor.to_numpy(lens)
    dtype = arrays[0].dtype if label == seen.dtype else np.dtype(np.float32)
    result = Output(target, seen, dtype)
    return CpuCall(lambda: result.write(dense_bias(*arrays, max_context=columns, rel_extend=extension)))
