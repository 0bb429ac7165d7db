"""The short way of torch operators without a GPU: CPU tensors that pass for a GPU's, runs that are noted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from cupymla.device import cuda
from cupymla.interop.call import Runner
from cupymla.interop.table import declared
from cupymla.tensor import view

torch = pytest.importorskip("torch")

from cupymla.interop.torch import on_gpu  # noqa: E402 - only where there is torch
from cupymla.interop.torch.arguments import number  # noqa: E402

OPTIONS = (None, False, 0, 1, "e", False)
"""All options of sparse_mla_fwd, in order."""


class Short:
    """The short way of sparse_mla_fwd; notes the addresses that it runs with."""

    def __init__(self) -> None:
        self.way = on_gpu.OnGpu(declared("sparse_mla_fwd"))
        self.runs: list[list[int]] = []

    def first(self, *tensors: Any, **options: Any) -> Any:
        """As the dispatcher calls."""
        return self.way(tensors, options)

    def again(self, *tensors: Any, options: tuple[Any, ...] = OPTIONS) -> Any:
        return self.way.again((*tensors, *(None,) * (5 - len(tensors))), options)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Short]:
    made = Short()

    def run(runner: Runner, addresses: Sequence[int], stream: int) -> None:
        made.runs.append(list(addresses))

    monkeypatch.setattr(on_gpu, "view", lambda *a: dataclasses.replace(view(*a), device=cuda(0)))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(Runner, "__call__", run)
    yield made


def inputs() -> tuple[Any, Any, Any]:
    return torch.zeros(2, 64, 512).bfloat16(), torch.zeros(64, 512).bfloat16(), torch.zeros(2, 32, dtype=torch.int32)


def test_the_first_call_of_a_layout_goes_through_the_dispatcher_and_later_ones_need_not(short: Short) -> None:
    first, second = inputs(), inputs()
    assert short.again(*first) is None
    short.first(*first)
    results = short.again(*second)
    assert isinstance(results, tuple)
    assert [(tuple(r.shape), r.stride(), r.dtype) for r in results] == [
        ((2, 64, 512), (64 * 512, 512, 1), torch.bfloat16),
        *[((2, 64), (64, 1), torch.float32)] * 2,
    ]
    assert short.runs[1] == [tensor.data_ptr() for tensor in (*second, *results)]
    assert len(short.runs) == 2


def test_options_and_layouts_are_told_apart(short: Short) -> None:
    q, kv, indices = inputs()
    short.first(q, kv, indices, causal=True)
    assert short.again(q, kv, indices) is None
    assert short.again(q, kv, indices, options=(None, True, 0, 1, "e", False)) is not None
    assert short.again(q, kv, indices, options=(None, 1, 0, 1, "e", False)) is None
    assert short.again(q, kv, indices, options=(None, True, 0, 1, ["e"], False)) is None
    assert short.again(q, kv, indices[:, ::2], options=(None, True, 0, 1, "e", False)) is None


def test_zeros_are_told_apart_by_their_signs(short: Short) -> None:
    gemv = on_gpu.OnGpu(declared("nvfp4_gemv"))
    a, b = (torch.zeros(rows, 32, dtype=torch.uint8) for rows in (8, 2))
    sfa, sfb = (torch.zeros(rows, 4, dtype=torch.uint8) for rows in (8, 2))
    for alpha in (0.0, -0.0, 0.0):
        gemv((a, b, sfa, sfb), {number("alpha"): alpha})
    assert len(gemv._plans) == 2


Kind: Any = type("Kind", (torch.Tensor,), {})
"""A class that might have a dispatch of its own."""


CHANGES: dict[str, Callable[[Any], Any]] = {
    "requires grad": lambda q: q.requires_grad_(),
    "subclass": lambda q: q.as_subclass(Kind),
    "negated": torch._neg_view,
    "parameter": torch.nn.Parameter,
    "sparse": lambda q: q.to_sparse(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_tensors_that_mean_more_than_their_memory_go_through_the_dispatcher(
    short: Short, change: Callable[[Any], Any]
) -> None:
    q, kv, indices = inputs()
    short.first(q, kv, indices)
    assert short.again(q, kv, indices) is not None
    assert short.again(change(q), kv, indices) is None


def test_a_gradient_that_nobody_wants_is_no_reason(short: Short) -> None:
    q, kv, indices = inputs()
    short.first(q, kv, indices)
    q.requires_grad_()
    with torch.no_grad():
        assert short.again(q, kv, indices) is not None


def test_whoever_listens_gets_to_see_the_call(short: Short) -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    q, kv, indices = inputs()
    short.first(q, kv, indices)
    for mode in (TorchFunctionMode(), TorchDispatchMode()):
        with mode:
            assert short.again(q, kv, indices) is None
    seen = []

    def mapped(x: Any) -> Any:
        seen.append(short.again(x, kv, indices))
        return x

    torch.func.vmap(mapped)(q[None])
    assert seen == [None]
    assert short.again(q, kv, indices) is not None
