"""Argument checks that the operators of the lightning indexer and of paged caches share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import tensor
from ..errors import InputError, kind
from ..tensor import View
from . import workspace as workspaces
from .checks import Checks, require_entries
from .mla import DTYPES, ROW_ALIGNMENT_BYTES, Layout, attributed

FP8 = ("float8_e4m3fn", "uint8")
"""fp8 e4m3fn, where the framework has it, or its bytes."""

MAX_EXTENT = 2**31 - 1
"""Bound of a number of queries, of keys and of topk: ids are int32."""


CHANNELS = (64, 128)
MAX_HEADS = 128

MAX_NAMED = 2**31 - 1024
"""Kernels that go through a row's entries count them in 32 bits, a few tiles beyond the last one."""


@dataclass(frozen=True, slots=True)
class NamedKeys:
    """Sizes of index queries, of keys, and of lists that name some of these for each query.

    Attributes:
        lead: the batch axis, as a tuple of one extent or of none.
        queries: T, of each batch entry.
        keys: L, of each batch entry.
        heads: H.
        channels: D.
        topk: entries of a row.
        dtype: of q and k: "bfloat16" or "float16".
    """

    lead: tuple[int, ...]
    queries: int
    keys: int
    heads: int
    channels: int
    topk: int
    dtype: str

    @property
    def row(self) -> tuple[int, ...]:
        """Shape of what there is for each query."""
        return (*self.lead, self.queries)

    @property
    def batch(self) -> int:
        """Batch entries; 1 without a batch axis."""
        return self.lead[0] if self.lead else 1


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of a cache.

    Attributes:
        blocks: of the cache.
        page: tokens of a block.
        block_bytes: from a block to the next.
    """

    blocks: int
    page: int
    block_bytes: int

    @property
    def num_slots(self) -> int:
        """Tokens that the cache has room for."""
        return self.blocks * self.page


class Validation(Checks):
    """The checks of one call. The first array fixes the device and whether there is a batch axis."""

    def shaped(
        self,
        array: object,
        argument: str,
        shape: tuple[int, ...],
        dtypes: Sequence[str],
        layout: Layout = "free",
        output: bool = False,
    ) -> View | None:
        """An array whose shape is known, None where there is none; `layout` as in `check_layout`."""
        if array is None:
            return None
        seen = self.view(array, argument, dtypes, output=output)
        if seen.shape != shape:
            raise self.error(argument, f"shape {list(shape)}", list(seen.shape))
        self.check_layout(seen, argument, layout)
        return seen

    def given(
        self, array: object, argument: str, shape: tuple[int, ...], dtypes: Sequence[str], layout: Layout = "free"
    ) -> View:
        """The same of an array that must be there."""
        seen = self.shaped(array, argument, shape, dtypes, layout)
        if seen is None:
            raise self.error(argument, f"an array of shape {list(shape)}", None)
        return seen

    def outputs(self, views: Any, wanted: Sequence[tuple[tuple[int, ...], str]], **arrays: object) -> None:
        """Set a call's results, of these shapes and dtypes: dq and dk in rows, others in any layout."""
        for (name, array), (shape, dtype) in zip(arrays.items(), wanted, strict=True):
            layout: Layout = "rows" if name in ("dq", "dk") else "free"
            setattr(views, name, self.shaped(array, name, shape, (dtype,), layout, output=True))

    def check_layout(self, seen: View, argument: str, layout: Layout) -> None:
        """Refuse strides that kernels cannot follow.

        Args:
            seen: the array.
            argument: its parameter's name.
            layout: "rows": the last axis contiguous, other strides multiples of 16 bytes, a 16-byte address. "lists":
                the last axis contiguous. "free": any strides. None may be negative.
        """
        if 0 in seen.shape:
            return
        if layout != "free" and seen.shape[-1] > 1 and seen.strides[-1] != 1:
            raise self.error(argument, "a contiguous last axis", f"strides {list(seen.strides)}")
        for extent, stride in zip(seen.shape, seen.strides, strict=True):
            if extent > 1 and stride < 0:
                raise self.error(argument, "strides that are not negative", f"strides {list(seen.strides)}")
        for extent, stride in zip(seen.shape[:-1], seen.strides_bytes, strict=False):
            if layout == "rows" and extent > 1 and stride % ROW_ALIGNMENT_BYTES:
                expected = f"strides of a multiple of {ROW_ALIGNMENT_BYTES} bytes"
                raise self.error(argument, expected, f"{list(seen.strides_bytes)} bytes")
        alignment = ROW_ALIGNMENT_BYTES if layout == "rows" else seen.itemsize
        if seen.ptr % alignment:
            raise self.error(argument, f"an address that is a multiple of {alignment} bytes", hex(seen.ptr))

    def extent(self, seen: View, argument: str, axis: int, what: str, least: int = 0, most: int = MAX_EXTENT) -> int:
        """An extent of an array, within what kernels can count."""
        extent = seen.shape[axis]
        if not least <= extent <= most:
            raise self.error(argument, f"{least} to {most} {what}", extent)
        return extent

    def workspace(self, array: Any, like: View) -> View | None:
        """A caller's workspace, which shares no memory with another array; see `workspace.read`."""
        try:
            seen = workspaces.read(array, like)
        except InputError as refused:
            raise attributed(refused, self.operator) from None
        if seen is not None:
            self._seen.append(("workspace", seen, True))
        return seen

    def rank(self, seen: View, argument: str, spelled: str, rank: int) -> tuple[int, ...]:
        """The leading batch axis, as a tuple of one extent or of none, of an array of `rank` axes without it."""
        if seen.ndim not in (rank, rank + 1):
            raise self.error(argument, f"shape {spelled}, with or without a leading batch axis", list(seen.shape))
        return seen.shape[:-rank]

    def index_heads(self, q: View, spelled: str) -> tuple[int, int]:
        """Heads and channels of index queries, which `spelled` ends with: [..., H, D]."""
        heads, channels = q.shape[-2:]
        if channels not in CHANNELS:
            raise self.error("q", f"64 or 128 channels, D in {spelled}", channels)
        if not 1 <= heads <= MAX_HEADS:
            raise self.error("q", f"1 to {MAX_HEADS} heads, H in {spelled}", heads)
        return heads, channels

    def index_keys(
        self, k: object, lead: tuple[int, ...], channels: int, dtypes: Sequence[str], most: int = MAX_EXTENT
    ) -> tuple[View, int]:
        """The argument `k`, [L, D] behind the batch axis of `lead`, and L, at most `most`."""
        seen = self.view(k, "k", dtypes)
        if seen.ndim != len(lead) + 2 or seen.shape[: len(lead)] != lead or seen.shape[-1] != channels:
            raise self.error("k", f"shape {_spelled(*lead, 'L', channels)}", list(seen.shape))
        self.check_layout(seen, "k", "rows")
        return seen, self.extent(seen, "k", -2, "keys", most=most)

    def named_keys(self, q: object, k: object, indices: object) -> tuple[dict[str, View], dict[str, Any]]:
        """The arguments `q`, `k` and `indices` [..., T, topk], and the sizes of `NamedKeys`, both by name."""
        q_seen = self.view(q, "q", DTYPES)
        lead = self.rank(q_seen, "q", "[T, H, D]", 3)
        heads, channels = self.index_heads(q_seen, "[T, H, D]")
        self.check_layout(q_seen, "q", "rows")
        queries = self.extent(q_seen, "q", -3, "queries")
        k_seen, keys = self.index_keys(k, lead, channels, (q_seen.dtype,))
        row = (*lead, queries)
        seen = self.view(indices, "indices", ("int32",))
        if seen.shape[:-1] != row or seen.ndim != len(row) + 1:
            raise self.error("indices", f"shape {_spelled(*row, 'topk')}", list(seen.shape))
        self.check_layout(seen, "indices", "lists")
        topk = self.extent(seen, "indices", -1, "entries of a row", most=MAX_NAMED)
        sizes = {"lead": lead, "queries": queries, "keys": keys, "heads": heads, "channels": channels, "topk": topk}
        return {"q": q_seen, "k": k_seen, "indices": seen}, {**sizes, "dtype": q_seen.dtype}

    def selection(
        self, options: Any, rows: tuple[int, ...], indices: object, count: object, values: object, lse: object
    ) -> dict[str, Any]:
        """Arrays for the results of an indexer's selection (`selection_results`), by name."""
        for name, array, wanted in (("values", values, options.return_values), ("lse", lse, options.return_lse)):
            if array is not None and not wanted:
                raise self.error(name, f"None without return_{name}", kind(array))
        entries = (*rows, options.topk)
        return {
            "indices": self.shaped(indices, "indices", entries, ("int32",), "lists", output=True),
            "count": self.shaped(count, "count", rows, ("int32",), output=True),
            "values": self.shaped(values, "values", entries, ("float32",), "lists", output=True),
            "lse": self.shaped(lse, "lse", rows, ("float32",), output=True),
        }

    def paged_shape(self, seen: View, argument: str, token: int, what: str = "tokens") -> tuple[int, int]:
        """Blocks and page of a cache [blocks, page, token] or [blocks, page, 1, token]; `what` a page holds."""
        middle = seen.shape[2:-1]
        if seen.ndim not in (3, 4) or seen.shape[-1] != token or middle not in ((), (1,)) or not seen.shape[1]:
            expected = f"shape [blocks, page, {token}] or [blocks, page, 1, {token}], page at least 1"
            raise self.error(argument, expected, list(seen.shape))
        blocks, page = seen.shape[:2]
        if max(blocks, 1) * page > MAX_EXTENT:
            raise self.error(argument, f"up to {MAX_EXTENT} {what}, blocks * page", max(blocks, 1) * page)
        return blocks, page

    def pages(self, seen: View, argument: str, token: int, alignment: int, what: str = "tokens") -> Pages:
        """The pages of a cache as `paged_shape` takes it, each block contiguous.

        Args:
            seen: the cache.
            argument: its parameter's name.
            token: elements of a token.
            alignment: bytes, of which the distance of blocks and the address are multiples.
            what: what a page holds.
        """
        blocks, page = self.paged_shape(seen, argument, token, what)
        if not blocks:
            return Pages(0, page, 0)
        if seen.strides[-1] != 1 or (page > 1 and seen.strides[1] != token):
            expected = f"blocks of page * {token * seen.itemsize} contiguous bytes"
            raise self.error(argument, expected, f"strides {list(seen.strides)}")
        block_bytes = (seen.strides[0] if blocks > 1 else page * token) * seen.itemsize
        if block_bytes < 0 or block_bytes % alignment:
            expected = f"a distance of blocks that is a multiple of {alignment} bytes, not negative"
            raise self.error(argument, expected, f"{block_bytes} bytes")
        if seen.ptr % alignment:
            raise self.error(argument, f"an address that is a multiple of {alignment} bytes", hex(seen.ptr))
        return Pages(blocks, page, block_bytes)


def _spelled(*extents: int | str) -> str:
    """A shape for an error, in which some extents have names."""
    return f"[{', '.join(map(str, extents))}]"


def look_at_named_keys(indices: View, lengths: View | None, keys: int, stream: object, operator: str) -> None:
    """Raise InputError for an entry that is neither -1 nor a key, among those that count. Waits for `stream`, None for
    the current one, when the arrays are on a GPU."""
    counted = None if lengths is None else tensor.fetched(lengths, stream)
    require_entries(tensor.fetched(indices, stream), counted, keys, "indices", operator)


def selection_results(options: Any, rows: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], str] | None, ...]:
    """Shape and dtype of an indexer's indices, count, values and lse; None for those that are not wanted."""
    entries = (*rows, options.topk)
    return (
        (entries, "int32"),
        (rows, "int32"),
        (entries, "float32") if options.return_values else None,
        (rows, "float32") if options.return_lse else None,
    )
