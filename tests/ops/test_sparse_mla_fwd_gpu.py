"""sparse_mla_fwd on a GPU beyond its cases: strides, hostile values, checked indices, large sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mla_gpu_kit import OnGpu

import cupymla
from cupymla import InputError

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

problem = OnGpu("sparse_mla_fwd", "h64_d576_k130_q3_kv300").problem


@pytest.mark.parametrize("axis", ["batch", "query", "head"])
def test_broadcast_queries(cp: Any, axis: str) -> None:
    _, arguments = problem(cp)
    q = arguments["q"]
    kv = cp.stack([arguments["kv"]] * 2)
    indices = cp.stack([arguments["indices"]] * 2)
    wide = {"batch": q[None], "query": cp.stack([q[:1]] * 2), "head": cp.stack([q[:, :1]] * 2)}[axis]
    wide = cp.broadcast_to(wide, (2, 3, 64, 576))
    assert 0 in wide.strides
    results = cupymla.sparse_mla_fwd(wide, kv, indices)
    expected = cupymla.sparse_mla_fwd(cp.ascontiguousarray(wide), kv, indices)
    for got, right in zip(results, expected, strict=True):
        assert got.tobytes() == right.tobytes()


def test_queries_with_heads_outermost(cp: Any) -> None:
    _, arguments = problem(cp)
    q = arguments.pop("q")
    turned = cp.ascontiguousarray(q.transpose(1, 0, 2)).transpose(1, 0, 2)
    assert turned.strides[1] > turned.strides[0]
    for got, right in zip(
        cupymla.sparse_mla_fwd(turned, **arguments), cupymla.sparse_mla_fwd(q, **arguments), strict=True
    ):
        assert got.tobytes() == right.tobytes()


def test_valid_entries_that_score_minus_infinity_are_not_empty(cp: Any) -> None:
    dtype = problem(cp)[1]["q"].dtype
    q = cp.ones((3, 64, 576), dtype)
    kv = cp.ones((4, 576), dtype)
    kv[1, 570] = -np.inf
    indices = cp.asarray([[1, 1], [1, 0], [-1, -1]], np.int32)
    out, max_logits, lse = (result.get() for result in cupymla.sparse_mla_fwd(q, kv, indices))
    assert np.isnan(out[0].astype(np.float32)).all()
    assert (lse[0] == -np.inf).all()
    assert (max_logits[0] == -np.inf).all()
    assert (out[1].astype(np.float32) == 1).all()
    assert (out[2].astype(np.float32) == 0).all()
    assert (lse[2] == np.inf).all()


def test_check_indices_names_the_first_bad_one(cp: Any) -> None:
    _, arguments = problem(cp)
    indices = cp.zeros((3, 2, 130), np.int32)[:, 0]
    indices[1, 7] = 300
    arguments["indices"] = indices
    with pytest.raises(InputError, match=r"300 at \[1, 7\]"):
        cupymla.sparse_mla_fwd(**arguments, check_indices=True)
    indices[1, 7] = -1
    cupymla.sparse_mla_fwd(**arguments, check_indices=True)
    indices[2, 129] = 300
    lengths = cp.full(3, 129, np.int32)
    cupymla.sparse_mla_fwd(**arguments, topk_length=lengths, check_indices=True)


def test_no_queries_and_no_keys(cp: Any) -> None:
    _, arguments = problem(cp)
    q, kv, indices = arguments["q"], arguments["kv"], arguments["indices"]
    out, max_logits, lse = cupymla.sparse_mla_fwd(q[:0], kv, indices[:0])
    assert out.shape == (0, 64, 512)
    assert lse.shape == max_logits.shape == (0, 64)
    out, max_logits, lse = cupymla.sparse_mla_fwd(q, kv[:0], indices)
    assert not out.astype(np.float32).any()
    assert bool((max_logits == -np.inf).all())
    assert bool((lse == np.inf).all())


def test_offsets_past_32_bits(cp: Any) -> None:
    """kv and out larger than 4 GiB: rows at their far end are read and written where they belong."""
    s_q, h_q, s_kv = (1 << 16) + 8, 64, 1 << 22
    dtype = problem(cp)[1]["q"].dtype
    q = cp.zeros((s_q, h_q, 576), dtype)
    q[-1] = 1
    kv = cp.zeros((s_kv, 576), dtype)
    kv[-1] = cp.arange(576, dtype=np.float32).astype(dtype) / 576
    indices = cp.full((s_q, 1), s_kv - 1, np.int32)
    out, _, lse = cupymla.sparse_mla_fwd(q, kv, indices)
    assert min(out.nbytes, kv.nbytes) > 2**32
    assert bool((out[-1].view(np.uint16) == kv[-1, :512].view(np.uint16)).all())
    assert bool((out[0].view(np.uint16) == kv[-1, :512].view(np.uint16)).all())
    expected = float(kv[-1].astype(np.float32).sum()) * 576**-0.5
    assert abs(float(lse[-1, 0]) - expected) < 1e-3 * abs(expected)


def test_a_million_queries(cp: Any) -> None:
    dtype = problem(cp)[1]["q"].dtype
    q = cp.ones((1 << 20, 1, 512), dtype)
    kv = cp.ones((4, 512), dtype)
    indices = cp.zeros((1 << 20, 1), np.int32)
    indices[1::2] = -1
    out, _, lse = cupymla.sparse_mla_fwd(q, kv, indices, sm_scale=1 / 512)
    assert bool((out[::2].astype(np.float32) == 1).all())
    assert not out[1::2].astype(np.float32).any()
    assert bool((lse[1::2] == np.inf).all())
    assert float(cp.abs(lse[::2] - 1).max()) < 1e-5
