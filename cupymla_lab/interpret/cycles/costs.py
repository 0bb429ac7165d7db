"""What an instruction asks of a scheduler: issue slots and pipes, by its opcode or by the machine code it became.

From PTX alone it is an estimate: ptxas drops, joins and splits instructions. Moves, conversions between sizes of
integers and reads of parameters are taken to be dropped, 64-bit integers to be two.
Source of rates: CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions", for compute capability
9.0, in results per cycle and multiprocessor: 128 for fp32 and 256 for fp16 in pairs (an instruction per cycle and
scheduler), 64 for integers, logic, shifts, comparisons and integer products (one in two), 16 for special functions (one
in eight).
Which instructions share a pipe: Nsight Compute's documentation, "Pipelines" (FMA heavy and lite, ALU, XU).
"""

from __future__ import annotations

import re

from ..program import Step
from .trace import Run

_NOTHING = Run(0, 0, 0, 0)
_SPECIAL = frozenset(("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh", "popc", "bfind", "brev", "clz"))
_FREE = frozenset(("mov", "cvta", "ret", "exit", "isspacep", "pragma", "mapa", "setmaxnreg", "griddepcontrol"))
_FLOATS = frozenset(("f32", "f16", "bf16", "f16x2", "bf16x2"))


def _names(*texts: str) -> frozenset[str]:
    return frozenset(name for text in texts for name in text.split())


# Machine code: opcodes by what they keep busy. First those of accesses, copies, barriers and products, which have
# events of their own; NOP fills up the end of the text.
_EVENTS = _names(
    "LD LDG LDS LDSM LDGSTS ST STG STS STSM ATOM ATOMG ATOMS RED REDG HMMA IMMA QMMA HGMMA IGMMA QGMMA",
    "SYNCS ARRIVES BAR SHFL VOTE VOTEU MATCH ELECT REDUX FENCE MEMBAR ERRBAR CGAERRBAR CCTL UCGABAR_ARV UCGABAR_WAIT",
    "UBLKPF UTMAPF UTMASTG NOP",
)
_ALU = _names(
    "FMNMX FSEL FSET FSETP F2FP I2FP HSETP2 HMNMX2 IABS IADD3 IMNMX ISETP LEA LOP3 MOV P2R R2P PLOP3 PRMT SEL SGXT",
    "BMSK SHF VIADD VIADDMNMX VIMNMX VIMNMX3 VABSDIFF FCHK MOVM",
    "DADD DMUL DFMA DSETP DMNMX",  # of the pipe of doubles, which is as fast
)
_FMA = _names("FFMA FMUL FADD FSWZADD HFMA2 HMUL2 HADD2")
_IMAD = _names("IMAD IMUL IDP")
_XU = _names("MUFU I2F F2I F2F FRND POPC FLO BREV")
# An issue slot and nothing that is modelled. So are those of the uniform datapath (U...).
_ISSUED = _names(
    "LDC LDL STL S2R S2UR CS2R B2R R2UR BRA BRX BRXU JMP CALL RET EXIT BREAK BSSY BSYNC BMOV YIELD NANOSLEEP WARPSYNC",
    "ENDCOLLECTIVE DEPBAR LDGDEPBAR WARPGROUP STAS UBLKCP UTMALDG UTMACCTL UTMACMDFLUSH PREEXIT ACQBULK",
)
_AT = re.compile(r'File "\.nv_debug_ptx_txt", line (\d+)')
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)")
_DIVERGED = re.compile(r"\bBRA\.DIV\b[^`]*`\((\.L\w+)\)")


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
        return Run(wide, 0, wide, 0, wide)
    if name in ("fma", "mad", "mul") or (name in ("add", "sub") and not _FLOATS.isdisjoint(parts)):
        return Run(wide, 0, wide, 0)
    if name == "bra":
        return Run(1, 0, 0, 0)
    if name in {"div", "rem"}:
        return Run(20 * wide, 10 * wide, 6 * wide, wide, 3 * wide)
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
    """What each line of PTX became, from nvdisasm's `--print-line-info-ptx`, without accesses and the like.

    Left out is what warps do that are not together where ptxas expects it (it stands apart, behind a BRA.DIV), and what
    subroutines do, as that of 64-bit divisions. An instruction that ptxas moved out of a loop counts where its PTX
    stands; of a loop that ptxas unrolled every copy counts.

    Returns the costs by line, of those that became anything; none for machine code without line numbers.
    """
    apart = frozenset(_DIVERGED.findall(text))
    found: dict[int, Run] = {}
    line, left_out = 0, False
    for row in text.splitlines():
        if (at := _AT.search(row)) is not None:
            line = int(at[1])
        elif row.endswith(":"):
            # A subroutine's name. No lines are told of its instructions.
            line = 0 if row.startswith("$") else line
            left_out = left_out or row[:-1] in apart
        elif (match := _INSTRUCTION.match(row)) is not None:
            guard, name = match.groups()
            if line and not left_out:
                one = Run(1, 0, 0, 0) if guard == "!PT" else _of_opcode(name.partition(".")[0])
                found[line] = Run(*(a + b for a, b in zip(found.get(line, _NOTHING), one, strict=True)))
            elif left_out and guard is None and name in ("BRA", "EXIT"):
                left_out = False
    return found


def is_known(opcode: str) -> bool:
    """Whether an opcode, without modifiers, is of a class above; others are taken to be for integers."""
    return opcode in _EVENTS | _ALU | _FMA | _IMAD | _XU | _ISSUED or opcode.startswith("U")


def _of_opcode(opcode: str) -> Run:
    if opcode in _EVENTS:
        return _NOTHING
    if opcode in _XU:
        return Run(1, 0, 0, 1)
    if opcode in _IMAD:
        return Run(1, 0, 1, 0, 1)
    if opcode in _FMA:
        return Run(1, 0, 1, 0)
    if opcode in _ISSUED or opcode.startswith("U"):
        return Run(1, 0, 0, 0)
    return Run(1, 1, 0, 0)
