"""What an instruction asks of a scheduler: issue slots and pipes, by its opcode or by the machine code it became.

From PTX alone it is an estimate: ptxas drops, joins and splits instructions. Moves, conversions between sizes of integers
and reads of parameters are taken to be dropped, 64-bit integers to be two.
Source of pipes and rates: CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions", for compute
capability 9.0; which instructions share a pipe: Nsight Compute's documentation, "Pipelines".
"""

from __future__ import annotations

import re

from ..program import Step
from .trace import Run

_NOTHING = Run(0, 0, 0, 0)
_SPECIAL = frozenset(("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh", "popc", "bfind", "brev", "clz"))
_FREE = frozenset(("mov", "cvta", "ret", "exit", "isspacep", "pragma", "mapa", "setmaxnreg", "griddepcontrol"))
_FLOATS = frozenset(("f32", "f16", "bf16", "f16x2", "bf16x2"))

# Machine code: prefixes of opcodes by what they keep busy. Accesses, copies, barriers and products have events of their own.
_OF_FMA = ("FFMA", "FMUL", "FADD", "HFMA", "HMUL", "HADD", "HFMA2", "DFMA")
_OF_XU = ("MUFU", "I2F", "F2I", "F2F", "POPC", "FLO", "BREV", "FRND")
_FULL_XU = ("I2FP", "F2FP", "F2IP")  # of the integer pipe, in spite of their names
_ISSUED = ("U", "LDC", "S2", "CS2R", "BRA", "BSSY", "BSYNC", "EXIT", "CALL", "RET", "NANOSLEEP", "YIELD", "BREAK", "R2UR", "BRX")
_EVENTS = (
    *("LDG", "STG", "LDS", "STS", "LDSM", "STSM", "LD.", "ST.", "RED", "ATOM", "HMMA", "IMMA", "QMMA", "HGMMA", "QGMMA"),
    *("SYNCS", "BAR", "UTMA", "UBLK", "SHFL", "VOTE", "MATCH", "ELECT", "FENCE", "MEMBAR", "ERRBAR", "CCTL", "DEPBAR", "LDGDEPBAR"),
    *("WARPSYNC", "WARPGROUP", "UCGABAR", "ARRIVES", "NOP", "STAS", "UTMACMDFLUSH", "UTMALDG", "ACQBULK", "VOTEU"),
)
_AT = re.compile(r'File "\.nv_debug_ptx_txt", line (\d+)')
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)")


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


def of_machine_code(text: str) -> dict[int, Run]:
    """What the instructions of each line of PTX became, from nvdisasm's `--print-line-info-ptx`, without accesses and the like.

    An instruction that ptxas moved out of a loop counts where its PTX stands; what subroutines do, as that of 64-bit
    divisions, is left out.
    """
    found: dict[int, Run] = {}
    line = 0
    for row in text.splitlines():
        if (at := _AT.search(row)) is not None:
            line = int(at[1])
        elif (match := _INSTRUCTION.match(row)) is not None:
            one = Run(1, 0, 0, 0) if match[1] == "!PT" else _of_opcode(match[2])
            before = found.get(line, _NOTHING)
            found[line] = Run(*(a + b for a, b in zip(before, one, strict=True)))
    return found


def _of_opcode(name: str) -> Run:
    if name.startswith(_EVENTS):
        return _NOTHING
    if name.startswith(_FULL_XU):
        return Run(1, 1, 0, 0)
    if name.startswith(_OF_XU):
        return Run(1, 0, 0, 1)
    if name.startswith("IMAD"):
        return Run(1, 0, 2, 0)
    if name.startswith(_OF_FMA):
        return Run(1, 0, 1, 0)
    if name.startswith(_ISSUED):
        return Run(1, 0, 0, 0)
    return Run(1, 1, 0, 0)
