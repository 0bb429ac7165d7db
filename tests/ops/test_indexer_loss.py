"""indexer_loss: the formula, its gradient, what is valid, what is refused; plans, and the kernel in the emulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from plan_kit import require_mirrored

import cupymla
from cupymla import arch
from cupymla.device import Device
from cupymla.errors import InputError, UnsupportedError
from cupymla.ops.indexer_loss import cuda, plan, reference
from cupymla.ops.indexer_loss.spec import Options, Problem
from cupymla.testing import compare
from cupymla_lab.emulated import emulated
from cupymla_lab.subjects import Subject

SUBJECT = Subject("indexer_loss")
PROBLEM = Problem((), 4, 100, 64, 128, 8, "bfloat16", Options(), Device("cuda", 0))


def problem() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "q": rng.standard_normal((5, 3, 64)).astype(np.float16),
        "k": rng.standard_normal((9, 64)).astype(np.float16),
        "weights": rng.standard_normal((5, 3)).astype(np.float32) / 8,
        "indices": rng.integers(0, 9, (5, 7)).astype(np.int32),
        "target": rng.random((5, 7), np.float32) * 3,
    }


def plain(scores: Any, target: Any) -> float:
    """The loss of one row, in float64, of its valid entries."""
    p = target / max(target.sum(), 1e-10)
    softmax = np.exp(scores) / np.exp(scores).sum()
    return float(sum(a * np.log(a / b) for a, b in zip(p, softmax, strict=True) if a))


def scores_of(given: dict[str, Any], relu: bool = True) -> Any:
    """[T, topk] float64, by another operator's reference."""
    logits = Subject("indexer_logits").reference(
        {name: given[name] for name in ("q", "k", "weights")} | ({} if relu else {"relu": False}), "float64"
    )[0]
    return np.take_along_axis(logits, given["indices"].clip(0, 8).astype(np.int64), axis=-1)


@pytest.mark.parametrize("relu", [True, False])
def test_the_loss_and_its_gradient(relu: bool) -> None:
    """The gradient is that of the loss, by central differences in float64."""
    given = problem()
    scores, target = scores_of(given, relu), given["target"].astype(np.float64)
    loss, grad = cupymla.indexer_loss(**given, relu=relu)
    np.testing.assert_allclose(loss, [plain(*row) for row in zip(scores, target, strict=True)], rtol=2e-5)
    step = 1e-5
    for t, s in np.ndindex(grad.shape):
        moved = np.zeros(7)
        moved[s] = step
        change = plain(scores[t] + moved, target[t]) - plain(scores[t] - moved, target[t])
        assert abs(change / (2 * step) - grad[t, s]) < 1e-6


def test_only_valid_entries_count() -> None:
    """What else a row holds may be anything: the result is that of a row without it."""
    given = problem()
    given["indices"][:, 1] = [-1, 9, -(2**31), 2**31 - 1, -7]
    given["indices"][:, 6] = 0
    given["target"][:, [1, 6]] = np.nan
    loss, grad = cupymla.indexer_loss(**given, topk_length=np.full(5, 6, np.int32))
    kept = [0, 2, 3, 4, 5]
    short = given | {name: np.ascontiguousarray(given[name][:, kept]) for name in ("indices", "target")}
    loss_short, grad_short = cupymla.indexer_loss(**short)
    np.testing.assert_array_equal(loss, loss_short)
    np.testing.assert_array_equal(grad[:, kept], grad_short)
    assert not grad[:, [1, 6]].any()


def test_causal_rows_see_complete_keys() -> None:
    given = problem()
    loss, grad = cupymla.indexer_loss(**given, causal=True, q_start=1, k_stride=2)
    for t in range(5):
        seen = given["indices"][t] < (1 + t + 1) // 2
        assert not grad[t][~seen].any() and (grad[t][seen] != 0).sum() == (seen.sum() if seen.sum() > 1 else 0)
        assert loss[t] == 0 or seen.any()


def test_rows_without_entries_or_target_are_zero() -> None:
    given = problem()
    given["target"][2] = 0
    given["k"][:] = np.nan
    loss, grad = cupymla.indexer_loss(**given, topk_length=np.array([0, -3, 7, 7, 0], np.int32))
    assert np.isnan(loss[3]) and np.isnan(grad[3]).all()
    others = [0, 1, 2, 4]
    assert not loss[others].any() and not grad[others].any()


def test_a_target_smaller_than_the_least_divisor() -> None:
    """Its p do not sum to 1, and the gradient says so."""
    given = problem()
    given["target"] *= np.float32(1e-12)
    _, grad = reference.indexer_loss(**given)
    whole = given["target"].astype(np.float64).sum(-1, keepdims=True) / 1e-10
    softmax = np.exp(scores_of(given))
    softmax /= softmax.sum(-1, keepdims=True)
    np.testing.assert_allclose(grad, whole * softmax - given["target"].astype(np.float64) / 1e-10, rtol=1e-9)


def test_a_given_lse_is_taken() -> None:
    given = problem()
    lse = np.log(np.exp(scores_of(given)).sum(-1)).astype(np.float32)
    for a, b in zip(cupymla.indexer_loss(**given, lse=lse), cupymla.indexer_loss(**given), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    moved, _ = cupymla.indexer_loss(**given, lse=lse + 1)
    np.testing.assert_allclose(moved - cupymla.indexer_loss(**given)[0], 1, atol=1e-6)


def test_plans() -> None:
    hopper = arch.named("sm_90a")
    for heads, filled in ((1, 16), (16, 16), (17, 32), (64, 64), (65, 128), (128, 128)):
        defines = dict(plan.plan(replace(PROBLEM, heads=heads), hopper).defines)
        assert (defines["CUPYMLA_HEADS"], defines["CUPYMLA_FILLED"]) == (filled, heads != filled)
    assert set(plan.sources()) <= set(plan.variants())
    with pytest.raises(UnsupportedError, match="sm_100f"):
        plan.variant(arch.named("sm_100f"))
    for wrong in ({"dtype": "float32"}, {"channels": 96}, {"heads": 24}, {"filled": 1}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            plan.variant(hopper, **wrong)


def test_the_record_is_the_kernels() -> None:
    require_mirrored(cuda.Parameters, "indexer_loss/sm90/params.cuh")


EMULATED = ("stages", "filled", "holes", "lse", "causal_stride4", "hostile_ids", "hostile", "batch_strided")


@pytest.mark.compile
@pytest.mark.parametrize("ending", EMULATED)
def test_the_kernel_in_the_emulator(ending: str) -> None:
    """With races looked for, and copies that come as late as they may."""
    case = next(case for case in SUBJECT.cases.CASES if case.name.endswith(f"_{ending}"))
    with emulated("sm_90a", 2) as machine:
        compare.require(machine.check("indexer_loss", case))
