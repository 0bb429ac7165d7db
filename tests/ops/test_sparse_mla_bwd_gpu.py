"""sparse_mla_bwd on a GPU beyond its cases: the distribution, graphs, overlap, chunks, equal bits, sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from equal_runs_kit import require_equal_runs
from mla_gpu_kit import OnGpu
from non_finite_kit import WHERE, non_finite_problem

import cupymla
from cupymla import driver
from cupymla.ops.mla_cases import sized
from cupymla.ops.sparse_mla_bwd import sizes
from cupymla.ops.sparse_mla_bwd.paths import fixed_order, packed_queries, token_order
from cupymla.testing.operators import arguments_on

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

ON_GPU = OnGpu("sparse_mla_bwd", "h128_d576_k130_q3_kv300")
problem, require_right = ON_GPU.problem, ON_GPU.require_right


@pytest.mark.parametrize("heads", [16, 64, 128, 192])
def test_the_distribution_is_right_and_repeats(cp: Any, heads: int) -> None:
    case = sized(heads, 576, 200, 5, 400, "_x", "options", wants_dist=True, sink="finite", selection="empty")
    host, arguments = problem(cp, case=case)
    found = []
    for _ in range(20):
        arguments["attn_dist"].fill(np.nan)
        results = cupymla.sparse_mla_bwd(**arguments)
        found.append(arguments["attn_dist"].get())
    require_right(host, results, arguments)
    assert all(other.tobytes() == found[0].tobytes() for other in found)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("heads", [3, 17])
def test_what_is_not_finite_stays_with_its_query(
    cp: Any, heads: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where neighbours are packed, as they would be only where there are more of them."""
    monkeypatch.setattr(packed_queries, "_MARGIN", 1e9)
    host = non_finite_problem(where, heads)
    arguments = arguments_on(cp, host)
    require_right(host, cupymla.sparse_mla_bwd(**arguments), arguments)


@pytest.mark.parametrize(("deterministic", "in_order"), [(False, False), (False, True), (True, False)])
def test_cupy_graph_replays_every_stage(
    cp: Any, deterministic: bool, in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums, lists and counts are cleared inside the graph, not once before it; the distribution is written there."""
    monkeypatch.setattr(token_order, "_ORDER_GAIN", -1.0 if in_order else 2.0)
    case = sized(128, 576, 130, 3, 300, "_x", "options", wants_dist=True)
    host, arguments = problem(cp, case=case)
    prepared = cupymla.sparse_mla_bwd.prepare(**(arguments | {"deterministic": deterministic}))
    prepared()
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        captured = prepared(stream=stream)
        graph = stream.end_capture()
    arguments["attn_dist"].fill(np.nan)
    cp.cuda.Device().synchronize()
    for _ in range(3):
        graph.launch(stream)
    stream.synchronize()
    require_right(host, captured, arguments)


@pytest.mark.parametrize("captured", [False, True])
def test_overlapping_kernels_give_the_bits_of_ordinary_launches(
    cp: Any, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage that read or cleared too early would show, if not each time: hence many times, on changing inputs."""
    case = sized(128, 576, 65, 9, 70, "_overlap", "options", deterministic=True, sink="finite", selection="duplicates")
    _, arguments = problem(cp, case=case)
    if not driver.has_dependent_launch(0):
        pytest.skip("needs a driver that has dependent launches in graphs")
    overlapping = cupymla.sparse_mla_bwd.prepare(**arguments)
    monkeypatch.setattr(driver, "has_dependent_launch", lambda index: False)
    ordinary = cupymla.sparse_mla_bwd.prepare(**arguments)
    stream = cp.cuda.Stream(non_blocking=True)
    graph = None
    got = overlapping()  # a prepared call writes the same arrays each time
    cp.cuda.Device().synchronize()
    if captured:
        with stream:
            stream.begin_capture()
            overlapping(stream=stream)
            graph = stream.end_capture()
    for _ in range(200):
        arguments["indices"][...] = cp.roll(arguments["indices"], 1, axis=-1)
        arguments["dout"][...] = cp.roll(arguments["dout"], 1, axis=0)
        stream.wait_event(cp.cuda.get_current_stream().record())
        if graph is None:
            overlapping(stream=stream)
        else:
            graph.launch(stream)
        stream.synchronize()
        wanted = ordinary()
        for one, other in zip(got, wanted, strict=True):
            assert bool((one.view(cp.uint8) == other.view(cp.uint8)).all())


def test_chunks_of_queries_add_up(cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two queries' rows at a time, the lists and partial rows are used again and again."""
    case = sized(128, 576, 130, 7, 60, "_x", "options", deterministic=True, selection="duplicates")
    host, arguments = problem(cp, case=case)
    monkeypatch.setattr(fixed_order, "PARTIAL_BYTES", 2 * 130 * 576 * 2)
    monkeypatch.setattr(sizes, "LIST_BYTES", 2 * (2 * 130 + 60) * 4)  # of two chunks of four
    require_right(host, cupymla.sparse_mla_bwd.prepare(**arguments)())


@pytest.mark.parametrize("heads", [128, 64, 16])
def test_deterministic_bits_hold_beside_other_work(cp: Any, heads: int) -> None:
    case = sized(heads, 576, 512, 300, 600, "_x", "options", deterministic=True, selection="full", sink="finite")
    _, arguments = problem(cp, case=case)
    require_equal_runs(cp, cupymla.sparse_mla_bwd.prepare(**arguments))


def test_no_queries_and_no_keys(cp: Any) -> None:
    _, arguments = problem(cp)
    few = {name: arguments[name][:0] for name in ("q", "out", "dout", "lse", "indices")}
    dq, dkv = cupymla.sparse_mla_bwd(**(arguments | few))
    assert dq.shape[0] == 0 and not dkv.astype(np.float32).any()
    dq, dkv = cupymla.sparse_mla_bwd(**(arguments | {"kv": arguments["kv"][:0]}))
    assert dkv.shape[0] == 0 and not dq.astype(np.float32).any()


@pytest.mark.parametrize("deterministic", [False, True])
def test_offsets_past_32_bits(cp: Any, deterministic: bool) -> None:
    """Rows of kv and of its sums at their far end, past 4 GiB, are read and written where they belong."""
    s_kv = 1 << 22
    dtype = problem(cp)[1]["q"].dtype
    kv = cp.zeros((s_kv, 576), dtype)
    kv[-1] = 1
    q, dout = cp.ones((3, 64, 576), dtype), cp.ones((3, 64, 512), dtype)
    indices = cp.full((3, 1), s_kv - 1, np.int32)
    out, _, lse = cupymla.sparse_mla_fwd(q, kv, indices)
    _, dkv = cupymla.sparse_mla_bwd(q, kv, out, dout, lse, indices, deterministic=deterministic)
    assert kv.nbytes > 2**32
    # One entry: P is 1, dS is 0, so the row gets 3 queries x 64 heads of dout in its value columns and nothing else.
    assert bool((dkv[-1, :512].astype(np.float32) == 192).all())
    assert not dkv[-1, 512:].astype(np.float32).any() and not dkv[:-1].view(np.uint16).any()
