"""ldmatrix, stmatrix and movmatrix, as C++ text.

Source: PTX ISA 9.0, "Warp-level matrix load instruction: ldmatrix", "Warp-level matrix store instruction: stmatrix",
"movmatrix".
"""

from __future__ import annotations

from ...ptx.syntax import Address, Operand, Vector
from .writer import Writer


def knows(parts: tuple[str, ...]) -> bool:
    """Whether `lower` writes this instruction, whose opcode is cut at the dots."""
    return parts[0] in ("ldmatrix", "stmatrix", "movmatrix") and "m8n8" in parts and parts[-1] == "b16"


def address_in_shared(w: Writer, operand: Operand) -> str:
    """The shared-memory address that an operand names, by that space's window or a generic one."""
    assert isinstance(operand, Address)
    inner = operand.items[0]
    if not any(part.startswith("shared") for part in w.parts):
        return f"to_shared(t, {w.read(inner, 'u64')})"
    read = w.read(inner, "u32")
    return read if "shared::cluster" in w.parts else f"own_address(t, {read})"


def lower(w: Writer) -> str:
    """The C++ of an instruction that `knows` knows."""
    if w.parts[0] == "movmatrix":
        return w.write(w.operands[0], f"transpose_matrix(t, {w.read(w.operands[1], 'u32')})", "u32")
    loads = w.parts[0] == "ldmatrix"
    vector, address = (w.operands[0], w.operands[1]) if loads else (w.operands[1], w.operands[0])
    items: tuple[Operand, ...] = vector.items if isinstance(vector, Vector) else (vector,)
    place = address_in_shared(w, address)
    transposed = int("trans" in w.parts)
    if loads:
        lines = [f"{{ uint32_t loaded[4]; load_matrices(t, loaded, {place}, {len(items)}, {transposed});"]
        lines += [w.write(item, f"loaded[{i}]", "u32") for i, item in enumerate(items)]
    else:
        listed = ", ".join(w.read(item, "u32") for item in items)
        lines = [f"{{ const uint32_t stored[4] = {{{listed}}};"]
        lines.append(f"store_matrices(t, stored, {place}, {len(items)}, {transposed});")
    return " ".join([*lines, "}"])
