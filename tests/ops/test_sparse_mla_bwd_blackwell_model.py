"""The time-lines behind the predictions for sparse_mla_bwd on Blackwell, as its page tells them.

A model, not a measurement: cycles of products and loads are counted, rates are published ones or an H200's. What it is
for is that the page's numbers follow from each other: changing one without the others fails here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "cuda" / "sparse_mla_bwd" / "sm100" / "README.md"

LOAD = 65  # cycles that a part takes from Tensor Memory to registers
PART_BYTES = 128 * 64 * 4
ROPE_BYTES = 64 * 64 * 4 // 2  # the mean of two CTAs, of which one has it
RATES = {8192: 16.4, 32768: 9.9, 131072: 6.9}  # fp32 reductions, bytes per cycle and SM of an H200, by s_kv
SMS, HERTZ = 148, 1.85e9
BLOCK_FLOPS = 2 * 128 * 64 * (3 * 576 + 2 * 512)  # of a pair: 64 slots, 128 heads

# Products, in the order in which they are issued.
DQ, PART, ROPE, S, DP = 704, 768, 256, 960, 768
# What is left of the exchange behind dP, P and dS, and three rounds between the CTAs.
REST, P_AND_DS, ROUNDS = 890, 900, 1000


@dataclass
class Reducers:
    """A warpgroup that takes parts of dKV out of Tensor Memory and reduces them, no part faster than L2 takes it.

    Attributes:
        room: bytes of registers.
        rate: bytes that leave per cycle.
        now: up to when they have worked.
        held: bytes in registers then.
    """

    room: float
    rate: float
    now: float = 0.0
    held: float = 0.0

    def take(self, ready: float, bytes_: int) -> float:
        """Take a part that is ready by then, as soon as there is room for it; returns when its place is free."""
        until_room = max(0.0, self.held + bytes_ - self.room) / self.rate
        begin = max(ready, self.now + until_room)
        self.held = max(0.0, self.held - (begin - self.now) * self.rate)
        self.now = begin + LOAD
        self.held += bytes_
        return self.now


def cycles_of_a_block(rate: float, room_parts: float, hidden: float = 0.0, blocks: int = 60) -> float:
    """From P and dS of one block to those of the next, once things go round.

    Args:
        rate: of reductions.
        room_parts: how many parts of dKV reducers have registers for.
        hidden: cycles of P and dS that are made under dP.
        blocks: how many are looked at.
    """
    reducers = Reducers(room_parts * PART_BYTES, rate)
    starts = [0.0]
    rope_free = 0.0
    for _ in range(blocks):
        done = [starts[-1] + DQ + PART, starts[-1] + DQ + 2 * PART]
        rope_done = max(done[1], rope_free) + ROPE
        # Reducers take a part when it is there; products go on into its place when they have.
        left_free = reducers.take(done[0], PART_BYTES)
        right_free = reducers.take(done[1], PART_BYTES)
        rope_free = reducers.take(rope_done, ROPE_BYTES)
        s_done = max(rope_done, left_free) + S
        dp_done = max(s_done, right_free) + DP
        starts.append(dp_done + REST + P_AND_DS - hidden + ROUNDS)
    half = blocks // 2
    return (starts[-1] - starts[half]) / (blocks - half)


def table(first_column: str) -> list[tuple[int, float]]:
    """Cycles and PFLOPS of a row of the page's table."""
    (row,) = (line for line in PAGE.read_text().splitlines() if line.startswith(f"| {first_column} |"))
    found = re.findall(r"([\d,]+) \((\d\.\d+)\)", row)
    return [(int(cycles.replace(",", "")), float(pflops)) for cycles, pflops in found]


@pytest.mark.parametrize(
    ("row", "room_parts", "hidden"),
    [
        ("reducers, a part's registers", 1, 0),
        ("**reducers, a part and a quarter: what is here**", 1.25, 0),
        ("reducers, two parts", 2, 0),
        ("what is here, half of P and dS under dP", 1.25, P_AND_DS / 2),
    ],
)
def test_the_pages_cycles_are_those_of_the_time_line(row: str, room_parts: float, hidden: float) -> None:
    told = table(row)
    assert len(told) == len(RATES)
    for (cycles, pflops), rate in zip(told, RATES.values(), strict=True):
        found = cycles_of_a_block(rate, room_parts, hidden)
        assert found == pytest.approx(cycles, rel=0.005)
        assert BLOCK_FLOPS / cycles * SMS / 2 * HERTZ / 1e15 == pytest.approx(pflops, abs=0.0051)


def test_the_chain_with_products_as_others_measured_them() -> None:
    """63, 141 and 56 cycles an instruction, which is slower than the data sheet's rate and than shared memory."""
    wide, row, rope = 141, 63, 56
    s, dp, dq, part, rope_part = 20 * row, 16 * row, 4 * wide + 4 * row, 16 * row, 8 * rope
    page = PAGE.read_text()
    many = dq + 2 * part + rope_part + s + dp + REST + P_AND_DS + ROUNDS
    assert f"S takes {s}, dP {dp}, dQ {dq} and dKV {2 * part + rope_part}, and the chain {round(many, -1)}: " in page
    assert f": {BLOCK_FLOPS / many * SMS / 2 * HERTZ / 1e15:.2f} PFLOPS.\n- It takes the mean" in page
    few = 16 * row + 8 * rope + 2 * part + rope_part + s + dp + REST + P_AND_DS + ROUNDS
    assert f"chain is {round(few, -1)}, still below reductions" in page and few < 9380


def test_loads_from_tensor_memory() -> None:
    """136 and 208 KB a block, at what 32 KB are taken to take."""
    for kilobytes in (64 + 72, 64 + 144):
        cycles = kilobytes / (PART_BYTES / 1024) * LOAD
        assert f"| Tensor Memory, loads | {kilobytes} KB:" in PAGE.read_text()
        assert re.search(rf"\| {kilobytes} KB: .* assumed, {cycles:.0f}; no stores \|", PAGE.read_text())


def test_reductions_bind_where_heads_are_few() -> None:
    """Products and workers take 7750 cycles of a block of 128 slots, reductions with six loads between them 9380."""
    page = PAGE.read_text()
    reduced = (4 * PART_BYTES + 2 * ROPE_BYTES) / RATES[8192]
    assert f"{round(reduced, -1):.0f} |" in page
    assert "has a block every 9380 cycles" in page
    assert reduced + 6 * LOAD == pytest.approx(9380, rel=0.002)
