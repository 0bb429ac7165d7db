"""The JAX functions on the CPU: the same bits as the public functions, under every transformation they are made for."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import interop_kit as kit
import numpy as np
import pytest

import cupymla
from cupymla import InputError, UnsupportedError
from cupymla.interop.table import DECLARATIONS, declared

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")

from cupymla.interop import jax as mla  # noqa: E402 - only where there is JAX


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    """Where there is a GPU, JAX would take it; and it asks the disk which of an error's frames are its own."""
    with jax.default_device(jax.devices("cpu")[0]), jax._src.config.traceback_filtering("off"):
        yield


PROBLEMS = [*kit.covering(kit.operator_problems(per_intent=2)), *kit.related_problems()]


def results_of(made: Any) -> tuple[np.ndarray[Any, Any], ...]:
    return tuple(np.asarray(array) for array in (made if isinstance(made, tuple) else (made,)))


def called(problem: kit.Problem, inputs: dict[str, Any]) -> Any:
    """The call under `jit`, its arrays traced."""
    function = getattr(mla, problem.declaration.name)
    arrays = {n: kit.placed(a) for n, a in inputs.items() if isinstance(a, np.ndarray)}
    options = {n: a for n, a in inputs.items() if n not in arrays}
    return jax.jit(lambda given: function(**given, **options))(arrays)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_same_bits_under_jit(problem: kit.Problem) -> None:
    """Arrays, options and results reach the operator and come back in their places."""
    inputs = kit.batch_first(problem, problem.inputs())
    kit.require_same(problem.declaration.outputs, results_of(called(problem, inputs)), problem.expected(inputs))


PLAIN = {problem.declaration.name: problem for problem in reversed(PROBLEMS)}


@pytest.mark.parametrize(("name", "option", "kind"), kit.numbers_and_flags())
def test_a_number_does_not_pass_for_a_flag_nor_a_flag_for_a_number(name: str, option: str, kind: str) -> None:
    """Neither where the function checks it nor where the bridge alone knows of it. NumPy's do as Python's do."""
    problem = PLAIN[name]
    inputs = kit.batch_first(problem, problem.inputs())
    for value in kit.WRONG[kind]:
        with pytest.raises(InputError) as caught:
            getattr(mla, name)(**{**inputs, option: value})
        assert (caught.value.operator, caught.value.argument) == (name, option)
    usual = inputs.get(option, problem.declaration.options[option].default)
    for convert in kit.RIGHT[kind] if usual is not None else ():
        getattr(mla, name)(**{**inputs, option: convert(usual)})


def selection(rng: Any, lead: tuple[int, ...] = (), s_q: int = 6, s_kv: int = 40, h: int = 4) -> tuple[Any, Any, Any]:
    """q, kv and indices, a few of them invalid."""
    q = kit.placed(rng.standard_normal((*lead, s_q, h, 576)), jnp.bfloat16)
    kv = kit.placed(rng.standard_normal((*lead, s_kv, 576)), jnp.bfloat16)
    return q, kv, kit.placed(rng.integers(-3, s_kv, (*lead, s_q, 9)), jnp.int32)


@pytest.fixture
def rng() -> Any:
    return np.random.default_rng(7)


def gradients(q: Any, kv: Any, indices: Any, sink: Any, **options: Any) -> Any:
    def loss(q: Any, kv: Any, sink: Any) -> Any:
        out, _, _ = mla.sparse_mla_fwd(q, kv, indices, attn_sink=sink, **options)
        return (out.astype(jnp.float32) ** 2).sum()

    return jax.grad(loss, (0, 1, 2))(q, kv, sink)


def backward(q: Any, kv: Any, indices: Any, sink: Any, **options: Any) -> Any:
    """The same by hand, through the public functions."""
    arrays = [np.asarray(array) for array in (q, kv, indices)]
    sink = np.asarray(sink)
    out, _, lse = cupymla.sparse_mla_fwd(*arrays, attn_sink=sink, **options)
    dout = (2 * out.astype(np.float32)).astype(out.dtype)
    return cupymla.sparse_mla_bwd(arrays[0], arrays[1], out, dout, lse, arrays[2], attn_sink=sink, **options)


@pytest.mark.parametrize("options", [{}, {"causal": True, "q_start": 20}, {"lse_base": "2", "sm_scale": 0.1}])
def test_gradient_is_sparse_mla_bwd(rng: Any, options: dict[str, Any]) -> None:
    q, kv, indices = selection(rng)
    sink = kit.placed(rng.standard_normal(4), jnp.float32)
    for transformed in (gradients, jax.jit(gradients, static_argnames=tuple(options))):
        got = transformed(q, kv, indices, sink, **options)
        kit.require_same(("dq", "dkv", "d_sink"), results_of(got), backward(q, kv, indices, sink, **options))


def test_gradient_under_checkpoint_and_scan(rng: Any) -> None:
    """Layers of a model are scanned and rematerialised."""
    q, kv, indices = selection(rng)

    def layer(carry: Any, _: Any) -> tuple[Any, Any]:
        out, _, lse = mla.sparse_mla_fwd(carry, kv, indices)
        return carry.at[..., :512].add(out), jax.lax.stop_gradient(lse)

    def loss(q: Any, scanned: bool) -> Any:
        if scanned:
            q, _ = jax.lax.scan(jax.checkpoint(layer), q, None, length=2)
        else:
            for _ in range(2):
                q, _ = layer(q, None)
        return q.astype(jnp.float32).sum()

    scanned, unrolled = (jax.jit(jax.grad(loss), static_argnums=1)(q, way) for way in (True, False))
    kit.require_same(("dq",), (np.asarray(scanned),), (np.asarray(unrolled),))


def test_gradient_through_statistics_is_refused(rng: Any) -> None:
    """A gradient that would silently be zero is worse than an error."""
    q, kv, indices = selection(rng)
    with pytest.raises(UnsupportedError, match="through 'lse'"):
        jax.grad(lambda q: mla.sparse_mla_fwd(q, kv, indices)[2].sum())(q)
    lse = mla.sparse_mla_fwd(q, kv, indices)[2]
    with pytest.raises(UnsupportedError, match=r"attn_dist: a gradient is not supported.*stop_gradient"):
        jax.grad(lambda q: mla.attn_dist(q, kv, indices, lse).sum())(q)


def test_a_call_whose_layouts_come_again_is_of_its_own_arrays(rng: Any) -> None:
    """What is remembered of a call is where its arrays stand, not which they were, nor what the operator refuses."""
    q, kv, indices = selection(rng)
    out, dout = (kit.placed(rng.standard_normal((*q.shape[:2], 512)), q.dtype) for _ in range(2))
    for first, second in ((out, out), (out, dout), (dout, out)):
        made = mla.sparse_mla_bwd_phase1(q, kv, first, second, indices)
        wanted = jax.jit(mla.sparse_mla_bwd_phase1)(q, kv, first, second, indices)
        kit.require_same((), results_of(made), results_of(wanted))
    table, lengths = kit.placed([[0, 1], [1, 0]], jnp.int32), kit.placed([7, 8], jnp.int32)
    query = kit.placed(rng.standard_normal((2, 4, 64)), jnp.bfloat16)
    caches = [kit.placed(rng.standard_normal((2, 4, 4, 64)), jnp.bfloat16) for _ in range(2)]
    words = {"block_tables": table, "context_lens": lengths, "kv_layout": "HND"}
    same = mla.xl_paged_attention(query, caches[0], caches[0], **words)
    for k_cache, v_cache in (caches, caches[::-1]):
        wanted = jax.jit(lambda *given: mla.xl_paged_attention(*given, **words))(query, k_cache, v_cache)
        made = mla.xl_paged_attention(query, k_cache, v_cache, **words)
        kit.require_same((), results_of(made), results_of(wanted))
        assert not np.array_equal(results_of(made)[0], results_of(same)[0])
        swapped = mla.xl_paged_attention(v_cache=v_cache, k_cache=k_cache, query=query, **words)
        kit.require_same((), results_of(swapped), results_of(wanted))
    mla.sparse_mla_fwd(q, kv, indices, causal=True, k_stride=1)
    with pytest.raises(InputError, match="k_stride"):
        mla.sparse_mla_fwd(q, kv, indices, causal=True, k_stride=True)
    with pytest.raises(InputError, match="indices"):
        mla.sparse_mla_fwd(q, kv, indices.astype(jnp.int16))
    start = jnp.asarray(30)
    for position in (30, start, 5):
        wanted = results_of(
            cupymla.sparse_mla_fwd(*map(np.asarray, (q, kv, indices)), causal=True, q_start=int(position))
        )
        kit.require_same((), results_of(mla.sparse_mla_fwd(q, kv, indices, causal=True, q_start=position)), wanted)


def test_a_target_is_a_constant_where_its_gradient_is_stopped(rng: Any) -> None:
    """On the way in or on the way out."""
    q, kv, indices = selection(rng)
    lse = mla.sparse_mla_fwd(q, kv, indices)[2]

    def learn(q: Any) -> Any:
        target = jax.lax.stop_gradient(mla.attn_dist(q, kv, indices, lse))
        given = mla.attn_dist(jax.lax.stop_gradient(q), kv, indices, lse)
        return (target + given).sum() + q.astype(jnp.float32).sum()

    np.testing.assert_array_equal(np.asarray(jax.grad(learn)(q), np.float32), 1)


def test_a_second_gradient_is_refused(rng: Any) -> None:
    """There is none, neither of the backward nor of the results that it goes by."""
    q, kv, indices = selection(rng)

    def loss(q: Any, kv: Any) -> Any:
        return mla.sparse_mla_fwd(q, kv, indices)[0].astype(jnp.float32).sum()

    for turned in (jax.grad, jax.jacrev):
        with pytest.raises(UnsupportedError, match="sparse_mla_fwd: a gradient of its gradient"):
            turned(lambda q: jax.grad(loss)(q, kv).astype(jnp.float32).sum())(q)
    with pytest.raises(UnsupportedError, match="sparse_mla_fwd: a gradient of its gradient"):
        jax.jit(jax.grad(lambda kv: jax.grad(loss)(q, kv).astype(jnp.float32).sum()))(kv)


def test_gradient_of_what_the_backward_does_not_know_is_refused(rng: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option of the forward alone: its gradient would be that of another function."""
    q, kv, indices = selection(rng)
    backward = declared("sparse_mla_bwd")
    kept = [p for p in backward.signature.parameters.values() if p.name != "sm_scale"]
    lesser = dataclasses.replace(backward)
    object.__setattr__(lesser, "signature", inspect.Signature(kept))
    monkeypatch.setattr("cupymla.interop.jax.functions.declared", lambda name: lesser)

    def loss(q: Any, scale: float | None) -> Any:
        return mla.sparse_mla_fwd(q, kv, indices, sm_scale=scale)[0].astype(jnp.float32).sum()

    with pytest.raises(UnsupportedError, match=r"gradient with sm_scale=0\.25.*gradients with sm_scale=None"):
        jax.grad(loss)(q, 0.25)
    jax.grad(loss)(q, None)


def mapped(function: Any, axes: Any, arguments: Any) -> tuple[np.ndarray[Any, Any], ...]:
    """vmap, traced; and what a loop over the mapped axis gives."""
    size = next(a.shape[0] for a, axis in zip(arguments, axes, strict=True) if axis is not None)
    made = results_of(jax.jit(jax.vmap(function, in_axes=axes))(*arguments))
    rows = [
        results_of(function(*(a if axis is None else a[i] for a, axis in zip(arguments, axes, strict=True))))
        for i in range(size)
    ]
    kit.require_same((), made, tuple(np.stack(column) for column in zip(*rows, strict=True)))
    return made


def custom_calls(function: Any, axes: Any, arguments: Any) -> tuple[int, bool]:
    """How many custom calls a mapped function makes, and whether one of them stands in a loop."""
    text = str(jax.make_jaxpr(jax.vmap(function, in_axes=axes))(*arguments))
    return text.count("ffi_call["), "scan[" in text


@pytest.mark.parametrize(
    ("axes", "options", "looped"),
    [
        ((0, 0, 0), {}, False),
        ((0, 0, None), {"causal": True}, False),
        ((None, 0, None), {}, False),
        ((0, None, 0), {}, False),
        ((0, None, None), {}, False),
        ((0, None, 0), {"causal": True}, True),
    ],
)
def test_vmap_uses_the_batch_axis_or_further_queries(
    rng: Any, axes: Any, options: dict[str, Any], looped: bool
) -> None:
    batch = selection(rng, (3,))
    arguments = [a if axis == 0 else a[0] for a, axis in zip(batch, axes, strict=True)]

    def function(q: Any, kv: Any, indices: Any) -> Any:
        return mla.sparse_mla_fwd(q, kv, indices, **options)

    assert custom_calls(function, axes, arguments) == (1, looped)
    mapped(function, axes, arguments)


def test_vmap_of_a_batched_call_and_of_a_vmap(rng: Any) -> None:
    q, kv, indices = selection(rng, (2, 3))
    mapped(mla.sparse_mla_fwd, (0, 0, 0), (q, kv, indices))
    mapped(mla.sparse_mla_fwd, (0, 0, None), (q, kv, indices[0]))
    twice = results_of(jax.vmap(jax.vmap(mla.sparse_mla_fwd))(q, kv, indices))
    kit.require_same((), twice, results_of(jax.vmap(mla.sparse_mla_fwd)(q, kv, indices)))


def test_vmap_of_nothing(rng: Any) -> None:
    """A mapped axis of extent 0, in every way of mapping."""
    q, kv, indices = (array[:0] for array in selection(rng, (2,)))
    assert jax.vmap(mla.sparse_mla_fwd)(q, kv, indices)[0].shape == (0, 6, 4, 512)
    one = selection(rng)
    assert jax.vmap(mla.sparse_mla_fwd, (0, None, None))(q, one[1], one[2])[0].shape == (0, 6, 4, 512)
    nested = (array[:, :0] for array in selection(rng, (2, 3)))
    assert jax.vmap(mla.sparse_mla_fwd)(*nested)[0].shape == (2, 0, 6, 4, 512)


def test_vmap_over_sinks_and_gradients(rng: Any) -> None:
    """d_sink is summed over a native batch, so a mapped gradient must not use it."""
    q, kv, indices = selection(rng, (3,))
    sinks = kit.placed(rng.standard_normal((3, 4)), jnp.float32)
    mapped(gradients, (0, 0, 0, 0), (q, kv, indices, sinks))
    mapped(gradients, (0, 0, 0, None), (q, kv, indices, sinks[0]))
    mapped(gradients, (0, None, 0, None), (q, kv[0], indices, sinks[0]))


def test_vmap_of_gemv_uses_its_batch_axis(rng: Any) -> None:
    a = kit.placed(rng.integers(0, 256, (3, 8, 32)), jnp.uint8)
    b = kit.placed(rng.integers(0, 256, (3, 2, 32)), jnp.uint8)
    sfa, sfb = (jnp.full((3, rows, 4), 56, jnp.uint8) for rows in (8, 2))
    assert custom_calls(mla.nvfp4_gemv, (0, 0, 0, 0), (a, b, sfa, sfb)) == (1, False)
    mapped(mla.nvfp4_gemv, (0, 0, 0, 0), (a, b, sfa, sfb))
    mapped(mla.nvfp4_gemv, (0, None, 0, None), (a, b[0], sfa, sfb[0]))
    mapped(mla.nvfp4_gemv, (None, 0, None, 0), (a[0], b, sfa[0], sfb))

    def batched(a: Any, b: Any, sfa: Any, sfb: Any) -> Any:
        return mla.nvfp4_gemv(a, b, sfa, sfb, batch_axis=0)

    mapped(batched, (0, 0, 0, 0), tuple(jnp.stack([array] * 2) for array in (a, b, sfa, sfb)))


def test_updated_caches_alias_donated_ones(rng: Any) -> None:
    """The old arrays stay as they are unless they are donated; then their memory is the new ones'."""
    key = kit.placed(rng.standard_normal((1, 2, 32)), jnp.float32)
    caches = jnp.zeros((3, 2, 8, 16, 4), jnp.float32), jnp.zeros((3, 2, 32, 16), jnp.float32)
    slots = kit.placed([17], jnp.int32)
    k_cache, v_cache = mla.reshape_and_cache(key, key, *caches, slots)
    assert not caches[0].any() and k_cache.any()
    addresses = [cache.unsafe_buffer_pointer() for cache in (k_cache, v_cache)]
    write = jax.jit(mla.reshape_and_cache, donate_argnums=(2, 3))
    updated = write(key, key, k_cache, v_cache, slots + 5)
    assert [cache.unsafe_buffer_pointer() for cache in updated] == addresses
    assert k_cache.is_deleted()


def test_bad_input_is_found_while_tracing(rng: Any) -> None:
    q, kv, indices = selection(rng)
    with pytest.raises(InputError, match="'kv': expected shape"):
        jax.eval_shape(lambda: mla.sparse_mla_fwd(q, kv[:, :100], indices))
    with pytest.raises(InputError, match="'indices': expected dtype int32"):
        mla.sparse_mla_fwd(q, kv, indices.astype(jnp.uint8))
    with pytest.raises(InputError, match=r"'sm_scale': expected a Python value.*static_argnames='sm_scale'.*traced"):
        jax.jit(mla.sparse_mla_fwd)(q, kv, indices, sm_scale=0.5)
    with pytest.raises(InputError, match=r"'sm_scale': expected a Python value.* got a JAX array") as caught:
        mla.sparse_mla_fwd(q, kv, indices, sm_scale=jnp.float32(0.5))
    assert "static" not in caught.value.expected
    with pytest.raises(InputError, match="'q': expected a JAX or NumPy array, got list"):
        mla.sparse_mla_fwd([1.0], kv, indices)
    with pytest.raises(InputError, match="'indices': expected dtype int32, got int64"):
        mla.sparse_mla_fwd(q, kv, np.asarray(indices).astype(np.int64))
    for unknown in ("out", "stream", "check_indices"):
        with pytest.raises(TypeError, match=f"sparse_mla_fwd.*{unknown}"):
            mla.sparse_mla_fwd(q, kv, indices, **{unknown: None})  # type: ignore[arg-type]


def test_a_dtype_that_jax_would_change_is_refused_where_the_operator_takes_it() -> None:
    key, cache = jnp.ones((1, 2, 64)), jnp.zeros((4, 16, 2, 64))
    expected = "'slot_mapping': expected a dtype that JAX keeps: int32, or set jax_enable_x64, got int64"
    with pytest.raises(InputError, match=expected):
        mla.reshape_and_cache(key, key, cache, cache, np.zeros(1, np.int64), kv_layout="NHD")


def test_arrays_of_4_bit_floats_are_refused_with_a_cure_that_works(rng: Any) -> None:
    """Whatever XLA makes of them in memory, what the error says gives the bytes that operators take."""
    codes = rng.integers(0, 16, (2, 3, 32)).astype(np.uint8)
    wide = {name: kit.placed(array.view(jnp.float4_e2m1fn)) for name, array in zip("ab", codes, strict=True)}
    packed = {name: kit.placed(array[:, ::2] | array[:, 1::2] << 4) for name, array in zip("ab", codes, strict=True)}
    scales = kit.placed(rng.integers(40, 60, (3, 2)), jnp.uint8)
    calls: dict[tuple[str, str], Callable[[Any], Any]] = {
        ("nvfp4_gemv", "a"): lambda a: mla.nvfp4_gemv(a, packed["b"], scales, scales),
        ("nvfp4_gemv", "b"): lambda b: mla.nvfp4_gemv(packed["a"], b, scales, scales),
        ("dequantize_nvfp4", "packed"): lambda packed: mla.dequantize_nvfp4(packed, scales),
    }
    declared_pairs = {(each.name, name) for each in DECLARATIONS for name in each.pairs}
    assert calls.keys() == declared_pairs
    for (function, argument), call in calls.items():
        array, right = (given["b" if argument == "b" else "a"] for given in (wide, packed))
        for refused in (call, jax.jit(call)):
            with pytest.raises(InputError, match="got dtype float4_e2m1fn") as caught:
                refused(array)
            assert (caught.value.operator, caught.value.argument) == (function, argument)
        kind, _, cure = caught.value.expected.partition(": ")
        assert kind == "dtype uint8, two codes per byte"
        made, _, first = cure.partition(" of c = ")
        # The very text of the error.
        made_bytes = eval(made, {"c": eval(first, {argument: array, "jax": jax, "jnp": jnp})})
        np.testing.assert_array_equal(made_bytes, right)
        np.testing.assert_array_equal(call(made_bytes), call(right))


def test_errors_of_the_run_carry_the_operators_words() -> None:
    """What only the run can show, such as extents that a program leaves open, comes back through XLA's status."""
    rows, others = jax.export.symbolic_shape("rows, others")
    arguments = jax.ShapeDtypeStruct((rows, 8), jnp.uint8), jax.ShapeDtypeStruct((others, 1), jnp.uint8)
    program = jax.export.export(jax.jit(mla.dequantize_nvfp4), disabled_checks=mla.export_checks())(*arguments)
    assert program.call(jnp.zeros((2, 8), jnp.uint8), jnp.zeros((2, 1), jnp.uint8)).shape == (2, 16)
    with pytest.raises(Exception, match=r"dequantize_nvfp4: argument 'scales': expected shape \[m = 2"):
        jax.block_until_ready(program.call(jnp.zeros((2, 8), jnp.uint8), jnp.zeros((3, 1), jnp.uint8)))


@pytest.mark.parametrize(("q_start", "k_stride"), [(0, 1), (20, 1), (-5, 1), (3, 4), (-9, 4)])
def test_traced_start_masks_as_causal_does(rng: Any, q_start: int, k_stride: int) -> None:
    """Within shard_map the position of a shard's first query is a traced number."""
    q, kv, indices = selection(rng, s_q=30)

    def run(q: Any, start: Any) -> Any:
        return mla.sparse_mla_fwd(q, kv, indices, causal=True, q_start=start, k_stride=k_stride)

    static = run(q, q_start)
    kit.require_same((), results_of(jax.jit(run)(q, q_start)), results_of(static))
    batched = jax.jit(
        lambda start: mla.sparse_mla_fwd(
            q[None], kv[None], indices[None], causal=True, q_start=start, k_stride=k_stride
        )
    )
    kit.require_same((), tuple(r[0] for r in results_of(batched(q_start))), results_of(static))


def test_a_refused_option_is_not_remembered_in_the_place_of_its_equal(rng: Any) -> None:
    """1 equals True and 1.0: a program is remembered by its options, which must not be those of another call."""
    arrays = selection(rng)
    for wrong, right in (({"causal": 1}, {"causal": True}), ({"k_stride": 2.0}, {"k_stride": 2})):
        for _ in range(2):
            with pytest.raises(InputError):
                mla.sparse_mla_fwd(*arrays, **wrong)
            assert mla.sparse_mla_fwd(*arrays, **right)[0].shape == (6, 4, 512)


def test_traced_start_is_checked_as_a_number_is(rng: Any) -> None:
    """What is masked by JAX never reaches the operator, so it has to be refused before."""
    q, kv, indices = selection(rng)

    def run(start: Any, **options: Any) -> Any:
        return jax.jit(lambda s: mla.sparse_mla_fwd(q, kv, indices, q_start=s, **{"causal": True, **options}))(start)

    for start, got in ((2.5, "float32 of shape []"), (jnp.arange(6), "int32 of shape [6]")):
        with pytest.raises(InputError) as refused:
            run(start)
        assert (refused.value.argument, refused.value.got) == ("q_start", got)
    for stride in (0, -1, 1.5, True):
        with pytest.raises(InputError, match="argument 'k_stride': expected an integer from 1"):
            run(3, k_stride=stride)
        with pytest.raises(InputError, match="argument 'k_stride': expected an integer from 1"):
            run(3, k_stride=stride, causal=False)
    with pytest.raises(InputError, match="argument 'causal': expected"):
        run(3, causal="yes")


def test_masks_of_shards_are_checked_as_those_of_whole_arrays_are(rng: Any) -> None:
    from cupymla.interop.jax import parallel

    arrays = selection(rng)
    mesh = jax.make_mesh((1,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = parallel.over_mesh(mesh, "context")
    for wrong in ({"k_stride": 0}, {"q_start": 1.5}, {"causal": "yes"}, {"k_stride": 0, "causal": False}):
        with pytest.raises(InputError, match=f"'{next(iter(wrong))}': expected"):
            spread(*arrays, **{"causal": True, **wrong})
    with pytest.raises(TypeError, match="sideways"):
        spread(*arrays, sideways=1)
    options: dict[str, Any] = {"causal": True, "q_start": 3, "k_stride": 2}
    kit.require_same((), results_of(spread(*arrays, **options)), results_of(mla.sparse_mla_fwd(*arrays, **options)))


def test_exported_program_runs_in_a_fresh_process(rng: Any, tmp_path: Any) -> None:
    """The call travels inside the program; the process that runs it needs `register` alone."""
    pytest.importorskip("flatbuffers", reason="jax.export writes programs with it")
    q, kv, indices = selection(rng)
    export = jax.export.export(jax.jit(mla.sparse_mla_fwd), disabled_checks=mla.export_checks())(q, kv, indices)
    (tmp_path / "program").write_bytes(export.serialize())
    expected = results_of(mla.sparse_mla_fwd(q, kv, indices))
    np.savez(tmp_path / "arrays.npz", *(np.asarray(a).view(np.uint8) for a in (q, kv, indices, expected[0])))
    program = f"""
import pathlib, numpy as np, ml_dtypes, jax
from cupymla.interop import jax as mla
mla.register()
folder = pathlib.Path({str(tmp_path)!r})
q, kv, indices, out = np.load(folder / "arrays.npz").values()
exported = jax.export.deserialize(bytearray((folder / "program").read_bytes()))
bf16 = ml_dtypes.bfloat16
got = exported.call(q.view(bf16), kv.view(bf16), indices.view(np.int32))
assert np.array_equal(np.asarray(got[0]).view(np.uint8), out)
print("equal")
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "equal", run.stderr


def test_exported_program_with_open_sizes(rng: Any) -> None:
    """Extents that the program leaves open are read from the buffers."""
    sizes = jax.export.symbolic_shape("s_q, s_kv")
    q, kv, indices = selection(rng)
    arguments = (
        jax.ShapeDtypeStruct((sizes[0], 4, 576), jnp.bfloat16),
        jax.ShapeDtypeStruct((sizes[1], 576), jnp.bfloat16),
        jax.ShapeDtypeStruct((sizes[0], 9), jnp.int32),
    )
    exported = jax.export.export(jax.jit(mla.sparse_mla_fwd), disabled_checks=mla.export_checks())(*arguments)
    for s_q, s_kv in ((6, 40), (2, 31)):
        given = q[:s_q], kv[:s_kv], indices[:s_q]
        kit.require_same((), results_of(exported.call(*given)), results_of(mla.sparse_mla_fwd(*given)))


def test_exported_program_whose_start_is_an_open_size(rng: Any) -> None:
    """The last queries of a context: where the first one stands depends on sizes that only the run knows."""
    s_q, s_kv = jax.export.symbolic_shape("s_q, s_kv")
    q, kv, indices = selection(rng)
    arguments = (
        jax.ShapeDtypeStruct((s_q, 4, 576), jnp.bfloat16),
        jax.ShapeDtypeStruct((s_kv, 576), jnp.bfloat16),
        jax.ShapeDtypeStruct((s_q, 9), jnp.int32),
    )

    def last(q: Any, kv: Any, indices: Any) -> Any:
        return mla.sparse_mla_fwd(q, kv, indices, causal=True, q_start=kv.shape[0] - q.shape[0])

    exported = jax.export.export(jax.jit(last), disabled_checks=mla.export_checks())(*arguments)
    for given in ((q, kv, indices), (q[:3], kv[:17], indices[:3])):
        kit.require_same((), results_of(exported.call(*given)), results_of(last(*given)))


def test_a_dtype_that_numpy_knows_nothing_of_is_refused(rng: Any) -> None:
    _, kv, indices = selection(rng)
    with pytest.raises(InputError, match=r"argument 'q': expected a numeric dtype, got key<fry>"):
        mla.sparse_mla_fwd(jax.random.key(0), kv, indices)


def test_calls_from_many_threads(rng: Any) -> None:
    """Programs that run at once do not share a runner."""
    from concurrent.futures import ThreadPoolExecutor

    problems = [selection(rng) for _ in range(4)]
    run = jax.jit(mla.sparse_mla_fwd)
    expected = [results_of(run(*problem)) for problem in problems]

    def work(place: int) -> None:
        for _ in range(5):
            kit.require_same((), results_of(run(*problems[place])), expected[place])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_threads_of_xla_keep_what_operators_remember(rng: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bindings are remembered for each thread; XLA's own must not forget them between two calls."""
    import threading

    from cupymla.interop import call
    from cupymla.interop.jax import handler

    memory, remembered = threading.local(), []
    run = call.run

    def watched(*arguments: Any) -> None:
        remembered.append(hasattr(memory, "mark"))
        memory.mark = True
        run(*arguments)

    monkeypatch.setattr(handler, "run", watched)
    q, kv, indices = selection(rng)
    program = jax.jit(lambda q: [mla.sparse_mla_fwd(q * (n + 1), kv, indices)[0] for n in range(6)])
    for _ in range(20):
        jax.block_until_ready(program(q))
    assert sum(remembered) > 60, f"{sum(remembered)} of {len(remembered)} calls found their thread's memory"


def test_every_function_is_there() -> None:
    for name in mla.__all__:
        assert callable(getattr(mla, name)) and name in dir(mla)
        assert name in vars(mla), "each use would make it anew"
        # As an attribute of a model that is saved, or an argument of another process.
        assert pickle.loads(pickle.dumps(getattr(mla, name))) is getattr(mla, name)
    assert "sm_scale" in str(__import__("inspect").signature(mla.sparse_mla_fwd))
    with pytest.raises(AttributeError, match="no attribute 'sparse_mla_sideways'"):
        _ = mla.sparse_mla_sideways  # type: ignore[attr-defined]


def test_a_factor_that_would_be_lost_is_refused() -> None:
    """quantize_nvfp4 returns the factor it finds beside its outputs: without it the codes mean nothing."""
    with pytest.raises(InputError, match=r"quantize_nvfp4: argument 'global_scale': expected a number or an array"):
        mla.quantize_nvfp4(jnp.ones((4, 64)), global_scale="amax")


def test_the_backward_is_recorded_with_its_workspace() -> None:
    """The workspace is a result of the custom call that nobody sees; where its size is unknown nothing is recorded."""
    case = next(p for p in kit.operator_problems(1) if p.declaration.name == "sparse_mla_bwd")
    inputs = {n: kit.placed(v) if isinstance(v, np.ndarray) else v for n, v in case.inputs().items()}
    arrays = {n: v for n, v in inputs.items() if isinstance(v, jax.Array)}
    options = {n: v for n, v in inputs.items() if n not in arrays}
    text = jax.jit(lambda a: mla.sparse_mla_bwd(**a, **options)).lower(arrays).as_text()
    assert "@cupymla_call(" in text and "unrecorded" not in text
    (call,) = [line for line in text.splitlines() if "@cupymla_call(" in line]
    assert call.count("ui8>") == 1
    text = (
        jax.jit(lambda x: mla.matrix_bd(**x, max_context=12))
        .lower(
            {
                "query": jnp.ones((4, 2, 32)),
                "pos_emb": jnp.ones((6, 2, 32)),
                "context_lens": jnp.zeros(4, jnp.int32),
            }
        )
        .as_text()
    )
    assert "@cupymla_call_unrecorded(" in text
