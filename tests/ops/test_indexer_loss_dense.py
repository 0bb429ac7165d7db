"""indexer_loss_dense: loss and gradients against torch's in float64, what is seen, what is spoilt, what is refused;
plans, and the kernels in the emulator."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from plan_kit import require_mirrored

import cupymla
from cupymla import arch
from cupymla.device import Device
from cupymla.errors import InputError, UnsupportedError
from cupymla.ops.indexer_logits import plan as scores_plan
from cupymla.ops.indexer_logits import spec as scoring
from cupymla.ops.indexer_loss_dense import cuda, plan, reference
from cupymla.ops.indexer_loss_dense.spec import Options, Problem
from cupymla.testing import compare
from cupymla_lab.emulate import Settings
from cupymla_lab.emulated import emulated
from cupymla_lab.subjects import Subject

SUBJECT = Subject("indexer_loss_dense")
SCORES = scoring.Problem((), 4096, 8192, 64, 128, "bfloat16", False, scoring.Options(), Device("cuda", 0))
PROBLEM = Problem(SCORES, 128, 576, True, "float32", Options())
QUERIES, KEYS = 7, 11


def problem() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "q": rng.standard_normal((QUERIES, 3, 64)).astype(np.float16),
        "k": rng.standard_normal((KEYS, 64)).astype(np.float16),
        "weights": rng.standard_normal((QUERIES, 3)).astype(np.float32) / 8,
        "mla_q": rng.standard_normal((QUERIES, 2, 512)).astype(np.float16),
        "mla_kv": rng.standard_normal((KEYS, 512)).astype(np.float16),
    }


def seen_by(given: dict[str, Any]) -> Any:
    """[T, L]: which keys each query sees, found here anew."""
    seen = np.zeros((QUERIES, KEYS), bool)
    for t, s in np.ndindex(seen.shape):
        visible = s >= given["starts"][t] if "starts" in given else True
        visible &= s < given["ends"][t] if "ends" in given else True
        if given.get("causal"):
            visible &= s < math.floor((given.get("q_start", 0) + t + 1) / given.get("k_stride", 1))
        seen[t, s] = visible
    return seen


def by_autograd(given: dict[str, Any]) -> tuple[Any, ...]:
    """loss, dq, dk and dweights, by torch in float64 of the loss written out row by row."""
    torch = pytest.importorskip("torch")
    q, k, weights, mla_q, mla_kv = (
        torch.from_numpy(given[name].astype(np.float64)) for name in ("q", "k", "weights", "mla_q", "mla_kv")
    )
    moving = [array.requires_grad_() for array in (q, k, weights)]
    scale = given.get("sm_scale", 512**-0.5)
    losses = []
    for t, visible in enumerate(seen_by(given)):
        ids = torch.from_numpy(np.flatnonzero(visible))
        if not len(ids):
            losses.append(torch.zeros((), dtype=torch.float64))
            continue
        attention = scale * mla_q[t] @ mla_kv[ids].T
        if "mla_lse" in given:
            unit = math.log(2) if given.get("lse_base") == "2" else 1
            norm = torch.from_numpy(given["mla_lse"][t].astype(np.float64)) * unit
        else:
            norm = attention.logsumexp(-1)
        target = (attention - norm[:, None]).exp().sum(0)
        p = target / target.sum().clamp(min=1e-10)
        products = q[t] @ k[ids].T
        scores = weights[t] @ (products.relu() if given.get("relu", True) else products)
        losses.append((p * (p.log() - scores.log_softmax(-1))).sum())
    loss = torch.stack(losses)
    slopes = torch.from_numpy(given["grad_loss"]).double() if "grad_loss" in given else 1
    (loss * slopes).sum().backward()
    return loss.detach().numpy(), *(array.grad.numpy() for array in moving)


RNG = np.random.default_rng(1)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_relu": {"relu": False, "dk_dtype": "float32"},
    "causal": {"causal": True, "q_start": 2},
    "causal_stride": {"causal": True, "q_start": -2, "k_stride": 2},
    "windows": {
        "starts": np.array([0, 3, -9, 5, 12, 9, 2], np.int32),
        "ends": np.array([9, 4, 40, 5, 20, -1, 11], np.int32),
    },
    "windows_causal": {"starts": np.arange(QUERIES, dtype=np.int32), "causal": True, "q_start": 1},
    "lse": {"mla_lse": RNG.uniform(2, 4, (QUERIES, 2)).astype(np.float32)},
    "lse_base2": {"mla_lse": RNG.uniform(2, 4, (QUERIES, 2)).astype(np.float32), "lse_base": "2"},
    "tiny_mass": {"mla_lse": np.full((QUERIES, 2), 30, np.float32)},
    "slopes": {"grad_loss": RNG.standard_normal(QUERIES, np.float32)},
    "scale": {"sm_scale": -0.3},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients(name: str) -> None:
    given = problem() | OPTIONS[name]
    exact = reference.indexer_loss_dense(**given)
    for got, expected in zip(exact, by_autograd(given), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)
    for got, expected in zip(cupymla.indexer_loss_dense(**given), exact, strict=True):
        np.testing.assert_array_equal(got, expected.astype(got.dtype))


def test_blocks_of_queries_are_no_other_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference takes some queries at a time."""
    whole = reference.indexer_loss_dense(**problem(), causal=True, q_start=3)
    monkeypatch.setattr(reference, "_BLOCK_ELEMENTS", 2 * KEYS * 3)
    for a, b in zip(whole, reference.indexer_loss_dense(**problem(), causal=True, q_start=3), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_it_is_the_loss_over_a_selection_of_all_keys() -> None:
    """By the operators that take selected keys."""
    given = problem()
    everything = np.broadcast_to(np.arange(KEYS, dtype=np.int32), (QUERIES, KEYS))
    names = ("q", "k", "weights")
    lse = np.log(
        np.exp(np.einsum("thd,sd->ths", given["mla_q"], given["mla_kv"], dtype=np.float64) * 512**-0.5).sum(-1)
    )
    target = Subject("attn_dist").reference(
        {"q": given["mla_q"], "kv": given["mla_kv"], "indices": everything, "lse": lse}, "float64"
    )[0]
    selected = {name: given[name] for name in names} | {"indices": everything}
    loss, slopes = Subject("indexer_loss").reference(selected | {"target": target}, "float64")
    gradients = Subject("indexer_bwd").reference(selected | {"grad_logits": slopes}, "float64")
    for a, b in zip(reference.indexer_loss_dense(**given), (loss, *gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


SPOILT = {
    "key": ("k", (2, 5)),
    "query": ("q", (1, 0, 3)),
    "weight": ("weights", (1, 2)),
    "latent": ("mla_kv", (2, 7)),
    "mla_query": ("mla_q", (1, 1, 7)),
    "slope": ("grad_loss", (1,)),
}


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("where", SPOILT)
def test_what_is_not_finite_reaches_whom_it_concerns(where: str, value: float) -> None:
    """Query 1 alone sees keys 1 and 2; a latent's infinity gives weights of zero or of infinity."""
    name, place = SPOILT[where]
    starts, ends = np.array([3, 1, 3, 4, 3, 3, 3], np.int32), np.array([9, 3, 9, 9, 11, 9, 4], np.int32)
    given = problem() | {"starts": starts, "ends": ends, "grad_loss": np.ones(QUERIES, np.float32)}
    loss, dq, dk, dweights = cupymla.indexer_loss_dense(**given)
    given[name] = given[name].copy()
    given[name][place] = value
    results = cupymla.indexer_loss_dense(**given)
    others = [0, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal(results[0][others], loss[others])
    np.testing.assert_array_equal(results[1][others], dq[others])
    np.testing.assert_array_equal(results[3][others], dweights[others])
    np.testing.assert_array_equal(np.delete(results[2], [1, 2], 0), np.delete(dk, [1, 2], 0))
    if where != "latent" or math.isnan(value):
        assert np.isnan(results[1][1]).all() and np.isnan(results[2][1:3]).all() and np.isnan(results[3][1]).all()


def test_who_sees_nothing_gives_nothing() -> None:
    """Whatever it holds."""
    given = problem() | {"ends": np.array([5, 0, 5, -4, 5, 5, 5], np.int32)}
    wanted = cupymla.indexer_loss_dense(**given)
    for name in ("q", "weights", "mla_q"):
        given[name][[1, 3]] = np.nan
    given["k"][5:] = np.nan
    given["mla_kv"][5:] = np.nan
    results = cupymla.indexer_loss_dense(**given)
    for a, b in zip(results, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not results[2][5:].any() and not results[0][[1, 3]].any()


def test_results_and_outputs() -> None:
    given = problem()
    for name in ("q", "k", "mla_q", "mla_kv", "weights"):
        given[name] = given[name].astype(ml_dtypes.bfloat16)
    assert [array.dtype.name for array in cupymla.indexer_loss_dense(**given)] == ["float32", *["bfloat16"] * 3]
    out = np.full((KEYS, 64), 7, np.float32)
    assert cupymla.indexer_loss_dense(**given, dk_dtype="float32", dk=out)[2] is out
    stacked: dict[str, Any] = {name: np.stack([array, array[::-1]]) for name, array in given.items()}
    both = cupymla.indexer_loss_dense(**stacked)
    for number in range(2):
        one: dict[str, Any] = {name: array[number] for name, array in stacked.items()}
        alone = cupymla.indexer_loss_dense(**one)
        for got, expected in zip(both, alone, strict=True):
            np.testing.assert_array_equal(got[number], expected)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"q": np.zeros((7, 3, 64), np.uint8)}, "'q': expected dtype"),
    ({"q": np.zeros((7, 129, 64), np.float16)}, "'q': expected 1 to 128 heads"),
    ({"k": np.zeros((11, 64), ml_dtypes.bfloat16)}, "'k': expected dtype float16"),
    ({"weights": None}, "'weights': expected an array"),
    ({"mla_q": np.zeros((7, 2, 512), ml_dtypes.bfloat16)}, "'mla_q': expected dtype float16"),
    ({"mla_q": np.zeros((7, 2, 128), np.float16)}, "'mla_q': expected shape"),
    ({"mla_q": np.zeros((7, 0, 512), np.float16)}, "'mla_q': expected 1 to 65536 heads"),
    ({"mla_kv": np.zeros((10, 512), np.float16)}, "'mla_kv': expected shape"),
    ({"mla_kv": np.zeros((11, 576), np.float16)}, "'mla_kv': expected shape"),
    ({"mla_lse": np.zeros((7, 3), np.float32)}, "'mla_lse': expected shape"),
    ({"starts": np.zeros(6, np.int32)}, "'starts': expected shape"),
    ({"ends": np.zeros(7, np.int64)}, "'ends': expected dtype int32"),
    ({"grad_loss": np.zeros((7, 1), np.float32)}, "'grad_loss': expected shape"),
    ({"k_stride": 0}, "'k_stride': expected an integer from 1"),
    ({"dk_dtype": "float16"}, "'dk_dtype': expected None or 'float32'"),
    ({"dk": np.zeros((11, 64), np.float32)}, "'dk': expected dtype float16"),
    ({"workspace": np.zeros(64, np.float32)}, "'workspace': expected dtype uint8"),
]


@pytest.mark.parametrize(("changed", "message"), BAD)
def test_what_cannot_be_used_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        cupymla.indexer_loss_dense(**(problem() | changed))


# Plans ---------------------------------------------------------------------------------------------------------------


def sized(queries: int, keys: int, **changed: Any) -> Problem:
    return replace(PROBLEM, scores=replace(SCORES, queries=queries, keys=keys), **changed)


@pytest.mark.parametrize("keys", [8192, 32768, 131072, 100])
@pytest.mark.parametrize("given_lse", [False, True])
def test_the_workspace_is_bounded(keys: int, given_lse: bool) -> None:
    assert 0 < plan.workspace_limit(sized(4096, keys, given_lse=given_lse)) <= 256 << 20


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (4096, 8192), (4093, 131072), (70, 700), (5000, 64), (3, 10**7)])
def test_blocks_slices_and_chunks_hold_all_rows(queries: int, keys: int) -> None:
    one = sized(queries, keys)
    blocks = list(plan.blocks(one))
    assert [row for block in blocks for row in range(block.first, block.first + block.rows)] == list(range(queries))
    rows = plan.block_rows(one)
    assert rows >= max(block.rows for block in blocks)
    for unit in (plan.slice_rows(one), plan.chunk_rows(one), rows):
        assert unit % plan.ROW_UNIT == 0
    assert plan.slices(one) * plan.slice_rows(one) >= rows
    key_blocks = plan.row_stride(one) // plan.BLOCK_KEYS
    assert plan.ctas(one, "target", rows) * plan.chunk_rows(one) >= rows * key_blocks


def test_parts_of_the_workspace_lie_apart() -> None:
    layout = plan.workspace(sized(100, 1000, given_lse=False))
    assert set(layout.offsets) == set(cuda._WORKSPACE)
    places = [*layout.offsets.values(), layout.bytes]
    assert all(low < high and low % 128 == 0 for low, high in itertools.pairwise(places))


@pytest.mark.parametrize(("rows", "split"), [(128, True), (2048, False), (264, False), (100, True), (300, True)])
def test_consumers_share_keys_where_rows_are_few(rows: int, split: bool) -> None:
    one = sized(rows, 8192)
    assert plan.splits_keys(one, rows) == split
    assert plan.ctas(one, "dq", rows) == (rows if split else -(-rows // 2))


def ran(one: Problem) -> list[str]:
    return [stage for block, stages in plan.steps(one) for stage in stages if plan.ctas(one, stage, block.rows)]


def test_stages_come_in_order() -> None:
    """Those of a batch entry around those of its blocks; the workspace's sums are made anew for each entry."""
    one = sized(4096, 8192, given_lse=False)
    each = ["target", "row_loss", "dq", "dk"]
    entry = ["mask", "lse", *each, *each, "round"]
    assert ran(one) == entry
    assert ran(replace(one, scores=replace(one.scores, lead=(3,)))) == entry * 3
    assert "lse" not in ran(replace(one, given_lse=True))


def test_empty_problems() -> None:
    assert plan.workspace_limit(sized(0, 0)) == 0 and not list(plan.blocks(sized(0, 0)))
    assert ran(sized(0, 5)) == ["mask", "dk", "round"]  # dk of keys that no query sees
    assert ran(sized(5, 0)) == ["mask", "row_loss", "dq"]


def test_plans() -> None:
    hopper = arch.named("sm_90a")
    for heads, tile in ((1, 16), (16, 16), (17, 32), (64, 64), (65, 64), (128, 64)):
        scores = replace(SCORES, heads=heads)
        assert dict(plan.source(replace(PROBLEM, scores=scores), hopper, "dq").defines)["CUPYMLA_HEADS"] == tile
        assert dict(plan.source(replace(PROBLEM, mla_heads=heads), hopper, "target").defines)["CUPYMLA_HEADS"] == tile
    assert set(plan.sources()) <= {*plan.variants(), *scores_plan.variants()}
    with pytest.raises(UnsupportedError, match="sm_100f"):
        plan.variant(arch.named("sm_100f"))
    for wrong in ({"stage": "all"}, {"dtype": "float32"}, {"channels": 96}, {"mla_channels": 64}, {"heads": 24}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            plan.variant(hopper, **wrong)


def test_the_record_is_the_kernels() -> None:
    require_mirrored(cuda.Parameters, "indexer_loss_dense/sm90/params.cuh")


# The emulator --------------------------------------------------------------------------------------------------------

EMULATED = (
    *("l300", "no_relu", "fp32", "lse_base2", "scale", "causal_stride4", "windows_causal", "l300_hostile"),
    *("batch_strided", "no_queries", "no_keys"),
)


def named(ending: str) -> Any:
    return next(case for case in SUBJECT.cases.CASES if case.name.endswith(f"_{ending}") and case.heads == 16)


@pytest.mark.compile
@pytest.mark.parametrize("ending", EMULATED)
def test_the_kernels_in_the_emulator(ending: str) -> None:
    """With races looked for, and copies and products that come as late as they may."""
    with emulated("sm_90a", 2) as machine:
        compare.require(machine.check("indexer_loss_dense", named(ending)))


@pytest.mark.compile
@pytest.mark.parametrize(("mode", "splits_keys"), [("eager", True), ("random", False)])
def test_row_blocks_add_up(mode: Any, splits_keys: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of rows, slices of them and stages that come round, with copies and products in other orders; and
    consumers that share their keys or have their own rows."""
    monkeypatch.setattr(plan, "BLOCK_BYTES", 8 * 640 * 8)
    monkeypatch.setattr(plan, "_part_rows", lambda *_: 4)
    monkeypatch.setattr(plan, "splits_keys", lambda *_: splits_keys)
    case = named("stages")
    with emulated("sm_90a", 2, Settings(mode, races="hardware")) as machine:
        compare.require(machine.check("indexer_loss_dense", case))
