"""The table of docs/blackwell_model.md: rates and bytes of our sm_100f kernels and of published ones, and what follows.

A model, not a measurement. Layouts are stated here, product by product; every number of the page's tables is computed
from them, so that the page cannot drift. `python tests/ops/test_blackwell_model.py` prints the tables.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "blackwell_model.md"

SMS, HERTZ = 148, 1.85e9
MULTIPLY_ADDS = 4096  # bf16, of an SM in a cycle
SHARED, EXPONENTIALS, HBM = 128, 16, 8e12 / SMS / HERTZ
L2, REDUCED = 37, 16.4  # bytes a cycle and SM, measured on an H200
STEP = 16  # channels or slots that one product sums over

# Cycles of one instruction by form, rows of an SM and columns: others' microbenchmarks on a GB300 (the forward's page).
MEASURED = {
    ("ws", 64, 64): 57,
    ("ws", 64, 128): 64,
    ("ws", 64, 256): 93,
    ("cta", 64, 64): 56,
    ("cta", 128, 64): 63,
    ("cta", 128, 256): 141,
    ("pair", 64, 128): 52,
    ("pair", 64, 256): 70,
}


@dataclass(frozen=True)
class Products:
    """Instructions of one kind.

    Attributes:
        count: in a block.
        form: "cta"; "ws", whose 64 rows use all lanes; "pair", of which an SM has half of the rows.
        rows: of one SM.
        columns: of the product.
        a_in_smem: how many of them read A from shared memory; all where None.
    """

    count: int
    form: str
    rows: int
    columns: int
    a_in_smem: int | None = None

    @property
    def cycles(self) -> float:
        """At the published rate; 64 rows of one CTA use half of the lanes."""
        rate = MULTIPLY_ADDS / 2 if (self.form, self.rows) == ("cta", 64) else MULTIPLY_ADDS
        return self.count * self.rows * self.columns * STEP / rate

    @property
    def measured(self) -> float | None:
        cycles = MEASURED.get((self.form, self.rows, self.columns))
        return None if cycles is None else self.count * cycles

    @property
    def smem(self) -> float:
        """KB that an SM reads: its rows of A, and all columns of B or, in a pair, half of them."""
        b_rows = self.columns / (2 if self.form == "pair" else 1)
        a_count = self.count if self.a_in_smem is None else self.a_in_smem
        return (a_count * self.rows + self.count * b_rows) * STEP * 2 / 1024


@dataclass(frozen=True)
class Kernel:
    """A kernel's block, as one SM has it; amounts in KB.

    Attributes:
        name: of its row.
        mflop: of an SM's part of a block, as the operator counts them.
        products: instructions.
        l2: gathered rows.
        smem: beside what products read.
        exponentials: how many.
        tmem: loaded by threads.
        reduced: fp32 sums added to global memory.
        hbm: where it may bind.
        published: TFLOPS, lowest and highest.
    """

    name: str
    mflop: float
    products: tuple[Products, ...]
    l2: float
    smem: float
    exponentials: int
    tmem: float
    reduced: float = 0
    hbm: float = 0
    published: tuple[int, ...] = ()

    def tflops(self, cycles: float) -> float:
        return self.mflop * 1e6 / cycles * SMS * HERTZ / 1e12

    @property
    def all_smem(self) -> float:
        return sum(each.smem for each in self.products) + self.smem

    @property
    def issue(self) -> float | None:
        times = [each.measured for each in self.products]
        return None if None in times else sum(time for time in times if time is not None)

    def rows(self, l2: float, as_measured: bool) -> dict[str, float]:
        """Cycles by resource."""
        nominal = sum(each.cycles for each in self.products)
        return {
            "MMA": (self.issue or nominal) if as_measured else nominal,
            "L2": self.l2 * 1024 / l2,
            "shared memory": self.all_smem * 1024 / SHARED,
            "exponentials": self.exponentials / EXPONENTIALS,
            "reductions": self.reduced * 1024 / REDUCED,
            "HBM": self.hbm * 1024 / HBM,
        }

    def bound(self, l2: float, as_measured: bool) -> tuple[str, float]:
        """The row that binds, and its cycles."""
        rows = self.rows(l2, as_measured)
        row = max(rows, key=rows.__getitem__)
        return row, rows[row]


def mflop(heads: int, slots: int, channels: int) -> float:
    return 2 * heads * slots * channels / 1e6


FORWARD, BACKWARD, BACKWARD_512 = 576 + 512, 3 * 576 + 2 * 512, 5 * 512

OURS = (
    Kernel(
        "`sparse_mla_fwd`, 128 heads",
        mflop(64, 128, FORWARD),
        (Products(36, "pair", 64, 128, a_in_smem=12), Products(16, "pair", 64, 256)),
        l2=72 + 32,
        smem=104 + 16,  # rows, P
        exponentials=64 * 128,
        tmem=32,
    ),
    Kernel(
        "`sparse_mla_fwd`, 64 heads",
        mflop(64, 64, FORWARD),
        (Products(36, "ws", 64, 64, a_in_smem=8), Products(8, "ws", 64, 256)),
        l2=72,
        smem=72 + 8,
        exponentials=64 * 64,
        tmem=16,
    ),
    Kernel(
        "`sparse_mla_bwd`, 128 heads",
        mflop(128, 64, BACKWARD) / 2,
        # S, dP, dQ, its RoPE, dKV, its RoPE; of the first CTA.
        (
            Products(20 + 16, "cta", 128, 64),
            Products(4, "cta", 128, 256),
            Products(4, "cta", 128, 64),
            Products(32, "cta", 128, 64),
            Products(8, "cta", 64, 64),
        ),
        l2=40,
        smem=40 + 32 + 32 + 32,  # rows; the other CTA's scores in and out; P and dS
        exponentials=4096,
        tmem=32 + 32 + 72,
        reduced=72,
    ),
    Kernel(
        "`sparse_mla_bwd`, 64 heads",
        mflop(64, 128, BACKWARD) / 2,
        (
            Products(20 + 16, "cta", 128, 64),
            Products(16, "cta", 128, 64),
            Products(8, "cta", 64, 64),
            Products(32, "cta", 128, 64),
            Products(8, "cta", 64, 64),
        ),
        l2=80,
        smem=80 + 32 + 32 + 32,
        exponentials=4096,
        tmem=32 + 32 + 144,
        reduced=144,
    ),
    Kernel(
        "`sparse_mla_bwd_phase1`, topk 1024",
        mflop(64, 128, 576),
        (Products(36, "pair", 64, 128),),
        l2=72,
        smem=72,
        exponentials=0,
        tmem=32,
        hbm=32 + (72 + 64 + 64) / 8,  # p; Q, out and dout over the blocks of a query
    ),
    Kernel(
        "`attn_dist`, 128 heads",
        mflop(128, 128, 576),
        (Products(36, "pair", 128, 128),),
        l2=144,
        smem=144,
        exponentials=128 * 128,
        tmem=64,
    ),
    Kernel(
        "`attn_dist`, 64 heads",
        mflop(64, 128, 576),
        (Products(36, "cta", 128, 64),),
        l2=144,
        smem=144,
        exponentials=64 * 128,
        tmem=32,
    ),
)

FLASHMLA = Kernel(
    "FlashMLA forward, h 128, d 576",
    mflop(64, 128, FORWARD),
    (Products(36, "pair", 64, 128, a_in_smem=12), Products(16, "pair", 64, 256)),
    l2=72 + 64,
    smem=136 + 16,
    exponentials=64 * 128,
    tmem=32,
    published=(1450,),
)
PUBLISHED = (
    FLASHMLA,
    Kernel(
        "FlashAttention 4 forward, h 128, d 512",
        mflop(64, 128, 512 + 512),
        (Products(32, "pair", 64, 128), Products(16, "pair", 64, 256)),
        l2=64 + 64,
        smem=128 + 16,
        exponentials=64 * 128,
        tmem=32,
        published=(1180,),
    ),
    Kernel(
        "FlashAttention 4 backward, h 128, d 512",
        mflop(128, 128, BACKWARD_512) / 2,
        # dP; both halves of P^T dO and dS^T Q; dQ, by a kernel of its own. P comes from the forward.
        (Products(32, "pair", 64, 128), Products(2 * 16, "pair", 64, 256), Products(16, "pair", 64, 256)),
        l2=64 + 64,
        # Rows twice; dO and Q anew for every block; P and dS in, P and dS out; dKV on its way out.
        smem=128 + 128 + 32 + 32 + 256,
        exponentials=0,
        tmem=32 + 128,
        reduced=128,
        hbm=48,
        published=(820,),
    ),
    Kernel(
        "cuDNN forward, h 64, d 576",
        mflop(64, 64, FORWARD),
        (Products(18, "ws", 64, 128, a_in_smem=0), Products(8, "ws", 64, 256)),
        l2=72,
        smem=72 + 8,
        exponentials=64 * 64,
        tmem=32,
        published=(947, 1032),
    ),
    Kernel(
        "cuDNN backward, h 64, d 576",
        mflop(64, 64, BACKWARD),
        # S and dP; four parts of dKV twice, four of dQ, and the RoPE of both.
        (Products(36 + 32, "cta", 64, 64), Products(3 * 16, "cta", 128, 64), Products(2 * 4, "cta", 64, 64)),
        l2=72,
        smem=72 + 16,
        exponentials=64 * 64,
        tmem=16 + 16 + 144,
        reduced=144,
        published=(617, 674),
    ),
)

NEEDED_L2 = FLASHMLA.l2 * 1024 / (FLASHMLA.mflop * 1e6 * SMS * HERTZ / (FLASHMLA.published[0] * 1e12))
"""Bytes a cycle and SM without which FlashMLA could not do what is published of it."""


def number(value: float) -> str:
    return f"{value:.0f}" if value else "-"


def amounts(kernel: Kernel) -> str:
    values = (kernel.l2, kernel.all_smem, kernel.exponentials, kernel.tmem, kernel.reduced, kernel.hbm)
    count = sum(each.count for each in kernel.products)
    _, cycles = kernel.bound(L2, as_measured=False)
    cells = (f"{kernel.mflop:.1f}", f"{count}", *map(number, values), f"{kernel.tmem * 1024 / cycles:.0f}")
    return f"| {kernel.name} | {' | '.join(cells)} |"


def cycles_of(kernel: Kernel) -> str:
    rows = kernel.rows(L2, as_measured=False)
    issue = "?" if kernel.issue is None else number(kernel.issue)
    needed = kernel.l2 * 1024 / NEEDED_L2
    bold = max(rows, key=rows.__getitem__)
    shown = {name: f"**{number(value)}**" if name == bold else number(value) for name, value in rows.items()}
    cells = [shown.pop("MMA"), issue, shown.pop("L2"), number(needed), *shown.values()]
    return f"| {kernel.name} | {' | '.join(cells)} |"


def shares(kernel: Kernel, bound: float) -> str:
    found = [f"{value / bound:.2f}" for value in kernel.published]
    return " to ".join(found) or "-"


def bounds(kernel: Kernel) -> str:
    first, second = kernel.bound(L2, as_measured=False), kernel.bound(NEEDED_L2, as_measured=True)
    cells: list[str] = []
    for row, cycles in (first, second):
        bound = kernel.tflops(cycles)
        cells += [f"{row}, {number(bound)}", shares(kernel, bound)]
    published = " to ".join(map(str, kernel.published)) or "-"
    return f"| {kernel.name} | {published} | {' | '.join(cells)} |"


@pytest.mark.parametrize("kernel", (*OURS, *PUBLISHED), ids=lambda kernel: kernel.name)
def test_the_page_has_what_follows_from_layouts_and_rates(kernel: Kernel) -> None:
    lines = PAGE.read_text().splitlines()
    for row in (amounts(kernel), cycles_of(kernel), bounds(kernel)):
        assert row in lines


def test_the_gathers_rate_of_an_h200_is_refuted() -> None:
    """FlashMLA gathers 136 KB a block: at 37 bytes a cycle it could not reach what is published of it."""
    page = PAGE.read_text()
    row, cycles = FLASHMLA.bound(L2, as_measured=False)
    assert row == "L2" and FLASHMLA.tflops(cycles) < FLASHMLA.published[0]
    assert f"{cycles:.0f} cycles" in page and f"{FLASHMLA.tflops(cycles):.0f} TFLOPS" in page
    assert f"{NEEDED_L2:.1f} bytes" in page
    assert f"{NEEDED_L2 * SMS * HERTZ / 1e12:.1f} TB/s" in page
    assert f"{HERTZ / 1e9 * FLASHMLA.published[0] / FLASHMLA.tflops(cycles):.2f} GHz" in page


def test_the_peak_is_that_of_the_rates() -> None:
    assert f"{SMS * HERTZ * MULTIPLY_ADDS * 2 / 1e12:.0f} TFLOPS" in PAGE.read_text()


def test_what_published_kernels_reach_is_told() -> None:
    """The range of shares in the text is that of the table."""
    found = []
    for kernel in PUBLISHED:
        _, cycles = kernel.bound(NEEDED_L2, as_measured=True)
        found += [value / kernel.tflops(cycles) for value in kernel.published]
    assert f"{min(found):.2f} to {max(found):.2f}" in PAGE.read_text()


def test_numbers_of_the_text() -> None:
    page = PAGE.read_text()

    def reached(kernel: Kernel, cycles: float | None) -> str:
        assert cycles is not None
        return f"{kernel.published[0] / kernel.tflops(cycles):.2f}"

    forward = PUBLISHED[1]
    texts = []
    for kernel in (FLASHMLA, forward):
        smem = kernel.rows(L2, as_measured=False)["shared memory"]
        texts.append((reached(kernel, kernel.issue), reached(kernel, smem)))
    (first, second), (third, fourth) = texts
    assert f"{first} of MMA as measured and {second} of shared memory" in page
    assert f"FlashAttention 4's forward {third} and {fourth}." in page
    backward = PUBLISHED[2]
    assert f"would be {backward.tflops(backward.reduced * 1024 / 9.9):.0f} TFLOPS" in page
    anew = (backward.all_smem + 32 * 4 - 16) * 1024 / SHARED  # S of P that is computed, and P is not read
    assert f"about {round(anew, -2):.0f} cycles, and {reached(backward, anew)} would" in page
    for kernel in OURS[:2]:
        ends = sorted(kernel.tflops(kernel.bound(*at)[1]) for at in ((L2, False), (NEEDED_L2, True)))
        assert f"| {kernel.name} | {ends[0]:.0f} to {ends[1]:.0f} | " in page
    loads = sorted(kernel.tmem * 1024 / 512 for kernel in OURS)
    assert f"take {loads[0]:.0f} to {loads[-1]:.0f} cycles" in page


def test_no_published_number_contradicts_the_measured_products() -> None:
    for kernel in PUBLISHED:
        assert kernel.issue is not None and kernel.tflops(kernel.issue) > max(kernel.published)


def test_kernels_pages_have_no_table_of_their_own_of_others() -> None:
    """They name the page, and a published kernel's share stands there alone."""
    for name in ("sparse_mla_fwd/sm100", "sparse_mla_bwd/sm100", "sparse_mla_bwd_phase1", "attn_dist/sm100"):
        text = (ROOT / "cuda" / name / "README.md").read_text()
        assert "docs/blackwell_model.md" in text
        assert not re.search(r"^\| (a pair that gathers|FlashMLA|FlashAttention|cuDNN)", text, flags=re.M)


if __name__ == "__main__":
    for line in (amounts, cycles_of, bounds):
        print("\n".join(map(line, (*OURS, *PUBLISHED))), end="\n\n")
    print(f"{NEEDED_L2:.2f} bytes a cycle")
