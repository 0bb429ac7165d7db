"""The Blackwell kernel of attn_dist on the host emulator: its own plan and binding meet the accuracy criterion."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated_kit import case_parameters, check, check_inputs, results_while_changing, settings
from sass_kit import machine_code
from variants_kit import compiled

from cupymla import arch, build
from cupymla.ops.attn_dist import plan
from cupymla.ops.mla_cases import MlaCase, sized
from cupymla.testing.operators import Array
from cupymla_lab.emulated import emulated
from cupymla_lab.subjects import Subject

pytestmark = pytest.mark.compile

SUBJECT = Subject("attn_dist")


@pytest.mark.parametrize(("case", "mode"), list(case_parameters(SUBJECT)))
def test_kernel_meets_the_accuracy_criterion(case: MlaCase, mode: str) -> None:
    check(SUBJECT, case, mode)


WALKS = (
    # A pair of CTAs: every ring comes round, heads are padded, and the last head block has fewer than 128 of them.
    sized(161, 512, 600, 4, 700, "_pair", "masks", lengths="hostile", selection="full", normalize="l1"),
    # One CTA, and rows that end in blocks without a valid entry.
    sized(33, 576, 600, 7, 700, "_one", "masks", lengths="hostile", selection="empty", normalize="l1"),
)


@pytest.mark.parametrize(("case", "mode"), [(WALKS[0], "random"), (WALKS[1], "lazy")], ids=["pair", "one CTA"])
def test_a_cluster_walks_several_queries_of_many_blocks(case: MlaCase, mode: str) -> None:
    """Stages, accumulators, Q, head blocks and row sums are used again, past queries without an entry."""
    cluster = 2 if case.h_q > 64 else 1
    (launch,) = check(SUBJECT, case, mode, multiprocessors=cluster)
    assert (launch.grid, launch.cluster) == ((cluster, 1, 1), cluster)


def dist(inputs: dict[str, Any], mode: Any, seed: int, multiprocessors: int) -> Array:
    with emulated("sm_100f", multiprocessors, settings(mode, seed)) as machine:
        return machine.run(SUBJECT, inputs)[0]


def test_the_same_bits_whatever_the_order_and_however_entries_are_assigned() -> None:
    case = sized(65, 512, 600, 1, 700, "_bits", "shapes")
    inputs = SUBJECT.cases.inputs(case, 3)
    first = dist(inputs, "eager", 1, 2)
    for seed, multiprocessors in ((2, 2), (3, 4), (4, 8)):
        np.testing.assert_array_equal(dist(inputs, "random", seed, multiprocessors), first)


def batches(layout: str, rng: np.random.Generator, like: Array) -> Array:
    """KV (2, 90, 512) whose strides are no multiples of each other's, or zero."""
    if layout == "interleaved":
        return rng.standard_normal((90, 2, 512)).astype(like.dtype).transpose(1, 0, 2)
    if layout == "one token":
        return np.broadcast_to(rng.standard_normal((2, 1, 512)).astype(like.dtype), (2, 90, 512))
    words = rng.standard_normal(90 * 520 * 2 + 8).astype(like.dtype)
    size = like.itemsize
    return np.lib.stride_tricks.as_strided(words, (2, 90, 512), ((90 * 520 + 8) * size, 520 * size, size))


@pytest.mark.parametrize("layout", ["interleaved", "one token", "odd distance"])
def test_keys_are_gathered_from_any_layout(layout: str) -> None:
    case = sized(16, 512, 65, 2, 90, "_layout", "strides", batch=2)
    inputs = SUBJECT.cases.inputs(case, 4)
    inputs["kv"] = batches(layout, np.random.default_rng(5), inputs["kv"])
    inputs["lse"] = np.full_like(inputs["lse"], 30.0)  # what these keys' forward gives would do as well
    check_inputs(SUBJECT, inputs, "eager")


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_infinities_of_a_selected_key_stay_in_its_entry(sign: float) -> None:
    """Heads that pad the product meet them as zero times infinity."""
    case = sized(20, 512, 65, 1, 90, "_infinite", "options", selection="full")
    inputs = SUBJECT.cases.inputs(case, 6)
    inputs["kv"] = inputs["kv"].copy()
    inputs["kv"][inputs["indices"][0, 7], 5] = np.inf * sign
    got = dist(inputs, "eager", 1, 2)
    with np.errstate(all="ignore"):
        (wanted,) = SUBJECT.reference(inputs, "same")
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(wanted))
    np.testing.assert_allclose(got[np.isfinite(got)], wanted[np.isfinite(wanted)], rtol=1e-4)


CHANGING = [
    pytest.param(sized(33, 512, 530, 7, 600, "_changing", "masks", selection="full", normalize="l1"), id="one CTA"),
    pytest.param(sized(65, 512, 530, 7, 600, "_changing", "masks", selection="full", normalize="l1"), id="pair"),
    pytest.param(sized(140, 512, 530, 8, 600, "_changing", "masks", selection="full"), id="pair, two head blocks"),
]


@pytest.mark.parametrize("case", CHANGING)
def test_lengths_that_change_under_way_leave_the_roles_in_agreement(case: MlaCase) -> None:
    """Planners of a pair that read topk_length for themselves wait for each other for ever; one CTA has one planner."""
    inputs = SUBJECT.cases.inputs(case, 1)
    inputs["topk_length"] = np.empty(case.s_q, np.int32)
    inputs["indices"] = np.full_like(inputs["indices"], -1)
    inputs["indices"][:, [0, 300]] = 7, 8

    def rows(*lengths: int) -> Array:
        return results_while_changing(SUBJECT, inputs, {"topk_length": lengths})[0]

    short, long, got = rows(3), rows(530), rows(3, 530)
    for query in range(case.s_q):
        assert got[query].tobytes() in (short[query].tobytes(), long[query].tobytes())


@pytest.mark.parametrize("case", CHANGING)
def test_indices_that_change_under_way_leave_the_roles_in_agreement(case: MlaCase) -> None:
    """They say how many blocks at the end of a row are dropped: here none, or all but one."""
    inputs = SUBJECT.cases.inputs(case, 1)
    inputs["lse"] = np.full_like(inputs["lse"], 30.0)
    first_alone, last_too = np.full_like(inputs["indices"], -1), np.full_like(inputs["indices"], -1)
    first_alone[:, 0] = last_too[:, 0] = last_too[:, -1] = 7
    (got,) = results_while_changing(SUBJECT, inputs, {"indices": (first_alone, last_too)})
    assert np.isfinite(got).all() and (got[:, 0] > 0).all() and not got[:, 1:-1].any()


@pytest.mark.parametrize("source", [s for s in compiled("cupymla.ops.attn_dist") if s.arch == "sm_100f"], ids=str)
def test_tensor_memory_and_shared_memory_are_within_budget(source: build.KernelSource) -> None:
    facts = build.cubin(source, fail_on_spill=True).facts
    assert facts["tmem_columns"] <= 512 and facts["smem_bytes"] <= arch.named(source.arch).smem_bytes


@pytest.mark.parametrize("block_heads", plan.BLOCK_HEADS)
def test_instructions_are_those_that_the_design_counts_on(block_heads: int, tmp_path: Path) -> None:
    """One thread issues products and gathers, without the loops over lanes that the compiler makes where it cannot
    tell; Tensor Memory is read 32 columns at a time, arithmetic is in pairs."""
    sass = machine_code(build.cubin(plan.variant(arch.named("sm_100f"), block_heads=block_heads)), tmp_path)
    pair = r"\.2CTA" if block_heads == 128 else r""
    counts = {name: len(re.findall(name, sass)) for name in (rf"UTCHMMA{pair} ", rf"GATHER4{pair} ", "FFMA2 ")}
    assert list(counts.values()) == [4, 8, 64], counts
    assert len(re.findall(r"LDTM\.x32", sass)) == 3
    assert "BRA.U.ANY" not in sass and "R2UR.BROADCAST" not in sass
