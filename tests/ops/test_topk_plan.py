"""Plans of topk: what fits shared memory, who gets clusters, and a record that is the kernel's."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
from plan_kit import require_mirrored

from cupymla import arch, build, driver
from cupymla.device import Device
from cupymla.errors import InputError, UnsupportedError
from cupymla.ops.topk import cuda, plan
from cupymla.ops.topk.spec import Options, Problem

PROBLEM = Problem((), 4096, 32768, 2048, "float32", Options(2048), Device("cuda", 0))
SM90 = arch.named("sm_90a")


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_90a", "sm_100f"])
@pytest.mark.parametrize("order", ["index", "score"])
def test_shared_memory_fits(target: str, order: Literal["index", "score"]) -> None:
    all_columns = (0, 1, 4096, 8192, 8193, 32768, 32769, 131072, 1 << 20, 1 << 24, 2**31 - 1)
    for rows, columns, topk in itertools.product((1, 200), all_columns, (1, 2048, 4096, 4097, 100000)):
        chosen = plan.plan(
            replace(PROBLEM, rows=rows, columns=columns, topk=topk, options=Options(topk, order)),
            arch.named(target),
            132,
        )
        assert chosen.array_bytes + plan.STORAGE_BYTES + 1024 <= arch.named(target).smem_bytes, (rows, columns, topk)
        wanted = min(topk, max(columns, 1))
        room = arch.named(target).smem_bytes - plan.STORAGE_BYTES - 1024
        most = 49152 if rows == 1 else 24576
        held = columns if columns <= 32768 else 49152  # by 1024 threads
        fits = columns <= 8192 or (columns <= most and held * 4 + 1024 * 16 <= room)
        clustered = rows == 1 and 8192 < columns <= 8 * 49152 and arch.named(target).capability >= (9, 0)
        assert bool(chosen.own) == ((fits or clustered) and order == "index")
        assert dict(chosen.source.defines)["CUPYMLA_CLUSTER"] == int(clustered and order == "index")
        if chosen.own and clustered:
            # All columns find a place, a CTA's are no few, and a thread has 16, or fewer where much is wanted.
            assert chosen.cluster * chosen.threads * chosen.kept >= columns >= chosen.cluster * 4096
            assert chosen.own == 48 and chosen.kept in (32, 48)
            assert chosen.ctas == chosen.cluster == (8 if columns > 32760 else 2)
            share = columns / chosen.cluster
            assert chosen.threads in (512, 1024) or share / 16 <= chosen.threads <= max(share / 16, topk / 2) + 32
            continue
        if chosen.own:
            # No thread more than there need be, and four bins for each.
            each = min(chosen.own, 32)
            assert 0 <= chosen.threads * each - columns < 32 * each or columns == 0 or chosen.threads == 1024
            assert chosen.threads * (chosen.kept or chosen.own) >= columns
            assert chosen.array_bytes == chosen.threads * 16 + (columns > 8192) * chosen.threads * 128
            assert chosen.ctas == rows and ("CUPYMLA_SHORT", chosen.own) in chosen.source.defines
            continue
        if chosen.streamed:
            # Candidates are more than what is wanted, columns have a bit each, and all can be sorted at once.
            assert chosen.capacity > wanted and chosen.capacity >= 4096
            assert 32 * chosen.bitmap_words >= columns + 14
            assert order == "index" or chosen.sorted >= wanted
        if order == "score":
            assert chosen.sorted & (chosen.sorted - 1) == 0 < chosen.sorted
        # The kernel's histogram has 2048 bins, assigned to all threads.
        assert 2048 % chosen.threads == 0 and chosen.ctas == rows * chosen.cluster


@pytest.mark.parametrize("order", ["index", "score"])
def test_few_long_rows_get_clusters_where_there_are_any(order: Literal["index", "score"]) -> None:
    few = replace(PROBLEM, rows=16, columns=131072, options=Options(2048, order))
    assert plan.plan(few, SM90, 132).cluster == 8
    assert plan.plan(few, arch.named("sm_80"), 108).cluster == 1
    assert plan.plan(replace(few, columns=4096), SM90, 132).cluster == 1
    assert plan.plan(replace(few, columns=300000), SM90, 132).cluster == 8


@pytest.mark.parametrize(
    ("rows", "columns", "cluster"),
    [
        (1, 32768, 8),
        (1, 32760, 4),
        (17, 32768, 4),
        (33, 131072, 4),
        (34, 131072, 3),
        (44, 147456, 3),
        (44, 147457, 2),
        (45, 98304, 2),
        (45, 98305, 2),
        (67, 9000, 1),
    ],
)
def test_clusters_that_keep_rows_are_as_large_as_there_are_multiprocessors_for(
    rows: int, columns: int, cluster: int
) -> None:
    assert plan.plan(replace(PROBLEM, rows=rows, columns=columns), SM90, 132).cluster == cluster


@pytest.mark.parametrize(
    ("rows", "columns", "without", "cluster"),
    [
        (16, 131072, {8}, 4),
        (32, 131072, {4}, 3),
        (32, 131072, {4, 3}, 2),
        (16, 524288, (), 8),
        (16, 524288, {8}, 4),
        (16, 524288, {8, 4, 2}, 1),
        (1, 32768, {8, 4, 3, 2}, 1),
    ],
)
def test_clusters_that_do_not_all_run_at_once_are_not_taken(
    rows: int, columns: int, without: Collection[int], cluster: int
) -> None:
    chosen = plan.plan(replace(PROBLEM, rows=rows, columns=columns), SM90, 132, without)
    assert (chosen.cluster, chosen.ctas) == (cluster, rows * cluster)


@pytest.mark.parametrize(("at_once", "cluster"), [({}, 8), ({8: 15}, 4), ({8: 15, 4: 15}, 3), ({8: 0, 4: 0, 3: 0}, 2)])
def test_the_driver_says_which_run_at_once(
    monkeypatch: pytest.MonkeyPatch, at_once: dict[int, int], cluster: int
) -> None:
    """On 132 multiprocessors an H200 has room for 15 clusters of eight CTAs, 30 of four, 39 of three and 66 of two."""
    monkeypatch.setattr(driver, "arch_of", lambda device: SM90)
    monkeypatch.setattr(driver, "multiprocessor_count", lambda index: 132)
    monkeypatch.setattr(build, "kernel", lambda source, index: SimpleNamespace(facts={"smem_bytes": 9000}))
    monkeypatch.setattr(cuda, "active_clusters", lambda kernel, geometry: at_once.get(geometry.cluster, 66))
    chosen = cuda.running_plan(plan.plan, replace(PROBLEM, rows=16, columns=32768), 0)
    assert chosen.cluster == cluster


def test_a_row_that_is_sorted_by_score_is_read_whole_where_much_is_wanted() -> None:
    by_score = replace(PROBLEM, rows=16, columns=131072, topk=5000, options=Options(5000, "score"))
    assert plan.plan(by_score, SM90, 132).cluster == 1
    assert plan.plan(replace(by_score, rows=17, topk=2048, options=Options(2048, "score")), SM90, 132).cluster == 4


def test_a_kernel_of_sm_90_serves_the_target_with_an_a() -> None:
    assert plan.variant(SM90, scores="float16").arch == "sm_90"


def test_what_no_kernel_serves_is_refused() -> None:
    with pytest.raises(InputError, match="scores"):
        plan.variant(SM90, scores="float64")
    with pytest.raises(UnsupportedError, match="rows"):
        plan.plan(replace(PROBLEM, rows=2**30), SM90, 132)


def test_the_record_is_the_kernels() -> None:
    require_mirrored(cuda.Parameters, "topk/sm80/params.cuh")


@pytest.mark.parametrize("columns", [32768, 65536, 131072, 262144, 524288, 1 << 20])
@pytest.mark.parametrize("rows", [64, 4096])
def test_what_a_sample_lets_through_has_room_but_for_rare_rows(columns: int, rows: int) -> None:
    """The threshold is the score of some rank in a sample; how many reach it, of independent scores, is drawn here.
    With room for 5120 entries all rows of a million columns were read twice."""
    chosen = plan.long_plan(replace(PROBLEM, rows=rows, columns=columns), SM90, 132)
    sample = chosen.threads * 8
    mean = 2048 / columns * sample
    rank = int(mean + 6 * np.sqrt(mean * (1 - 2048 / columns))) + 2  # `first_rank` in cuda/topk/sm80/stream.cuh
    passed = np.random.default_rng(0).beta(rank, sample - rank + 1, 10000) * columns
    assert (passed > chosen.capacity).mean() < 0.01
    assert (passed < 2048).mean() < 0.001
