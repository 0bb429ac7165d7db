"""What kernels for sm_80 add to the host machine: cp.async, mma.sync, packed 16-bit floats, as C++ text.

Source: PTX ISA 9.0, "cp.async", "Matrix Fragments for mma.m16n8k16", "Half Precision Floating Point Instructions".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...ptx.syntax import Address, Operand, Vector

if TYPE_CHECKING:
    from .recompile import Writer

_SYMBOLS = {"add": "+", "sub": "-", "mul": "*"}
_HALVES = ("f16", "f16x2", "bf16", "bf16x2")


def knows(parts: tuple[str, ...]) -> bool:
    """Whether `lower` writes this instruction, whose opcode is cut at the dots."""
    if parts[:2] == ("cp", "async"):
        return "bulk" not in parts and "mbarrier" not in parts
    if parts[0] == "mma":
        return parts[3] == "m16n8k16" and parts[-1] == "f32" and parts[-2] in ("f16", "bf16")
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


def _multiply(w: Writer) -> str:
    def read(operand: Operand, kind: str) -> str:
        assert isinstance(operand, Vector)
        return ", ".join(w.read(item, kind) for item in operand.items)

    d, a, b, c = w.operands
    assert isinstance(d, Vector)
    lines = [f"{{ const uint32_t a[4] = {{{read(a, 'u32')}}}, b[2] = {{{read(b, 'u32')}}};"]
    lines.append(f"float d[4] = {{{read(c, 'f32')}}}; multiply_16x8x16(t, d, a, b, {int(w.parts[-2] == 'bf16')});")
    lines += [w.write(item, f"d[{index}]", "f32") for index, item in enumerate(d.items)]
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
