"""The JAX functions on a GPU: XLA's stream, command buffers, threads, devices."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import interop_kit as kit
import numpy as np
import pytest
from threads_kit import in_threads

from cupymla import driver
from cupymla.ops import registry
from cupymla.testing import compare
from cupymla.testing.operators import kernels_for
from cupymla_lab.subjects import Subject, cheapest

pytestmark = pytest.mark.gpu
jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")

FORWARD = Subject("sparse_mla_fwd")
CASE = next(case for case in FORWARD.cases.CASES if case.name == "h64_d576_k130_q3_kv300")
SERVED = [p for p in kit.operator_problems(per_intent=2) if Subject(p.declaration.name).entry.kernels]
WITH_KERNELS = [entry.name for entry in registry.OPERATORS if entry.kernels]


@pytest.fixture(autouse=True)
def on_gpu() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU")


@pytest.fixture
def mla() -> Any:
    from cupymla.interop import jax as bridge

    return bridge


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry, the stream, for each time XLA has called the handler."""
    from cupymla.interop import call
    from cupymla.interop.jax import handler

    seen: list[int] = []
    run = call.run

    def counted(*arguments: Any) -> None:
        seen.append(arguments[-1])
        run(*arguments)

    monkeypatch.setattr(handler, "run", counted)
    yield seen


def require_right(subject: Subject, inputs: dict[str, Any], results: Any) -> None:
    """The accuracy criterion of `testing.compare`, against both references."""
    got = results if isinstance(results, tuple) else (results,)
    same, exact = subject.reference(inputs, "same"), subject.reference(inputs, "float64")
    rows = zip(subject.outputs, got, same, exact, strict=False)
    compare.require([compare.compare(name, np.asarray(array), s, e) for name, array, s, e in rows])


def arrays_of(inputs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    arrays = {name: jnp.asarray(value) for name, value in inputs.items() if isinstance(value, np.ndarray)}
    return arrays, {name: value for name, value in inputs.items() if name not in arrays}


@pytest.mark.parametrize("problem", SERVED, ids=lambda problem: problem.name)
def test_right_under_jit(problem: kit.Problem, mla: Any) -> None:
    subject = Subject(problem.declaration.name)
    if not kernels_for(subject.entry, driver.compute_capability(0)):
        pytest.skip("no kernel for this GPU")
    inputs = kit.batch_first(problem, problem.inputs())
    arrays, options = arrays_of(inputs)
    function = getattr(mla, subject.name)
    results = jax.jit(lambda given: function(**given, **options))(arrays)
    plain = kit.without_requests(inputs)
    require_right(subject, plain, results)


def test_runs_behind_what_made_its_inputs(hopper: None, mla: Any) -> None:
    """On any stream but XLA's, a call would read q and kv before the slow products in front of it have made them."""
    inputs = FORWARD.cases.inputs(CASE, 0)
    arrays, _ = arrays_of(inputs)
    slow = jnp.ones((4096, 4096), jnp.float32)

    def late_inputs(q: Any, kv: Any, indices: Any, slow: Any) -> Any:
        for _ in range(20):
            slow = slow @ slow * 1e-4
        late = (slow[0, 0] * 0).astype(q.dtype)
        results = mla.sparse_mla_fwd(q + late, jnp.nan_to_num(kv) + late, indices)
        return results, results[0].astype(jnp.float32).sum()

    program = jax.jit(late_inputs)
    inputs["kv"] = np.nan_to_num(inputs["kv"].astype(np.float32)).astype(inputs["kv"].dtype)
    for _ in range(3):
        results, total = program(arrays["q"], jnp.asarray(inputs["kv"]), arrays["indices"], slow)
        require_right(FORWARD, inputs, results)
        np.testing.assert_allclose(total, np.asarray(results[0]).astype(np.float64).sum(), rtol=1e-3, atol=1)


def test_returns_before_the_device_is_done(hopper: None, mla: Any) -> None:
    """A handler that waited for the stream would hold the host until the products in front of it are done."""
    arrays, _ = arrays_of(FORWARD.cases.inputs(CASE, 0))
    slow = jnp.ones((8192, 8192), jnp.float32)

    def behind_slow_products(arrays: Any, slow: Any) -> Any:
        for _ in range(30):
            slow = slow @ slow * 1e-4
        late = (slow[0, 0] * 0).astype(arrays["q"].dtype)
        return mla.sparse_mla_fwd(**{**arrays, "q": arrays["q"] + late})

    program = jax.jit(behind_slow_products)
    jax.block_until_ready(program(arrays, slow))
    results = program(arrays, slow)
    assert not results[0].is_ready()
    jax.block_until_ready(results)


def test_command_buffers_replay_with_new_contents(hopper: None, mla: Any, runs: list[int]) -> None:
    """Twelve calls in one program: XLA records them once and then replays them without the handler."""
    problems = [FORWARD.cases.inputs(CASE, seed) for seed in range(3)]

    def twelve_calls(arrays: Any) -> Any:
        scales = [576**-0.5 * (1 + i) for i in range(12)]
        return [mla.sparse_mla_fwd(**arrays, sm_scale=scale) for scale in scales]

    program = jax.jit(twelve_calls)
    counts = []
    for inputs in [*problems, *problems]:
        arrays, _ = arrays_of(inputs)
        before = len(runs)
        results = jax.block_until_ready(program(arrays))
        counts.append(len(runs) - before)
        require_right(FORWARD, inputs, results[0])
        require_right(FORWARD, {**inputs, "sm_scale": 576**-0.5 * 12}, results[11])
    assert counts[0] >= 12
    print("handler calls by execution:", counts)


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_recorded_programs_of_every_operator_follow_new_contents(name: str, mla: Any) -> None:
    """Eight calls in a program are more than XLA asks for before it records; new arrays lie elsewhere."""
    subject = Subject(name)
    if not kernels_for(subject.entry, driver.compute_capability(0)):
        pytest.skip("no kernel for this GPU")
    (problem, *_) = (p for p in SERVED if p.declaration.name == name)
    problems = [kit.batch_first(problem, inputs) for inputs in kit.contents(subject, 3)]
    function, options = getattr(mla, name), arrays_of(problems[0])[1]

    def eight_calls(arrays: Any) -> Any:
        made = []
        for _ in range(8):
            arrays = jax.lax.optimization_barrier(arrays)  # or they would be one call
            made.append(function(**arrays, **options))
        return made

    program = jax.jit(eight_calls)
    for inputs in [*problems, *problems]:
        results = jax.block_until_ready(program(arrays_of(inputs)[0]))
        plain = kit.without_requests(inputs)
        require_right(subject, plain, results[0])
        require_right(subject, plain, results[7])


def test_threads_run_programs_at_once(hopper: None, mla: Any) -> None:
    program = jax.jit(mla.sparse_mla_fwd)

    def work(seed: int) -> None:
        inputs = FORWARD.cases.inputs(CASE, seed)
        arrays, _ = arrays_of(inputs)
        for _ in range(20):
            results = program(**arrays)
        require_right(FORWARD, inputs, results)

    in_threads([partial(work, seed) for seed in range(4)])


def test_memory_of_inputs_is_used_again_only_behind_the_call(hopper: None, mla: Any) -> None:
    """Arrays that die right after the call: XLA's allocator hands their memory out in the order of its stream."""
    inputs = FORWARD.cases.inputs(CASE, 0)
    for _ in range(50):
        arrays, _ = arrays_of(inputs)
        results = mla.sparse_mla_fwd(**arrays)
        del arrays
        jnp.full((3, 64, 576), 7, jnp.bfloat16).block_until_ready()
    require_right(FORWARD, inputs, results)


def test_operators_without_a_kernel_say_so(mla: Any) -> None:
    subject = Subject("sparse_mla_bwd_phase1")
    if kernels_for(subject.entry, driver.compute_capability(0)):
        pytest.skip("there is a kernel")
    arrays, options = arrays_of(subject.cases.inputs(cheapest(subject, 1)[0], 0))
    with pytest.raises(Exception, match=r"sparse_mla_bwd_phase1.* is not supported on"):
        jax.block_until_ready(mla.sparse_mla_bwd_phase1(**arrays, **options))


@pytest.mark.skipif("jax.device_count() < 2", reason="needs two GPUs")
def test_runs_on_the_device_of_its_arrays(hopper: None, mla: Any) -> None:
    inputs = FORWARD.cases.inputs(CASE, 0)
    program = jax.jit(mla.sparse_mla_fwd)
    for device in jax.devices():
        arrays = {n: jax.device_put(a, device) for n, a in arrays_of(inputs)[0].items()}
        results = program(**arrays)
        assert results[0].devices() == {device}
        require_right(FORWARD, inputs, results)
