"""Arithmetic beyond the everyday one, as C++ text: transcendental functions, narrow floats, reductions over a warp.

Functions that hardware approximates are computed exactly and rounded once, but for ex2
(`cupymla_lab/ptx/approximation.py`).
Source: PTX ISA 9.0, "Floating Point Instructions", "cvt", "redux.sync", "Integer Arithmetic Instructions".
"""

from __future__ import annotations

from .writer import Writer

_FUNCTIONS = {"lg2": "std::log2", "sqrt": "std::sqrt", "sin": "std::sin", "cos": "std::cos", "tanh": "std::tanh"}
_HALVES = ("f16", "bf16", "f16x2", "bf16x2")
_FP8 = ("e4m3x2", "e5m2x2")
_TF32_ROUNDINGS = {"rna": "kAway", "rz": "kToZero"}
_REDUCTIONS = {"add": 0, "min": 1, "max": 2, "and": 3, "or": 4, "xor": 5}


def knows(parts: tuple[str, ...]) -> bool:
    """Whether `lower` writes this instruction, whose opcode is cut at the dots."""
    if parts[0] == "cvt":
        return (parts[-2] in _FP8 and parts[-1] in ("f32", "f16x2")) or parts[-2] == "tf32"
    if parts[0] in ("min", "max", "neg", "abs"):
        return parts[-1] in _HALVES
    if parts[0] == "redux":
        return parts[-1] != "f32"
    return parts[0] in (*_FUNCTIONS, "rsqrt", "copysign", "bfind", "bmsk", "sad") and parts[-1] not in _HALVES


def lower(w: Writer) -> str:
    """The C++ of an instruction that `knows` knows."""
    stem = w.parts[0]
    if stem == "cvt":
        return _convert(w)
    if stem in ("min", "max", "neg", "abs") and w.parts[-1] in _HALVES:
        return _halves(w)
    if stem == "redux":
        return _reduce(w)
    kind = w.parts[-1]
    values = [w.read(operand, kind) for operand in w.operands[1:]]
    if stem in _FUNCTIONS:
        return w.write(w.operands[0], f"{_FUNCTIONS[stem]}({values[0]})", kind)
    if stem == "rsqrt":
        return w.write(w.operands[0], f"1 / std::sqrt({values[0]})", kind)
    if stem == "copysign":
        return w.write(w.operands[0], f"std::copysign({values[1]}, {values[0]})", kind)
    if stem == "bfind":
        return w.write(w.operands[0], f"highest_bit({values[0]}, {int('shiftamt' in w.parts)})", "u32")
    if stem == "bmsk":
        return w.write(w.operands[0], f"bit_mask({', '.join(values)}, {int('clamp' in w.parts)})", "u32")
    a, b, c = values
    return w.write(w.operands[0], f"({a} < {b} ? {b} - {a} : {a} - {b}) + {c}", kind)


def _convert(w: Writer) -> str:
    to, from_ = w.parts[-2:]
    relu = int("relu" in w.parts)
    if to == "tf32":
        rounding = next((name for part, name in _TF32_ROUNDINGS.items() if part in w.parts), "kToEven")
        value, saturates = w.read(w.operands[1], "f32"), int("satfinite" in w.parts)
        return w.write(w.operands[0], f"to_tf32({value}, {rounding}, {relu}, {saturates})", "u32")
    name = "to_e4m3" if to.startswith("e4m3") else "to_e5m2"
    if from_ == "f32":
        high, low = (w.read(operand, "f32") for operand in w.operands[1:3])
    else:
        word = w.read(w.operands[1], "u32")
        low, high = (f"from_half(static_cast<uint16_t>({word} >> {shift}))" for shift in (0, 16))
    return w.write(w.operands[0], f"{name}({high}, {relu}) << 8 | {name}({low}, {relu})", "u16")


def _halves(w: Writer) -> str:
    """min, max, neg and abs on one or two 16-bit floats."""
    kind, stem = w.parts[-1], w.parts[0]
    wide, narrow = ("from_bfloat", "to_bfloat") if kind.startswith("b") else ("from_half", "to_half")
    packed = kind.endswith("x2")
    values = [w.read(operand, "u32" if packed else "u16") for operand in w.operands[1:]]
    if stem in ("neg", "abs"):
        bits = "0x80008000u" if packed else "0x8000u"
        made = f"{values[0]} ^ {bits}" if stem == "neg" else f"{values[0]} & ~{bits}"
        return w.write(w.operands[0], made, "u32" if packed else "u16")
    halves = []
    for shift in (0, 16) if packed else (0,):
        a, b = (f"{wide}(static_cast<uint16_t>({value} >> {shift}))" for value in values)
        chosen = f"extreme({a}, {b}, {int(stem == 'max')}, {int('NaN' in w.parts)})"
        halves.append(f"static_cast<uint32_t>({narrow}({chosen})) << {shift}")
    return w.write(w.operands[0], " | ".join(halves), "u32" if packed else "u16")


def _reduce(w: Writer) -> str:
    value, mask = w.read(w.operands[1], "u32"), w.read(w.operands[2], "u32")
    operation = next(_REDUCTIONS[part] for part in w.parts if part in _REDUCTIONS)
    signed = int(w.parts[-1] == "s32")
    return w.write(w.operands[0], f"reduce_lanes(t, {mask}, {value}, {operation}, {signed})", "u32")
