"""tcgen05.mma against NumPy: every kind, element type, shape class, layout, operand place and option."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from device import Where, run
from isa_oracle import column_mask, zero_columns
from mma_problems import (
    A_COLUMN,
    A_SCALES,
    B_START,
    BAD_HINTS,
    FILL,
    HINTS,
    MASKED,
    METADATA,
    SAME_BITS,
    USE,
    Case,
    Problem,
    cases,
    sparse_cases,
    stationary_cases,
)
from ptx_kernels import mma_ws

from cupymla_lab.emulate import EmulationError, Settings
from cupymla_lab.emulate.host import library
from cupymla_lab.emulate.host.library import Model

pytestmark = pytest.mark.compile


@pytest.mark.parametrize("case", [*cases(), *stationary_cases(), *sparse_cases()], ids=str)
def test_products_agree_bit_for_bit(case: Case, where: Where) -> None:
    """Every operand is exact and every sum fits, so there is one right answer; other columns stay untouched."""
    problem = Problem(case)
    np.testing.assert_array_equal(problem.run(where), problem.wanted())


@pytest.mark.parametrize("mode", ["lazy", "random"])
@pytest.mark.parametrize(
    "case",
    [
        cases()[0],
        Case("mxf4nvf4", "e2m1", "e2m1", 256, 64, 2, block=16, ue8m0=False),
        Case("f16", "bf16", "bf16", 64, 256, a_in_tmem=True, ws=True),
    ],
    ids=str,
)
def test_modes_agree(case: Case, mode: Any, where: Where) -> None:
    problem = Problem(case)
    for seed in range(3):
        np.testing.assert_array_equal(problem.run(where, Settings(mode, seed=seed)), problem.wanted())


# Bits that keep any random bytes finite and of moderate size.
_MASKS = {"bf16": 0xBFFFBFFF, "f16": 0xBBFFBBFF, "tf32": 0xBFFFFFFF}


@pytest.mark.skipif(not library.available(), reason="needs a C++ compiler on x86-64")
@pytest.mark.parametrize("case", SAME_BITS, ids=str)
def test_the_model_as_cpp_and_as_ptx_give_the_same_bits(case: Case) -> None:
    """On the host the model is C++, with products of its own. These sums do not fit, so every rounding counts."""
    problem = Problem(case)
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 2**32, problem.smem.size // 4, dtype=np.uint32) & _MASKS.get(case.a, 0xB7B7B7B7)
    problem.smem = raw.view(np.uint8).reshape(problem.smem.shape)
    found = problem.run("host")
    np.testing.assert_array_equal(found, problem.run("host", model="ptx"))
    assert (found != problem.wanted()).any()


# What each does to an argument: which one, and the bits that it turns over. First, the failure that follows.
BAD = {
    "reserved descriptor bit": (15, (1, 1 << 14)),
    "fixed descriptor bits": (15, (1, 1 << 46)),
    "swizzle 3": (16, (1, 1 << 61)),
    "absolute leading dimension": (17, (0, 1 << 52)),
    "reserved instruction bit": (18, (2, 1 << 32 + 6)),
    "element type": (19, (2, 4 << 32 + 7)),
    "N of 12": (20, (2, 5 << 32 + 17)),
    "sparse": (23, (2, 1 << 32 + 2)),
    "columns that are not there": (12, (2, 500)),
    "lane 5": (35, (2, 5 << 16)),
}


@pytest.mark.parametrize("name", BAD)
def test_what_the_tables_do_not_have_is_refused(name: str, where: Where) -> None:
    code, (index, bits) = BAD[name]
    problem = Problem(Case("f16", "f16", "f16", 128, 32))
    problem.arguments[index] ^= bits
    with pytest.raises(EmulationError) as caught:
        problem.run(where)
    assert caught.value.code == code and caught.value.instruction.startswith("tcgen05.mma")
    assert (caught.value.cta, caught.value.thread) == (0, 0) and caught.value.line > 0


# The same for a sparse one.
BAD_SPARSE = {
    "dense": (23, (2, 1 << 32 + 2)),
    "M of 64": (50, (2, 12 << 32 + 24)),
    "selector 2": (51, (2, 2 << 32)),
    "an odd column": (52, (4, 1)),
    "lane 16": (52, (4, 16 << 16)),
    "columns that are not there": (12, (4, 1 << 9)),
    "B swizzled by 32 bytes": (16, (1, 4 << 61)),
}


@pytest.mark.parametrize("name", BAD_SPARSE)
def test_what_sparse_products_do_not_have_is_refused(name: str, where: Where) -> None:
    code, (index, bits) = BAD_SPARSE[name]
    problem = Problem(Case("f16", "f16", "f16", 128, 64, sparse=True))
    problem.arguments[index] ^= bits
    with pytest.raises(EmulationError) as caught:
        problem.run(where)
    assert caught.value.code == code and caught.value.instruction.startswith("tcgen05.mma.sp")


def test_each_group_of_lanes_has_metadata_of_its_own(where: Where) -> None:
    problem = Problem(Case("f16", "f16", "f16", 64, 64, sparse=True, ws=True))
    found = problem.run(where)
    problem.tmem[0, 64:, METADATA] = 0xEEEEEEEE
    other = problem.run(where)
    assert (found[0, :64, :32] == other[0, :64, :32]).all() and (found[0, 64:, :32] != other[0, 64:, :32]).any()
    problem.arguments[2] ^= 40 << 32 + 17  # N of 256
    with pytest.raises(EmulationError, match="M, N or K"):
        problem.run(where)


@pytest.mark.parametrize(("kind", "a"), [("f16", "f16"), ("tf32", "tf32"), ("i8", "s8")])
def test_metadata_that_means_nothing_is_refused(kind: str, a: str, where: Where) -> None:
    """Codes that name one place twice, and in kind tf32 all but two."""
    good = [0b0100, 0b1110] if kind == "tf32" else [4, 8, 9, 12, 13, 6, 14]
    for code in range(16):
        problem = Problem(Case(kind, a, a, 128, 64, sparse=True))
        problem.tmem[0, 77, METADATA] = problem.tmem[0, 77, METADATA] & ~np.uint32(0xF00) | np.uint32(code << 8)
        if code in good:
            problem.run(where)
        else:
            with pytest.raises(EmulationError, match="means nothing"):
                problem.run(where)


# The same for a weight-stationary product of 64 rows.
BAD_STATIONARY = {
    "reserved instruction bit": (18, (2, 1 << 32 + 29)),
    "N of 32": (20, (2, 12 << 32 + 17)),
    "N of 192": (20, (2, 16 << 32 + 17)),
    "M of 256": (20, (2, 20 << 32 + 24)),
    "lane 16": (35, (2, 16 << 16)),
    "lane of A": (35, (0, 64 << 16)),
    "sparse": (23, (2, 1 << 32 + 2)),
    "columns that are not there": (12, (2, 480)),
    "reserved mask bit": (44, (4, 1 << 36)),
    "shift beyond the instruction descriptor's": (45, (4, 9 << 56)),
}


@pytest.mark.parametrize("name", BAD_STATIONARY)
def test_what_weight_stationary_products_do_not_have_is_refused(name: str, where: Where) -> None:
    code, (index, bits) = BAD_STATIONARY[name]
    problem = Problem(MASKED)
    problem.arguments[index] ^= bits
    with pytest.raises(EmulationError) as caught:
        problem.run(where)
    assert caught.value.code == code and caught.value.instruction.startswith("tcgen05.mma.ws")


def test_a_shift_of_64_rows_is_refused(where: Where) -> None:
    problem = Problem(Case("f16", "f16", "f16", 64, 32, a_in_tmem=True, shifted=True))
    with pytest.raises(EmulationError, match="128 or 256"):
        problem.run(where)


def test_a_dense_product_has_no_maximum_shift(where: Where) -> None:
    problem = Problem(Case("f16", "f16", "f16", 128, 32))
    problem.arguments[2] ^= 1 << 32 + 30
    with pytest.raises(EmulationError) as caught:
        problem.run(where)
    assert caught.value.code == 18


@pytest.mark.parametrize("m", [32, 64])
def test_each_group_of_lanes_multiplies_the_rows_of_a_that_lie_there(m: int, where: Where) -> None:
    """A that is in the first group alone is found out; a different A in each group makes products of their own."""
    case = Case("f16", "f16", "f16", m, 128, a_in_tmem=True, ws=True)
    problem = Problem(case)
    problem.tmem[0, m:, A_COLUMN:] = 0x7FFF7FFF
    found, wanted = problem.run(where), problem.wanted()
    np.testing.assert_array_equal(found[0, :m], wanted[0, :m])
    assert (found[0, m:, :m] != wanted[0, m:, :m]).all()
    others = [Problem(replace(case, seed=seed)) for seed in range(128 // m)]
    for part, other in enumerate(others):
        lanes = slice(part * m, part * m + m)
        problem.tmem[0, lanes, A_COLUMN : A_COLUMN + 8] = other.tmem[0, lanes, A_COLUMN : A_COLUMN + 8]
        other.b = problem.b
    found = problem.run(where)
    for part, other in enumerate(others):
        lanes = slice(part * m, part * m + m)
        np.testing.assert_array_equal(found[0, lanes, :m], other.wanted()[0, lanes, :m])


def test_zero_columns_are_those_of_the_isas_examples() -> None:
    """Masks as the ISA prints them, the last column first: used spans of 4 and zero spans of 3."""

    def printed(part: int, m: int, mask: int, digits: int) -> str:
        columns = zero_columns(mask, m, 128).reshape(128 // m, -1)[part]
        return "".join(str(int(zero)) for zero in columns[:digits][::-1])

    assert not zero_columns(column_mask((4, 5), any_zero=False), 128, 64).any()
    assert printed(0, 128, column_mask((4, 3)), 14) == "11100001110000"
    mask = column_mask((4, 3), zero_first=(1, 0, 0, 0))
    assert (printed(0, 64, mask, 17), printed(1, 64, mask, 14)) == ("11100001110000111", "00001110000111"[::-1])
    mask = column_mask((4, 3), (0, 1, 2, 1), (1, 1, 0, 0), shift=2)
    assert [printed(part, 32, mask, digits) for part, digits in enumerate((14, 13, 12, 13))] == [
        "00001110000111",
        "0000111000011",
        "111000011100",
        "1110000111000",
    ]


@pytest.mark.parametrize("hints", HINTS)
def test_collector_hints_change_no_value(hints: tuple[str, ...], where: Where) -> None:
    problem = Problem(Case("f16", "f16", "f16", 64, 64, accumulate=True, ws=True))
    plain = problem.run(where, hints=("",) * len(hints))
    np.testing.assert_array_equal(problem.run(where, hints=hints), plain)


@pytest.mark.parametrize(
    ("code", "hints", "step"),
    BAD_HINTS,
)
def test_collector_buffers_are_filled_before_use(code: int, hints: tuple[str, ...], step: int, where: Where) -> None:
    problem = Problem(Case("f16", "f16", "f16", 64, 64, ws=True))
    problem.arguments.append(step)
    with pytest.raises(EmulationError) as caught:
        problem.run(where, hints=hints)
    assert caught.value.code == code and hints[-1] in caught.value.instruction


@pytest.mark.parametrize("model", ["native", "ptx"])
@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_b_may_not_change_between_fill_and_use(mode: Any, model: Model) -> None:
    """Another B at the same place; hardware could multiply by either."""
    if not library.available():
        pytest.skip("needs a C++ compiler on x86-64")
    change = f"""
    mov.b32 %r40, 0x12345678; st.shared.b32 [%smem+{B_START}], %r40;
    fence.proxy.async.shared::cta;
"""
    problem = Problem(Case("f16", "f16", "f16", 64, 64, ws=True))
    text = mma_ws("f16", hints=(FILL, USE))
    first, second = text.split("setp.eq.b32 q, 0, 0;", 1)
    commit = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%bar];\n"
    wait = "again: mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar], 0;\n@!%p bra again;\n"
    renew = "mbarrier.inval.shared::cta.b64 [%bar];\nmbarrier.init.shared::cta.b64 [%bar], 1;\nfence.proxy.async;\n"
    changed = first + "setp.eq.b32 q, 0, 0;\n" + commit + wait + renew + change + second
    same = changed.replace(change, "")
    given = problem.smem, problem.tmem, problem.arguments
    run(same, *given, settings=Settings(mode), model=model)
    with pytest.raises(EmulationError, match="is not what the buffer was filled with"):
        run(changed, *given, settings=Settings(mode), model=model)


def test_scale_factors_that_are_not_in_all_quarters_are_found_out(where: Where) -> None:
    """The ISA asks for a copy in each 32 lanes; the model reads the copy that hardware would."""
    problem = Problem(Case("mxf8f6f4", "e4m3", "e4m3", 128, 32, block=32))
    problem.tmem[0, 32:, A_SCALES:] = 0x7F7F7F7F
    assert (problem.run(where) != problem.wanted()).any()
