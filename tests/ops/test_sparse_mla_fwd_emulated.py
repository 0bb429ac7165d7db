"""The Blackwell kernel of sparse_mla_fwd on the host emulator, and what its machine code holds.

The operator's own plan and binding meet the accuracy criterion; which cases run is said in emulated_kit.py. Compiles,
needs no GPU.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import emulated_kit as kit
import numpy as np
import pytest
from sass_kit import machine_code, require_single_issuers
from variants_kit import compiled

from cupymla import arch, build
from cupymla.build.source import cuda_root
from cupymla.ops.mla_cases import MlaCase, sized
from cupymla.ops.sparse_mla_fwd import blackwell_plan, plan
from cupymla_lab.subjects import Subject

pytestmark = pytest.mark.compile

SUBJECT = Subject("sparse_mla_fwd")


@pytest.mark.parametrize(("case", "mode"), list(kit.case_parameters(SUBJECT)))
def test_kernel_meets_the_accuracy_criterion(case: MlaCase, mode: str) -> None:
    kit.check(SUBJECT, case, mode)


KERNELS = [pytest.param(100, 2, id="pair"), pytest.param(40, 1, id="few heads")]
"""Heads, and the CTAs that take them."""


@pytest.mark.parametrize(("heads", "ctas"), KERNELS)
def test_a_cluster_walks_several_queries_of_several_blocks(heads: int, ctas: int) -> None:
    """Stages of the ring serve Q, keys and values in turn, past queries without an entry: a warp that gets ahead of a
    barrier's phases, or falls behind them, shows only after several. Heads are padded, of a pair in the second CTA."""
    case = sized(heads, 576, 200, 9, 250, "_walk", "masks", lengths="hostile", selection="full")
    (launch,) = kit.check(SUBJECT, case, "random", seed=3, multiprocessors=ctas)
    assert (launch.grid, launch.cluster) == ((ctas, 1, 1), ctas)


@pytest.mark.parametrize(("heads", "topk", "mode"), [(66, 70, "random"), (16, 40, "eager")])
def test_a_cluster_walks_many_queries_of_one_block(heads: int, topk: int, mode: str) -> None:
    """Q of the next query is staged while this one's only block is multiplied."""
    kit.check(SUBJECT, sized(heads, 576, topk, 9, 200, "_short", "masks"), mode, seed=4, multiprocessors=2)


WAIT_OF_QUERY_STAGES = """      storage.free[ring.stage].wait(ring.free());
      __syncwarp();
      if (lane == 0) {
        if (part == 0"""


@pytest.mark.parametrize("warp", [0, 3])
def test_a_key_warp_may_come_late_to_the_last_stage_of_q(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, warp: int
) -> None:
    """Q's last stage has no tile of the last key warp. The others must not get so far without it that the stage's phase
    is over before it waits. Mode random shows that with few of its seeds, so the delay is written into the source."""
    folder = tmp_path / "cuda"
    shutil.copytree(cuda_root(), folder)
    producer = folder / "sparse_mla_fwd" / "sm100" / "producer.cuh"
    text = producer.read_text()
    assert text.count(WAIT_OF_QUERY_STAGES) == 1
    late = f"if (part == 1 && own == {warp}) for (int i = 0; i < 2048; ++i) __nanosleep(1000);\n"
    producer.write_text(text.replace(WAIT_OF_QUERY_STAGES, late + WAIT_OF_QUERY_STAGES))
    ours = plan.variant
    monkeypatch.setattr(plan, "variant", lambda *given, **named: replace(ours(*given, **named), root=str(folder)))
    kit.check(SUBJECT, sized(40, 576, 40, 3, 250, "_late", "masks", selection="full"), "random", multiprocessors=1)


def merge_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan splits as few blocks as there are."""
    for constant in ("_MERGE_BLOCKS", "_PAIR_MERGE_BLOCKS"):
        monkeypatch.setattr(blackwell_plan, constant, 0)


# Heads, queries, multiprocessors and how many share the entries of a query.
PARTS = [
    pytest.param(70, 2, 8, 2, id="2 pairs"),
    pytest.param(70, 1, 8, 4, id="4 pairs", marks=pytest.mark.interpret_all),
    pytest.param(20, 2, 4, 2, id="2"),
    pytest.param(64, 1, 8, 8, id="8"),
]


@pytest.mark.parametrize(("heads", "queries", "multiprocessors", "parts"), PARTS)
def test_a_cluster_shares_the_entries_of_a_query(
    monkeypatch: pytest.MonkeyPatch, heads: int, queries: int, multiprocessors: int, parts: int
) -> None:
    """Three blocks for two pairs, and for four, one of which has none; five for two CTAs, and for eight, three of which
    have none. The plan is told that merging costs nothing, so that it splits so few. Statistics and a sink go through
    the merge, and a query without an entry."""
    merge_costs_nothing(monkeypatch)
    lengths: Any = "hostile" if queries > 1 else "none"
    d_qk = 512 if heads > 64 else 576
    case = sized(heads, d_qk, 300, queries, 400, "_split", "parts", sink="finite", lengths=lengths)
    (launch,) = kit.check(SUBJECT, case, "random", seed=2, multiprocessors=multiprocessors)
    cluster = (2 if heads > 64 else 1) * parts
    assert (launch.cluster, launch.grid) == (cluster, (cluster * queries, 1, 1))


@pytest.mark.parametrize(("heads", "mode"), [(128, "lazy"), (64, "random")])
def test_output_is_rescaled_where_the_maximum_grows(heads: int, mode: str) -> None:
    """Later blocks hold ever larger scores, by far more than the slack of the base, in some heads only."""
    inputs = SUBJECT.cases.inputs(sized(heads, 576, 600, 1, 600, "_growing", "options", selection="full"), 2)
    inputs["indices"] = np.arange(600, dtype=np.int32).reshape(1, 600)
    growth = np.linspace(0.1, 6, 600).astype(np.float32)[:, None]
    inputs["kv"] = (inputs["kv"].astype(np.float32) * growth).astype(inputs["kv"].dtype)
    inputs["q"][:, ::3] *= inputs["q"].dtype.type(8)
    kit.check_inputs(SUBJECT, inputs, mode, seed=5)


def require_either(got: tuple[Any, ...], short: tuple[Any, ...], long: tuple[Any, ...]) -> None:
    """Every query has all results of one of its two lengths."""
    for query, found in enumerate(zip(*got, strict=True)):
        either = [[part[query].tobytes() for part in results] for results in (short, long)]
        assert [part.tobytes() for part in found] in either, query


# Sizes, multiprocessors and lengths: one pair, or CTA, takes 36 queries, so that what is handed on comes round; several
# share one.
CHANGING = [
    pytest.param(sized(70, 576, 64, 36, 300, "_changing", "masks", selection="full"), 2, (0, 64), id="a pair"),
    pytest.param(sized(70, 512, 260, 1, 300, "_changing", "masks", selection="full"), 4, (1, 260), id="sharing pairs"),
    pytest.param(sized(9, 512, 64, 36, 300, "_changing", "masks", selection="full"), 1, (0, 64), id="few heads"),
    pytest.param(sized(9, 576, 260, 1, 300, "_changing", "masks", selection="full"), 4, (1, 260), id="sharing CTAs"),
]


@pytest.mark.parametrize(("case", "multiprocessors", "lengths"), CHANGING)
def test_lengths_that_change_under_way_leave_the_roles_in_agreement(
    monkeypatch: pytest.MonkeyPatch, case: MlaCase, multiprocessors: int, lengths: tuple[int, int]
) -> None:
    """Roles that read topk_length for themselves wait for each other for ever. Pairs that share a query agree too."""
    merge_costs_nothing(monkeypatch)
    inputs = SUBJECT.cases.inputs(case, 1)
    inputs["topk_length"] = np.empty(case.s_q, np.int32)

    def results(*values: int) -> tuple[Any, ...]:
        return kit.results_while_changing(SUBJECT, inputs, {"topk_length": values}, multiprocessors=multiprocessors)

    require_either(results(*lengths), results(lengths[0]), results(lengths[1]))


@pytest.mark.parametrize(("heads", "d_qk"), [(128, 576), (64, 512)])
def test_indices_that_change_under_way_leave_every_head_a_result(heads: int, d_qk: int) -> None:
    """Whether a head has a valid entry is said by the warps that masked its scores: of others it may not be true."""
    inputs = SUBJECT.cases.inputs(sized(heads, d_qk, 2, 20, 100, "_changing", "masks", selection="full"), 1)
    values = (inputs["indices"].copy(), np.full_like(inputs["indices"], -1))
    out, max_logits, lse = kit.results_while_changing(SUBJECT, inputs, {"indices": values})
    assert not any(np.isnan(part.astype(np.float32)).any() for part in (out, max_logits, lse))
    empty = np.isposinf(lse)
    assert not out[empty].any() and np.isfinite(max_logits[~empty]).all()


@pytest.mark.parametrize(("heads", "mode"), [(66, "random"), (5, "lazy")])
def test_lengths_of_many_queries_come_round(heads: int, mode: str) -> None:
    """Three batches of lengths and a part of a fourth, most of them 0: nothing else holds roles back."""
    d_qk = 576 if heads > 64 else 512
    inputs = SUBJECT.cases.inputs(sized(heads, d_qk, 40, 50, 100, "_batches", "masks", selection="full"), 3)
    inputs["topk_length"] = np.zeros(50, np.int32)
    inputs["topk_length"][[0, 15, 16, 31, 40, 49]] = [40, 1, 33, 2, 40, 7]
    kit.check_inputs(SUBJECT, inputs, mode, seed=6, multiprocessors=2 if heads > 64 else 1)


SOURCES = [source for source in compiled("cupymla.ops.sparse_mla_fwd") if source.arch == plan.BLACKWELL]


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_machine_code_has_the_intended_instructions(source: build.KernelSource, tmp_path: Path) -> None:
    """Products of the intended form, most of those with Q from Tensor Memory; gathers of four rows; no spills; the
    budgets."""
    pytest.importorskip("cupy", reason="compiling goes through CuPy's NVRTC bindings")
    made = build.cubin(source, fail_on_spill=True)
    assert made.facts["tmem_columns"] == 512
    assert made.facts["smem_bytes"] <= arch.named(source.arch).smem_bytes
    text = machine_code(made, tmp_path)
    require_single_issuers(text)
    found = Counter(re.findall(r"\b(UTC\w*MMA\S*|UTMALDG\S*|LDTM|STTM)", text))
    defines = dict(source.defines)
    channels, pair = defines["CUPYMLA_D_QK"], defines["CUPYMLA_HEADS"] == 128
    assert isinstance(channels, int)
    assert made.facts["threads"] == (384 if pair else 448)
    product, gather = ("UTCHMMA.2CTA", "UTMALDG.2D.GATHER4.2CTA") if pair else ("UTCHMMA.WS", "UTMALDG.2D.GATHER4")
    # One product of S for each 16 channels; of O 16, or 8, in each of two places of the code.
    assert found[product] == channels // 16 + 2 * (16 if pair else 8)
    assert len(re.findall(re.escape(product) + r"\S* tmem", text)) == (6 if pair else 7) * 4
    assert found[gather] > 0 and found["LDTM"] > 0 and found["STTM"] > 0
    assert {name for name in found if "MMA" in name} == {product}
