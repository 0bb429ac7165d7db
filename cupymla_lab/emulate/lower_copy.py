"""Bulk copies: instructions that the model executes when their completion is waited for.

Each form of copy in a module becomes one function that reads its operands from memory and executes the instruction as
sm_90a has it; the model calls it by number. Cache hints are left off, `.cta_group::1` too. Copies for a CTA pair,
gathers and scatters, which sm_90a does not have, are carried out by threads; so are copies from shared memory to shared
memory on a GPU, which only a thread of the CTA that they come from can issue. Reductions from shared memory to shared
memory are executed when they are issued there, whatever the mode.

Source: PTX ISA 9.0, "Data Movement and Conversion Instructions: Bulk copy", "Tensor copy".
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ptx.syntax import Address, Constant, Operand, Vector
from .code import Code

# `kBetweenCtas` and `kAtOnce` of model/queue.cuh, beside the number of a copy, or of a reduction, from shared memory
# to shared memory.
_BETWEEN_CTAS, _AT_ONCE = 0x80000000, 0x40000000


def bulk(code: Code) -> None:
    """cp.async.bulk and cp.reduce.async.bulk in all forms."""
    parts = code.instruction.parts
    if "commit_group" in parts:
        code.unless_removed("cp.async.bulk.commit_group;")
        code.call("group_end", code.site)
    elif "wait_group" in parts:
        _wait(code)
    elif "prefetch" in parts:
        code.call("grid_ahead", code.site)  # it changes no result
    elif "bulk_group" in parts:
        _to_global(code)
    else:
        _to_shared(code)


def _wait(code: Code) -> None:
    newest = code.value(code.operand(0))
    code.call("group_wait", newest, code.site)
    # What the model has just executed is no group of its own yet; it is made one and waited for.
    removed = code.removed()
    code.line(f"@!{removed} cp.async.bulk.commit_group;")
    code.line(f"@!{removed} cp.async.bulk.wait_group 0;")


def _cleaned(parts: Sequence[str]) -> list[str]:
    """Qualifiers as sm_90a has them: without CTA groups, cache hints and gathers."""
    gone = ("cta_group::1", "cta_group::2", "L2::cache_hint", "tile::gather4")
    return [part for part in parts if part not in gone]


def _reject(code: Code) -> None:
    for part in code.instruction.parts:
        if part.startswith("im2col") and part != "im2col":
            raise code.error(f".{part} is left out")
        if part in ("ignore_oob", "cp_mask"):
            raise code.error(f".{part} is left out")


def _tensor(operand: Operand) -> tuple[Operand, tuple[Operand, ...]]:
    """The tensor map and the coordinates of `[map, {x, y}]`."""
    assert isinstance(operand, Address)
    if len(operand.items) == 1:
        return operand.items[0], ()
    coordinates = operand.items[1]
    return operand.items[0], coordinates.items if isinstance(coordinates, Vector) else (coordinates,)


class _Form:
    """Collects a copy's operands as words and, in step, the lines that load them again."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self.words: list[tuple[str, int]] = []
        self.lines: list[str] = []

    def take(self, register: str, bits: int) -> str:
        """Add a register; returns the name it has when the copy is executed."""
        name = f"%w{len(self.words)}"
        self.lines.append(f".reg .b{bits} {name}; ld.b{bits} {name}, [%ops+{8 * len(self.words)}];")
        self.words.append((register, bits))
        return name


def _mask(form: _Form, operand: Operand) -> tuple[str, str]:
    """The multicast mask for the model, and as the 16-bit register that the instruction takes."""
    mask = form.code.value(operand)
    wide = form.take(mask, 32)
    narrow = f"{wide}h"
    form.lines.append(f".reg .b16 {narrow}; cvt.u16.u32 {narrow}, {wide};")
    return mask, narrow


def _to_shared(code: Code) -> None:
    _reject(code)
    parts, operands = code.instruction.parts, list(code.instruction.operands)
    if "mbarrier::complete_tx::bytes" not in parts:
        raise code.error("a bulk copy to shared memory without a barrier")
    form, tensor = _Form(code), "tensor" in parts
    if "L2::cache_hint" in parts:
        operands.pop()
    # First the two places in shared memory, which the model turns into what every CTA of the cluster knows them by.
    destination = code.shared(operands[0], named=True)
    to = form.take(destination, 32)
    barrier = code.shared(operands[2 if tensor else 3], named=True)
    signal = form.take(barrier, 32)
    between = not tensor and "global" not in parts
    if tensor:
        base, coordinates = _tensor(operands[1])
        source = form.take(code.value(base, 64), 64)
        places = [form.take(code.value(item), 32) for item in coordinates]
    else:
        bits = 32 if between else 64
        source = form.take(code.value(code.inner(operands[1]), bits), bits)
        size = form.take(code.value(operands.pop(2)), 32)
    if tensor and {"cta_group::2", "tile::gather4"} & set(parts):
        _by_threads(code, operands, destination, barrier)
        return
    rest = operands[3:]
    mask, tail = code.value(Constant("0")), ""
    if "multicast::cluster" in parts:
        mask, narrow = _mask(form, rest.pop())
        tail = f", {narrow}"
    if rest:
        offsets = [form.take(code.value(item, 16), 16) for item in code.items(rest.pop(0))]
        tail = f", {{{', '.join(offsets)}}}{tail}"
    opcode = ".".join(_cleaned(parts))
    if not tensor:
        form.lines.append(f"{opcode} [{to}], [{source}], {size}, [{signal}]{tail};")
    else:
        form.lines.append(f"{opcode} [{to}], [{source}, {{{', '.join(places)}}}], [{signal}]{tail};")
    flag = 0 if not between else _AT_ONCE if "reduce" in parts else _BETWEEN_CTAS
    number = code.value(Constant(str(code.thunks.number(form.lines) | flag)))
    words = [(number, 32), (barrier, 32), (mask, 32), *form.words]
    code.call("load", code.buffer(words), len(words), code.site)


def _by_threads(code: Code, operands: Sequence[Operand], destination: str, barrier: str) -> None:
    """A copy that the model carries out; see `Tile` in cupymla_lab/emulate/model/tile.cuh."""
    parts = code.instruction.parts
    if any(part.startswith("im2col") for part in parts):
        raise code.error(".im2col with .cta_group::2 is left out")
    base, coordinates = _tensor(operands[1])
    code.call("grid_ahead", code.site)
    zero = code.value(Constant("0"))
    mask = code.value(operands[3]) if "multicast::cluster" in parts else zero
    flags = int("tile::gather4" in parts) | int("cta_group::2" in parts) << 1
    words = [(code.value(base, 64), 64), (barrier, 32), (mask, 32), (destination, 32)]
    words.append((code.value(Constant(str(flags))), 32))
    places = [code.value(item) for item in coordinates] + [zero] * (5 - len(coordinates))
    code.call("tile", code.buffer([*words, *((place, 32) for place in places)]), code.site)


def _to_global(code: Code) -> None:
    _reject(code)
    parts, operands = code.instruction.parts, list(code.instruction.operands)
    form, tensor = _Form(code), "tensor" in parts
    code.call("grid_ahead", code.site)
    if "L2::cache_hint" in parts:
        operands.pop()
    if "tile::scatter4" in parts:
        _scatter(code, operands)
        return
    opcode = ".".join(_cleaned(parts))
    if tensor:
        base, coordinates = _tensor(operands[0])
        target = form.take(code.value(base, 64), 64)
        places = [form.take(code.value(item), 32) for item in coordinates]
        from_ = code.shared(operands[1], named=True)
        source = form.take(from_, 32)
        form.lines.append(f"{opcode} [{target}, {{{', '.join(places)}}}], [{source}];")
        bytes_ = code.value(Constant("16"))
    else:
        target = form.take(code.value(code.inner(operands[0]), 64), 64)
        from_ = code.shared(operands[1], named=True)
        source = form.take(from_, 32)
        bytes_ = code.value(operands[2])
        size = form.take(bytes_, 32)
        form.lines.append(f"{opcode} [{target}], [{source}], {size};")
    number = code.value(Constant(str(code.thunks.number(form.lines))))
    words = [(number, 32), (from_, 32), (bytes_, 32), *form.words]
    code.call("store", code.buffer(words), len(words), code.site)


def _scatter(code: Code, operands: Sequence[Operand]) -> None:
    """A store to four rows; see `execute_store` in cupymla_lab/emulate/model/queue.cuh."""
    base, coordinates = _tensor(operands[0])
    if len(coordinates) != 5:
        raise code.error(f"expected a column and four rows, found {len(coordinates)} coordinates")
    source, zero = code.shared(operands[1], named=True), code.value(Constant("0"))
    number, flags = code.value(Constant("0xffffffff")), code.value(Constant("1"))
    words = [(number, 32), (source, 32), (zero, 32)]
    words += [(code.value(base, 64), 64), (zero, 32), (zero, 32), (source, 32), (flags, 32)]
    words += [(code.value(item), 32) for item in coordinates]
    code.call("scatter", code.buffer(words), code.site)


def zero_fill(code: Code) -> None:
    """st.bulk, which clears shared memory."""
    address = code.shared(code.operand(0), any(part.startswith("shared") for part in code.instruction.parts))
    code.call("clear", address, code.value(code.operand(1)))
