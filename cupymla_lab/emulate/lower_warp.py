"""ldmatrix and stmatrix of 8-bit elements as calls into the model.

Source: PTX ISA 9.0, "Warp-level matrix load instruction: ldmatrix", "Warp-level matrix store instruction: stmatrix".
"""

from __future__ import annotations

from .code import BUFFER, Code

SHAPES = frozenset({"m16n16", "m8n16", "m16n8"})
_COUNTS = {"x1": 0, "x2": 1, "x4": 2}
_FORMATS = {("b8",): 8, ("b8x16", "b6x16_p32"): 6, ("b8x16", "b4x16_p64"): 4}
# Which forms there are: of each instruction and shape, the counts, the formats, and whether it transposes.
_FORMS = {
    ("ldmatrix", "m16n16"): (("x1", "x2"), (8, 6, 4), True),
    ("ldmatrix", "m8n16"): (("x1", "x2", "x4"), (6, 4), False),
    ("stmatrix", "m16n8"): (("x1", "x2", "x4"), (8,), True),
}


def byte_matrices(code: Code) -> None:
    """ldmatrix .m16n16 and .m8n16, stmatrix .m16n8; see cupymla_lab/emulate/model/warp.cuh."""
    parts = [part for part in code.instruction.parts if part not in ("sync", "aligned") and "shared" not in part]
    stem, shape = parts[0], next(part for part in parts if part in SHAPES)
    count = next((part for part in parts if part in _COUNTS), "")
    bits = _FORMATS.get(tuple(part for part in parts[1:] if part[0] == "b"), 0)
    counts, formats, transposes = _FORMS.get((stem, shape), ((), (), False))
    if count not in counts or bits not in formats or ("trans" in parts) != transposes:
        raise code.error(f"a form of {stem} .{shape} that sm_100a does not have")
    loads = stem == "ldmatrix"
    registers = code.items(code.operand(0 if loads else 1))
    expected = (2 if shape == "m16n16" else 1) << _COUNTS[count]
    if len(registers) != expected:
        raise code.error(f"expected {expected} registers, found {len(registers)}")
    named = any(part.startswith("shared") for part in code.instruction.parts)
    address = code.shared(code.operand(1 if loads else 0), named)
    form = _COUNTS[count] | (shape == "m16n16") << 2 | bits << 4
    if loads:
        code.call("load_bytes", code.buffer_address(), address, form)
        for index, register in enumerate(registers):
            code.line(f"ld.local.b32 {register}, [{BUFFER}+{4 * index}];")
        return
    buffer = code.buffer_address()
    for index, register in enumerate(registers):
        code.line(f"st.local.b32 [{BUFFER}+{4 * index}], {code.value(register)};")
    code.call("store_bytes", buffer, address, form)
