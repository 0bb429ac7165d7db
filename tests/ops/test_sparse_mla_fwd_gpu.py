"""sparse_mla_fwd on a GPU beyond its cases: prepared calls, graphs, streams, threads, frameworks, large sizes."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from mla_gpu_kit import OnGpu, in_jax, in_torch, jax_with_gpu, torch_with_gpu

import cupymla
from cupymla import InputError
from cupymla.ops.sparse_mla_fwd import cases
from cupymla.ops.sparse_mla_fwd.reference import sparse_mla_fwd as reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

ON_GPU = OnGpu("sparse_mla_fwd", "h64_d576_k130_q3_kv300")
problem, require_right = ON_GPU.problem, ON_GPU.require_right


def test_prepared_call_follows_its_inputs(cp: Any) -> None:
    host, arguments = problem(cp)
    plan = cupymla.sparse_mla_fwd.prepare(**arguments)
    first = plan()
    require_right(host, first)
    other, changed = problem(cp, seed=1)
    for name in ("q", "kv", "indices"):
        arguments[name][...] = changed[name]
    second = plan()
    assert all(a is b for a, b in zip(first, second, strict=True))
    require_right(other, second)


def test_cupy_graph_replays_prepared_and_ordinary_calls(cp: Any) -> None:
    _, arguments = problem(cp)
    plan = cupymla.sparse_mla_fwd.prepare(**arguments)
    outputs = {name: cp.empty_like(array) for name, array in zip(cases.OUTPUTS, plan(), strict=True)}
    stream = cp.cuda.Stream(non_blocking=True)
    cupymla.sparse_mla_fwd(**arguments, **outputs)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        captured = plan(stream=stream)
        cupymla.sparse_mla_fwd(**arguments, **outputs, stream=stream)
        graph = stream.end_capture()
    other, changed = problem(cp, seed=2)
    for name in ("q", "kv", "indices"):
        arguments[name][...] = changed[name]
    cp.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    require_right(other, captured)
    require_right(other, tuple(outputs.values()))


def test_prepared_call_without_a_stream_is_captured_on_the_current_one(cp: Any) -> None:
    host, arguments = problem(cp)
    plan = cupymla.sparse_mla_fwd.prepare(**arguments)
    with cp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        results = plan()
        graph = stream.end_capture()
    for result in results:
        result.fill(7)
    cp.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    require_right(host, results)


def test_call_runs_on_the_stream_it_is_given(cp: Any) -> None:
    host, arguments = problem(cp)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    results = cupymla.sparse_mla_fwd(**arguments, stream=stream)
    stream.synchronize()
    require_right(host, results)
    with cp.cuda.Stream(non_blocking=True) as current:
        results = cupymla.sparse_mla_fwd(**arguments)
        current.synchronize()
    require_right(host, results)


def test_threads_do_not_share_a_binding(cp: Any) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            host, arguments = problem(cp, seed)
            with cp.cuda.Stream(non_blocking=True) as stream:
                for _ in range(20):
                    results = cupymla.sparse_mla_fwd(**arguments)
                stream.synchronize()
            require_right(host, results)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_fresh_thread_with_given_outputs(cp: Any) -> None:
    """A thread in which nothing has touched CUDA yet: the call has to bring its context."""
    host, arguments = problem(cp)
    outputs = {
        name: cp.empty_like(array)
        for name, array in zip(cases.OUTPUTS, cupymla.sparse_mla_fwd(**arguments), strict=True)
    }
    cp.cuda.Device().synchronize()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            cupymla.sparse_mla_fwd(**arguments, **outputs, stream=0)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures
    cp.cuda.Device().synchronize()
    require_right(host, tuple(outputs.values()))


@pytest.mark.parametrize("axis", ["batch", "query", "head"])
def test_broadcast_queries(cp: Any, axis: str) -> None:
    _, arguments = problem(cp)
    q = arguments["q"]
    kv = cp.stack([arguments["kv"]] * 2)
    indices = cp.stack([arguments["indices"]] * 2)
    wide = {"batch": q[None], "query": cp.stack([q[:1]] * 2), "head": cp.stack([q[:, :1]] * 2)}[axis]
    wide = cp.broadcast_to(wide, (2, 3, 64, 576))
    assert 0 in wide.strides
    results = cupymla.sparse_mla_fwd(wide, kv, indices)
    expected = cupymla.sparse_mla_fwd(cp.ascontiguousarray(wide), kv, indices)
    for got, right in zip(results, expected, strict=True):
        assert got.tobytes() == right.tobytes()


def test_queries_with_heads_outermost(cp: Any) -> None:
    _, arguments = problem(cp)
    q = arguments.pop("q")
    turned = cp.ascontiguousarray(q.transpose(1, 0, 2)).transpose(1, 0, 2)
    assert turned.strides[1] > turned.strides[0]
    for got, right in zip(
        cupymla.sparse_mla_fwd(turned, **arguments), cupymla.sparse_mla_fwd(q, **arguments), strict=True
    ):
        assert got.tobytes() == right.tobytes()


def test_valid_slots_that_score_minus_infinity_are_not_empty(cp: Any) -> None:
    dtype = problem(cp)[1]["q"].dtype
    q = cp.ones((3, 64, 576), dtype)
    kv = cp.ones((4, 576), dtype)
    kv[1, 570] = -np.inf
    indices = cp.asarray([[1, 1], [1, 0], [-1, -1]], np.int32)
    out, max_logits, lse = (result.get() for result in cupymla.sparse_mla_fwd(q, kv, indices))
    assert np.isnan(out[0].astype(np.float32)).all()
    assert (lse[0] == -np.inf).all()
    assert (max_logits[0] == -np.inf).all()
    assert (out[1].astype(np.float32) == 1).all()
    assert (out[2].astype(np.float32) == 0).all()
    assert (lse[2] == np.inf).all()


def test_torch_arrays_on_torch_s_stream(cp: Any) -> None:
    torch = torch_with_gpu()
    host, _ = problem(cp)
    arguments = in_torch(torch, host)
    with torch.cuda.stream(torch.cuda.Stream()):
        results = cupymla.sparse_mla_fwd(**arguments)
        assert all(isinstance(result, torch.Tensor) for result in results)
        torch.cuda.current_stream().synchronize()
    require_right(host, tuple(cp.from_dlpack(result) for result in results))


def test_jax_arrays_are_complete_when_jax_uses_them(cp: Any) -> None:
    jax = jax_with_gpu()
    host, _ = problem(cp)
    arguments = in_jax(jax, host)
    out, max_logits, lse = cupymla.sparse_mla_fwd(**arguments)
    assert isinstance(out, jax.Array)
    exact = reference(**host, precision="same")
    np.testing.assert_allclose(np.asarray(lse), exact[2], rtol=1e-5)
    np.testing.assert_allclose(np.asarray(out, np.float32), exact[0].astype(np.float32), atol=0.05)
    assert np.isfinite(np.asarray(max_logits)).all()


def test_bad_input_launches_nothing(cp: Any) -> None:
    _, arguments = problem(cp)
    out = cp.full((3, 64, 512), 7, np.float32).astype(arguments["q"].dtype)
    arguments["indices"] = arguments["indices"].astype(np.int64)
    with pytest.raises(InputError):
        cupymla.sparse_mla_fwd(**arguments, out=out)
    assert bool((out.astype(np.float32) == 7).all())


def test_check_indices_names_the_first_bad_one(cp: Any) -> None:
    _, arguments = problem(cp)
    indices = cp.zeros((3, 2, 130), np.int32)[:, 0]
    indices[1, 7] = 300
    arguments["indices"] = indices
    with pytest.raises(InputError, match=r"300 at \[1, 7\]"):
        cupymla.sparse_mla_fwd(**arguments, check_indices=True)
    indices[1, 7] = -1
    cupymla.sparse_mla_fwd(**arguments, check_indices=True)
    indices[2, 129] = 300
    lengths = cp.full(3, 129, np.int32)
    cupymla.sparse_mla_fwd(**arguments, topk_length=lengths, check_indices=True)


def test_no_queries_and_no_keys(cp: Any) -> None:
    _, arguments = problem(cp)
    q, kv, indices = arguments["q"], arguments["kv"], arguments["indices"]
    out, max_logits, lse = cupymla.sparse_mla_fwd(q[:0], kv, indices[:0])
    assert out.shape == (0, 64, 512)
    assert lse.shape == max_logits.shape == (0, 64)
    out, max_logits, lse = cupymla.sparse_mla_fwd(q, kv[:0], indices)
    assert not out.astype(np.float32).any()
    assert bool((max_logits == -np.inf).all())
    assert bool((lse == np.inf).all())


def test_offsets_past_32_bits(cp: Any) -> None:
    """kv and out larger than 4 GiB: rows at their far end are read and written where they belong."""
    s_q, h_q, s_kv = (1 << 16) + 8, 64, 1 << 22
    dtype = problem(cp)[1]["q"].dtype
    q = cp.zeros((s_q, h_q, 576), dtype)
    q[-1] = 1
    kv = cp.zeros((s_kv, 576), dtype)
    kv[-1] = cp.arange(576, dtype=np.float32).astype(dtype) / 576
    indices = cp.full((s_q, 1), s_kv - 1, np.int32)
    out, _, lse = cupymla.sparse_mla_fwd(q, kv, indices)
    assert min(out.nbytes, kv.nbytes) > 2**32
    assert bool((out[-1].view(np.uint16) == kv[-1, :512].view(np.uint16)).all())
    assert bool((out[0].view(np.uint16) == kv[-1, :512].view(np.uint16)).all())
    expected = float(kv[-1].astype(np.float32).sum()) * 576**-0.5
    assert abs(float(lse[-1, 0]) - expected) < 1e-3 * abs(expected)


def test_a_million_queries(cp: Any) -> None:
    dtype = problem(cp)[1]["q"].dtype
    q = cp.ones((1 << 20, 1, 512), dtype)
    kv = cp.ones((4, 512), dtype)
    indices = cp.zeros((1 << 20, 1), np.int32)
    indices[1::2] = -1
    out, _, lse = cupymla.sparse_mla_fwd(q, kv, indices, sm_scale=1 / 512)
    assert bool((out[::2].astype(np.float32) == 1).all())
    assert not out[1::2].astype(np.float32).any()
    assert bool((lse[1::2] == np.inf).all())
    assert float(cp.abs(lse[::2] - 1).max()) < 1e-5
