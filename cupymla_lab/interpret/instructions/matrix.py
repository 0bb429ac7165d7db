"""8x8 tiles of 16-bit elements between shared memory and the fragments of a warp.

Lane l holds elements 2(l mod 4) and 2(l mod 4)+1 of row l/4. Source: PTX ISA 9.0, "ldmatrix", "stmatrix", "movmatrix".
"""

from __future__ import annotations

import numpy as np

from .. import access
from ..operands import Operands, items
from ..outcomes import BLOCK
from ..program import Step
from ..threads import Lanes
from ..traps import Trap, Unknown
from ..types import Array
from .kit import Builder, Handler

_LANE = np.arange(32)
_ROW = _LANE // 4
_COLUMN = 2 * (_LANE % 4)
_WORD = np.dtype(np.uint32)
_HALF = np.dtype(np.uint16)


def _form(step: Step) -> bool:
    """Whether tiles are transposed. Raises Unknown for elements of other sizes."""
    if "m8n8" not in step.parts or "b16" not in step.parts:
        raise Unknown("a shape or an element size")
    return "trans" in step.parts


def _tiles(words: Array) -> Array:
    """Fragments `[warps, 32]` as tiles `[warps, 8, 8]`."""
    pairs = np.ascontiguousarray(words).view(_HALF).reshape(len(words), 32, 2)
    tiles = np.empty((len(words), 8, 8), _HALF)
    tiles[:, _ROW, _COLUMN] = pairs[:, :, 0]
    tiles[:, _ROW, _COLUMN + 1] = pairs[:, :, 1]
    return tiles


def _fragments(tiles: Array) -> Array:
    """Tiles `[warps, 8, 8]` as the words of each lane, flat."""
    pairs = np.stack([tiles[:, _ROW, _COLUMN], tiles[:, _ROW, _COLUMN + 1]], 2)
    words: Array = np.ascontiguousarray(pairs).view(_WORD).reshape(-1)
    return words


def _require_whole_warps(lanes: Lanes) -> None:
    if lanes.count % 32 or (lanes.warps % 32).any():
        raise Trap("an instruction of whole warps in a warp that has lost threads")


def _givers(lanes: Lanes, k: int) -> Lanes:
    """The lanes that give the addresses of a tile's rows."""
    return Lanes(lanes.group, lanes.front, lanes.index.reshape(-1, 32)[:, 8 * k : 8 * k + 8].reshape(-1))


def _load(operands: Operands, step: Step) -> Handler:
    transposed = _form(step)
    puts, address = operands.all_written(step.operands[0], "b32"), operands.address(step.operands[1])

    def run(lanes: Lanes) -> int | None:
        if not lanes.converged():
            return BLOCK
        _require_whole_warps(lanes)
        rows = np.array(address(lanes)).reshape(-1, 32)
        results = []
        for k in range(len(puts)):
            places = rows[:, 8 * k : 8 * k + 8].reshape(-1)
            tiles = access.load(_givers(lanes, k), "shared", places, _HALF, 8, access.TOGETHER).reshape(-1, 8, 8)
            results.append(_fragments(tiles.transpose(0, 2, 1) if transposed else tiles))
        for put, words in zip(puts, results, strict=True):
            put(lanes, words)
        return None

    return run


def _store(operands: Operands, step: Step) -> Handler:
    transposed = _form(step)
    address, values = operands.address(step.operands[0]), [operands.read(r, "b32") for r in items(step.operands[1])]

    def run(lanes: Lanes) -> int | None:
        if not lanes.converged():
            return BLOCK
        _require_whole_warps(lanes)
        rows = np.array(address(lanes)).reshape(-1, 32)
        for k, value in enumerate(values):
            tiles = _tiles(value(lanes).reshape(-1, 32))
            if transposed:
                tiles = tiles.transpose(0, 2, 1)
            access.store(_givers(lanes, k), "shared", rows[:, 8 * k : 8 * k + 8].reshape(-1), tiles.reshape(-1, 8))
        return None

    return run


def _move(operands: Operands, step: Step) -> Handler:
    if not _form(step):
        raise Unknown("movmatrix without .trans")
    value, put = operands.read(step.operands[1], "b32"), operands.write(step.operands[0], "b32")

    def run(lanes: Lanes) -> int | None:
        if not lanes.converged():
            return BLOCK
        _require_whole_warps(lanes)
        put(lanes, _fragments(_tiles(value(lanes).reshape(-1, 32)).transpose(0, 2, 1)))
        return None

    return run


HANDLERS: dict[str, Builder] = {"ldmatrix": _load, "stmatrix": _store, "movmatrix": _move}
