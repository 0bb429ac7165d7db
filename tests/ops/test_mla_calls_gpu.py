"""Calls of every MLA operator on a GPU: prepared, in graphs, on streams, in threads, from frameworks, refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from mla_gpu_kit import OnGpu, in_jax, in_torch, jax_with_gpu, overwrite, torch_with_gpu
from threads_kit import in_threads

from cupymla import InputError
from cupymla.ops.sparse_mla_fwd import plan as fwd_plan
from cupymla.testing.operators import as_tuple

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

CASES = {
    "sparse_mla_fwd": "h64_d576_k130_q3_kv300",
    "sparse_mla_bwd": "h128_d576_k130_q3_kv300",
    "attn_dist": "h64_d576_k130_q3_kv300",
}


ORDER = "h65_d576_k130_q80_kv50_order_duplicates"
"""Of the forward, whose queries a GPU can take in the order of tokens; it has a workspace then."""


@pytest.fixture(params=[*CASES, "order"])
def on_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> OnGpu:
    if request.param != "order":
        return OnGpu(request.param, CASES[request.param])
    monkeypatch.setattr(fwd_plan, "_ORDER_GAIN", -1.0)
    return OnGpu("sparse_mla_fwd", ORDER)


def test_prepared_call_follows_its_inputs(cp: Any, on_gpu: OnGpu) -> None:
    host, arguments = on_gpu.problem(cp)
    plan = on_gpu.call.prepare(**arguments)
    first = plan()
    on_gpu.require_right(host, first)
    other, changed = on_gpu.problem(cp, seed=1)
    overwrite(arguments, changed)
    second = plan()
    assert all(a is b for a, b in zip(as_tuple(first), as_tuple(second), strict=True))
    on_gpu.require_right(other, second)


@pytest.mark.parametrize("on_gpu", ["sparse_mla_fwd", "attn_dist", "order"], indirect=True)
def test_cupy_graph_replays_prepared_and_ordinary_calls(cp: Any, on_gpu: OnGpu) -> None:
    """That of the backward, which has several kernels, is in test_sparse_mla_bwd_gpu.py."""
    _, arguments = on_gpu.problem(cp)
    plan = on_gpu.call.prepare(**arguments)
    outputs = on_gpu.outputs_like(cp, plan())
    stream = cp.cuda.Stream(non_blocking=True)
    on_gpu.call(**arguments, **outputs)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        captured = plan(stream=stream)
        on_gpu.call(**arguments, **outputs, stream=stream)
        graph = stream.end_capture()
    other, changed = on_gpu.problem(cp, seed=2)
    overwrite(arguments, changed)
    cp.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    on_gpu.require_right(other, captured)
    on_gpu.require_right(other, tuple(outputs.values()))


def test_prepared_call_without_a_stream_is_captured_on_the_current_one(cp: Any, on_gpu: OnGpu) -> None:
    host, arguments = on_gpu.problem(cp)
    plan = on_gpu.call.prepare(**arguments)
    with cp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        results = plan()
        graph = stream.end_capture()
    for result in as_tuple(results):
        result.fill(7)
    cp.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    on_gpu.require_right(host, results)


def test_call_runs_on_the_stream_it_is_given(cp: Any, on_gpu: OnGpu) -> None:
    host, arguments = on_gpu.problem(cp)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    results = on_gpu.call(**arguments, stream=stream)
    stream.synchronize()
    on_gpu.require_right(host, results)
    with cp.cuda.Stream(non_blocking=True) as current:
        results = on_gpu.call(**arguments)
        current.synchronize()
    on_gpu.require_right(host, results)


def test_threads_do_not_share_a_binding(cp: Any, on_gpu: OnGpu) -> None:
    def work(seed: int) -> None:
        host, arguments = on_gpu.problem(cp, seed)
        cp.cuda.Device().synchronize()
        with cp.cuda.Stream(non_blocking=True) as stream:
            for _ in range(20):
                results = on_gpu.call(**arguments)
            stream.synchronize()
        on_gpu.require_right(host, results)

    in_threads([partial(work, seed) for seed in range(4)])


def test_fresh_thread_with_given_outputs(cp: Any, on_gpu: OnGpu) -> None:
    """A thread in which nothing has touched CUDA yet: the call has to bring its context."""
    host, arguments = on_gpu.problem(cp)
    outputs = on_gpu.outputs_like(cp, on_gpu.call(**arguments))
    cp.cuda.Device().synchronize()
    in_threads([partial(on_gpu.call, **arguments, **outputs, stream=0)])
    cp.cuda.Device().synchronize()
    on_gpu.require_right(host, tuple(outputs.values()))


def test_torch_arrays_on_torch_s_stream(cp: Any, on_gpu: OnGpu) -> None:
    torch = torch_with_gpu()
    host, _ = on_gpu.problem(cp)
    arguments = in_torch(torch, host)
    side = torch.cuda.Stream()
    # What the arguments are made on: torch leaves it to its caller to say that another stream comes behind it.
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results = as_tuple(on_gpu.call(**arguments))
        assert all(isinstance(result, torch.Tensor) for result in results)
        torch.cuda.current_stream().synchronize()
    on_gpu.require_right(host, tuple(cp.from_dlpack(result) for result in results))


def test_jax_arrays_are_complete_when_jax_uses_them(cp: Any, on_gpu: OnGpu) -> None:
    jax = jax_with_gpu()
    host, _ = on_gpu.problem(cp)
    arguments = in_jax(jax, host)
    results = as_tuple(on_gpu.call(**arguments))
    assert all(isinstance(result, jax.Array) for result in results)
    on_gpu.require_right(host, tuple(cp.asarray(np.asarray(result)) for result in results))


def test_bad_input_launches_nothing(cp: Any, on_gpu: OnGpu) -> None:
    _, arguments = on_gpu.problem(cp)
    outputs = on_gpu.outputs_like(cp, on_gpu.call(**arguments))
    for output in outputs.values():
        output.fill(7)
    arguments["indices"] = arguments["indices"].astype(np.int64)
    with pytest.raises(InputError, match="indices"):
        on_gpu.call(**arguments, **outputs)
    for output in outputs.values():
        assert bool((output.astype(np.float32) == 7).all())
