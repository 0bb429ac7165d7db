"""Plans of topk: what fits shared memory, who gets clusters, and a record that is the kernel's."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from cupymla import arch
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
        most = 32768 if rows == 1 else 24576
        fits = columns <= 8192 or (columns <= most and columns * 4 + 1024 * 16 <= room)
        assert bool(chosen.own) == (fits and order == "index")
        if chosen.own:
            # No thread more than there need be, and four bins for each.
            assert 0 <= chosen.threads * chosen.own - columns < 32 * chosen.own or columns == 0
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


def test_few_long_rows_get_clusters_where_there_are_any() -> None:
    few = replace(PROBLEM, rows=16, columns=131072)
    assert plan.plan(few, SM90, 132).cluster == 8
    assert plan.plan(few, arch.named("sm_80"), 108).cluster == 1
    assert plan.plan(replace(few, rows=17), SM90, 132).cluster == 1
    assert plan.plan(replace(few, columns=4096), SM90, 132).cluster == 1
    assert plan.plan(replace(few, topk=5000), SM90, 132).cluster == 1  # read whole, by one CTA


def test_a_kernel_of_sm_90_serves_the_target_with_an_a() -> None:
    assert plan.variant(SM90, scores="float16").arch == "sm_90"


def test_what_no_kernel_serves_is_refused() -> None:
    with pytest.raises(InputError, match="scores"):
        plan.variant(SM90, scores="float64")
    with pytest.raises(UnsupportedError, match="rows"):
        plan.plan(replace(PROBLEM, rows=2**30), SM90, 132)


def test_the_record_is_the_kernels() -> None:
    text = (Path(__file__).parents[2] / "cuda/topk/sm80/params.cuh").read_text()
    body = re.sub(r"//.*", "", text[text.index("struct Parameters {") : text.index("};")])
    declared = [
        name
        for line in re.findall(r"(?:const )?u?int\d+_t\*? ([^;]+);", body)
        for name in re.split(r",\s*", line.strip())
    ]
    assert declared == [name for name, *_ in cuda.Parameters._fields_]
