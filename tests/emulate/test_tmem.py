"""Moving data to, from and within Tensor Memory, and its life cycle, against NumPy statements of the ISA's figures."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from device import Where, blank, run
from isa_oracle import COLUMNS, MOVE_REGISTERS, Array, move_place

from cupymla_lab.emulate import EmulationError, Settings
from cupymla_lab.emulate.settings import Mode

pytestmark = pytest.mark.compile

SPLIT = 64


def forms() -> list[tuple[str, int]]:
    """Shapes with multiplicities."""
    return [
        (shape, times)
        for shape, each in MOVE_REGISTERS.items()
        for times in (1, 2, 4, 8, 16, 32, 64, 128)
        if each * times <= 128 and not (shape == "16x32bx2" and times == 128)
    ]


def columns(shape: str, times: int, packed: bool) -> int:
    """Columns that a form covers, from its first to its last."""
    width = {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8, "16x32bx2": 1}[shape] * times
    return (width << packed) + (split_of(times, packed) if shape == "16x32bx2" else 0)


def split_of(times: int, packed: bool) -> int:
    """The distance of the halves of 16x32bx2: beyond the first half."""
    return max(SPLIT, times << packed)


def instruction(shape: str, times: int, packed: bool, store: bool, half: int) -> str:
    count = MOVE_REGISTERS[shape] * times
    registers = "{" + ", ".join(f"%r{i}" for i in range(count)) + "}"
    split = f", {split_of(times, packed)}" if shape == "16x32bx2" else ""
    pack = (".unpack::16b" if store else ".pack::16b") if packed else ""
    place = f"add.u32 %column, %tmem, %window; add.u32 %column, %column, {16 * half << 16};"
    if store:
        text = f"tcgen05.st.sync.aligned.{shape}.x{times}{pack}.b32 [%column]{split}, {registers};"
        values = [f"shl.b32 %r{i}, %thread, 8; or.b32 %r{i}, %r{i}, {i | i << 16};" for i in range(count)]
        return "\n".join([place, *values, text, "tcgen05.wait::st.sync.aligned;"])
    text = f"tcgen05.ld.sync.aligned.{shape}.x{times}{pack}.b32 {registers}, [%column]{split};"
    return "\n".join([place, text, "tcgen05.wait::ld.sync.aligned;"])


def words(tmem: Array, shape: str, times: int, packed: bool, half: int) -> Array:
    """What every thread's registers hold after a load: (128 threads, registers)."""
    count = MOVE_REGISTERS[shape] * times
    split = split_of(times, packed)
    found = np.zeros((128, count), np.uint32)
    for thread in range(128):
        for index in range(count):
            lane, column = move_place(shape, thread % 32, index, 0 if packed else split)
            if packed:
                # Register by register, two columns for one; the second half of 16x32bx2 keeps its distance.
                lane, first = move_place(shape, thread % 32, index, 0)
                column = 2 * first + (split if shape == "16x32bx2" and thread % 32 >= 16 else 0)
            row = thread // 32 * 32 + lane + 16 * half
            found[thread, index] = tmem[row, column]
            if packed:
                found[thread, index] = tmem[row, column] & 0xFFFF | (tmem[row, column + 1] & 0xFFFF) << 16
    return found


STORED = [(shape, times) for shape, times in forms() if times in (1, 4, 32)]


@functools.cache
def moves(store: bool) -> tuple[str, ...]:
    """All loads or all stores, which are compiled at once."""
    chosen = STORED if store else forms()
    return tuple(
        instruction(shape, times, packed, store, int(not store and shape != "32x32b"))
        for shape, times in chosen
        for packed in (False, True)
        if columns(shape, times, packed) <= COLUMNS
    )


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize(("shape", "times"), forms(), ids=str)
def test_loads(shape: str, times: int, packed: bool, where: Where) -> None:
    if columns(shape, times, packed) > COLUMNS:
        pytest.skip("more columns than there are")
    half = int(shape != "32x32b")
    smem, tmem = blank()
    text = instruction(shape, times, packed, False, half)
    _, registers = run(text, smem, tmem, [], by="warps", where=where, among=moves(False))
    wanted = words(tmem[0], shape, times, packed, half)
    np.testing.assert_array_equal(registers[0, :, : wanted.shape[1]], wanted)


@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "unpacked"])
@pytest.mark.parametrize(("shape", "times"), STORED, ids=str)
def test_stores(shape: str, times: int, packed: bool, mode: Mode, where: Where) -> None:
    """What is stored is found where a load of the same form looks, and nothing else changes."""
    smem, tmem = blank()
    text = instruction(shape, times, packed, True, 0)
    settings = Settings(mode)
    after, registers = run(text, smem, tmem, [], by="warps", settings=settings, where=where, among=moves(True))
    count = MOVE_REGISTERS[shape] * times
    np.testing.assert_array_equal(words(after[0], shape, times, packed, 0), registers[0, :, :count])
    touched = words(np.arange(128 * COLUMNS, dtype=np.uint32).reshape(128, COLUMNS), shape, times, False, 0)
    untouched = np.count_nonzero(after[0] == tmem[0])
    assert untouched >= 128 * COLUMNS - (np.unique(touched).size << packed)


COPIES = {
    "128x256b": (128, 32),
    "4x256b": (4, 32),
    "128x128b": (128, 16),
    "64x128b.warpx2::02_13": (64, 16),
    "64x128b.warpx2::01_23": (64, 16),
    "32x128b.warpx4": (32, 16),
}


FORMS = ("", ".b8x16.b6x16_p32", ".b8x16.b4x16_p64")


@functools.cache
def by_a_thread(group: int) -> tuple[str, ...]:
    """The copies and the shift."""
    return *(copy(shape, form, group) for shape in COPIES for form in FORMS), shift(group)


def copy(shape: str, form: str, group: int) -> str:
    place = "add.u64 %a0, %a0, %start;\nadd.u32 %r1, %tmem, 8;"
    return f"{place}\ntcgen05.cp.cta_group::{group}.{shape}{form} [%r1], %a0;"


def shift(group: int) -> str:
    return f"add.u32 %r1, %tmem, {64 << 16 | 16};\ntcgen05.shift.cta_group::{group}.down [%r1];"


def copied_to(shape: str, row: int) -> tuple[int, ...]:
    """The lanes that a row of the source lands in."""
    if shape == "4x256b":
        return (32 * row,)
    if shape == "64x128b.warpx2::02_13":
        return row, row + 64
    if shape == "64x128b.warpx2::01_23":
        return row // 32 * 64 + row % 32, row // 32 * 64 + 32 + row % 32
    if shape == "32x128b.warpx4":
        return tuple(row + 32 * quarter for quarter in range(4))
    return (row,)


def unpacked(line: Array, bits: int) -> Array:
    """16 elements of 4 or 6 bits, which begin 16 bytes, to a byte each; 4 bits sit in a byte's middle."""
    flags = np.unpackbits(line, bitorder="little")[: 16 * bits].reshape(16, bits)
    values = (flags << np.arange(bits)).sum(axis=1)
    found: Array = (values << 2 if bits == 4 else values).astype(np.uint8)
    return found


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("form", FORMS, ids=["bytes", "6bit", "4bit"])
@pytest.mark.parametrize("shape", COPIES)
def test_copies(shape: str, form: str, group: int, where: Where) -> None:
    rows, width = COPIES[shape]
    rng = np.random.default_rng(3)
    smem, tmem = blank(group)
    smem[:, : rows * 32] = rng.integers(0, 256, (group, rows * 32), np.uint8)
    # Rows of 16 bytes, eight behind each other, the second half of wide rows behind all of them.
    descriptor = 16 * rows >> 4 << 16 | 128 >> 4 << 32 | 1 << 46
    operands = copy(shape, form, group), smem, tmem, [descriptor], group
    after, _ = run(*operands, where=where, among=by_a_thread(group))
    for cta in range(group):
        for row in range(rows):
            parts = [smem[cta, 16 * rows * part + 16 * row :][:16] for part in range(width // 16)]
            bits = {"": 8, ".b8x16.b6x16_p32": 6, ".b8x16.b4x16_p64": 4}[form]
            line = np.concatenate([part if bits == 8 else unpacked(part, bits) for part in parts])
            for lane in copied_to(shape, row):
                tmem[cta, lane, 8 : 8 + width // 4] = line.view(np.uint32)
    np.testing.assert_array_equal(after, tmem)


@pytest.mark.parametrize("group", [1, 2])
def test_shift(group: int, where: Where) -> None:
    """Rows move down by one within 32 lanes, eight columns wide; the last row stays."""
    smem, tmem = blank(group)
    after, _ = run(shift(group), smem, tmem, [], group, where=where, among=by_a_thread(group))
    tmem[:, 64:95, 16:24] = tmem[:, 65:96, 16:24]
    np.testing.assert_array_equal(after, tmem)


MISUSE = (
    ("a foreign lane", "add.u32 %r1, %tmem, 0x200000;\ntcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r1];", 13),
    (
        "columns beyond",
        "add.u32 %r1, %tmem, 510;\ntcgen05.ld.sync.aligned.32x32b.x4.b32 {%r2,%r3,%r4,%r5}, [%r1];",
        12,
    ),
    ("a second allocation", "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%slot], 32;", 6),
    ("no power of two", "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%slot], 48;", 5),
    ("a part of it", "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tmem, 256;", 10),
    ("what begins elsewhere", "add.u32 %r1, %tmem, 8;\ntcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;", 9),
)
FIRST = "setp.ge.u32 %p, %thread, 32;\n@%p bra past;\n"
FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tmem, 512;\n"
TWICE, LEFT = f"{FIRST}{FREE}{FREE}past:", "exit;"
EARLY = (
    "add.u32 %column, %tmem, %window;\nmov.b32 %r1, 7;\ntcgen05.st.sync.aligned.32x32b.x1.b32 [%column], {%r1};\n"
    "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%column];\ntcgen05.wait::ld.sync.aligned;\n"
    "tcgen05.wait::st.sync.aligned;"
)
BY_WARPS = (*(f"{FIRST}{text}\npast:" for _, text, _ in MISUSE), TWICE, LEFT, EARLY)


@pytest.mark.parametrize(("name", "text", "code"), MISUSE)
def test_misuse_is_reported(name: str, text: str, code: int, where: Where) -> None:
    smem, tmem = blank()
    with pytest.raises(EmulationError) as caught:
        run(f"{FIRST}{text}\npast:", smem, tmem, [], by="warps", where=where, among=BY_WARPS)
    assert caught.value.code == code


def test_freeing_twice_and_leaks_are_reported(where: Where) -> None:
    smem, tmem = blank()
    with pytest.raises(EmulationError) as caught:
        run(TWICE, smem, tmem, [], by="warps", where=where, among=BY_WARPS)
    assert caught.value.code == 9
    with pytest.raises(EmulationError) as caught:
        run(LEFT, smem, tmem, [], by="warps", where=where, among=BY_WARPS)
    assert caught.value.code == 11


def test_reading_before_the_store_has_landed_sees_the_old_value(where: Where) -> None:
    """Mode lazy shows a missing tcgen05.wait::st; mode eager hides it."""
    smem, tmem = blank()
    found: dict[Any, Array] = {}
    modes: tuple[Mode, ...] = ("eager", "lazy")
    for mode in modes:
        settings = Settings(mode)
        _, registers = run(EARLY, smem, tmem, [], by="warps", settings=settings, where=where, among=BY_WARPS)
        found[mode] = registers[0, :, 2]
    assert (found["eager"] == 7).all() and (found["lazy"] == tmem[0, :, 0]).all()
