"""What recompiled code tells the machine so that it finds races; see races.hpp."""

from __future__ import annotations

import re

from ...ptx.syntax import Instruction, Module

WITH_LINES = frozenset(
    ("ld", "st", "atom", "red", "mbarrier", "cp", "ldmatrix", "stmatrix", "wgmma", "call", "trap", "brkpt")
)
"""Instructions that are remembered with their line; a call may be one of the model's."""

_ELSEWHERE = frozenset(("global", "local", "param", "const", "param::entry", "param::func"))
_STRONG = frozenset(("volatile", "relaxed", "acquire", "release"))


def may_be_shared(parts: tuple[str, ...]) -> bool:
    """Whether the address of an instruction, its opcode cut at the dots, may be one of shared memory."""
    return _ELSEWHERE.isdisjoint(parts)


def _may_be_global(parts: tuple[str, ...]) -> bool:
    spaces = (part for part in parts[1:] if part in _ELSEWHERE or part.startswith("shared"))
    return next(spaces, "global") == "global"


def touched(parts: tuple[str, ...], pointer: str, bytes_: int, how: str) -> str:
    """Code that looks for races of an access: `how` is one of `Access` in runtime.hpp."""
    if not _may_be_global(parts):
        return f"touched(t, {pointer}, {bytes_}, {how});" if may_be_shared(parts) else ""
    grid = _grid_access(parts)
    if "global" in parts:
        return f"touched_grid(t, {pointer}, {bytes_}, {grid});"
    return f"touched(t, {pointer}, {bytes_}, {how}, {grid});"


def _grid_access(parts: tuple[str, ...]) -> str:
    """What an instruction does with global memory: `GridAccess` in runtime.hpp."""
    atomic = parts[0] in ("atom", "red")
    strong = atomic or not _STRONG.isdisjoint(parts)
    acquires = "acquire" in parts or "acq_rel" in parts
    releases = "release" in parts or "acq_rel" in parts
    flags = {
        "kGridReads": atomic or parts[0] in ("ld", "ldu"),
        "kGridWrites": atomic or parts[0] == "st",
        "kGridStrong": strong,
        "kGridConstant": "nc" in parts,
        "kGridAcquires": acquires,
        "kGridReleases": releases,
        # Sums of floats are no counters.
        "kGridOrders": strong and (parts[0] != "red" or releases or parts[-1][0] in "us"),
    }
    return " | ".join(name for name, is_so in flags.items() if is_so)


def smallest_stores(module: Module) -> tuple[int, int]:
    """How many bytes a module's instructions write at a time, at least, to shared and to global memory; 4 at most."""
    bodies = [function.body for function in module.functions if function.body is not None]
    found = [statement.parts for body in bodies for statement, _ in body.walk() if isinstance(statement, Instruction)]
    of_shared = min((_stored(parts) for parts in found if may_be_shared(parts)), default=4)
    # Tiles end at any element.
    tiles = [2 for parts in found if "bulk_group" in parts and "tensor" in parts]
    return of_shared, min((*tiles, *(_stored(parts) for parts in found if _may_be_global(parts))), default=4)


def _stored(parts: tuple[str, ...]) -> int:
    if parts[0] == "stmatrix":
        return 2 if "trans" in parts else 4
    bits = re.fullmatch(r"[a-z]+(\d+)(x2)?", parts[-1])
    if parts[0] not in ("st", "red", "atom") or bits is None:
        return 4
    return min(4, int(bits[1]) * (2 if bits[2] else 1) // 8)


def order(parts: tuple[str, ...]) -> str:
    """What an arrival hands on or a wait takes: `Order` in runtime.hpp."""
    wide = any(part in ("cluster", "gpu", "sys") for part in parts)
    return " | ".join(["0", *["kClusterScope"] * wide, *["kRelaxed"] * ("relaxed" in parts)])


def fence(parts: tuple[str, ...]) -> str:
    """Code for a fence, which orders nothing but for races."""
    if "proxy" in parts:
        return "fenced(t, kProxyFence);" if any(part.startswith("async") for part in parts) else ";"
    wide = any(part in ("gpu", "sys", "gl") for part in parts)
    return f"fenced(t, {'kWideFence' if wide else 'kFence'});"
