"""What a cubin says of itself, read from its ELF image with nothing but `struct`.

Sources: the ELF-64 object file format for headers, sections and symbols; the attribute records of `.nv.info`
(format byte, attribute byte, 16-bit size or value) as `cuobjdump -elf` prints them.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

_MACHINE_CUDA = 190
_NOBITS = 8
_FUNCTION, _GLOBAL_OR_WEAK = 2, (1, 2)
_KERNEL = 0x10
_FORMAT_SIZED = 4
_REGISTERS, _PARAMETER = 0x2F, 0x17
_PARAMETER_SIZE_BIT = 18

# A fact is spelled `name = expression`; an expression holds comparisons but no assignment.
_FACT_NAME = re.compile(r"(\w+)\s*=(?!=)")


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel takes from the machine, as ptxas and the ELF image tell it.

    Attributes:
        registers: per thread.
        spill_store_bytes: written to local memory per thread because registers ran out, callees included.
        spill_load_bytes: read back.
        stack_bytes: stack frame per thread.
        static_smem_bytes: shared memory the kernel declares; dynamic shared memory comes on top.
    """

    registers: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    stack_bytes: int = 0
    static_smem_bytes: int = 0

    @property
    def spills(self) -> bool:
        """Whether anything was spilled."""
        return bool(self.spill_store_bytes or self.spill_load_bytes)


@dataclass(frozen=True, slots=True)
class Cubin:
    """One compiled kernel.

    Attributes:
        data: the ELF image.
        entry: the kernel's name.
        arch: the target it was compiled for.
        facts: the launch facts that the source states (see `cuda/common/entry.cuh`).
        parameters: size in bytes of each kernel parameter, in order.
        resources: registers, spills, stack and static shared memory.
        log: the compiler's log.
        path: the file it is kept in, or None when no cache folder could be written.
        cached: True when it was found rather than compiled now.
        seconds: how long the compilation took, whenever that was.
        toolchain: compiler and header versions.
    """

    data: bytes = field(repr=False)
    entry: str
    arch: str
    facts: Mapping[str, int]
    parameters: tuple[int, ...]
    resources: Resources
    log: str = field(default="", repr=False)
    path: Path | None = None
    cached: bool = False
    seconds: float = 0.0
    toolchain: str = ""


@dataclass(frozen=True, slots=True)
class Symbol:
    """A row of the symbol table: where a named object or function lies."""

    name: str
    section: int
    offset: int
    size: int
    kernel: bool


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    kind: int
    offset: int
    size: int
    link: int


def whole_bytes(image: bytes) -> int:
    """Where an ELF-64 image's header tables end, which is where the image ends (ELF-64 object file format, ELF header).

    The size of the bytes themselves when they are no ELF header.
    """
    if len(image) < 64 or image[:4] != b"\x7fELF":
        return len(image)
    program, section = struct.unpack_from("<QQ", image, 32)
    program_step, programs, section_step, sections = struct.unpack_from("<HHHH", image, 54)
    return int(max(len(image), program + program_step * programs, section + section_step * sections))


class Image:
    """A parsed cubin. Raises ValueError when the bytes are no complete CUDA ELF-64 image."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        if len(data) < 64 or data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a little-endian ELF-64 image")
        if whole_bytes(data) > len(data):
            raise ValueError(f"{len(data)} bytes of an ELF image of {whole_bytes(data)}")
        try:
            self._sections = self._read_sections()
            self._symbols = self._read_symbols()
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise ValueError(f"damaged ELF image: {error}") from error

    def _read_sections(self) -> list[_Section]:
        (machine,) = struct.unpack_from("<H", self._data, 18)
        if machine != _MACHINE_CUDA:
            raise ValueError(f"ELF machine {machine} is not CUDA's {_MACHINE_CUDA}")
        (start,) = struct.unpack_from("<Q", self._data, 40)
        step, count, names = struct.unpack_from("<HHH", self._data, 58)
        rows = [struct.unpack_from("<IIQQQQIIQQ", self._data, start + i * step) for i in range(count)]
        base = rows[names][4]
        sections = [_Section(self._text(base + row[0]), row[1], row[4], row[5], row[6]) for row in rows]
        for section in sections:
            if section.kind != _NOBITS and section.offset + section.size > len(self._data):
                raise ValueError(f"section {section.name} reaches past the end")
        return sections

    def _text(self, offset: int) -> str:
        end = self._data.index(b"\0", offset)
        return self._data[offset:end].decode()

    def _named(self, name: str) -> _Section | None:
        return next((section for section in self._sections if section.name == name), None)

    def _read_symbols(self) -> list[Symbol]:
        table = self._named(".symtab")
        if table is None:
            return []
        names = self._sections[table.link].offset
        symbols = []
        for at in range(table.offset, table.offset + table.size, 24):
            name, info, other, section, offset, size = struct.unpack_from("<IBBHQQ", self._data, at)
            kernel = info & 0xF == _FUNCTION and info >> 4 in _GLOBAL_OR_WEAK and bool(other & _KERNEL)
            symbols.append(Symbol(self._text(names + name), section, offset, size, kernel))
        return symbols

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names of its kernels."""
        return tuple(symbol.name for symbol in self._symbols if symbol.kernel)

    def content(self, name: str) -> bytes | None:
        """The initial bytes of a global variable, or None when there is none of that name.

        Raises ValueError when the image is damaged.
        """
        symbol = next((symbol for symbol in self._symbols if symbol.name == name and symbol.size), None)
        if symbol is None:
            return None
        if symbol.section >= len(self._sections):
            raise ValueError(f"{name} lies in section {symbol.section} of {len(self._sections)}")
        section = self._sections[symbol.section]
        if symbol.offset + symbol.size > section.size:
            raise ValueError(f"{name} reaches past the end of section {section.name}")
        start = section.offset + symbol.offset
        return bytes(symbol.size) if section.kind == _NOBITS else self._data[start : start + symbol.size]

    def facts(self) -> dict[str, int]:
        """The launch facts, empty when the source states none. Raises ValueError when names and values disagree."""
        return facts_of(self.content)

    def _attributes(self, section_name: str) -> Iterator[tuple[int, int, bytes]]:
        """Attribute, 16-bit inline value and payload of each record in a `.nv.info` section."""
        section = self._named(section_name)
        if section is None:
            return
        at, end = section.offset, section.offset + section.size
        while at + 4 <= end:
            form, attribute, value = struct.unpack_from("<BBH", self._data, at)
            extra = value if form == _FORMAT_SIZED else 0
            yield attribute, value, self._data[at + 4 : at + 4 + extra]
            at += 4 + extra

    def machine_code(self) -> dict[str, bytes]:
        """What a GPU is given of the image, by section: code, constants, variables, what launches need; no lines."""
        kept = (".text.", ".nv.constant", ".nv.info", ".nv.global", ".nv.shared", ".nv.local")
        return {
            section.name: section.size.to_bytes(8, "little")
            if section.kind == _NOBITS
            else self._data[section.offset : section.offset + section.size]
            for section in self._sections
            if section.name.startswith(kept)
        }

    def registers(self, kernel: str) -> int:
        """Registers per thread of a kernel; 0 when the image does not say."""
        for attribute, _, payload in self._attributes(".nv.info"):
            if attribute == _REGISTERS and len(payload) == 8:
                symbol, count = struct.unpack("<II", payload)
                if symbol < len(self._symbols) and self._symbols[symbol].name == kernel:
                    return int(count)
        return 0

    def shared_bytes(self, kernel: str) -> int:
        """Static shared memory of a kernel, with what the system keeps of it for itself (1024 bytes since sm_90)."""
        section = self._named(f".nv.shared.{kernel}")
        return 0 if section is None else section.size

    def parameters(self, kernel: str) -> tuple[int, ...]:
        """Size in bytes of each parameter of a kernel, in order."""
        sizes = {}
        for attribute, _, payload in self._attributes(f".nv.info.{kernel}"):
            if attribute == _PARAMETER and len(payload) == 12:
                _, ordinal, _, packed = struct.unpack("<IHHI", payload)
                sizes[ordinal] = packed >> _PARAMETER_SIZE_BIT
        return tuple(size for _, size in sorted(sizes.items()))


def facts_of(content: Callable[[str], bytes | None]) -> dict[str, int]:
    """The launch facts that a source states (see `cuda/common/entry.cuh`), empty when it states none.

    `content` gives what a variable of that name holds, None where there is none. Raises ValueError when names and
    values disagree.
    """
    names, values = content("cupymla_fact_names"), content("cupymla_fact_values")
    if names is None or values is None:
        return {}
    keys = _FACT_NAME.findall(names.rstrip(b"\0").decode())
    if len(keys) * 4 != len(values) or len(set(keys)) != len(keys):
        raise ValueError(f"{len(values) // 4} launch facts but {len(keys)} names: {', '.join(keys)}")
    return dict(zip(keys, struct.unpack(f"<{len(keys)}I", values), strict=True))


def frozen(facts: Mapping[str, int]) -> Mapping[str, int]:
    """A view of `facts` that nobody can change, for a `Cubin` that is shared by all callers."""
    return MappingProxyType(dict(facts))
