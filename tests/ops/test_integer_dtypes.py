"""Ids of another integer dtype, as `torch.topk` and `numpy.argsort` give them: the error says how to convert them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_cupy
import numpy as np
import pytest
from fake_arrays import Foreign

import cupymla
from cupymla import dlpack
from cupymla.errors import InputError
from cupymla.ops.dtypes import dtype_got
from cupymla.tensor import view

Q, KV = np.zeros((2, 1, 576), np.float16), np.zeros((9, 576), np.float16)
IDS = np.array([[1, 0, 2], [2, 1, 0]])
SCORES = np.zeros((2, 5), np.float32)
QUERY, CACHE = np.zeros((2, 1, 64), np.float32), np.zeros((3, 16, 1, 64), np.float32)

CALLS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "the lists of the MLA operators": ("indices", lambda to, ids: cupymla.sparse_mla_fwd(to(Q), to(KV), ids)),
    "their lengths": (
        "topk_length",
        lambda to, ids: cupymla.sparse_mla_fwd(to(Q), to(KV), to(IDS.astype(np.int32)), topk_length=ids[0, :2]),
    ),
    "the indexer's limits": ("ends", lambda to, ids: cupymla.topk(to(SCORES), 2, ends=ids[:, 0])),
    "block tables": (
        "block_tables",
        lambda to, ids: cupymla.xl_paged_attention(
            to(QUERY), to(CACHE), to(CACHE), ids, to(np.ones(2, np.int32)), kv_layout="NHD"
        ),
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_validation_says_how_numpy_converts(call: str) -> None:
    argument, run = CALLS[call]
    with pytest.raises(InputError) as caught:
        run(np.asarray, IDS)
    assert (caught.value.argument, caught.value.got.removeprefix("dtype ")) == (
        argument,
        f"int64: pass {argument}.astype(numpy.int32)",
    )


@pytest.mark.parametrize("call", CALLS)
def test_every_validation_says_how_torch_converts_and_that_is_enough(call: str) -> None:
    torch: Any = pytest.importorskip("torch")
    argument, run = CALLS[call]
    with pytest.raises(InputError, match=rf"'{argument}': expected dtype int32, got .*int64: pass {argument}\.to\("):
        run(torch.from_numpy, torch.from_numpy(IDS))
    run(torch.from_numpy, torch.from_numpy(IDS).to(torch.int32))


def test_other_frameworks_are_told_their_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def got(array: Any) -> str:
        return dtype_got(view(array, "indices"), "indices", ("int32",))

    fake_cupy.install(monkeypatch)
    assert got(fake_cupy.ndarray(IDS)) == "int64: pass indices.astype(cupy.int32)"
    assert got(Foreign(dlpack.CPU, 0, host=IDS)) == "int64: convert indices to int32"
    jax: Any = pytest.importorskip("jax")
    assert got(jax.numpy.asarray(IDS, "int16")) == "int16: pass indices.astype(jax.numpy.int32)"


def test_no_advice_where_none_helps() -> None:
    assert dtype_got(view(SCORES, "indices"), "indices", ("int32",)) == "float32"
    assert dtype_got(view(IDS, "q"), "q", ("float16", "bfloat16")) == "int64"


def test_an_output_is_not_to_be_replaced_by_a_copy() -> None:
    with pytest.raises(InputError) as caught:
        cupymla.topk(SCORES, 2, count=np.zeros(2, np.int64))
    assert caught.value.got == "int64"


def test_the_bridges_say_it_too() -> None:
    torch: Any = pytest.importorskip("torch")
    from cupymla.interop import torch as mla

    with pytest.raises(InputError, match=r"expected dtype int32, got int64: pass indices\.to\(torch\.int32\)"):
        mla.sparse_mla_fwd(*map(torch.from_numpy, (Q, KV, IDS)))
