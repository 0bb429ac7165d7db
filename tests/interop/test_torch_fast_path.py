"""The fast path past torch's dispatcher, without a GPU: CPU tensors that pass for a GPU's, launches that are noted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import cupymla
from cupymla import InputError, driver
from cupymla.device import cuda
from cupymla.interop.table import declared
from cupymla.ops import calls
from cupymla.tensor import fast, read

torch = pytest.importorskip("torch")

from cupymla.interop import torch as mla  # noqa: E402 - only where there is torch
from cupymla.interop.torch import gradients  # noqa: E402


class Short:
    """What sparse_mla_fwd launches, and which of its calls the dispatcher gets."""

    def __init__(self) -> None:
        self.calls = declared("sparse_mla_fwd").calls()
        self.bound = 0
        self.workspace_bytes = 0
        self.runs: list[list[int]] = []
        self.dispatched = 0

    def bind(self, *_: Any) -> Any:
        self.bound += 1
        short = self

        class Binding:
            launcher, workspace_bytes = None, short.workspace_bytes
            at: tuple[int, ...] = ()

            def point(self, views: Any, results: Any, workspace: int) -> None:
                self.at = (views.q.ptr, views.kv.ptr, views.indices.ptr, *results)

            def launch(self, stream: int) -> None:
                short.runs.append(list(self.at))

        return Binding()

    def called(self, *_: Any) -> None:
        self.dispatched += 1

    def takes(self, *tensors: Any, **options: Any) -> bool:
        """Whether a call goes the fast path."""
        before = len(self.runs)
        mla.sparse_mla_fwd(*tensors, **options)
        return len(self.runs) > before


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Short]:
    made, empty = Short(), torch.empty_strided
    calls.bound.forget()
    monkeypatch.setattr(made.calls, "bind", made.bind)
    monkeypatch.setattr(gradients, "called", made.called)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    monkeypatch.setattr(
        torch, "empty_strided", lambda shape, strides, dtype, device: empty(shape, strides, dtype=dtype)
    )
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(read, "_torch_device", lambda device: cuda(0))
    monkeypatch.setattr(driver, "is_current", lambda index: True)
    monkeypatch.setattr(driver, "on_device", lambda index: contextlib.nullcontext())
    yield made
    calls.bound.forget()


def inputs() -> tuple[Any, Any, Any]:
    return torch.zeros(2, 64, 512).bfloat16(), torch.zeros(64, 512).bfloat16(), torch.zeros(2, 32, dtype=torch.int32)


def test_a_layout_is_bound_once_and_results_are_torchs(short: Short) -> None:
    first, second = inputs(), inputs()
    mla.sparse_mla_fwd(*first)
    results = mla.sparse_mla_fwd(*second)
    assert isinstance(results, tuple)
    assert [(tuple(r.shape), r.stride(), r.dtype) for r in results] == [
        ((2, 64, 512), (64 * 512, 512, 1), torch.bfloat16),
        *[((2, 64), (64, 1), torch.float32)] * 2,
    ]
    assert short.runs[1] == [tensor.data_ptr() for tensor in (*second, *results)]
    assert (len(short.runs), short.bound, short.dispatched) == (2, 1, 0)


@pytest.mark.parametrize("shape", [(2, 3), (0, 5), (5, 0), (3, 0, 2), (1, 1, 4), (7,), ()])
def test_results_lie_as_torch_lays_them_out(short: Short, shape: tuple[int, ...]) -> None:
    ((made,), _) = fast.TORCH.maker([(shape, "bfloat16")], 0)()
    wanted = torch.zeros(shape, dtype=torch.bfloat16)
    assert (made.shape, made.stride(), made.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)


def test_options_and_layouts_are_told_apart(short: Short) -> None:
    q, kv, indices = inputs()
    for changes in ({}, {"causal": True}, {"sm_scale": 0.5}, {"lse_base": "2"}, {"q_start": 1}):
        assert short.takes(q, kv, indices, **changes)
    assert short.takes(q, kv, indices[:, :16])
    assert short.bound == 6


@pytest.mark.parametrize("changes", [{"causal": 1}, {"q_start": True}, {"lse_base": ["e"]}, {"deterministic": 1}])
def test_options_that_are_wrong_are_refused(short: Short, changes: dict[str, Any]) -> None:
    q, kv, indices = inputs()
    assert short.takes(q, kv, indices)
    try:
        mla.sparse_mla_fwd(q, kv, indices, **changes)
    except Exception as refused:
        assert isinstance(refused, InputError)
    assert len(short.runs) == 1


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
    assert short.takes(q, kv, indices)
    assert not short.takes(change(q), kv, indices)
    assert short.dispatched == 1


def test_a_gradient_that_nobody_wants_is_no_reason(short: Short) -> None:
    q, kv, indices = inputs()
    q.requires_grad_()
    with torch.no_grad():
        assert short.takes(q, kv, indices)


@pytest.mark.parametrize("call", [cupymla.sparse_mla_fwd, mla.sparse_mla_fwd], ids=["public", "of torch"])
def test_weights_are_tensors_like_others(short: Short, call: Callable[..., Any]) -> None:
    """Those of a model that is not trained are parameters all the same."""
    weights = [torch.nn.Parameter(tensor, requires_grad=False) for tensor in inputs()]
    read.view(weights[0], "q")
    fast.remember(weights[0])
    for _ in range(2):
        out, *_ = call(*weights)
        assert short.runs.pop()[:3] == [weight.data_ptr() for weight in weights] and type(out) is torch.Tensor
    assert (short.bound, short.dispatched) == (1, 0)


def test_whoever_listens_gets_to_see_the_call(short: Short) -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    q, kv, indices = inputs()
    assert short.takes(q, kv, indices)
    for mode in (TorchFunctionMode(), TorchDispatchMode()):
        with mode:
            assert not short.takes(q, kv, indices)
    seen = []

    def mapped(x: Any) -> Any:
        seen.append(short.takes(x, kv, indices))
        return x

    torch.func.vmap(mapped)(q[None])
    assert seen == [False]
    assert short.takes(q, kv, indices)


def test_a_captured_workspace_is_the_graphs(short: Short, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's allocator gives a graph a pool of its own; to keep the memory as well would be for good."""
    monkeypatch.setattr(driver, "capturing", lambda stream: True)
    kept: list[object] = []
    monkeypatch.setattr(calls, "captured", kept)
    short.workspace_bytes = 64
    assert short.takes(*inputs()) and not kept
