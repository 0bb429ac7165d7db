"""sparse_mla_bwd on the CPU: every gradient against autograd, JAX and finite differences, and the public call."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from case_kit import quick
from mla_oracle import Oracle, assert_close, solve, unlike

from cupymla.ops.attn_dist import attn_dist
from cupymla.ops.mla_cases import MlaCase
from cupymla.ops.sparse_mla_bwd import cases, reference, sparse_mla_bwd
from cupymla.ops.sparse_mla_fwd import reference as forward
from cupymla.ops.sparse_mla_fwd import sparse_mla_fwd
from cupymla_lab.problems import sparse_mla_bwd as problems

Array = npt.NDArray[Any]
BF16 = ml_dtypes.bfloat16


def exact_problem(case: MlaCase, seed: int) -> tuple[dict[str, Any], Oracle]:
    """Arguments with out and lse unrounded, so that the gradients can be compared in float64."""
    arguments = cases.inputs(case, seed)
    expected = solve(**arguments)
    lse = expected.lse / math.log(2) if case.softmax.lse_base == "2" else expected.lse
    return arguments | {"out": expected.out, "lse": lse}, expected


@pytest.mark.parametrize("case", quick("sparse_mla_bwd"), ids=lambda case: case.name)
def test_reference_agrees_with_autograd(case: MlaCase) -> None:
    """Catches a wrong term, sign, mask or scatter in any gradient, d_sink and the distribution included."""
    arguments, expected = exact_problem(case, seed=1)
    if case.wants_dist:
        arguments["attn_dist"] = np.full(expected.dist.shape, np.nan)
    results = reference.sparse_mla_bwd(**arguments)
    assert len(results) == (3 if case.sink != "none" else 2)
    assert_close("dq", results[0], expected.dq)
    assert_close("dkv", results[1].reshape(expected.dkv.shape), expected.dkv)
    assert results[1].shape == arguments["kv"].shape
    if case.sink != "none":
        assert_close("d_sink", results[2], expected.d_sink)
    if case.wants_dist:
        assert_close("attn_dist", arguments["attn_dist"], expected.dist)


@pytest.mark.parametrize("case", quick("sparse_mla_bwd"), ids=lambda case: case.name)
def test_call_and_same_precision(case: MlaCase) -> None:
    """The public path keeps every option on its way to the reference and stores in the documented dtypes.

    The same-precision reference sets kernels' tolerance: it must meet the criterion's similarity bound itself.
    """
    arguments = cases.inputs(case, seed=2)
    exact = reference.sparse_mla_bwd(**(arguments | {"attn_dist": None}))
    got = sparse_mla_bwd(**arguments)
    dtype = arguments["q"].dtype
    assert [a.dtype for a in got[:2]] == [dtype, np.float32 if case.options.get("dkv_dtype") else dtype]
    assert all(a.dtype == np.float32 for a in got[2:])
    for array, expected in zip(got, exact, strict=True):
        np.testing.assert_array_equal(array, expected.astype(array.dtype))
    same = reference.sparse_mla_bwd(**(arguments | {"attn_dist": None}), precision="same")
    assert [a.dtype for a in same] == [dtype, np.float32 if case.options.get("dkv_dtype") else dtype, np.float32][
        : len(same)
    ]
    for name, array, expected in zip(("dq", "dkv", "d_sink"), same, exact, strict=False):
        assert unlike(array, expected) <= 1e-5, name


def test_same_precision_rounds_p_and_ds_to_the_input_dtype() -> None:
    """One query, P = (1, 0.3) / 1.3: dkv of channel 2, which only dout reaches, is bf16(P) in fp32."""
    q, kv = np.zeros((1, 1, 512), BF16), np.zeros((2, 512), BF16)
    q[0, 0, 0], kv[1, 0] = 1, 1
    dout = np.zeros((1, 1, 512), BF16)
    dout[0, 0, 2] = 1
    arguments: dict[str, Any] = {
        "q": q,
        "kv": kv,
        "out": np.zeros_like(dout),
        "dout": dout,
        "indices": np.array([[0, 1]], np.int32),
    }
    arguments |= {"lse": np.full((1, 1), math.log(1.3), np.float32)}
    dkv = reference.sparse_mla_bwd(**arguments, sm_scale=math.log(0.3), dkv_dtype="float32", precision="same")[1]
    assert dkv[:, 2].tolist() == [float(BF16(1 / 1.3)), float(BF16(0.3 / 1.3))]


def test_finite_differences() -> None:
    """Independent of any autograd: central differences of sum(out * dout) along random directions, sink included."""
    generator = np.random.default_rng(7)
    indices = np.array([[0, 3, 3, -1, 5], [4, 1, 9, 2, 0]], np.int32)
    point: dict[str, Any] = {"q": generator.standard_normal((2, 2, 512)), "kv": generator.standard_normal((6, 512))}
    point["attn_sink"] = generator.standard_normal(2)
    options: dict[str, Any] = {"indices": indices, "causal": True, "q_start": 3}
    dout = generator.standard_normal((2, 2, 512))
    out, _, lse = forward.sparse_mla_fwd(**point, **options)
    gradients = reference.sparse_mla_bwd(out=out, dout=dout, lse=lse, **point, **options)
    for (name, value), gradient in zip(point.items(), gradients, strict=True):
        direction = generator.standard_normal(value.shape)
        step = 1e-5
        ahead, behind = (
            float((forward.sparse_mla_fwd(**(point | {name: value + sign * direction}), **options)[0] * dout).sum())
            for sign in (step, -step)
        )
        slope = (ahead - behind) / (2 * step)
        # Central differences err by step**2 times a third derivative, a few hundred here, and 1e-16 / step.
        assert abs(slope - float((gradient * direction).sum())) < 1e-6, name


def test_gradients_agree_with_jax() -> None:
    """A second autodiff, by per-entry gather instead of a dense softmax."""
    name = "h16_d576_k65_q6_kv200_sink"
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    jnp = jax.numpy
    case = next(case for case in problems.CASES if case.name == name)
    arguments, expected = exact_problem(case, seed=4)
    valid, tokens = expected.valid, np.where(expected.valid, arguments["indices"], 0)
    scale = arguments.get("sm_scale", case.d_qk**-0.5)

    def loss(q: Any, kv: Any, sink: Any) -> Any:
        keys = kv[tokens]
        scores = jnp.where(valid[:, None, :], scale * jnp.einsum("shd,skd->shk", q, keys), -jnp.inf)
        norm = jnp.logaddexp(jax.scipy.special.logsumexp(scores, axis=-1), sink)
        out = jnp.einsum("shk,skd->shd", jnp.exp(scores - norm[..., None]), keys[..., :512])
        return (out * arguments["dout"].astype(np.float64)).sum()

    with jax.enable_x64(True):
        kv = arguments["kv"].astype(np.float64)
        kv[~np.isin(np.arange(case.s_kv), tokens[valid])] = 0
        sink = np.asarray(arguments.get("attn_sink", np.full(case.h_q, -np.inf)), np.float64)
        results = jax.grad(loss, argnums=(0, 1, 2))(arguments["q"].astype(np.float64), kv, sink)
    got = reference.sparse_mla_bwd(**arguments)
    assert_close("dq", got[0], np.asarray(results[0]))
    assert_close("dkv", got[1], np.asarray(results[1]))
    if case.sink != "none":
        assert_close("d_sink", got[2], np.asarray(results[2]))


def arguments_of(name: str) -> dict[str, Any]:
    return cases.inputs(next(case for case in problems.CASES if case.name == name), seed=6)


def test_empty_rows_give_no_gradient_whatever_they_hold() -> None:
    """The forward leaves out = 0 and lse = +inf there; NaN, Inf or an lse of -inf must not leak either."""
    arguments = arguments_of("h16_d576_k65_q7_kv200_empty")
    empty = np.isinf(arguments["lse"]).all(axis=-1)
    sink = np.linspace(-1, 1, 16).astype(np.float32)
    assert empty.any() and not empty.all()
    clean = sparse_mla_bwd(**arguments, attn_sink=sink)
    assert not clean[0][empty].any()
    for out, dout, lse in ((np.nan, np.inf, -np.inf), (1, np.nan, np.nan), (np.inf, 0, 0)):
        spoiled = {name: arguments[name].copy() for name in ("out", "dout", "lse")}
        for name, value in zip(spoiled, (out, dout, lse), strict=True):
            spoiled[name][empty] = value
        for array, expected in zip(sparse_mla_bwd(**(arguments | spoiled), attn_sink=sink), clean, strict=True):
            np.testing.assert_array_equal(array, expected)


def test_unselected_tokens_get_zero() -> None:
    """Rows that hold NaN and that no valid entry names have a gradient of exactly 0."""
    arguments = arguments_of("h16_d576_k65_q5_kv200_singleton_batch".replace("q5", "q4"))
    dkv = sparse_mla_bwd(**arguments)[1]
    unnamed = ~np.isfinite(arguments["kv"].astype(np.float32)).all(axis=-1)
    assert unnamed.any() and not dkv[unnamed].any()


def test_infinite_sinks() -> None:
    """+inf leaves no gradient to q and kv; -inf is no sink; neither has a d_sink."""
    arguments = arguments_of("h8_d512_k130_q3_kv300")
    plain = sparse_mla_bwd(**arguments, dkv_dtype="float32")
    none = sparse_mla_bwd(**arguments, attn_sink=np.full(8, -np.inf, np.float32), dkv_dtype="float32")
    for array, expected in zip(none, (*plain, np.zeros(8)), strict=True):
        np.testing.assert_array_equal(array, expected)
    arguments["out"] = np.zeros_like(arguments["out"])
    for array in sparse_mla_bwd(**arguments, attn_sink=np.full(8, np.inf, np.float32)):
        assert not array.any()


def test_attn_dist_output_is_the_operators_own() -> None:
    """What the backward hands out on request is what attn_dist computes, with a sink and without."""
    for name in ("h16_d576_k65_q6_kv200_dist", "h128_d512_k130_q4_kv200_dist_sink"):
        arguments = arguments_of(name)
        sparse_mla_bwd(**arguments)
        shared = {key: arguments[key] for key in ("q", "kv", "indices", "lse")}
        np.testing.assert_array_equal(arguments["attn_dist"], attn_dist(**shared))


def test_the_sink_in_the_distribution_is_attn_dist_of_the_lse_with_it() -> None:
    """The gradients are the same either way."""
    arguments = arguments_of("h16_d576_k65_q6_kv200_sink_lse")
    counted = sparse_mla_bwd(**arguments)
    shared = {key: arguments[key] for key in ("q", "kv", "indices")}
    lse = np.logaddexp(arguments["lse"].astype(np.float64), arguments["attn_sink"])
    expected = attn_dist(**shared, lse=lse.astype(np.float32))
    np.testing.assert_allclose(arguments["attn_dist"], expected, rtol=1e-5)
    assert arguments["attn_dist"].sum() < 0.9 * attn_dist(**shared, lse=arguments["lse"]).sum()
    for array, same in zip(counted, sparse_mla_bwd(**(arguments | {"attn_dist_sink": False})), strict=True):
        np.testing.assert_allclose(array.astype(float), same.astype(float), rtol=2**-7)


def test_deterministic_changes_nothing_on_the_cpu() -> None:
    arguments = arguments_of("h128_d576_k130_q6_kv50_det_duplicates")
    results = [sparse_mla_bwd(**(arguments | {"deterministic": value})) for value in (True, False, True)]
    for other in results[1:]:
        for array, expected in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(array, expected)


def test_outputs_given_are_overwritten_and_returned() -> None:
    """dkv is not added to; d_sink, dq and dkv come back as given."""
    arguments = arguments_of("h16_d576_k65_q6_kv200_sink")
    given: dict[str, Any] = {
        "dq": np.full(arguments["q"].shape, 3, BF16),
        "dkv": np.full(arguments["kv"].shape, 3, np.float32),
    }
    given["d_sink"] = np.full(16, 3, np.float32)
    got = sparse_mla_bwd(**arguments, **given, dkv_dtype="float32")
    assert all(array is provided for array, provided in zip(got, given.values(), strict=True))
    for array, expected in zip(got, sparse_mla_bwd(**arguments, dkv_dtype="float32"), strict=True):
        np.testing.assert_array_equal(array, expected)


def test_training_step_through_the_public_functions() -> None:
    """The forward's outputs fit the backward as they are; a step along the gradient raises sum(out * dout)."""
    generator = np.random.default_rng(8)
    q = generator.standard_normal((4, 16, 576)).astype(BF16)
    kv = generator.standard_normal((30, 576)).astype(BF16)
    indices = generator.integers(-4, 40, (4, 20)).astype(np.int32)
    dout = generator.standard_normal((4, 16, 512)).astype(BF16)
    out, _, lse = sparse_mla_fwd(q, kv, indices)
    dq, dkv = sparse_mla_bwd(q, kv, out, dout, lse, indices)
    norm = float((dq.astype(np.float64) ** 2).sum() + (dkv.astype(np.float64) ** 2).sum())
    moved = [array.astype(np.float64) + 1e-5 * d.astype(np.float64) for array, d in ((q, dq), (kv, dkv))]
    before = forward.sparse_mla_fwd(q, kv, indices)[0]
    gain = ((forward.sparse_mla_fwd(moved[0], moved[1], indices)[0] - before) * dout.astype(np.float64)).sum()
    # The gradients carry bf16's 2**-8, the step's second-order term is of order 1e-5.
    assert abs(gain / (1e-5 * norm) - 1) < 0.02
