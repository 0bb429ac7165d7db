"""topk's selection by a CTA or a cluster that keeps the row, without a GPU: hostile rows of all kinds side by side,
rows whose visible columns are fewer than, as many as and one more than what is wanted. Compiles, needs no GPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupymla
from cupymla.ops.topk import plan
from cupymla_lab.emulate import MODES, Settings
from cupymla_lab.emulate.settings import Mode
from cupymla_lab.emulated import Emulated, emulated

pytestmark = pytest.mark.compile


def hostile(columns: int) -> Any:
    """[rows, columns] float32: a kind of trouble in each row."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((14, columns)).astype(np.float32)
    x[0] = np.where(x[0] > 2, x[0], np.where(x[0] > 0, 0.0, -0.0))  # a plateau of zeros of both signs
    x[1] = 3.25  # equals alone
    x[2, ::2], x[2, 1::7] = -np.inf, np.nan
    x[3] = -np.inf
    x[4, ::5], x[4, 1::5] = np.inf, -np.inf  # more +inf than are wanted
    x[5] = np.exp2(rng.integers(-140, 127, columns)).astype(np.float32) * rng.choice([-1, 1], columns)
    x[6, ::999] *= 1e30  # bins of equal width hold all but these in one
    x[7] = 1 + rng.random(columns) * 2.0**-8  # 16 leading bits in common
    x[8] = np.sort(x[8])
    x[9] = np.nan
    x[9, -1] = 1  # one number alone
    x[10] = np.round(x[10])  # few different numbers
    x[11] = np.where(np.arange(columns) < columns - 20, 1e-42, 2e-42)  # subnormal numbers
    x[12] = np.minimum(x[12], 0)  # half zeros, and nothing above
    x[13] = x[13] > 0  # two values
    return x


def check(machine: Emulated, scores: Any, topk: int, **limits: Any) -> None:
    """Every result is the reference's, bit for bit; and a CTA or a cluster keeps each row."""
    given = {"scores": scores, "topk": topk, "return_values": True, **limits}
    results = machine.call(cupymla.topk, **machine.arguments(given, ()))
    for got, wanted in zip(results, cupymla.topk(**given), strict=True):
        np.testing.assert_array_equal(got.get().view(np.uint8), wanted.view(np.uint8))
    launch = machine.launches[-1]
    assert launch.grid[0] == len(scores) * launch.cluster
    if launch.cluster == 1:
        own = 8 if scores.shape[1] <= 8192 else 32
        assert launch.block == min(1024, -(-scores.shape[1] // (32 * own)) * 32)


@pytest.mark.parametrize(("columns", "topk"), [(4096, 2048), (8193, 2048), (8193, 250)])
def test_hostile_rows(columns: int, topk: int) -> None:
    """In registers and in shared memory, there with and without a bound."""
    with emulated("sm_90", 13, Settings("random", seed=1, races="hardware")) as machine:
        check(machine, hostile(columns), topk)
        assert machine.launches[-1].cluster == 1


def test_threads_of_48_columns() -> None:
    scores = hostile(33001)[[0, 2, 8, 10, 12, 13]]
    with emulated("sm_90", 6, Settings("random", seed=2, races="hardware")) as machine:
        check(machine, scores, 500)
        assert machine.launches[-1].cluster == 1 and machine.launches[-1].block == 1024


@pytest.mark.parametrize(
    ("multiprocessors", "cluster", "topk", "mode"),
    [*((132, 8, 250, mode) for mode in MODES), (57, 4, 1000, "lazy"), (28, 2, 33, "random")],
)
def test_hostile_rows_that_clusters_keep(
    multiprocessors: int, cluster: int, topk: int, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words and counts are on their way for a while. A bound holds where there are eight columns for each that is
    wanted, and where few have a number it does not."""
    monkeypatch.setattr(plan, "_ALONE_COLUMNS", 2000)
    monkeypatch.setattr(plan, "_LEAST_SHARE", 1)
    with emulated("sm_90", multiprocessors, Settings(mode, seed=1, races="hardware")) as machine:
        check(machine, hostile(2100), topk)
        assert machine.launches[-1].cluster == cluster


def test_a_cluster_keeps_several_chunks_of_columns() -> None:
    """Each thread has eight columns up to three times over, of a row that begins anywhere."""
    scores = np.concatenate([hostile(16901)[[0, 2, 8]], np.zeros((3, 5), np.float32)], 1)[:, 2:]
    starts, ends = np.array([0, 7, 10001], np.int32), np.array([16904, 16899, 16889], np.int32)
    with emulated("sm_90", multiprocessors=6) as machine:
        check(machine, scores, 1000, starts=starts, ends=ends)
        assert machine.launches[-1].cluster == 2


@pytest.mark.parametrize("topk", [1, 31, 33, 700, 701, 800])
def test_ranks_of_a_row_that_is_no_multiple_of_anything(topk: int) -> None:
    with emulated("sm_90") as machine:
        check(machine, hostile(701), topk)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_narrow_scores(dtype: Any) -> None:
    with np.errstate(over="ignore"):
        scores = hostile(1003).astype(dtype)
    with emulated("sm_90") as machine:
        check(machine, scores[:, :1000], 100)  # rows that begin anywhere


@pytest.mark.parametrize("cluster", [1, 8])
def test_what_is_visible(cluster: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing, one column, as many as are wanted and one more, all; from anywhere on. By one CTA and by clusters."""
    columns = 3000
    monkeypatch.setattr(plan, "_ALONE_COLUMNS", columns // cluster)
    monkeypatch.setattr(plan, "_LEAST_SHARE", 1)
    scores = hostile(columns)[[0, 10] * 6]
    lengths = np.array([0, 1, 63, 64, 65, columns] * 2, np.int32)
    starts = np.array([0] * 6 + [5, -9, 1001, 7, columns - 65, columns - 1], np.int32)
    with emulated("sm_90") as machine:
        check(machine, scores, 64, starts=starts, ends=np.minimum(starts, 10**6) + lengths)
