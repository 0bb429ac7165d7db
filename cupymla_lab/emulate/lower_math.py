"""Arithmetic that sm_100 adds, as sequences of what sm_90a has.

Source: PTX ISA 9.0, "Floating Point Instructions", "cvt", "ld", "st", "redux.sync".
"""

from __future__ import annotations

from ..ptx.syntax import Address, Constant, Name, Offset, Operand
from .code import Code


def packed_pair(code: Code) -> None:
    """add, sub, mul and fma on .f32x2: each half by itself."""
    parts = code.instruction.parts
    opcode = ".".join((*parts[:-1], "f32"))
    sources = []
    for operand in code.instruction.operands[1:]:
        low, high = code.temporary(32), code.temporary(32)
        code.line(f"mov.b64 {{{low}, {high}}}, {operand};")
        sources.append((low, high))
    results = (code.temporary(32), code.temporary(32))
    for half in (0, 1):
        listed = ", ".join(source[half] for source in sources)
        code.line(f"{opcode} {results[half]}, {listed};")
    code.line(f"mov.b64 {code.operand(0)}, {{{results[0]}, {results[1]}}};")


def mixed_precision(code: Code) -> None:
    """add, sub and fma with 16-bit sources and a 32-bit result."""
    parts = code.instruction.parts
    narrow = parts[-1]
    count = 2 if parts[0] == "fma" else 1
    operands = list(map(str, code.instruction.operands))
    for index in range(1, 1 + count):
        wide = code.temporary(32)
        code.line(f"cvt.f32.{narrow} {wide}, {operands[index]};")
        operands[index] = wide
    code.line(f"{'.'.join(parts[:-1])} {', '.join(operands)};")


def three_inputs(code: Code) -> None:
    """min and max of three."""
    parts = code.instruction.parts
    first = code.temporary(32)
    a, b, c = map(str, code.instruction.operands[1:4])
    if "abs" in parts:
        absolute = []
        for operand in (a, b, c):
            name = code.temporary(32)
            code.line(f"abs.f32 {name}, {operand};")
            absolute.append(name)
        a, b, c = absolute
    opcode = ".".join(part for part in parts if part != "abs")
    code.line(f"{opcode} {first}, {a}, {b};")
    code.line(f"{opcode} {code.operand(0)}, {first}, {c};")


def wide_move(code: Code) -> None:
    """ld and st of 32 bytes: two of 16 each. Evictions from L2, which only these have, and policies are left off."""
    parts = [part for part in code.instruction.parts if not part.startswith(("L2::evict", "L2::cache_hint"))]
    loads = parts[0] == "ld"
    vector, address = (0, 1) if loads else (1, 0)
    registers = [str(item) for item in code.items(code.operand(vector))]
    half = len(registers) // 2
    parts[parts.index("v8" if "v8" in parts else "v4")] = f"v{half}"
    opcode, place = ".".join(parts), code.operand(address)
    base = code.temporary(64)
    # The first load may overwrite the register that holds the address.
    code.line(f"mov.b64 {base}, {code.value(code.inner(place), 64)};")
    for index in (0, 1):
        four = "{" + ", ".join(registers[index * half : (index + 1) * half]) + "}"
        where = str(Address((Offset(Name(base), str(16 * index)),)))
        code.line(f"{opcode} {four}, {where};" if loads else f"{opcode} {where}, {four};")


# What `convert` of the model makes of its operands; cupymla_lab/emulate/model/convert.cuh.
FORMATS = {"e2m1": 1, "e2m3": 2, "e3m2": 3, "e4m3": 4, "e5m2": 5, "ue8m0": 6, "f16": 7, "bf16": 8, "f32": 9}
ROUNDINGS = {"rn": 0, "rz": 1, "rp": 2, "rs": 3}


def _element(kind: str) -> tuple[str, int]:
    """An element type and how many of it a register holds: ("e2m1", 2) for e2m1x2."""
    stem, _, count = kind.partition("x")
    return stem, int(count or 1)


def conversion(code: Code) -> None:
    """cvt to and from e2m1, e2m3, e3m2 and ue8m0, and with stochastic rounding."""
    parts = code.instruction.parts
    to, from_ = _element(parts[-2]), _element(parts[-1])
    if to[0] not in FORMATS or from_[0] not in FORMATS or any(part.startswith("scaled") for part in parts):
        raise code.error("this conversion is left out")
    rounding = next((ROUNDINGS[part] for part in parts if part in ROUNDINGS), 0)
    flags = FORMATS[to[0]] | FORMATS[from_[0]] << 4 | to[1] << 8 | rounding << 12
    flags |= ("relu" in parts) << 14 | ("satfinite" in parts) << 15
    operands = list(code.instruction.operands[1:])
    bits = operands.pop() if "rs" in parts else Constant("0")
    sources: list[Operand] = []
    for operand in operands:
        sources += code.items(operand)
    values = [code.value(source) for source in sources]
    zero = code.value(Constant("0"))
    values += [zero] * (4 - len(values))
    result = code.call("convert", flags, *values, code.value(bits))
    assert result is not None
    _assign(code, code.operand(0), result)


def saturated_tf32(code: Code) -> None:
    """cvt to tf32 with .satfinite: what is infinite once it is rounded becomes the largest number, 0x2000 below it."""
    opcode = ".".join(part for part in code.instruction.parts if part != "satfinite")
    rounded, magnitude, infinite = code.temporary(32), code.temporary(32), code.temporary(1)
    code.line(f"{opcode} {rounded}, {code.operand(1)};")
    code.line(f"and.b32 {magnitude}, {rounded}, 0x7fffffff;")
    code.line(f"setp.eq.u32 {infinite}, {magnitude}, 0x7f800000;")
    code.line(f"@{infinite} sub.u32 {rounded}, {rounded}, 0x2000;")
    code.line(f"mov.b32 {code.operand(0)}, {rounded};")


def _assign(code: Code, destination: Operand, result: str) -> None:
    bits = code.bits(destination) or 32
    if bits == 32:
        code.line(f"mov.b32 {destination}, {result};")
    else:
        code.line(f"cvt.u{bits}.u32 {destination}, {result};")


def float_reduction(code: Code) -> None:
    """redux.sync of .f32."""
    parts = code.instruction.parts
    flags = ("max" in parts) | ("abs" in parts) << 1 | ("NaN" in parts) << 2
    result = code.call("reduce", code.value(code.operand(1)), code.value(code.operand(2)), int(flags))
    code.line(f"mov.b32 {code.operand(0)}, {result};")
