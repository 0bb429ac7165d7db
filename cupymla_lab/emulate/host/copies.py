"""Copies and reductions that other units carry out, as C++ text: bulk copies, st.async, red.async, vectors of red.

Source: PTX ISA 9.0, "Data Movement and Conversion Instructions", "red", "red.async", "st.async".
"""

from __future__ import annotations

from ...ptx.syntax import Address, Name, Operand, Vector
from . import races
from .writer import Writer

_OPERATIONS = {"add": "kAdd", "min": "kMin", "max": "kMax", "inc": "kInc", "dec": "kDec"}
_OPERATIONS |= {"and": "kAnd", "or": "kOr", "xor": "kXor"}
# Types of reductions: the runtime's name, the register's type, its size.
_NUMBERS = {
    "u32": ("kU32", "u32", 4),
    "b32": ("kU32", "u32", 4),
    "s32": ("kS32", "u32", 4),
    "u64": ("kU64", "u64", 8),
    "b64": ("kU64", "u64", 8),
    "s64": ("kS64", "u64", 8),
    "f32": ("kF32", "u32", 4),
    "f64": ("kF64", "u64", 8),
    "f16": ("kF16", "u16", 2),
    "bf16": ("kBf16", "u16", 2),
    "f16x2": ("kF16", "u32", 4),
    "bf16x2": ("kBf16", "u32", 4),
}
_CPP = {2: "uint16_t", 4: "uint32_t", 8: "uint64_t"}


def knows(parts: tuple[str, ...]) -> bool:
    """Whether `lower` writes this instruction, whose opcode is cut at the dots."""
    if parts[0] == "cp":
        return "bulk" in parts
    if parts[0] in ("st", "red") and "async" in parts:
        return True
    if parts[0] not in ("red", "atom"):
        return False
    return bool({"v2", "v4", "v8"} & set(parts)) or any(part in parts for part in ("f16", "bf16", "f16x2", "bf16x2"))


def lower(w: Writer) -> str:
    """The C++ of an instruction that `knows` knows."""
    if w.parts[0] == "cp":
        return _bulk(w)
    return _asynchronous(w) if "async" in w.parts else _reduce(w)


def _reduction(parts: tuple[str, ...]) -> str:
    operation = next((_OPERATIONS[part] for part in parts if part in _OPERATIONS), None)
    if operation is None:
        return "Reduction{}"
    number = next((_NUMBERS[part][0] for part in reversed(parts) if part in _NUMBERS), "kU32")
    return f"Reduction{{{operation}, {number}}}"


def _inner(operand: Operand) -> Operand:
    if not isinstance(operand, Address):
        raise ValueError(f"{operand} is no address")
    return operand.items[0]


def _items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


# Bulk copies -------------------------------------------------------------------------------------------------------


def _coordinates(w: Writer, operand: Operand) -> tuple[str, int, str]:
    assert isinstance(operand, Address)
    items = _items(operand.items[1])
    listed = ", ".join(w.read(item, "s32") for item in items)
    return w.read(operand.items[0], "u64"), len(items), f"const int32_t at[{len(items)}] = {{{listed}}};"


def _bulk(w: Writer) -> str:
    parts, operands = w.parts, w.operands
    if "commit_group" in parts:
        return "commit_group(t);"
    if "wait_group" in parts:
        return f"wait_group(t, {w.read(operands[0], 'u32')});"
    if "bulk_group" in parts:
        return _to_global(w)
    mask = w.read(operands[-1], "u16") if "multicast::cluster" in parts else "0"
    to = w.read(_inner(operands[0]), "u32")
    if "tensor" in parts:
        map_, rank, at = _coordinates(w, operands[1])
        return f"{{ {at} copy_tile(t, {to}, {map_}, at, {rank}, {w.read(_inner(operands[2]), 'u32')}, {mask}); }}"
    size, barrier = w.read(operands[2], "u32"), w.read(_inner(operands[3]), "u32")
    if "global" in parts:
        return f"copy_bytes(t, {to}, {w.read(_inner(operands[1]), 'u64')}, {size}, {barrier}, {mask});"
    source = w.read(_inner(operands[1]), "u32")
    return f"copy_shared(t, {to}, {source}, {size}, {barrier}, {_reduction(parts)});"


def _to_global(w: Writer) -> str:
    parts, operands = w.parts, w.operands
    source = w.read(_inner(operands[1]), "u32")
    if "tensor" in parts:
        map_, rank, at = _coordinates(w, operands[0])
        operation = next((_OPERATIONS[part] for part in parts if part in _OPERATIONS), "kReplace")
        return f"{{ {at} store_tile(t, {map_}, at, {rank}, {source}, {operation}); }}"
    to, size = w.read(_inner(operands[0]), "u64"), w.read(operands[2], "u32")
    return f"store_bytes(t, {to}, {source}, {size}, {_reduction(parts)});"


# Single numbers and vectors ----------------------------------------------------------------------------------------


def _values(w: Writer, operand: Operand) -> tuple[str, str, int]:
    """An array of an operand's numbers, its declaration and its size."""
    kind = next(part for part in reversed(w.parts) if part in _NUMBERS)
    _, register, size = _NUMBERS[kind]
    items = _items(operand)
    listed = ", ".join(w.read(item, register) for item in items)
    return "given", f"const {_CPP[size]} given[{len(items)}] = {{{listed}}};", size * len(items)


def _asynchronous(w: Writer) -> str:
    """st.async and red.async: they arrive some time later and count their bytes at a barrier."""
    _, declared, size = _values(w, w.operands[1])
    to, barrier = w.read(_inner(w.operands[0]), "u32"), w.read(_inner(w.operands[2]), "u32")
    return f"{{ {declared} store_async(t, {to}, given, {size}, {barrier}, {_reduction(w.parts)}); }}"


def _reduce(w: Writer) -> str:
    """red and atom on vectors and 16-bit floats."""
    returns = w.parts[0] == "atom"
    operands = list(w.operands) if returns else [Name("_"), *w.operands]
    _, declared, size = _values(w, operands[2])
    space = next((part for part in w.parts if part in ("global", "shared", "shared::cta", "shared::cluster")), "")
    how = "kLoads | kStores"
    lines = [f"{{ breathe(t); {declared} unsigned char* at = {w.place(operands[1], space, size, how)};"]
    lines.append(races.touched(w.parts, "at", size, "kAtomic"))
    if returns:
        count = len(_items(operands[0]))
        lines.append(f"{_CPP[size // count]} before[{count}]; std::memcpy(before, at, {size});")
    lines.append(f"reduce(at, given, {size}, {_reduction(w.parts)});")
    if returns:
        kind = {2: "u16", 4: "u32", 8: "u64"}[size // count]
        lines += [w.write(item, f"before[{i}]", kind) for i, item in enumerate(_items(operands[0]))]
    return " ".join([*lines, "}"])
