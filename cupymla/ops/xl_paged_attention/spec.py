"""Argument validation of xl_paged_attention: every check a caller can fail, and the problem they leave behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ... import tensor
from ...errors import InputError
from ...tensor import Device, View
from ..arguments import Arguments, Choice, Flag, Number, option
from .checks import FLOATS, FP8, Reader
from .paging import HEAD_SIZES, LAYOUTS, key_counts, read_caches, read_scale

NAME = "xl_paged_attention"
EXTENSIONS = ("zero", "clamp")
LSE_BASES = ("e", "2")

MAX_BLOCKS = 2**31 - 1
"""Blocks of a cache: kernels count them in 32 bits, with a sign."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Sizes and options of one call: all that a plan depends on.

    Attributes:
        device: where every array is.
        num_seqs: sequences, one query token each.
        num_heads: query heads, a multiple of num_kv_heads.
        num_kv_heads: heads of the cache.
        head_size: channels of a head.
        num_blocks: blocks in the cache.
        block_size: tokens in a block.
        max_blocks: block-table entries of a sequence.
        dtype: label of query and out.
        kv_dtype: label of the cache's elements.
        kv_layout: "vllm", "NHD" or "HND".
        bias: "none", "dense", "relative", "fused" or "alibi".
        bias_dtype: label of the bias array; "" without one.
        extent: columns of matrix_bd, or distances of rel_bias or pos_emb; 0 otherwise.
        rel_extend: "zero" or "clamp", what holds past `extent` distances.
        bias_scaled: True for scale * (q.k + bias), False for scale * q.k + bias.
        scale: the factor on the scores.
        return_lse: whether the caller wants the log-sum-exp.
        lse_base: "e" or "2".
    """

    device: Device
    num_seqs: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    num_blocks: int
    block_size: int
    max_blocks: int
    dtype: str
    kv_dtype: str
    kv_layout: str
    bias: str
    bias_dtype: str
    extent: int
    rel_extend: str
    bias_scaled: bool
    scale: float
    return_lse: bool
    lse_base: str

    @property
    def capacity(self) -> int:
        """The most keys a sequence can have: what its table, and a dense bias, can name."""
        blocks = self.max_blocks * self.block_size
        return min(blocks, self.extent) if self.bias == "dense" else blocks


@dataclass(slots=True)
class Views:
    """The arrays of one call; shapes as in the public function's docstring."""

    query: View
    k_cache: View
    v_cache: View
    block_tables: View
    context_lens: View
    pos_bias_u: View | None = None
    matrix_bd: View | None = None
    rel_bias: View | None = None
    pos_bias_v: View | None = None
    pos_emb: View | None = None
    alibi_slopes: View | None = None
    k_scale: float | View = 1.0
    v_scale: float | View = 1.0
    out: View | None = None
    lse: View | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """The options; what each means is said at `Problem`.

    Attributes:
        scale: None for head_size ** -0.5.
        kv_dtype: what a uint8 cache holds.
        return_lse: implied by an array for it.
    """

    scale: float | None = option(None, Number(optional=True))
    rel_extend: Literal["zero", "clamp"] = option("zero", Choice(EXTENSIONS))
    bias_scaled: bool = option(True, Flag())
    kv_layout: Literal["vllm", "NHD", "HND"] = option("vllm", Choice(LAYOUTS))
    kv_dtype: Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"] | None = option(
        None, Choice((None, *FLOATS, *FP8))
    )
    return_lse: bool = option(False, Flag())
    lse_base: Literal["e", "2"] = option("e", Choice(LSE_BASES))


ARGUMENTS = Arguments(NAME, Views, Options, results=("out", "lse"), numbers=("k_scale", "v_scale"))


def read(*, check_indices: object = False, stream: object = None, **given: Any) -> tuple[Views, Problem]:
    """Check everything about a call, by name, that can be known without reading the arrays. Raises InputError."""
    inputs, values, (out, lse) = ARGUMENTS.placed(given)
    (query, k_cache, v_cache, block_tables, context_lens, pos_bias_u, *bias, k_scale, v_scale) = inputs
    matrix_bd, rel_bias, pos_bias_v, pos_emb, alibi_slopes = bias
    reader = Reader(NAME)
    options = reader.chosen(ARGUMENTS, *values)
    layout = options.kv_layout
    seen_query = _read_query(reader, query)
    dtype = seen_query.dtype
    keys, v_seen, label = read_caches(reader, k_cache, v_cache, dtype, layout, options.kv_dtype)
    if reader.sizes["num_heads"] % reader.sizes["num_kv_heads"]:
        heads = reader.sizes["num_heads"]
        reader.reject("k_cache", f"num_kv_heads that divides num_heads {heads}", reader.sizes["num_kv_heads"])
    if reader.sizes["num_blocks"] > MAX_BLOCKS:
        reader.reject("k_cache", f"num_blocks up to {MAX_BLOCKS}", reader.sizes["num_blocks"])
    tables = reader.array(block_tables, "block_tables", "num_seqs max_blocks", ("int32",))
    reader.check_rows(tables, "block_tables")
    lens = reader.array(context_lens, "context_lens", "num_seqs", ("int32",))
    terms = _read_bias(reader, dtype, matrix_bd, rel_bias, pos_bias_v, pos_emb, alibi_slopes)
    views = Views(
        query=seen_query,
        k_cache=keys,
        v_cache=v_seen,
        block_tables=tables,
        context_lens=lens,
        pos_bias_u=read_offset(reader, pos_bias_u, "pos_bias_u", dtype),
        k_scale=read_scale(reader, k_scale, "k_scale", label),
        v_scale=read_scale(reader, v_scale, "v_scale", label),
        out=_read_out(reader, out, dtype),
        lse=None if lse is None else _read_lse(reader, lse),
        **terms,
    )
    reader.separate()
    form, array = _form(views)
    extension = options.rel_extend
    if extension != EXTENSIONS[0] and views.rel_bias is None and views.pos_emb is None:
        reader.reject("rel_extend", f"{EXTENSIONS[0]!r} without rel_bias or pos_emb, which it extends", repr(extension))
    sizes = reader.sizes
    assert reader.device is not None
    problem = Problem(
        device=reader.device,
        num_seqs=sizes["num_seqs"],
        num_heads=sizes["num_heads"],
        num_kv_heads=sizes["num_kv_heads"],
        head_size=sizes["head_size"],
        num_blocks=sizes["num_blocks"],
        block_size=sizes["block_size"],
        max_blocks=sizes["max_blocks"],
        dtype=dtype,
        kv_dtype=label,
        kv_layout=layout,
        bias=form,
        bias_dtype=array.dtype if array else "",
        extent=sizes.get("max_context", sizes.get("extent", 0)),
        rel_extend=extension,
        bias_scaled=options.bias_scaled,
        scale=sizes["head_size"] ** -0.5 if options.scale is None else options.scale,
        return_lse=options.return_lse or lse is not None,
        lse_base=options.lse_base,
    )
    if reader.option(Flag(), "check_indices", check_indices):
        look(views, problem, stream)
    return views, problem


def look(views: Views, problem: Problem, stream: object) -> None:
    """Look at tables and lengths. Raises InputError; see `check_indices`."""
    check_indices(problem, tensor.fetched(views.block_tables, stream), tensor.fetched(views.context_lens, stream))


def check_indices(problem: Problem, block_tables: npt.NDArray[Any], context_lens: npt.NDArray[Any]) -> None:
    """Raise InputError when a length, or a table entry that a length makes use of, is out of range."""
    wrong = np.flatnonzero((context_lens < 0) | (context_lens > problem.capacity))
    if wrong.size:
        where = int(wrong[0])
        raise InputError("context_lens", f"0 to {problem.capacity}", f"{context_lens[where]} at [{where}]", NAME)
    counts = key_counts(context_lens, problem.max_blocks, problem.block_size, None)
    used = np.arange(problem.max_blocks) * problem.block_size < counts[:, None]
    bad = np.argwhere(used & ((block_tables < 0) | (block_tables >= problem.num_blocks)))
    if bad.size:
        row, column = map(int, bad[0])
        got = f"{block_tables[row, column]} at [{row}, {column}]"
        raise InputError("block_tables", f"0 to {problem.num_blocks - 1} in the used entries", got, NAME)


def _read_query(reader: Reader, query: Any) -> View:
    seen = reader.array(query, "query", "num_seqs num_heads head_size", FLOATS)
    if reader.sizes["head_size"] not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        reader.reject("query", f"head_size one of {sizes}", reader.sizes["head_size"])
    if reader.sizes["num_heads"] < 1:
        reader.reject("query", "at least one head", f"shape {list(seen.shape)}")
    reader.check_rows_of_heads("query")
    reader.check_rows(seen, "query", alignment=16)
    return seen


def _read_bias(
    reader: Reader, dtype: str, matrix_bd: Any, rel_bias: Any, pos_bias_v: Any, pos_emb: Any, alibi_slopes: Any
) -> dict[str, View | None]:
    """At most one form of bias, each array in its shape."""
    forms = {"matrix_bd": matrix_bd, "rel_bias": rel_bias, "pos_emb": pos_emb, "alibi_slopes": alibi_slopes}
    given = [name for name, value in forms.items() if value is not None]
    if len(given) > 1:
        reader.reject(given[1], f"at most one form of bias beside '{given[0]}'", " and ".join(given))
    if pos_bias_v is not None and pos_emb is None:
        reader.reject("pos_bias_v", "pos_emb beside it", "no pos_emb")
    seen: dict[str, View | None] = dict.fromkeys([*forms, "pos_bias_v"])
    floats = tuple(dict.fromkeys((dtype, "float32")))
    if matrix_bd is not None:
        found = seen["matrix_bd"] = reader.array(matrix_bd, "matrix_bd", "num_seqs num_heads max_context", floats)
        reader.check_rows(found, "matrix_bd")
    if rel_bias is not None:
        found = seen["rel_bias"] = reader.array(rel_bias, "rel_bias", "num_seqs num_heads extent", floats)
        reader.check_rows(found, "rel_bias")
        _check_extent(reader, found, "rel_bias", axis=2)
    if pos_emb is not None:
        found = seen["pos_emb"] = read_pos_emb(reader, pos_emb, dtype)
    if alibi_slopes is not None:
        seen["alibi_slopes"] = reader.array(alibi_slopes, "alibi_slopes", "num_heads", ("float32",))
    seen["pos_bias_v"] = read_offset(reader, pos_bias_v, "pos_bias_v", dtype)
    return seen


def read_pos_emb(reader: Reader, pos_emb: Any, dtype: str) -> View:
    """The position table of the fused form and of the function matrix_bd."""
    seen = reader.array(pos_emb, "pos_emb", "extent num_heads head_size", (dtype,))
    reader.check_rows(seen, "pos_emb", alignment=16)
    _check_extent(reader, seen, "pos_emb", axis=0)
    return seen


def _check_extent(reader: Reader, seen: View, argument: str, axis: int) -> None:
    if seen.shape[axis] < 1:
        reader.reject(argument, "an extent of at least one distance", f"shape {list(seen.shape)}")


def read_offset(reader: Reader, array: Any, argument: str, dtype: str) -> View | None:
    """u or v, [num_heads, head_size] in the query's dtype or fp32."""
    if array is None:
        return None
    seen = reader.array(array, argument, "num_heads head_size", tuple(dict.fromkeys((dtype, "float32"))))
    reader.check_rows(seen, argument, alignment=16)
    return seen


def _read_out(reader: Reader, out: Any, dtype: str) -> View | None:
    if out is None:
        return None
    seen = reader.array(out, "out", "num_seqs num_heads head_size", (dtype,), output=True)
    reader.check_rows(seen, "out", alignment=16)
    return seen


def _read_lse(reader: Reader, lse: Any) -> View:
    return reader.array(lse, "lse", "num_seqs num_heads", ("float32",), output=True)


def _form(views: Views) -> tuple[str, View | None]:
    by_form = {
        "dense": views.matrix_bd,
        "relative": views.rel_bias,
        "fused": views.pos_emb,
        "alibi": views.alibi_slopes,
    }
    for form, array in by_form.items():
        if array is not None:
            return form, array
    return "none", None
