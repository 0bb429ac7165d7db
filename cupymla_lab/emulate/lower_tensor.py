"""tcgen05 instructions as calls into the model.

Source: PTX ISA 9.0, "TensorCore 5th Generation Instructions". The numbers that stand for kinds, shapes and spreads are
those of cupymla_lab/emulate/model/descriptor.cuh, tmem.cuh and move.cuh.
"""

from __future__ import annotations

from ..ptx.syntax import Address, Constant, Operand, Vector
from .code import BUFFER, Code, constant

KINDS = {"tf32": 0, "f16": 1, "f8f6f4": 2, "i8": 3, "mxf8f6f4": 4, "mxf4": 5, "mxf4nvf4": 6}
MOVE_SHAPES = {"32x32b": 0, "16x64b": 1, "16x128b": 2, "16x256b": 3, "16x32bx2": 4}
_REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
WS_KINDS = ("tf32", "f16", "f8f6f4", "i8")
COLLECTOR_USES = {"discard": 0, "fill": 1, "use": 2, "lastuse": 3}
COPY_SHAPES = {"128x256b": 0, "4x256b": 1, "128x128b": 2, "64x128b": 3, "32x128b": 4}
SPREADS = {"": 0, "warpx2::02_13": 1, "warpx2::01_23": 2, "warpx4": 3}
COPY_FORMATS = {"": 0, "b6x16_p32": 1, "b4x16_p64": 2}


def _group(code: Code) -> int:
    for part in code.instruction.parts:
        if part.startswith("cta_group::"):
            return int(part.removeprefix("cta_group::"))
    raise code.error("a .cta_group is missing")


def _pick(code: Code, table: dict[str, int], what: str) -> int:
    for part in code.instruction.parts:
        if part in table:
            return table[part]
    if "" in table:
        return table[""]
    raise code.error(f"no {what} among {', '.join(table)}")


def _has(code: Code, part: str) -> bool:
    return part in code.instruction.parts


def _tmem(code: Code, operand: Operand) -> str:
    return code.value(code.inner(operand), 32)


def alloc(code: Code) -> None:
    """tcgen05.alloc, .dealloc and .relinquish_alloc_permit."""
    action = code.instruction.parts[1]
    if action == "alloc":
        address = code.shared(code.operand(0), _has(code, "shared::cta"))
        code.call("alloc", address, code.value(code.operand(1)), _group(code), code.site)
    elif action == "dealloc":
        code.call("dealloc", code.value(code.operand(0)), code.value(code.operand(1)), _group(code), code.site)
    else:
        code.call("relinquish", _group(code), code.site)


def _form(code: Code) -> tuple[int, int]:
    """The form word without the split, and how many registers it moves."""
    parts = code.instruction.parts
    shape = next((part for part in parts if part in MOVE_SHAPES), None)
    times = next((int(part[1:]) for part in parts if part[0] == "x" and part[1:].isdigit()), None)
    if shape is None or times is None:
        raise code.error("no shape or multiplicity that tcgen05.ld and .st have")
    registers = _REGISTERS[shape] * times
    if registers > 128:
        raise code.error(f"{shape} has no .x{times}")
    packed = _has(code, "pack::16b") or _has(code, "unpack::16b")
    return MOVE_SHAPES[shape] | (times.bit_length() - 1) << 3 | packed << 7, registers


def load(code: Code) -> None:
    """tcgen05.ld: the model fills the function's local buffer, from which the registers are loaded."""
    if _has(code, "red"):
        raise code.error("tcgen05.ld.red, which sm_100a does not have, is left out")
    form, count = _form(code)
    if form & 7 == MOVE_SHAPES["16x32bx2"]:
        form |= constant(code.operand(2)) << 8
    registers = code.items(code.operand(0))
    if len(registers) != count:
        raise code.error(f"expected {count} registers, found {len(registers)}")
    address = _tmem(code, code.operand(1))
    code.call("ld", code.buffer_address(), address, form, code.site)
    for at in range(0, count, 4):
        four = [str(register) for register in registers[at : at + 4]]
        if len(four) == 4:
            code.line(f"ld.local.v4.b32 {{{', '.join(four)}}}, [{BUFFER}+{4 * at}];")
        else:
            for index, register in enumerate(four):
                code.line(f"ld.local.b32 {register}, [{BUFFER}+{4 * (at + index)}];")


def store(code: Code) -> None:
    """tcgen05.st, the other way."""
    form, count = _form(code)
    split = form & 7 == MOVE_SHAPES["16x32bx2"]
    if split:
        form |= constant(code.operand(1)) << 8
    registers = code.items(code.operand(2 if split else 1))
    if len(registers) != count:
        raise code.error(f"expected {count} registers, found {len(registers)}")
    address, buffer = _tmem(code, code.operand(0)), code.buffer_address()
    for index, register in enumerate(registers):
        code.line(f"st.local.b32 [{BUFFER}+{4 * index}], {code.value(register)};")
    code.call("st", buffer, address, form, code.site)


def wait(code: Code) -> None:
    """tcgen05.wait::ld and ::st."""
    code.call("wait_ld" if code.instruction.parts[1] == "wait::ld" else "wait_st", code.site)


def fence(code: Code) -> None:
    """tcgen05.fence::before_thread_sync and ::after_thread_sync."""
    before = code.instruction.parts[1] == "fence::before_thread_sync"
    code.call("fence_before" if before else "fence_after", code.site)


def _vector_size(code: Code, kind: str) -> int:
    """The N of .scale_vec::NX, with the aliases .block16 and .block32 and the default resolved."""
    sizes = {"scale_vec::1X": 1, "scale_vec::2X": 2, "scale_vec::4X": 4, "block16": 4}
    sizes["block32"] = 1 if kind == "mxf8f6f4" else 2
    for part in code.instruction.parts:
        if part in sizes:
            found = sizes[part]
            break
    else:
        if kind == "mxf4nvf4":
            raise code.error(".kind::mxf4nvf4 needs a .scale_vec size")
        found = sizes["block32"]
    allowed = {"mxf8f6f4": (1,), "mxf4": (2,), "mxf4nvf4": (2, 4)}[kind]
    if found not in allowed:
        raise code.error(f".kind::{kind} has no such .scale_vec size")
    return found


def _kind(code: Code) -> str:
    parts = code.instruction.parts
    kind = next((part.removeprefix("kind::") for part in parts if part.startswith("kind::")), "")
    if kind not in KINDS:
        raise code.error(f"no .kind that tcgen05.mma has: {kind or 'none'}")
    return kind


def _collector(code: Code) -> tuple[str, str]:
    """The collector buffer that is named and what is done with it; two empty strings where none is."""
    found = [part for part in code.instruction.parts if part.startswith("collector::")]
    if not found:
        return "", ""
    _, buffer, use = (*found[0].split("::"), "", "")[:3]
    if len(found) > 1 or use not in COLLECTOR_USES:
        raise code.error(f"expected one collector hint, ending in {', '.join(COLLECTOR_USES)}; found {found}")
    return buffer, use


def mma(code: Code) -> None:
    """tcgen05.mma and .mma.sp: operands go to the model as ten words, see `Mma` in cupymla_lab/emulate/model/mma.cuh.

    Where a scaled product has its factors' addresses, a sparse one has that of its metadata.
    """
    parts = code.instruction.parts
    kind = _kind(code)
    buffer, use = _collector(code)
    if buffer not in ("", "a"):
        raise code.error("a dense tcgen05.mma has collector buffer a; those of B belong to .ws")
    scaled = "block_scale" in parts
    if scaled != (kind.startswith("mxf")):
        raise code.error(f".kind::{kind} {'has no' if scaled else 'needs'} .block_scale")
    operands = list(code.instruction.operands)
    a_in_tmem, sparse = isinstance(code.operand(1), Address), "sp" in parts
    if sparse and scaled:
        raise code.error("tcgen05.mma.sp with .block_scale is left out")
    metadata = _tmem(code, operands.pop(3)) if sparse else ""
    if "ashift" in parts and (not a_in_tmem or scaled or use in ("fill", "use")):
        raise code.error(".ashift takes A in Tensor Memory, without .block_scale and collector hints to fill or use")
    rest = list(operands[4:])
    vector = scales = None
    masks: tuple[Operand, ...] = ()
    if scaled:
        vector, scales, rest = _vector_size(code, kind), rest[:2], rest[2:]
    elif rest and isinstance(rest[0], Vector):
        masks, rest = rest[0].items, rest[1:]
    group = _group(code)
    if masks and len(masks) != 4 * group:
        raise code.error(f"disable-output-lane has {4 * group} words in .cta_group::{group}")
    if not 1 <= len(rest) <= 2:
        raise code.error("operands that tcgen05.mma does not have")
    flags = KINDS[kind] | group << 3 | (vector or 0) << 5 | a_in_tmem << 8 | ("ashift" in parts) << 9 | sparse << 15
    words = [(_tmem(code, operands[1]), 32) if a_in_tmem else (code.value(operands[1], 64), 64)]
    words.append((code.value(operands[2], 64), 64))
    words.append((_joined(code, _tmem(code, operands[0]), code.value(operands[3])), 64))
    words.append((code.value(Constant(str(flags)), 64), 64))
    enable = code.value(rest[0])
    if len(rest) == 2:
        code.line(f"or.b32 {enable}, {enable}, {constant(rest[1]) << 8};")
    words.append((enable, 32))
    zero = code.value(Constant("0"))
    a_scale, b_scale = [_tmem(code, scale) for scale in scales] if scales else [metadata or zero, zero]
    words.append((_joined(code, a_scale, b_scale), 64))
    lanes = [code.value(mask) for mask in masks]
    lanes += [zero] * (8 - len(lanes))
    for low, high in zip(lanes[::2], lanes[1::2], strict=True):
        words.append((_joined(code, low, high), 64))
    code.call("mma", code.buffer(words), code.site)


def mma_ws(code: Code) -> None:
    """tcgen05.mma.ws and .ws.sp: the same ten words.

    Where a scaled product has its factors' addresses, the zero-column mask; where there would be disabled lanes, the
    address of a sparse A's metadata.
    """
    parts = code.instruction.parts
    kind = _kind(code)
    if kind not in WS_KINDS:
        raise code.error(f".kind::{kind} has no .ws; {', '.join(WS_KINDS)} have")
    if _group(code) != 1:
        raise code.error("tcgen05.mma.ws has .cta_group::1 only")
    if "ashift" in parts or "block_scale" in parts:
        raise code.error("tcgen05.mma.ws has neither .ashift nor .block_scale")
    buffer, use = _collector(code)
    buffers = {"": 0, "b0": 0, "b1": 1, "b2": 2, "b3": 3}
    if buffer not in buffers:
        raise code.error(f"tcgen05.mma.ws has collector buffers b0 to b3, not {buffer}")
    operands, sparse = list(code.instruction.operands), "sp" in parts
    metadata = _tmem(code, operands.pop(3)) if sparse else code.value(Constant("0"))
    if not 5 <= len(operands) <= 6 or isinstance(operands[4], Vector):
        raise code.error("expected D, A, B, instruction descriptor, enable-input-d and perhaps a zero-column mask")
    a_in_tmem = isinstance(operands[1], Address)
    hints = 1 << 10 | buffers[buffer] << 11 | COLLECTOR_USES[use or "discard"] << 13
    flags = KINDS[kind] | 1 << 3 | a_in_tmem << 8 | hints | sparse << 15
    words = [(_tmem(code, operands[1]), 32) if a_in_tmem else (code.value(operands[1], 64), 64)]
    words.append((code.value(operands[2], 64), 64))
    words.append((_joined(code, _tmem(code, operands[0]), code.value(operands[3])), 64))
    words.append((code.value(Constant(str(flags)), 64), 64))
    words.append((code.value(operands[4]), 32))
    words.append((code.value(operands[5] if len(operands) == 6 else Constant("0"), 64), 64))
    words += [(metadata, 32), *[(code.value(Constant("0"), 64), 64)] * 3]
    code.call("mma", code.buffer(words), code.site)


def _joined(code: Code, low: str, high: str) -> str:
    wide = code.temporary(64)
    code.line(f"mov.b64 {wide}, {{{low}, {high}}};")
    return wide


def copy(code: Code) -> None:
    """tcgen05.cp from shared memory."""
    shape = _pick(code, COPY_SHAPES, "shape")
    spread = _pick(code, SPREADS, "multicast")
    expected = {3: (1, 2), 4: (3,)}.get(shape, (0,))
    if spread not in expected:
        raise code.error("this shape of tcgen05.cp has other multicasts")
    flags = shape | spread << 3 | _pick(code, COPY_FORMATS, "format") << 5 | _group(code) << 7
    words = [(code.value(code.operand(1), 64), 64), (_tmem(code, code.operand(0)), 32)]
    words.append((code.value(Constant(str(flags)), 64), 64))
    code.call("cp", code.buffer(words), code.site)


def shift(code: Code) -> None:
    """tcgen05.shift.down."""
    code.call("shift", _tmem(code, code.operand(0)), _group(code), code.site)


def commit(code: Code) -> None:
    """tcgen05.commit, to one barrier or to the same one of several CTAs."""
    barrier = code.shared(code.operand(0), _has(code, "shared::cluster"))
    mask = code.value(code.operand(1)) if _has(code, "multicast::cluster") else code.value(Constant("0"))
    code.call("commit", barrier, mask, _group(code), code.site)
