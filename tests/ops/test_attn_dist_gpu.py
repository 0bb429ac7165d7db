"""attn_dist on a GPU beyond its cases: against a dense softmax, hostile values, equal bits, sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mla_gpu_kit import OnGpu, torch_with_gpu

import cupymla
from cupymla.ops.attn_dist import cases
from cupymla.ops.mla_cases import sized

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

problem = OnGpu("attn_dist", "h64_d576_k130_q3_kv300").problem

LARGE = [sized(h, d, k, q, 8192) for h, d, k, q in ((128, 576, 2048, 5), (64, 512, 2048, 300), (200, 576, 1000, 40))]


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_softmax_in_torch_gives_the_same(cp: Any, case: Any) -> None:
    """An independent computation, from scores to sums, in float64: neither this package's reference nor its lse."""
    torch = torch_with_gpu()
    arguments = cases.inputs(case, 0, cp)
    lse = cupymla.sparse_mla_fwd(arguments["q"], arguments["kv"], arguments["indices"])[2]
    dist = cupymla.attn_dist(**(arguments | {"lse": lse}))
    q, kv = (torch.from_dlpack(arguments[name].astype(np.float32)).double() for name in ("q", "kv"))
    for s in range(0, case.s_q, max(1, case.s_q // 5)):
        keys = kv[torch.from_dlpack(arguments["indices"][s]).long()]
        wanted = torch.softmax(q[s] @ keys.T * case.d_qk**-0.5, -1).sum(0)
        got = torch.from_dlpack(dist[s]).double()
        # Scores of up to 2**3 are sums of 36 steps, each truncated: 36 * 2**-23 * 2**3, and lse adds its own 2**-20.
        assert float(((got - wanted) / wanted).abs().max()) < 36 * 2.0**-20 + 2.0**-20


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_rows_sum_to_the_heads(cp: Any, case: Any) -> None:
    arguments = cases.inputs(case, 1, cp)
    arguments["indices"][1::3, 7:] = -1
    arguments["indices"][2::3] = -1
    arguments["lse"] = cupymla.sparse_mla_fwd(arguments["q"], arguments["kv"], arguments["indices"])[2]
    kinds: tuple[tuple[Any, int], ...] = ((None, case.h_q), ("l1", 1))
    for normalize, total in kinds:
        sums = cupymla.attn_dist(**arguments, normalize=normalize).astype(np.float64).sum(axis=-1).get()
        wanted = np.where(np.arange(case.s_q) % 3 == 2, 0, total)
        # lse and the scores are rounded to fp32, and scores truncate 36 times: relative to a sum, 2**-16 at most.
        np.testing.assert_allclose(sums, wanted, rtol=2.0**-15)


def test_padded_heads_add_nothing_whatever_the_keys_hold(cp: Any) -> None:
    """An infinite channel makes NaN of the zeros that stand for heads that are not there."""
    dtype = problem(cp)[1]["q"].dtype
    for heads in (1, 20, 65, 130):
        q = cp.ones((2, heads, 576), dtype)
        kv = cp.zeros((4, 576), dtype)
        kv[1, 3] = -np.inf
        kv[2, 5] = np.inf
        kv[3] = np.nan
        indices = cp.asarray([[0, 1, -1], [1, 2, 0]], np.int32)
        dist = cupymla.attn_dist(q, kv, indices, cp.zeros((2, heads), np.float32)).get()
        np.testing.assert_array_equal(dist, [[heads, 0, 0], [0, np.inf, heads]])


def test_an_infinite_lse_takes_a_head_out(cp: Any) -> None:
    _, arguments = problem(cp)
    kept = cupymla.attn_dist(**(arguments | {"q": arguments["q"][:, :20].copy(), "lse": arguments["lse"][:, :20]}))
    arguments["lse"][:, 20:] = np.inf
    dist = cupymla.attn_dist(**arguments)
    assert dist.tobytes() == kept.tobytes()


def test_same_bits_in_slices_and_in_one_piece(cp: Any) -> None:
    """Few queries are cut into slices, many are not: a row does not depend on it."""
    arguments = cases.inputs(sized(128, 576, 1000, 140, 2000), 0, cp)
    whole = cupymla.attn_dist(**arguments)
    for s in (0, 139):
        alone = {name: value[s : s + 1] if name != "kv" else value for name, value in arguments.items()}
        assert cupymla.attn_dist(**alone).tobytes() == whole[s : s + 1].tobytes()


def test_no_queries_and_no_keys(cp: Any) -> None:
    _, arguments = problem(cp)
    q, kv, indices, lse = (arguments[name] for name in ("q", "kv", "indices", "lse"))
    assert cupymla.attn_dist(q[:0], kv, indices[:0], lse[:0]).shape == (0, 130)
    assert not cupymla.attn_dist(q, kv[:0], indices, lse).any()


def test_offsets_past_32_bits(cp: Any) -> None:
    """kv and dist larger than 4 GiB: rows at their far end are read and written where they belong."""
    s_q, topk, s_kv = (1 << 14) + 8, 1 << 16, 1 << 22
    dtype = problem(cp)[1]["q"].dtype
    q = cp.ones((s_q, 1, 576), dtype)
    kv = cp.zeros((s_kv, 576), dtype)
    kv[-1] = cp.asarray(1 / 576, dtype)
    indices = cp.full((1, topk), -1, np.int32)
    indices[0, -1] = s_kv - 1
    indices = cp.broadcast_to(indices, (s_q, topk))
    dist = cupymla.attn_dist(q, kv, indices, cp.zeros((s_q, 1), np.float32), sm_scale=1.0)
    assert min(dist.nbytes, kv.nbytes) > 2**32
    value = np.exp(np.float64(kv[-1].astype(np.float32).get()).sum())
    np.testing.assert_allclose(dist[[0, -1], -1].get(), value, rtol=1e-5)
    assert not dist[-1, :-1].any()


def test_a_million_queries(cp: Any) -> None:
    dtype = problem(cp)[1]["q"].dtype
    q = cp.ones((1 << 20, 1, 512), dtype)
    kv = cp.ones((4, 512), dtype)
    indices = cp.zeros((1 << 20, 1), np.int32)
    indices[1::2] = -1
    dist = cupymla.attn_dist(q, kv, indices, cp.ones((1 << 20, 1), np.float32), sm_scale=1 / 512)
    np.testing.assert_array_equal(dist[1::2].get(), 0)
    assert float(cp.abs(dist[::2] - 1).max()) < 1e-6
