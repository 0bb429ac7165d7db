"""The torch operators on the CPU: the same bits as the public functions, and everything torch asks of an operator."""

from __future__ import annotations

from typing import Any

import interop_kit as kit
import ml_dtypes
import numpy as np
import pytest
from build_kit import python

import cupymla
from cupymla import InputError, UnsupportedError

torch = pytest.importorskip("torch")

from cupymla.interop import torch as mla  # noqa: E402 - only where there is torch

PROBLEMS = [*kit.operator_problems(per_intent=2), *kit.related_problems()]
PLAIN = {problem.declaration.name: problem for problem in reversed(PROBLEMS)}
CARRIERS = {1: np.uint8, 2: np.int16}


def tensor(array: np.ndarray[Any, Any]) -> Any:
    """A tensor over the same memory, strides included."""
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(CARRIERS[array.dtype.itemsize])).view(getattr(torch, array.dtype.name))


def array(given: Any) -> np.ndarray[Any, Any]:
    """The NumPy array of a tensor."""
    name = str(given.dtype).removeprefix("torch.")
    if hasattr(ml_dtypes, name):
        carrier = {1: torch.uint8, 2: torch.int16}[given.element_size()]
        bits: np.ndarray[Any, Any] = given.view(carrier).numpy().view(getattr(ml_dtypes, name))
        return bits
    plain: np.ndarray[Any, Any] = given.numpy()
    return plain


def results_of(made: Any) -> tuple[np.ndarray[Any, Any], ...]:
    return tuple(array(given) for given in (made if isinstance(made, tuple) else (made,)))


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_same_bits(problem: kit.Problem) -> None:
    """Arrays with their strides, options and results reach the operator and come back in their places."""
    inputs = problem.inputs()
    expected = problem.expected(inputs)
    given = {name: tensor(value) if isinstance(value, np.ndarray) else value for name, value in inputs.items()}
    made = getattr(mla, problem.declaration.name)(**given)
    kit.require_same(problem.declaration.outputs, results_of(made), expected)


# opcheck compares what an operator got with what it was before, which torch cannot with some arrays of 8-bit floats.
NO_OPCHECK = {"reshape_and_cache-fp8", "dequantize_fp8-plain", "indexer_k_quant_and_cache-fp8"}
CHECKED = [p for p in kit.operator_problems(per_intent=1) if p.name.endswith(("-shapes", "-options", "-strides"))]
CHECKED += [p for p in kit.related_problems() if p.name not in NO_OPCHECK]


@pytest.mark.parametrize("problem", CHECKED, ids=lambda problem: problem.name)
def test_opcheck(problem: kit.Problem) -> None:
    """Schema, fake results (shapes, dtypes, strides), autograd registration, and tracing with open sizes.

    Tracing takes longest. What it sees are options and which arrays there are: sizes are open, strides are the fakes'.
    """
    inputs = problem.inputs()
    given = {name: tensor(value) if isinstance(value, np.ndarray) else value for name, value in inputs.items()}
    declaration = problem.declaration
    mla.register()
    numbers = {f"{name}_number": given.pop(name) for name in declaration.either if isinstance(given.get(name), float)}
    arrays = tuple(given.pop(name, None) for name in declaration.arrays)
    operator = getattr(torch.ops.cupymla, declaration.name).default
    traced = () if problem.name.endswith(("-shapes", "-strides")) else ("test_aot_dispatch_dynamic",)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration", *traced)
    torch.library.opcheck(operator, arrays, {**given, **numbers}, test_utils=checks)


def selection(seed: int = 0, s_q: int = 6, s_kv: int = 40, h: int = 4) -> tuple[Any, ...]:
    """q, kv, indices and sink, those that have one with a gradient."""
    torch.manual_seed(seed)
    q = torch.randn(s_q, h, 576).bfloat16().requires_grad_()
    kv = torch.randn(s_kv, 576).bfloat16().requires_grad_()
    indices = torch.randint(-3, s_kv, (s_q, 9), dtype=torch.int32)
    return q, kv, indices, torch.randn(h).requires_grad_()


def test_opcheck_with_gradients() -> None:
    q, kv, indices, sink = selection()
    mla.register()
    operator = torch.ops.cupymla.sparse_mla_fwd.default
    torch.library.opcheck(operator, (q, kv, indices, None, sink), {"causal": True, "q_start": 20})


def loss(q: Any, kv: Any, indices: Any, sink: Any) -> Any:
    out, _, _ = mla.sparse_mla_fwd(q, kv, indices=indices, attn_sink=sink, causal=True, q_start=20)
    return out.float().square().sum()


def gradients(function: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    wanted = [a for a in arguments if a.requires_grad]
    return tuple(torch.autograd.grad(function(*arguments), wanted))


def test_gradient_is_sparse_mla_bwd() -> None:
    arguments = selection()
    q, kv, indices, sink = (argument.detach() for argument in arguments)
    options = {"attn_sink": sink, "causal": True, "q_start": 20}
    out, _, lse = cupymla.sparse_mla_fwd(q, kv, indices, **options)
    expected = cupymla.sparse_mla_bwd(q, kv, out, (2 * out.float()).bfloat16(), lse, indices, **options)
    kit.require_same(("dq", "dkv", "d_sink"), results_of(gradients(loss, arguments)), results_of(expected))


def test_a_second_gradient_is_refused() -> None:
    """There is none; leaving it out of a sum of losses would go unnoticed."""
    q, kv, indices, sink = selection()
    first = torch.autograd.grad(loss(q, kv, indices, sink), (q, kv, sink), create_graph=True)
    expected = torch.autograd.grad(loss(q, kv, indices, sink), (q, kv, sink))
    kit.require_same((), results_of(tuple(g.detach() for g in first)), results_of(expected))
    for gradient in first:
        penalty = gradient.float().square().sum() + q.float().sum()
        with pytest.raises(UnsupportedError, match="sparse_mla_fwd: a gradient of its gradient"):
            penalty.backward(retain_graph=True)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_whole(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile sees through to the operators: one graph, the same bits, forward and backward, of other sizes too.

    Inductor's programs cost a C++ compiler seconds each: there those for any size serve both, and it does without a
    precompiled header and without trying the compiler's vector instructions, which take longer.
    """
    if backend == "inductor":
        monkeypatch.setattr("torch._inductor.config.cpp_cache_precompile_headers", False)
        monkeypatch.setattr("torch._inductor.config.cpp.vec_isa_ok", True)
    arguments = selection()
    compiled = torch.compile(loss, fullgraph=True, backend=backend, dynamic=True if backend == "inductor" else None)
    kit.require_same((), results_of(gradients(compiled, arguments)), results_of(gradients(loss, arguments)))
    other = selection(1, s_q=3, s_kv=50)
    kit.require_same((), results_of(gradients(compiled, other)), results_of(gradients(loss, other)))


def test_statistics_and_distributions_require_no_gradient() -> None:
    """There is no gradient through them: torch sees constants, and says so when nothing else is left."""
    q, kv, indices, _ = selection()
    out, max_logits, lse = mla.sparse_mla_fwd(q, kv, indices)
    assert out.requires_grad and not max_logits.requires_grad and not lse.requires_grad
    assert not mla.attn_dist(q, kv, indices, lse).requires_grad


def test_caches_are_updated_in_place_under_compile() -> None:
    torch.manual_seed(0)
    key = torch.randn(1, 2, 32)
    caches = torch.zeros(3, 2, 8, 16, 4), torch.zeros(3, 2, 32, 16)

    def step(key: Any, k_cache: Any, v_cache: Any) -> Any:
        k_cache, v_cache = mla.reshape_and_cache(key, key, k_cache, v_cache, torch.tensor([17], dtype=torch.int32))
        return k_cache.sum() + v_cache.sum()

    total = torch.compile(step, fullgraph=True, backend="aot_eager")(key, *caches)
    torch.testing.assert_close(total, 2 * key.sum())
    assert caches[0].any() and caches[1].any()


@pytest.mark.parametrize("name", ["reshape_and_cache", "copy_blocks"])
def test_autograd_notices_what_is_written_in_place(name: str) -> None:
    """A gradient that needs the old contents would be that of the new ones."""
    weight = torch.ones(()).requires_grad_()
    caches = torch.zeros(3, 2, 8, 16, 4), torch.zeros(3, 2, 32, 16)
    key, slots = torch.ones(4, 2, 32), torch.tensor([0, 5, -1, 40], dtype=torch.int32)

    def write() -> None:
        if name == "copy_blocks":
            mla.copy_blocks(*caches, torch.tensor([[0, 1]], dtype=torch.int32))
        else:
            mla.reshape_and_cache(key, key, *caches, slots)

    for cache in caches:
        before = (cache * weight).sum()
        write()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            before.backward()
    with torch.inference_mode():
        write()
        caches = torch.zeros(3, 2, 8, 16, 4), torch.zeros(3, 2, 32, 16)
        write()


def test_what_is_written_in_place_has_no_gradient() -> None:
    """The error names what helps, and not the module that was called."""
    k, cache = torch.randn(3, 128).requires_grad_(), torch.zeros(2, 64, 132, dtype=torch.uint8)
    with pytest.raises(
        InputError, match=r"'k': expected a tensor outside autograd, .* no gradient \(pass tensor.detach"
    ):
        mla.indexer_k_quant_and_cache(k, cache, torch.arange(3))
    with torch.no_grad():
        mla.indexer_k_quant_and_cache(k, cache, torch.arange(3))


def test_results_come_from_torchs_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA-graph pools and memory limits hold only for memory that torch has handed out itself."""
    from cupymla import tensor as arrays

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("allocated outside of torch")

    monkeypatch.setattr(arrays, "allocate", refuse)
    monkeypatch.setattr(arrays, "from_numpy", refuse)
    q, kv, indices, _ = selection()
    out, _, _ = mla.sparse_mla_fwd(q.detach(), kv.detach(), indices)
    assert out.shape == (6, 4, 512)


def test_bad_input() -> None:
    q, kv, indices, _ = selection()
    with pytest.raises(InputError, match="'kv': expected shape"):
        mla.sparse_mla_fwd(q, kv[:, :100], indices)
    with pytest.raises(InputError, match="'indices': expected a torch tensor, got ndarray"):
        mla.sparse_mla_fwd(q, kv, indices.numpy())
    with pytest.raises(InputError, match="'alpha': expected a number or a tensor, got str"):
        mla.nvfp4_gemv(q, kv, indices, alpha="one")
    untyped: Any = mla
    with pytest.raises(TypeError, match=r"sparse_mla_fwd.*'out'"):
        untyped.sparse_mla_fwd(q, kv, indices, out=None)
    with pytest.raises(TypeError, match=r"sparse_mla_fwd.*missing.*'indices'"):
        untyped.sparse_mla_fwd(q, kv)
    with pytest.raises(TypeError, match=r"sparse_mla_fwd.*multiple values.*'q'"):
        untyped.sparse_mla_fwd(q, kv, indices, q=q)
    with pytest.raises(TypeError, match=r"sparse_mla_fwd.*too many positional"):
        untyped.sparse_mla_fwd(q, kv, indices, None)
    with pytest.raises(TypeError, match=r"matrix_bd.*missing.*'max_context'"):
        untyped.matrix_bd(q, kv, context_lens=indices)


@pytest.mark.parametrize(("name", "option", "kind"), kit.numbers_and_flags())
def test_a_number_does_not_pass_for_a_flag_nor_a_flag_for_a_number(name: str, option: str, kind: str) -> None:
    """The schema alone would take True for 1 and None for False. NumPy's do as Python's do."""
    problem = PLAIN[name]
    inputs = {n: tensor(value) if isinstance(value, np.ndarray) else value for n, value in problem.inputs().items()}
    usual = inputs.get(option, problem.declaration.options[option].default)
    for value in kit.WRONG[kind]:
        with pytest.raises(InputError) as caught:
            getattr(mla, name)(**{**inputs, option: value})
        assert (caught.value.operator, caught.value.argument) == (name, option)
    for convert in kit.RIGHT[kind] if usual is not None else ():
        getattr(mla, name)(**{**inputs, option: convert(usual)})


def test_numbers_of_numpy_do_in_the_place_of_tensors() -> None:
    x = torch.randn(4, 64)
    plain = mla.quantize_nvfp4(x, global_scale=2.0)
    for value in (np.float32(2), np.int64(2), 2):
        kit.require_same((), results_of(mla.quantize_nvfp4(x, global_scale=value)), results_of(plain))
    for wrong in (True, np.True_):
        with pytest.raises(InputError, match="'global_scale': expected a number or a tensor, got bool"):
            mla.quantize_nvfp4(x, global_scale=wrong)


def test_every_function_is_there() -> None:
    for name in mla.__all__:
        assert callable(getattr(mla, name)) and name in dir(mla)
        assert name in vars(mla), "each use would make it anew"
    with pytest.raises(AttributeError, match="no attribute 'sparse_mla_sideways'"):
        _ = mla.sparse_mla_sideways  # type: ignore[attr-defined]


def test_a_factor_that_would_be_lost_is_refused() -> None:
    """quantize_nvfp4 returns the factor it finds beside its outputs: without it the codes mean nothing."""
    with pytest.raises(InputError, match="'global_scale': expected a number or a tensor, such as"):
        mla.quantize_nvfp4(torch.ones(4, 64), global_scale="amax")


# Threads -------------------------------------------------------------------------------------------------------------

AT_ONCE = """
import threading
import torch
from cupymla.interop import torch as mla
start, found = threading.Barrier(8), []
def work():
    start.wait()
    found.append(mla.topk(torch.arange(5.0)[None], 2)[0].tolist())
threads = [threading.Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert found == [[[3, 4]]] * 8, found
"""


def test_threads_may_ask_for_their_first_function_at_once() -> None:
    """torch lets a namespace be registered once in a process."""
    done = python(AT_ONCE)
    assert done.returncode == 0, done.stderr
