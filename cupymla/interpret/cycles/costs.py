"""What an instruction asks of a scheduler, by its opcode: issue slots and pipes.

An estimate from PTX: ptxas drops, joins and splits instructions. Moves, conversions between sizes of integers and
reads of parameters are taken to be dropped, 64-bit integers to be two.
Source of pipes and rates: CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions", for compute
capability 9.0.
"""

from __future__ import annotations

from ..program import Step
from .trace import Run

_NOTHING = Run(0, 0, 0, 0)
_SPECIAL = frozenset(("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh", "popc", "bfind", "brev", "clz"))
_FREE = frozenset(("mov", "cvta", "ret", "exit", "isspacep", "pragma", "mapa", "setmaxnreg", "griddepcontrol"))
_FLOATS = frozenset(("f32", "f16", "bf16", "f16x2", "bf16x2"))


def cost(step: Step) -> Run:
    """Of one warp's turn at an instruction that is no memory access, barrier or matrix product."""
    name, parts = step.parts[0], step.parts
    if name in _FREE or (name == "ld" and "param" in parts):
        return _NOTHING
    if name in _SPECIAL:
        return Run(1, 0, 0, 1)
    if name == "cvt":
        return _conversion(parts)
    wide = 2 if any(part in ("s64", "u64", "b64") for part in parts) else 1
    if name in ("mad", "mul") and _FLOATS.isdisjoint(parts):
        return Run(wide, 0, 2 * wide, 0)
    if name in ("fma", "mad", "mul") or (name in ("add", "sub") and not _FLOATS.isdisjoint(parts)):
        return Run(wide, 0, wide, 0)
    if name == "bra":
        return Run(1, 0, 0, 0)
    if name in {"div", "rem"}:
        return Run(20 * wide, 10 * wide, 9 * wide, wide)
    return Run(wide, wide, 0, 0)


def _conversion(parts: tuple[str, ...]) -> Run:
    to, of = parts[-2:]
    floats = to.startswith(("f", "bf", "e")), of.startswith(("f", "bf", "e"))
    if not any(floats):
        return _NOTHING
    if all(floats):
        return Run(1, 1, 0, 0)
    return Run(1, 0, 0, 1)
