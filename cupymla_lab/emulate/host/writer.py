"""What the instructions' C++ is written with: their operands as expressions, their results into registers."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence, Set
from typing import Protocol

from ...ptx import Source
from ...ptx.syntax import Address, Constant, Group, Instruction, Name, Negated, Offset, Operand
from ..code import LAUNCH

SIZES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4, "s32": 4}
SIZES |= {"f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "f16x2": 4, "b128": 16, "pred": 1}
CPP = {"pred": "bool", "b8": "uint8_t", "u8": "uint8_t", "s8": "int8_t", "b16": "uint16_t", "u16": "uint16_t"}
CPP |= {"s16": "int16_t", "b32": "uint32_t", "u32": "uint32_t", "s32": "int32_t", "b64": "uint64_t", "u64": "uint64_t"}
CPP |= {"b128": "uint128_t", "s64": "int64_t", "f32": "float", "f64": "double", "f16": "uint16_t", "bf16": "uint16_t"}

_SPECIAL = {
    "%laneid": "t.lane",
    "%cluster_ctarank": "t.cta->rank",
    "%cluster_nctarank": "t.cta->cluster_size",
    "%dynamic_smem_size": "t.cta->dynamic_bytes",
    "%total_smem_size": "(t.cta->smem_bytes - machine::kSystemBytes)",
    "%globaltimer": "machine::now()",
    "%clock64": "machine::now()",
    "%clock": "static_cast<uint32_t>(machine::now())",
    "%warpid": "(t.index / 32)",
    "%smid": "t.cta->position[0]",
}
for _axis, _name in enumerate("xyz"):
    _SPECIAL |= {
        f"%tid.{_name}": f"t.id[{_axis}]",
        f"%ntid.{_name}": f"t.block[{_axis}]",
        f"%ctaid.{_name}": f"t.cta->position[{_axis}]",
        f"%nctaid.{_name}": f"t.grid[{_axis}]",
        f"%cluster_ctaid.{_name}": f"t.cta->in_cluster[{_axis}]",
        f"%cluster_nctaid.{_name}": f"t.cta->cluster_extent[{_axis}]",
    }


class Module(Protocol):
    """A module as far as its functions' instructions name what is in it."""

    @property
    def source(self) -> Source:
        """Its text."""

    @property
    def shared(self) -> Mapping[str, int]:
        """Offsets of its shared variables."""

    @property
    def dynamic(self) -> Set[str]:
        """Names of those that begin dynamic shared memory."""

    @property
    def globals(self) -> Set[str]:
        """Names of its global variables."""

    def dynamic_start(self) -> int:
        """Offset of dynamic shared memory."""


class Products(Protocol):
    """The registers that products of warpgroups use."""

    def table(self, registers: Sequence[str]) -> str:
        """The name of a table with their numbers."""


class Body(Protocol):
    """The function that an instruction stands in: what its names mean there."""

    name: str

    @property
    def unit(self) -> Module:
        """The module."""

    @property
    def products(self) -> Products:
        """Registers of products."""

    def register(self, name: str) -> tuple[str, int] | None:
        """C++ name and size in bytes of a register, 0 for a predicate; None when it is none."""

    def array(self, name: str) -> str | None:
        """The C++ name of a local array or parameter."""

    def label(self, name: str) -> str:
        """The C++ name of a label."""

    def table(self, name: str) -> tuple[str, ...]:
        """The labels of a table of branch targets."""


def mangled(name: str) -> str:
    """A PTX name as a C++ one, which C's library does not have."""
    return "ptx_" + re.sub(r"\W", lambda found: f"_{ord(found[0]):x}_", name)


class Writer:
    """Reads an instruction's operands as C++ expressions and writes its results.

    Attributes:
        used_bytes: how many of a load's bytes are used, by a pragma ahead of it; 0 where there is none.
    """

    def __init__(self, body: Body, instruction: Instruction, used_bytes: int) -> None:
        self.used_bytes = used_bytes
        self._body = body
        self.parts = instruction.parts
        self.operands = instruction.operands
        self.line = body.unit.source.line(instruction.start)
        self.names: set[str] = set()
        self._text = str(instruction)

    def _register(self, name: str) -> tuple[str, int] | None:
        """C++ name and size of a register, which the instruction uses; None when it is none."""
        found = self._body.register(name)
        if found is not None:
            self.names.add(found[0])
        return found

    def register(self, operand: Operand, size: int) -> str:
        """The C++ name of a register of that size in bytes."""
        found = self._register(operand.text) if isinstance(operand, Name) else None
        if found is None or found[1] != size:
            raise ValueError(f"{operand} is no register of {size} bytes")
        return found[0]

    def of_products(self, registers: Sequence[str]) -> str:
        """The name of a table with the numbers of registers that a wgmma uses."""
        return self._body.products.table(registers)

    def read(self, operand: Operand, kind: str) -> str:
        """An operand as an expression of a PTX type; floats as float and double."""
        cpp = CPP[kind]
        if isinstance(operand, Negated):
            return f"!{self.read(operand.operand, 'pred')}"
        if isinstance(operand, Constant):
            return self._constant(operand.text, kind)
        if isinstance(operand, Offset):
            return f"static_cast<{cpp}>({self.read(operand.base, kind)} + ({operand.constant}))"
        if not isinstance(operand, Name):
            raise ValueError(f"{operand} is no value")
        special = _SPECIAL.get(operand.text)
        if special is not None:
            return f"static_cast<{cpp}>({special})"
        found = self._register(operand.text)
        if found is None:
            return f"static_cast<{cpp}>({self._symbol(operand.text)})"
        name, size = found
        if kind == "pred":
            return name
        if kind in ("f32", "f64") and SIZES[kind] == size:
            return f"BITS_AS({cpp}, {name})"
        return name if cpp == f"uint{8 * size}_t" else f"static_cast<{cpp}>({name})"

    def _symbol(self, name: str) -> str:
        unit = self._body.unit
        place = self._body.array(name)
        if place is not None:
            return f"reinterpret_cast<uint64_t>({place})"
        if name in unit.shared:
            return f"shared_address(t, {unit.shared[name]})"
        if name in unit.dynamic:
            return f"shared_address(t, {unit.dynamic_start()})"
        if name in unit.globals:
            return f"reinterpret_cast<uint64_t>({mangled(name)})"
        raise KeyError(name)

    @staticmethod
    def _constant(text: str, kind: str) -> str:
        if text[:2] in ("0f", "0F"):
            bits = int(text[2:], 16)
            return f"BITS_AS(float, uint32_t{{{bits:#x}u}})" if kind == "f32" else f"{bits:#x}u"
        if text[:2] in ("0d", "0D"):
            bits = int(text[2:], 16)
            return f"BITS_AS(double, uint64_t{{{bits:#x}ull}})" if kind == "f64" else f"{bits:#x}ull"
        if kind in ("f32", "f64"):
            number = float(text)
            bits = struct.unpack("<Q", struct.pack("<d", number))[0]
            return f"static_cast<{CPP[kind]}>(BITS_AS(double, uint64_t{{{bits:#x}ull}}))"
        return f"static_cast<{CPP[kind]}>({text.rstrip('U')}ll)" if kind != "pred" else f"({text} != 0)"

    def write(self, operand: Operand, expression: str, kind: str) -> str:
        """Code that puts a value of a PTX type into a register. Narrow values are extended as their type says."""
        if isinstance(operand, Name) and operand.text == "_":
            return f"(void)({expression});"
        if not isinstance(operand, Name):
            raise ValueError(f"{operand} is no register")
        found = self._register(operand.text)
        if found is None:
            raise KeyError(operand.text)
        name, size = found
        if size == 0:
            return f"{name} = ({expression});"
        if kind in ("f32", "f64"):
            return f"{name} = BITS_AS(uint{8 * size}_t, {expression});"
        return f"{name} = static_cast<int{8 * size}_t>({expression});" if kind[0] == "s" else f"{name} = {expression};"

    def size(self, operand: Operand) -> int:
        """The size in bytes of a register operand."""
        found = self._register(operand.text) if isinstance(operand, Name) else None
        if found is None:
            raise ValueError(f"{operand} is no register")
        return found[1]

    def place(self, operand: Operand, space: str, bytes_: int, how: str) -> str:
        """An address operand as a pointer expression. `how`: of `Use` in runtime.hpp."""
        if not isinstance(operand, Address):
            raise ValueError(f"{operand} is no address")
        inner = operand.items[0]
        if space.startswith("shared"):
            anywhere = "" if space == "shared::cluster" else "own_"
            return f"{anywhere}shared(t, {self.read(inner, 'u32')}, {bytes_})"
        address = self.read(inner, "u64")
        if space in ("global", "") and not self._is_model(inner):
            return f"global(t, {address}, {bytes_}, {how}, {json.dumps(self._text)})"
        return f"generic({address}, {bytes_})"

    def names_global(self, operand: Operand) -> str:
        """Code for an instruction that uses global memory, perhaps, at an address but not through `place`."""
        if not isinstance(operand, Address):
            raise ValueError(f"{operand} is no address")
        address = self.read(operand.items[0], "u64")
        return f"if (!t.released) require_released(t, {address}, {json.dumps(self._text)});"

    def _is_model(self, address: Operand) -> bool:
        """Whether an address is the emulation's own: its launch state, or what one of its functions reads."""
        base = address.base if isinstance(address, Offset) else address
        return (isinstance(base, Name) and base.text == LAUNCH) or self._body.name.startswith("cupymla_emulate_")

    def parameter(self, operand: Operand, offset: int = 0) -> str:
        """A parameter's place as a pointer expression."""
        if not isinstance(operand, Address):
            raise ValueError(f"{operand} is no address")
        inner = operand.items[0]
        extra = 0
        if isinstance(inner, Offset):
            extra, inner = int(inner.constant, 0), inner.base
        assert isinstance(inner, Name)
        place = self._body.array(inner.text)
        if place is None:
            return f"generic({self.read(operand.items[0], 'u64')} + {offset}, 1)"
        plain = f"const_cast<void*>(static_cast<const void*>({place}))"
        return f"(reinterpret_cast<unsigned char*>({plain}) + {extra + offset})"

    def label(self, operand: Operand) -> str:
        """A branch's target."""
        assert isinstance(operand, Name)
        return self._body.label(operand.text)

    def targets(self, operand: Operand) -> list[str]:
        """The targets of a table."""
        assert isinstance(operand, Name)
        return [self._body.label(name) for name in self._body.table(operand.text)]

    def call(self) -> str:
        """A call with the arrays that hold its parameters."""
        operands = list(self.operands)
        groups = [operand for operand in operands if isinstance(operand, Group)]
        names = [operand for operand in operands if isinstance(operand, Name)]
        arrays = []
        for group in groups:
            for item in group.items:
                assert isinstance(item, Name)
                arrays.append(str(self._body.array(item.text)))
        return f"{mangled(names[0].text)}({', '.join(('t', *arrays))});"
