"""Arrays of rows for every query and head, such as q and dout, as the maps that kernels load their tiles by."""

from __future__ import annotations

from typing import Protocol

from ..tensormap import TileMap

BOX_CHANNELS = 64
"""Of 16 bits, that fill a row of the widest swizzle."""


class Extents(Protocol):
    """What a map has of a problem."""

    @property
    def batch(self) -> int | None:
        """Extent of the batch axis, None without one."""

    @property
    def s_q(self) -> int:
        """Queries of a batch entry."""

    @property
    def h_q(self) -> int:
        """Heads of a query."""

    @property
    def dtype(self) -> str:
        """Label, of 16 bits."""


def head_tiles(
    problem: Extents,
    ptr: int,
    strides: tuple[int, int, int],
    channels: int,
    heads: int,
    queries: int = 1,
    box_channels: int = BOX_CHANNELS,
) -> TileMap:
    """Boxes of some heads x 64 channels or fewer of one or several queries, in the swizzled layout that products read.

    Args:
        problem: gives the extents.
        ptr: the array's address.
        strides: (batch, query, head), in elements of 16 bits.
        channels: of a row.
        heads: of a box.
        queries: of a box.
        box_channels: of a box, 64 or 32; its row is as long as a row of the swizzle.
    """
    batch, query, head = strides
    shape = (channels, problem.h_q, problem.s_q, problem.batch or 1)
    # Without a batch axis there is no stride of one, but the map wants a multiple of 16 bytes.
    strides_bytes = (head * 2, query * 2, (channels if problem.batch is None else batch) * 2)
    box = (box_channels, heads, queries, 1)
    return TileMap(ptr, problem.dtype, shape, strides_bytes, box, swizzle=box_channels * 2)
