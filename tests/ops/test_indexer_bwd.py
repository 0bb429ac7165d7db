"""indexer_bwd: the gradients against differences, what is valid, what is refused; plans, and the kernels in the
emulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, replace
from itertools import accumulate
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from plan_kit import require_mirrored

import cupymla
from cupymla import arch
from cupymla.device import Device
from cupymla.errors import InputError, UnsupportedError
from cupymla.ops.indexer_bwd import cuda, plan, reference
from cupymla.ops.indexer_bwd.spec import Options, Problem
from cupymla.testing import compare
from cupymla_lab.emulate import Settings
from cupymla_lab.emulated import emulated
from cupymla_lab.subjects import Subject

SUBJECT = Subject("indexer_bwd")
PROBLEM = Problem((), 4, 100, 64, 128, 8, "bfloat16", "float32", Options(), Device("cuda", 0))
NAMES = ("q", "k", "weights")


def problem() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "q": rng.standard_normal((5, 3, 64)).astype(np.float16),
        "k": rng.standard_normal((9, 64)).astype(np.float16),
        "weights": rng.standard_normal((5, 3)).astype(np.float32) / 8,
        "grad_logits": rng.standard_normal((5, 7)).astype(np.float32),
        "indices": rng.integers(0, 9, (5, 7)).astype(np.int32),
    }


def wide(given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name].astype(np.float64) for name in NAMES}


def scores(at: dict[str, Any], indices: Any, relu: bool = True) -> Any:
    """[T, topk], written out; what an entry that is no key gets means nothing."""
    products = np.einsum("thd,tsd->ths", at["q"], at["k"][np.clip(indices, 0, len(at["k"]) - 1)])
    return np.einsum("th,ths->ts", at["weights"], np.maximum(products, 0) if relu else products)


def require_derivatives(
    objective: Callable[[dict[str, Any]], float], at: dict[str, Any], gradients: tuple[Any, ...]
) -> None:
    """dq, dk, dweights are those of a function, by central differences in float64 at some places."""
    rng = np.random.default_rng(1)
    for name, gradient in zip(NAMES, gradients, strict=True):
        for flat in rng.permutation(gradient.size)[:30]:
            place = np.unravel_index(flat, gradient.shape)
            values = []
            for step in (1e-5, -1e-5):
                moved = at | {name: at[name].copy()}
                moved[name][place] += step
                values.append(objective(moved))
            assert abs((values[0] - values[1]) / 2e-5 - gradient[place]) < 1e-6 * (1 + abs(gradient[place]))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_relu": {"relu": False},
    "causal": {"causal": True, "q_start": 2, "k_stride": 1},
    "causal_stride": {"causal": True, "q_start": -1, "k_stride": 2, "relu": False},
    "lengths": {"topk_length": np.array([3, -1, 9, 7, 0], np.int32)},
    "deterministic": {"deterministic": True, "dk_dtype": "float32"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_a_sum_of_scores(name: str) -> None:
    """Differences of the sum of grad_logits times scores, over valid entries that are found here anew."""
    given, options = problem(), OPTIONS[name]
    given["indices"][:, 2] = [-1, 9, 2**31 - 1, -(2**31), 4]
    valid = (given["indices"] >= 0) & (given["indices"] < 9)
    if "topk_length" in options:
        valid &= np.arange(7) < options["topk_length"][:, None]
    if options.get("causal"):
        valid &= given["indices"] < ((options["q_start"] + np.arange(5) + 1) // options["k_stride"])[:, None]
    g = np.where(valid, given["grad_logits"].astype(np.float64), 0)

    def objective(at: dict[str, Any]) -> float:
        return float((g * scores(at, given["indices"], options.get("relu", True))).sum())

    exact = reference.indexer_bwd(**given, **options)
    require_derivatives(objective, wide(given), exact)
    for got, expected in zip(cupymla.indexer_bwd(**given, **options), exact, strict=True):
        np.testing.assert_array_equal(got, expected.astype(got.dtype))


def test_gradients_of_the_loss() -> None:
    """Through indexer_loss: differences of its KL divergence, written out, one row of it without a target."""
    given = problem()
    target = np.random.default_rng(2).random((5, 7))
    target[3] = 0
    p = target / np.maximum(target.sum(-1, keepdims=True), 1e-10)

    def objective(at: dict[str, Any]) -> float:
        own = scores(at, given["indices"])
        log_softmax = own - np.log(np.exp(own).sum(-1, keepdims=True))
        return float(np.where(p > 0, p * (np.log(np.where(p > 0, p, 1)) - log_softmax), 0).sum())

    arrays = {name: given[name] for name in (*NAMES, "indices")}
    loss, grad = Subject("indexer_loss").reference(arrays | {"target": target}, "float64")
    np.testing.assert_allclose(loss.sum(), objective(wide(given)), rtol=1e-9)
    gradients = reference.indexer_bwd(**(given | {"grad_logits": grad}))
    require_derivatives(objective, wide(given), gradients)
    assert not gradients[0][3].any() and not gradients[2][3].any()


def test_only_valid_entries_count() -> None:
    """What else a row holds may be anything: the result is that of a row without it."""
    given = problem()
    given["indices"][:, 1] = [-1, 9, -(2**31), 2**31 - 1, -7]
    given["grad_logits"][:, [1, 6]] = np.nan
    results = cupymla.indexer_bwd(**given, topk_length=np.full(5, 6, np.int32))
    kept = [0, 2, 3, 4, 5]
    short = given | {name: np.ascontiguousarray(given[name][:, kept]) for name in ("indices", "grad_logits")}
    for got, expected in zip(results, cupymla.indexer_bwd(**short), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_rows_without_entries_and_keys_that_nobody_names_are_zero() -> None:
    given = problem()
    given["indices"][given["indices"] == 4] = 5
    for name in NAMES:
        given[name][...] = np.nan
    dq, dk, dweights = cupymla.indexer_bwd(**given, topk_length=np.array([0, -3, 7, 7, 0], np.int32))
    assert not dq[[0, 1, 4]].any() and not dweights[[0, 1, 4]].any() and not dk[4].any()
    assert np.isnan(dweights[[2, 3]]).all()


def test_at_zero_the_derivative_is_zero() -> None:
    given = problem()
    given["k"][:] = 0
    dq, dk, dweights = cupymla.indexer_bwd(**given)
    assert not dk.any() and not dq.any() and not dweights.any()
    _, dk, _ = cupymla.indexer_bwd(**given, relu=False)
    assert dk.any()


def test_a_key_that_is_named_twice_counts_twice() -> None:
    given = problem()
    given["indices"][:, 1] = given["indices"][:, 0]
    once = given | {"indices": given["indices"][:, 1:].copy(), "grad_logits": given["grad_logits"][:, 1:].copy()}
    once["grad_logits"][:, 0] += given["grad_logits"][:, 0]
    for both, one in zip(reference.indexer_bwd(**given), reference.indexer_bwd(**once), strict=True):
        np.testing.assert_allclose(both, one, atol=1e-6)


def test_results_have_the_dtypes_of_their_arguments() -> None:
    given = problem()
    given |= {name: given[name].astype(ml_dtypes.bfloat16) for name in NAMES}
    assert {array.dtype.name for array in cupymla.indexer_bwd(**given)} == {"bfloat16"}
    _, dk, dweights = cupymla.indexer_bwd(**problem(), dk_dtype="float32")
    assert dk.dtype == dweights.dtype == np.float32
    out = np.full((9, 64), np.nan, np.float32)
    assert cupymla.indexer_bwd(**problem(), dk_dtype="float32", dk=out)[1] is out
    np.testing.assert_array_equal(out, dk)


def test_each_batch_entry_by_itself() -> None:
    given = problem()
    other = {name: np.roll(array, 1, axis=0) for name, array in given.items()}
    stacked: dict[str, Any] = {name: np.stack([given[name], other[name]]) for name in given}
    both = cupymla.indexer_bwd(**stacked)
    for entry, arguments in enumerate((given, other)):
        for got, expected in zip(both, cupymla.indexer_bwd(**arguments), strict=True):
            np.testing.assert_array_equal(got[entry], expected)


def test_results_share_no_memory_with_arguments() -> None:
    given = problem()
    with pytest.raises(InputError, match="'dq': expected memory of its own"):
        cupymla.indexer_bwd(**given, dq=given["q"])


def test_plans() -> None:
    hopper = arch.named("sm_90a")
    for heads, block in ((1, 16), (16, 16), (17, 32), (64, 64), (65, 64), (128, 64)):
        chosen = plan.launches(replace(PROBLEM, heads=heads), hopper)
        assert [launch.source.entry for launch in chosen] == ["indexer_bwd_zero", "indexer_bwd", "indexer_bwd_round"]
        assert dict(chosen[1].source.defines)["CUPYMLA_HEADS"] == block and chosen[1].ctas == 4
    exact = replace(PROBLEM, options=replace(PROBLEM.options, deterministic=True))
    chosen = plan.launches(exact, hopper)
    stages = ("zero", "bound", "total", "gradients", "round")
    assert [launch.source for launch in chosen] == [
        plan.variant(hopper, stage=stage, deterministic=True) for stage in stages
    ]
    assert plan.launches(replace(exact, queries=2**18, topk=2**11), hopper)
    with pytest.raises(UnsupportedError, match="262145 queries of 2048 entries, 'deterministic'"):
        plan.launches(replace(exact, queries=2**18 + 1, topk=2**11), hopper)
    assert not plan.launches(replace(PROBLEM, queries=0, keys=0), hopper)
    assert set(plan.sources()) <= set(plan.variants())
    with pytest.raises(UnsupportedError, match="sm_100f"):
        plan.variant(arch.named("sm_100f"))
    wrongs = ({"stage": 2}, {"dtype": "float32"}, {"channels": 96}, {"heads": 128}, {"deterministic": 1})
    for wrong in wrongs:
        with pytest.raises(InputError, match=next(iter(wrong))):
            plan.variant(hopper, **wrong)


def test_totals_are_added_up_by_ranges_of_keys() -> None:
    """Ranges fit shared memory, and are about as large; beyond eight there are none."""
    hopper, options = arch.named("sm_90a"), replace(PROBLEM.options, deterministic=True)
    most = 28672
    sizes = ((1, 1, 1), (most, most, 1), (most + 1, 14337, 2), (8 * most, most, 8), (8 * most + 1, 0, 1))
    for keys, size, ranges in sizes:
        for lead, queries in (((), 4), ((), 500), ((3,), 500), ((200,), 500)):
            problem = replace(PROBLEM, lead=lead, queries=queries, keys=keys, options=options)
            assert plan.range_keys(problem) == size
            launches = plan.launches(problem, hopper)
            ctas = next(launch.ctas for launch in launches if launch.source.entry.endswith("total"))
            assert ctas % (problem.batch * ranges) == 0 and ctas <= max(132, problem.batch * ranges)
            assert ctas <= problem.batch * ranges * queries
    assert plan.range_keys(replace(PROBLEM, keys=0)) == 0


def test_the_workspace_holds_sums_and_bounds() -> None:
    assert plan.workspace(PROBLEM).bytes == 100 * 128 * 4
    exact = replace(PROBLEM, lead=(3,), keys=7, options=replace(PROBLEM.options, deterministic=True))
    layout = plan.workspace(exact)
    sizes = (21 * 128 * 4, 176, 21 * 4 * 2 * 4, 48, 3 * 128 * 4, 16)
    assert astuple(layout) == (0, *accumulate(sizes))
    assert [plan.adds_log2(replace(PROBLEM, queries=n, topk=1)) for n in (0, 1, 2, 3, 4, 5)] == [0, 0, 1, 2, 2, 3]


def test_the_record_is_the_kernels() -> None:
    require_mirrored(cuda.Parameters, "indexer_bwd/sm90/params.cuh")


EMULATED = (
    *("stages", "h33_d128_t6_l90_k63_filled", "k65_det", "fp32", "no_relu", "causal_stride4", "hostile_ids_det"),
    *("no_ids", "same_det", "hostile", "hostile_det", "wide", "batch_strided_det"),
)


def named(ending: str) -> Any:
    return next(case for case in SUBJECT.cases.CASES if case.name.endswith(f"_{ending}"))


@pytest.mark.compile
@pytest.mark.parametrize("ending", EMULATED)
def test_the_kernels_in_the_emulator(ending: str) -> None:
    """With races looked for, and copies and products that come as late as they may."""
    with emulated("sm_90a", 2) as machine:
        compare.require(machine.check("indexer_bwd", named(ending)))


@pytest.mark.compile
@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_all_waits_are_there(mode: Any) -> None:
    """Tiles that come round all stages, and two blocks of heads, with products as early and as late as they may be."""
    with emulated("sm_90a", 2, Settings(mode, races="hardware")) as machine:
        compare.require(machine.check("indexer_bwd", named("hostile_ids_det")))


def integer_sums(arguments: dict[str, Any], relu: bool = True) -> tuple[Any, Any]:
    """dk in float32 by kernels, and in float64, of problems of 16 heads and 128 channels in bf16."""
    options: dict[str, Any] = {"deterministic": True, "dk_dtype": "float32", "relu": relu}
    with emulated("sm_90a", 16) as machine:
        dk = machine.call(cupymla.indexer_bwd, **machine.arguments(arguments, ()), **options)[1].get()
    return dk, reference.indexer_bwd(**arguments, **options)[1]


@pytest.mark.compile
def test_integer_sums_of_factors_far_apart() -> None:
    """A gradient times weights that is below all numbers, but not with q: its unit follows the terms themselves."""
    arguments = {
        "q": np.full((1, 16, 128), 1e25, ml_dtypes.bfloat16),
        "k": np.full((64, 128), 1e-25, ml_dtypes.bfloat16),
        "weights": np.full((1, 16), 1e-22, np.float32),
        "grad_logits": np.full((1, 128), 1e-25, np.float32),
        "indices": np.zeros((1, 128), np.int32),
    }
    dk, exact = integer_sums(arguments)
    assert exact[0].min() > 1e-19
    np.testing.assert_allclose(dk, exact, rtol=2**-8)  # a factor of each term is rounded to bf16


def ones(counts: Any, heads: int = 16) -> dict[str, Any]:
    """One query that names key i counts[i] times, with a gradient of 1 and a product of 1 for each of `heads`."""
    weights = np.zeros((1, 16), np.float32)
    weights[:, :heads] = 1
    return {
        "q": np.ones((1, 16, 128), ml_dtypes.bfloat16),
        "k": np.full((len(counts), 128), 1 / 128, ml_dtypes.bfloat16),
        "weights": weights,
        "grad_logits": np.ones((1, sum(counts)), np.float32),
        "indices": np.repeat(np.arange(len(counts), dtype=np.int32), counts)[None],
    }


@pytest.mark.compile
def test_integer_sums_that_reach_their_bounds() -> None:
    """Some of these counts are just below a power of two, with what is kept for rounding: none is too large to hold."""
    counts = (1, 2, 3, 7, 15, 31, 60, 61, 62, 63, 64, 124, 125, 126, 127, 128)
    dk, _ = integer_sums(ones(counts, 1))
    np.testing.assert_array_equal(dk, np.repeat(np.array(counts, np.float32)[:, None], 128, 1))


@pytest.mark.compile
@pytest.mark.parametrize("small", [2.0**-20, 2.0**-50])
def test_integer_sums_of_small_channels_and_keys(small: float) -> None:
    """A channel that is small in every query has units of its own; so has a key whose entries are all small."""
    arguments = ones((3, 5))
    arguments["q"][..., 1] = small
    arguments["grad_logits"][:, :3] = small
    dk, exact = integer_sums(arguments)
    np.testing.assert_allclose(dk, exact, rtol=1e-6)


@pytest.mark.compile
def test_integer_sums_of_keys_with_many_entries() -> None:
    """512 entries a key and exact weights: what shows is how coarsely an entry is rounded beside its key's total."""
    case = SUBJECT.cases.GradientCase(
        **{"name": "many", "intent": "shapes", "queries": 64, "keys": 8, "topk": 64, "heads": 64},
        **{"bf16_weights": True, "deterministic": True, "dk_dtype": "float32"},
    )
    with emulated("sm_90a", 8) as machine:
        compare.require(machine.check("indexer_bwd", case))


@pytest.mark.compile
def test_integer_sums_near_the_end_of_floats() -> None:
    """Where bounds are above 2^126, terms are looked at one by one."""
    arguments = ones((2, 3))
    arguments["q"][:, 0::2, ::2] = 2.0**120
    arguments["q"][:, 1::2, ::2] = -(2.0**120)
    arguments["weights"][:, :7] = 8
    dk, exact = integer_sums(arguments, relu=False)
    assert exact.max() == 21 * 2.0**120
    np.testing.assert_allclose(dk, exact, rtol=1e-6)


@pytest.mark.compile
def test_integer_sums_of_weights_that_round_to_infinity() -> None:
    """Such a weight is above the largest bf16, so what its operand adds is not finite."""
    arguments = ones((2, 3), 1)
    arguments["weights"][:, 0] = 3.4e38
    arguments["q"] *= ml_dtypes.bfloat16(1e-30)
    dk, _ = integer_sums(arguments)
    assert np.isposinf(dk).all()


@pytest.mark.compile
@pytest.mark.parametrize(("most", "ranges"), [(11, 8), (11, 5), (29, 8)])
def test_totals_are_the_same_whoever_adds_them_up(most: int, ranges: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one range of keys, by six or three, and in L2: totals, and so dk, have the same bits."""
    case = named("hostile_ids_det")
    size = {(11, 8): 10, (11, 5): 0, (29, 8): 20}[most, ranges]
    found = []
    for _ in range(2):
        with emulated("sm_90a", 2) as machine:
            results = machine.results(SUBJECT, SUBJECT.cases.inputs(case, 0))
            found.append({name: array.tobytes() for name, array in results.items()})
        monkeypatch.setattr(plan, "_MOST_RANGE_KEYS", most)
        monkeypatch.setattr(plan, "_MOST_RANGES", ranges)
    assert plan.range_keys(replace(PROBLEM, keys=case.keys)) == size
    assert found[0] == found[1]


@pytest.mark.compile
def test_integer_sums_have_the_same_bits_in_any_order() -> None:
    """Every query adds to one key; threads and CTAs come in another order with each seed."""
    found = []
    for seed in range(2):
        with emulated("sm_90a", 2, seed=seed) as machine:
            results = machine.results(SUBJECT, SUBJECT.cases.inputs(named("same_det"), 0))
            found.append({name: array.tobytes() for name, array in results.items()})
    assert found[0] == found[1]
