"""nvfp4_gemv's E8M0 scales over their whole range, in the PTX interpreter: where they are multiplied into codes as
bfloat16 one factor serves scales up to 2^5, and two serve them all.

Compiles to PTX, needs no GPU.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cupymla.ops.nvfp4_gemv import formats, reference
from cupymla.testing.operators import Subject
from cupymla.testing.without_gpu import machine_for

pytestmark = pytest.mark.compile

SUBJECT = Subject("nvfp4_gemv")
ONE, NAN = 127, 255
BLOCK = 32
EDGES = (0, 1, 5, 9, 126, 127, 131, 132, 133, 134, 200, 253, 254)
"""Around the ends and around the largest scale that one factor holds."""


def run(host: dict[str, Any], arch: str = "sm_90", turn: int = 0) -> npt.NDArray[Any]:
    with machine_for("nvfp4_gemv", arch, turn) as machine:
        return machine.run(SUBJECT, host)[0]


def pairs_of(rng: np.random.Generator, rows: int, k: int) -> npt.NDArray[np.uint8]:
    return rng.integers(0, 256, (rows, k // 2), dtype=np.uint8)


def require_within_bound(host: dict[str, Any], got: npt.NDArray[Any]) -> None:
    exact, bound = reference.nvfp4_gemv(**host), reference.error_bound(**host)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(exact))
    there = ~np.isnan(exact)
    assert there.any()
    assert np.all(np.abs(got[there] - exact[there]) <= bound[there] + np.abs(exact[there]) * 2.0**-24 + 2.0**-150)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("b_dtype", ["e2m1", "bfloat16", "float16"])
@pytest.mark.parametrize("n", [1, 7, 16])
def test_every_code_times_every_scale(n: int, b_dtype: str, arch: str) -> None:
    """Row s has every E2M1 code under scale code s, in one block; column j picks code j."""
    codes = np.tile(np.arange(BLOCK, dtype=np.uint8) % 16, (256, 1))
    chosen = np.eye(BLOCK, dtype=np.uint8)[:n]
    host: dict[str, Any] = {
        "a": formats.pack_pairs(codes), "sfa": np.arange(256, dtype=np.uint8)[:, np.newaxis], "format": "mxfp4",
        "out_dtype": "float32",
    }  # fmt: skip
    if b_dtype == "e2m1":
        host |= {"b": formats.pack_pairs(chosen * 2), "sfb": np.full((n, 1), ONE, np.uint8)}
    else:
        host["b"] = chosen.astype(ml_dtypes.bfloat16 if b_dtype == "bfloat16" else np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = (formats.MXFP4.decode_scales(host["sfa"]) * formats.E2M1[codes[:, :n]]).astype(np.float32)
    np.testing.assert_array_equal(run(host, arch), expected)


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
        require_within_bound(host, run(host, turn=2))


@pytest.mark.parametrize("b_dtype", ["e2m1", "bfloat16"])
@pytest.mark.parametrize("n", [1, 3, 16])
def test_neighbours_far_apart(n: int, b_dtype: str) -> None:
    """Each block's scales of a are as large as b's are small, and the next block's are others altogether."""
    rng = np.random.default_rng(20 + n)
    m, blocks = 70, 21
    middle = rng.choice(EDGES, blocks)

    def near(rows: int, code: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.asarray(np.clip(code + rng.integers(-2, 3, (rows, blocks)), 0, 254))

    host: dict[str, Any] = {
        "a": pairs_of(rng, m, blocks * BLOCK), "sfa": near(m, middle).astype(np.uint8), "format": "mxfp4",
        "out_dtype": "float32",
    }  # fmt: skip
    if b_dtype == "e2m1":
        host |= {"b": pairs_of(rng, n, blocks * BLOCK), "sfb": near(n, 254 - middle).astype(np.uint8)}
    else:
        exponents = np.clip(near(n, 254 - middle), 8, 246) - ONE
        values = rng.standard_normal((n, blocks, BLOCK)) * 2.0 ** exponents[:, :, np.newaxis]
        host["b"] = values.reshape(n, -1).astype(ml_dtypes.bfloat16)
    require_within_bound(host, run(host, turn=n))


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
    got = run(host)
    require_within_bound(host, got)
    assert np.isnan(got).sum() == m + 3 * (n - 1)
