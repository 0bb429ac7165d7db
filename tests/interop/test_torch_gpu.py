"""The torch operators on a GPU: streams, allocator, compiled programs, CUDA graphs."""

from __future__ import annotations

from functools import partial
from typing import Any

import interop_kit as kit
import numpy as np
import pytest
from threads_kit import in_threads

from cupymla import driver
from cupymla.bench.frameworks import to_torch
from cupymla.ops import registry
from cupymla.testing import compare
from cupymla.testing.operators import kernels_for
from cupymla_lab.subjects import Subject

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

FORWARD = Subject("sparse_mla_fwd")
CASE = next(case for case in FORWARD.cases.CASES if case.name == "h64_d576_k130_q3_kv300")
SERVED = [p for p in kit.operator_problems(per_intent=2) if Subject(p.declaration.name).entry.kernels]
WITH_KERNELS = [entry.name for entry in registry.OPERATORS if entry.kernels]


@pytest.fixture(autouse=True)
def on_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("this torch has no GPU")


@pytest.fixture
def mla() -> Any:
    from cupymla.interop import torch as bridge

    return bridge


def on_device(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: to_torch(value, "cuda") if isinstance(value, np.ndarray) else value for name, value in inputs.items()}


def array(tensor: Any) -> Any:
    """A tensor's elements for the comparison; what float32 holds of a narrow float is all of it."""
    import ml_dtypes

    name = str(tensor.dtype).removeprefix("torch.")
    host = tensor.cpu()
    if not hasattr(ml_dtypes, name):
        return host.numpy()
    carrier = {1: torch.uint8, 2: torch.int16}[tensor.element_size()]
    return host.view(carrier).numpy().view(getattr(ml_dtypes, name))


def require_right(subject: Subject, inputs: dict[str, Any], results: Any) -> None:
    got = results if isinstance(results, tuple) else (results,)
    same, exact = subject.reference(inputs, "same"), subject.reference(inputs, "float64")
    rows = zip(subject.outputs, got, same, exact, strict=False)
    compare.require([compare.compare(name, array(tensor), s, e) for name, tensor, s, e in rows])


def overwrite(given: dict[str, Any], other: dict[str, Any]) -> None:
    """Give tensors other contents where they lie; byte by byte, as torch copies no 4-bit floats."""
    for name, tensor in other.items():
        if isinstance(tensor, torch.Tensor):
            narrow = tensor.element_size() == 1
            (given[name].view(torch.uint8) if narrow else given[name]).copy_(
                tensor.view(torch.uint8) if narrow else tensor
            )


@pytest.mark.parametrize("problem", SERVED, ids=lambda problem: problem.name)
def test_right(problem: kit.Problem, mla: Any) -> None:
    """Twice, for the second call takes the remembered way; with other addresses, for only those are new to it."""
    subject = Subject(problem.declaration.name)
    if not kernels_for(subject.entry, driver.compute_capability(0)):
        pytest.skip("no kernel for this GPU")
    inputs = problem.inputs()
    kept = []
    for _ in range(2):
        kept.append(on_device(inputs))
        require_right(subject, kit.without_requests(inputs), getattr(mla, subject.name)(**kept[-1]))


def test_remembered_calls_follow_strides_options_and_alignment(hopper: None, mla: Any) -> None:
    """Layouts that differ in one respect are different calls."""
    inputs = FORWARD.cases.inputs(CASE, 0)
    given = on_device(inputs)
    wide = torch.zeros(3, 64, 640, dtype=torch.bfloat16, device="cuda")
    wide[..., :576] = given["q"]
    for options in ({}, {"sm_scale": 0.5}, {"lse_base": "2"}, {"causal": True, "q_start": 100}):
        for q in (given["q"], wide[..., :576]):
            for shift in (0, 8):
                flat = torch.zeros(3 * 130 + 8, dtype=torch.int32, device="cuda")
                indices = flat[shift : shift + 390].view(3, 130)
                indices.copy_(given["indices"])
                results = mla.sparse_mla_fwd(**{**given, "q": q, "indices": indices}, **options)
                require_right(FORWARD, {**inputs, **options}, results)
    odd = torch.zeros(3 * 130 + 1, dtype=torch.int32, device="cuda")[1:].view(3, 130)
    odd.copy_(given["indices"])
    require_right(FORWARD, inputs, mla.sparse_mla_fwd(**{**given, "indices": odd}))


def test_runs_on_the_current_stream(hopper: None, mla: Any) -> None:
    """On another stream it would read q before the slow products have made it."""
    inputs = FORWARD.cases.inputs(CASE, 0)
    given = on_device(inputs)
    stream = torch.cuda.Stream()
    ones = torch.ones(8192, 8192, device="cuda")

    def enqueue() -> Any:
        slow = ones
        for _ in range(10):
            slow = slow @ slow * 1e-4
        q = given["q"] + (slow[0, 0] * 0).to(torch.bfloat16)
        return mla.sparse_mla_fwd(**{**given, "q": q})

    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        enqueue()  # what happens once, compiling and taking memory for this stream, may wait for the device
        stream.synchronize()
        results = enqueue()
        assert not stream.query()
    stream.synchronize()
    require_right(FORWARD, inputs, results)


def test_cuda_graph_follows_new_contents(hopper: None, mla: Any) -> None:
    """Captured on its first call with warm-up as torch asks; results come from the graph's own pool."""
    inputs = FORWARD.cases.inputs(CASE, 0)
    given = on_device(inputs)
    mla.sparse_mla_fwd(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = mla.sparse_mla_fwd(**given)
        total = results[0].float().sum()
    for seed in (1, 2):
        other = FORWARD.cases.inputs(CASE, seed)
        for name, tensor in on_device(other).items():
            given[name].copy_(tensor)
        graph.replay()
        torch.cuda.synchronize()
        require_right(FORWARD, other, results)
        torch.testing.assert_close(total, results[0].float().sum(), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_cuda_graphs_of_every_operator_follow_new_contents(name: str, mla: Any) -> None:
    subject = Subject(name)
    if not kernels_for(subject.entry, driver.compute_capability(0)):
        pytest.skip("no kernel for this GPU")
    first, *others = kit.contents(subject, 3)
    given, function = on_device(first), getattr(mla, name)
    function(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function(**given)
    for inputs in others:
        overwrite(given, on_device(inputs))
        graph.replay()
        torch.cuda.synchronize()
        require_right(subject, kit.without_requests(inputs), results)


@pytest.mark.parametrize("problem", kit.related_problems(), ids=lambda problem: problem.name)
def test_cuda_graphs_of_every_related_function_repeat_the_call(problem: kit.Problem, mla: Any) -> None:
    inputs, function = problem.inputs(), getattr(mla, problem.declaration.name)
    given, expected = on_device(inputs), function(**on_device(inputs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function(**given)
    overwrite(given, on_device(inputs))  # caches are written in place, and a capture runs nothing
    graph.replay()
    torch.cuda.synchronize()
    pairs = [made if isinstance(made, tuple) else (made,) for made in (results, expected)]
    for found, wanted in zip(*pairs, strict=True):
        np.testing.assert_array_equal(kit.bits(array(found)), kit.bits(array(wanted)))


def test_kernel_may_be_loaded_during_capture(hopper: None, mla: Any) -> None:
    """A layout that was never seen, captured at once: its plan is made while the stream records."""
    inputs = FORWARD.cases.inputs(CASE, 3)
    given = on_device(inputs)
    mla.sparse_mla_fwd(**given)
    graph = torch.cuda.CUDAGraph()
    short = {**given, "q": given["q"][:2], "indices": given["indices"][:2]}
    with torch.cuda.graph(graph):
        results = mla.sparse_mla_fwd(**short)
    graph.replay()
    torch.cuda.synchronize()
    require_right(FORWARD, {**inputs, "q": inputs["q"][:2], "indices": inputs["indices"][:2]}, results)


def test_compiled_with_cuda_graphs(hopper: None, mla: Any) -> None:
    inputs = FORWARD.cases.inputs(CASE, 0)
    given = on_device(inputs)

    def program(q: Any, kv: Any, indices: Any) -> Any:
        out, _, lse = mla.sparse_mla_fwd(q * 1, kv, indices)
        return out.float().sum(-1), lse + 1, out

    compiled = torch.compile(program, fullgraph=True, mode="reduce-overhead")
    arguments = [given[name] for name in ("q", "kv", "indices")]
    for _ in range(4):
        sums, lse, out = (tensor.clone() for tensor in compiled(*arguments))
    expected = program(*arguments)
    torch.testing.assert_close(sums, expected[0], rtol=1e-4, atol=1e-2)
    assert torch.equal(lse, expected[1]) and torch.equal(out, expected[2])


def test_memory_comes_from_torch(hopper: None, mla: Any) -> None:
    given = on_device(FORWARD.cases.inputs(CASE, 0))
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    results = mla.sparse_mla_fwd(**given)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == len(results)


def test_threads_do_not_share_a_runner(hopper: None, mla: Any) -> None:
    def work(seed: int) -> None:
        inputs = FORWARD.cases.inputs(CASE, seed)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            given = on_device(inputs)
            for _ in range(20):
                results = mla.sparse_mla_fwd(**given)
            stream.synchronize()
        require_right(FORWARD, inputs, results)

    in_threads([partial(work, seed) for seed in range(4)])


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
def test_runs_on_the_device_of_its_tensors(hopper: None, mla: Any) -> None:
    """The current device is the first one all the time."""
    inputs = FORWARD.cases.inputs(CASE, 0)
    for index in range(torch.cuda.device_count()):
        given = {n: v.to(f"cuda:{index}") if torch.is_tensor(v) else v for n, v in on_device(inputs).items()}
        results = mla.sparse_mla_fwd(**given)
        assert results[0].device.index == index
        torch.cuda.synchronize(index)
        require_right(FORWARD, inputs, results)
