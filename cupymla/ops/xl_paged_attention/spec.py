"""The door of xl_paged_attention: every check a caller can fail, and the problem they leave behind."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import InputError
from ...tensor import Device, View
from .checks import FLOATS, Reader
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
        check_indices: whether tables and lengths are checked before the run.
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
    check_indices: bool

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
    pos_bias_u: View | None
    matrix_bd: View | None
    rel_bias: View | None
    pos_bias_v: View | None
    pos_emb: View | None
    alibi_slopes: View | None
    k_scale: float | View
    v_scale: float | View
    out: View | None
    lse: View | None


OUTPUTS = ("out", "lse")
SCALES = ("k_scale", "v_scale")
INPUTS = tuple(entry.name for entry in fields(Views) if entry.name not in OUTPUTS)

OPTIONS = ("scale", "rel_extend", "bias_scaled", "kv_layout", "kv_dtype", "return_lse", "lse_base")
"""What else a call depends on."""


@dataclass(slots=True, eq=False)
class Outline:
    """What a call with these layouts and options is, wherever its arrays lie. Equal to itself alone.

    Attributes:
        problem: sizes and options.
        masks: for each field of Views, the bits of its address that must be zero.
        spans: for each field of Views, the bytes from its address to its end; 0 where it has no memory.
        outputs: which fields of Views are outputs that were given.
    """

    problem: Problem
    masks: tuple[int, ...]
    spans: tuple[int, ...]
    outputs: tuple[int, ...]


def read(
    query: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any,
    context_lens: Any,
    *,
    scale: object = None,
    pos_bias_u: Any = None,
    matrix_bd: Any = None,
    rel_bias: Any = None,
    rel_extend: object = "zero",
    pos_bias_v: Any = None,
    pos_emb: Any = None,
    alibi_slopes: Any = None,
    bias_scaled: object = True,
    kv_layout: object = "vllm",
    kv_dtype: object = None,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    return_lse: object = False,
    lse_base: object = "e",
    check_indices: object = False,
    out: Any = None,
    lse: Any = None,
) -> tuple[Views, Outline]:
    """Check everything about a call that can be known without reading the arrays. Raises InputError."""
    reader = Reader(NAME)
    seen_query = _read_query(reader, query)
    dtype = seen_query.dtype
    layout = reader.choice(kv_layout, "kv_layout", LAYOUTS)
    keys, values, label = read_caches(reader, k_cache, v_cache, dtype, layout, kv_dtype)
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
        v_cache=values,
        block_tables=tables,
        context_lens=lens,
        pos_bias_u=read_offset(reader, pos_bias_u, "pos_bias_u", dtype),
        k_scale=read_scale(reader, k_scale, "k_scale", label),
        v_scale=read_scale(reader, v_scale, "v_scale", label),
        out=_read_out(reader, out, dtype),
        lse=None if lse is None else _read_lse(reader, lse),
        **terms,
    )
    reader.check_outputs_apart()
    form, array = _form(views)
    extension = reader.choice(rel_extend, "rel_extend", EXTENSIONS)
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
        bias_scaled=reader.flag(bias_scaled, "bias_scaled"),
        scale=sizes["head_size"] ** -0.5 if scale is None else reader.number(scale, "scale"),
        return_lse=reader.flag(return_lse, "return_lse") or lse is not None,
        lse_base=reader.choice(lse_base, "lse_base", LSE_BASES),
        check_indices=reader.flag(check_indices, "check_indices"),
    )
    names = Views.__slots__
    return views, Outline(
        problem,
        masks=tuple([reader.alignments.get(name, 1) - 1 for name in names]),
        spans=tuple([_span(getattr(views, name)) for name in names]),
        outputs=tuple([names.index(name) for name in ("out", "lse") if getattr(views, name) is not None]),
    )


def _span(array: View | float | None) -> int:
    """Bytes from an array's address to its end; strides are not negative."""
    if not isinstance(array, View) or 0 in array.shape:
        return 0
    steps = sum(stride * (extent - 1) for stride, extent in zip(array.strides, array.shape, strict=True))
    return (1 + steps) * array.itemsize


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
    """The position table of the fused form and of the matrix_bd companion."""
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
