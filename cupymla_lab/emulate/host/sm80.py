"""What kernels for sm_80 add to the host machine: cp.async, mma.sync, packed 16-bit floats, as C++ text.

Source: PTX ISA 9.0, "cp.async", "Matrix Fragments for mma.m16n8k16", "Half Precision Floating Point Instructions".
"""

from __future__ import annotations

import re

from ...ptx.syntax import Address, Operand, Vector
from .matrices import address_in_shared
from .writer import Writer

_SYMBOLS = {"add": "+", "sub": "-", "mul": "*"}
_HALVES = ("f16", "f16x2", "bf16", "bf16x2")


def knows(parts: tuple[str, ...]) -> bool:
    """Whether `lower` writes this instruction, whose opcode is cut at the dots."""
    if parts[:2] == ("cp", "async"):
        return "bulk" not in parts
    if parts[0] == "mma":
        return _product(parts) is not None
    if parts[0] == "cvt":
        return parts[-2:] in (("f16x2", "e4m3x2"), ("f16x2", "e5m2x2"))
    return parts[0] in (*_SYMBOLS, "fma") and parts[-1] in _HALVES and "f32" not in parts


def lower(w: Writer) -> str:
    """The C++ of an instruction that `knows` knows."""
    if w.parts[0] == "cp":
        return _copy(w)
    if w.parts[0] == "mma":
        return _multiply(w)
    if w.parts[0] == "cvt":
        source = w.read(w.operands[1], "u16")
        return w.write(w.operands[0], f"halves_of_{w.parts[-1][:4]}({source})", "u32")
    return _arithmetic(w)


def _copy(w: Writer) -> str:
    if "commit_group" in w.parts:
        return "commit_async(t);"
    if "mbarrier" in w.parts:
        return f"arrive_async(t, {address_in_shared(w, w.operands[0])}, {int('noinc' not in w.parts)});"
    if "wait_group" in w.parts or "wait_all" in w.parts:
        return f"wait_async(t, {w.read(w.operands[0], 'u32') if w.operands else '-1'});"
    to, source, size, *rest = w.operands
    if "L2::cache_hint" in w.parts:
        rest.pop()
    assert isinstance(to, Address) and isinstance(source, Address)
    whole = w.read(size, "u32")
    read = w.read(rest[0], "u32") if rest else whole
    return (
        w.names_global(source)
        + f" copy_async(t, {w.read(to.items[0], 'u32')}, {w.read(source.items[0], 'u64')}, {whole}, {read});"
    )


# Elements of products: the runtime's name, their size in bytes.
_ELEMENTS = {"f16": ("kHalf", 2), "bf16": ("kBfloat", 2), "tf32": ("kTf32", 4), "e4m3": ("kE4m3", 1)}
_ELEMENTS |= {"e5m2": ("kE5m2", 1), "s8": ("kSigned8", 1), "u8": ("kUnsigned8", 1)}


def _product(parts: tuple[str, ...]) -> int | None:
    """How many registers of A a product has; None for one that is not known here."""
    shape = next((found for part in parts if (found := re.fullmatch(r"m16n8k(\d+)", part))), None)
    if shape is None or len(parts) < 4 or {"sp", "block_scale", "satfinite"} & set(parts):
        return None
    d, a, b, c = parts[-4:]
    if a not in _ELEMENTS or b not in _ELEMENTS or d != c or d not in ("f32", "s32", "f16"):
        return None
    size = _ELEMENTS[a][1]
    integers = a in ("s8", "u8")
    if _ELEMENTS[b][1] != size or integers != (d == "s32") or integers != (b in ("s8", "u8")):
        return None
    count = int(shape[1]) * size // 8
    return count if count in (2, 4) else None


def _multiply(w: Writer) -> str:
    def read(operand: Operand, kind: str) -> list[str]:
        assert isinstance(operand, Vector)
        return [w.read(item, kind) for item in operand.items]

    d, a, b, c = w.operands
    assert isinstance(d, Vector)
    count = _product(w.parts)
    fragments = read(a, "u32"), read(b, "u32")
    if count is None or (len(fragments[0]), len(fragments[1])) != (count, count // 2):
        raise ValueError("fragments of mma that these types do not have")
    of_a, of_b = (_ELEMENTS[part][0] for part in w.parts[-3:-1])
    lines = [f"{{ const uint32_t a[] = {{{', '.join(fragments[0])}}}, b[] = {{{', '.join(fragments[1])}}};"]
    lines.append(f"double sums[4]; multiply_16x8(t, sums, a, b, {count}, {of_a}, {of_b});")
    kind = w.parts[-1]
    if kind == "f16":
        for index, (item, word) in enumerate(zip(d.items, read(c, "u32"), strict=True)):
            halves = [f"sums[{2 * index + half}] + wide_f16({word} >> {16 * half})" for half in (0, 1)]
            low, high = (f"static_cast<uint32_t>(narrow_f16({half}))" for half in halves)
            lines.append(w.write(item, f"{low} | {high} << 16", "u32"))
        return " ".join([*lines, "}"])
    for index, (item, value) in enumerate(zip(d.items, read(c, "u32" if kind == "s32" else "f32"), strict=True)):
        made = f"static_cast<float>(sums[{index}] + static_cast<double>({value}))"
        if kind == "s32":
            made = f"static_cast<uint32_t>(static_cast<int64_t>(sums[{index}])) + {value}"
        lines.append(w.write(item, made, "u32" if kind == "s32" else "f32"))
    return " ".join([*lines, "}"])


def _arithmetic(w: Writer) -> str:
    kind = w.parts[-1]
    bits = "u32" if kind.endswith("x2") else "u16"
    values = [w.read(operand, bits) for operand in w.operands[1:]]
    halves = []
    for shift in (0, 16) if bits == "u32" else (0,):
        sources = [f"wide_{kind[:-2] if bits == 'u32' else kind}({value} >> {shift})" for value in values]
        result = f"std::fma({', '.join(sources)})" if w.parts[0] == "fma" else _SYMBOLS[w.parts[0]].join(sources)
        halves.append(f"static_cast<uint32_t>(narrow_{kind[:-2] if bits == 'u32' else kind}({result})) << {shift}")
    return w.write(w.operands[0], " | ".join(halves), bits)
