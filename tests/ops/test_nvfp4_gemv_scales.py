"""nvfp4_gemv's E8M0 scales over their whole range, in the engine: where they are multiplied into codes as
bfloat16 one factor serves scales up to 2^5, and two serve them all.

Compiles to PTX, needs no GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gemv_scales_kit import BLOCK, blocks_past_float32, every_code_and_scale, neighbours_far_apart, pairs_of

from cupymla.ops.nvfp4_gemv import nvfp4_gemv, reference
from cupymla_lab.subjects import Subject
from cupymla_lab.without_gpu import machine_for

pytestmark = pytest.mark.compile

SUBJECT = Subject("nvfp4_gemv")
NAN = 255


# By the operand and the most columns of a variant: one for each, where possible one that other tests compile. Scales
# are multiplied in one way for a column and in another for several, of vectors that are weight-only too; that vectors
# of 16 bits lie in one block of eight columns and in two shows with the conversions of sm_100f.
TARGETS = {
    "e2m1": {1: "sm_89", 8: "sm_80", 16: "sm_90"},
    "bfloat16": {1: "sm_90", 8: "sm_80"},
    "float16": {1: "sm_80", 16: "sm_80"},
}
COLUMNS = [("e2m1", 1), ("e2m1", 7), ("e2m1", 16), ("bfloat16", 1), ("bfloat16", 7), ("float16", 1), ("float16", 16)]


def target(b_dtype: str, n: int) -> str:
    """For so many columns."""
    return next(arch for most, arch in TARGETS[b_dtype].items() if n <= most)


def run(host: dict[str, Any], arch: str, turn: int = 0) -> npt.NDArray[Any]:
    with machine_for("nvfp4_gemv", arch, turn) as machine:
        return machine.run(SUBJECT, host)[0]


def require_within_bound(host: dict[str, Any], got: npt.NDArray[Any]) -> None:
    exact, bound = reference.nvfp4_gemv(**host), reference.error_bound(**host)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(exact))
    there = ~np.isnan(exact)
    assert there.any()
    assert np.all(np.abs(got[there] - exact[there]) <= bound[there] + np.abs(exact[there]) * 2.0**-24 + 2.0**-150)


@pytest.mark.parametrize(("b_dtype", "n"), COLUMNS)
def test_every_code_times_every_scale(b_dtype: str, n: int) -> None:
    host, expected = every_code_and_scale(n, b_dtype)
    np.testing.assert_array_equal(run(host, target(b_dtype, n)), expected)


@pytest.mark.parametrize(("fmt", "n"), [("nvfp4", 4), ("mxfp4", 1), ("mxfp4", 8)])
def test_a_block_past_float32_that_its_scale_brings_back(fmt: str, n: int) -> None:
    """On the CPU as well, which sums blocks before it multiplies their scale in."""
    host = blocks_past_float32(fmt, n)
    require_within_bound(host, nvfp4_gemv(**host))
    require_within_bound(host, run(host, "sm_89" if fmt == "nvfp4" else target("bfloat16", n)))


@pytest.mark.parametrize("n", [1, 2, 8, 9])
def test_every_scale_of_a_column(n: int) -> None:
    """Column j of call s has scale code s + j, and meets scales of a that bring the product back to one."""
    rng = np.random.default_rng(n)
    for first in (0, 120, 128, 255 - n):
        sfb = (first + np.arange(n, dtype=np.uint8))[:, np.newaxis]
        sfa = (254 - np.minimum(sfb[rng.integers(0, n, 40)], 254)).astype(np.uint8)
        host = {
            "a": pairs_of(rng, 40, BLOCK), "sfa": sfa, "b": pairs_of(rng, n, BLOCK), "sfb": sfb, "format": "mxfp4",
            "out_dtype": "float32",
        }  # fmt: skip
        require_within_bound(host, run(host, target("e2m1", n), turn=2))


@pytest.mark.parametrize(
    ("b_dtype", "n"), [("e2m1", 1), ("e2m1", 3), ("e2m1", 16), ("bfloat16", 1), ("bfloat16", 3), ("bfloat16", 8)]
)
def test_neighbours_far_apart(b_dtype: str, n: int) -> None:
    host = neighbours_far_apart(n, b_dtype)
    require_within_bound(host, run(host, target(b_dtype, n), turn=n))


@pytest.mark.parametrize("n", [2, 11])
def test_nan_scales_stay_in_their_rows_and_columns(n: int) -> None:
    rng = np.random.default_rng(3)
    m, blocks = 37, 17
    host: dict[str, Any] = {
        "a": pairs_of(rng, m, blocks * BLOCK), "b": pairs_of(rng, n, blocks * BLOCK), "format": "mxfp4",
        "sfa": rng.integers(120, 130, (m, blocks), dtype=np.uint8), "out_dtype": "float32",
        "sfb": rng.integers(120, 130, (n, blocks), dtype=np.uint8),
    }  # fmt: skip
    host["sfa"][[0, 9, 36], [16, 3, 8]] = NAN
    host["sfb"][1, 12] = NAN
    got = run(host, target("e2m1", n))
    require_within_bound(host, got)
    assert np.isnan(got).sum() == m + 3 * (n - 1)
