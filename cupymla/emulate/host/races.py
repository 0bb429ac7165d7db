"""What recompiled code tells the machine so that it finds races; see races.hpp."""

from __future__ import annotations

import re

from ...ptx.syntax import Instruction, Module

WITH_LINES = frozenset(("ld", "st", "atom", "red", "mbarrier", "cp", "ldmatrix", "stmatrix", "call"))
"""Instructions that are remembered with their line; a call may be one of the model's."""

_ELSEWHERE = frozenset(("global", "local", "param", "const", "param::entry", "param::func"))


def may_be_shared(parts: tuple[str, ...]) -> bool:
    """Whether the address of an instruction, its opcode cut at the dots, may be one of shared memory."""
    return _ELSEWHERE.isdisjoint(parts)


def touched(parts: tuple[str, ...], pointer: str, bytes_: int, how: str) -> str:
    """Code that looks for races of an access: `how` is one of `Access` in runtime.hpp."""
    return f"touched(t, {pointer}, {bytes_}, {how});" if may_be_shared(parts) else ""


def smallest_store(module: Module) -> int:
    """How many bytes a module's instructions write to shared memory at a time, at least; 4 at most."""
    bodies = [function.body for function in module.functions if function.body is not None]
    found = [statement.parts for body in bodies for statement, _ in body.walk() if isinstance(statement, Instruction)]
    return min(map(_stored, found), default=4)


def _stored(parts: tuple[str, ...]) -> int:
    if parts[0] == "stmatrix":
        return 2 if "trans" in parts else 4
    bits = re.fullmatch(r"[a-z]+(\d+)", parts[-1])
    if parts[0] not in ("st", "red", "atom") or not may_be_shared(parts) or bits is None:
        return 4
    return min(4, int(bits[1]) // 8)


def order(parts: tuple[str, ...]) -> str:
    """What an arrival hands on or a wait takes: `Order` in runtime.hpp."""
    wide = any(part in ("cluster", "gpu", "sys") for part in parts)
    return " | ".join(["0", *["kClusterScope"] * wide, *["kRelaxed"] * ("relaxed" in parts)])


def fence(parts: tuple[str, ...]) -> str:
    """Code for a fence, which orders nothing but for races."""
    proxy = "proxy" in parts
    if proxy and not any(part.startswith("async") for part in parts):
        return ";"
    return f"fenced(t, {'true' if proxy else 'false'});"
