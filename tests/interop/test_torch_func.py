"""Torch operators under the transforms of `torch.func`: what they give is what a loop and autograd give."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cupymla import InputError, UnsupportedError  # noqa: E402
from cupymla.interop import torch as mla  # noqa: E402
from cupymla.interop.torch import arguments, gradients  # noqa: E402

Function = Callable[..., Any]


def selection(batch: tuple[int, ...] = (), seed: int = 0) -> tuple[Any, ...]:
    """q, kv and indices, some of them invalid."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(*batch, 6, 4, 576, generator=generator).bfloat16()
    kv = torch.randn(*batch, 40, 576, generator=generator).bfloat16()
    return q, kv, torch.randint(-3, 40, (*batch, 6, 9), generator=generator, dtype=torch.int32)


def as_tuple(made: Any) -> tuple[Any, ...]:
    return tuple(made) if isinstance(made, list | tuple) else (made,)


def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the operators that run from here on."""
    ran: list[str] = []
    run = arguments.operator

    def operator(declaration: Any) -> Any:
        ran.append(declaration.name)
        return run(declaration)

    monkeypatch.setattr(gradients, "operator", operator)
    return ran


def require_mapped(function: Function, axes: tuple[int | None, ...], arguments: tuple[Any, ...]) -> None:
    """vmap gives what a loop over the mapped axes gives, without torch's warning of a loop of its own."""
    size = next(a.shape[axis] for a, axis in zip(arguments, axes, strict=True) if axis is not None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = as_tuple(torch.func.vmap(function, axes)(*arguments))
    rows = [
        as_tuple(
            function(
                *(
                    a if axis is None else a.select(axis, i).contiguous()
                    for a, axis in zip(arguments, axes, strict=True)
                )
            )
        )
        for i in range(size)
    ]
    for one, column in zip(made, zip(*rows, strict=True), strict=True):
        assert torch.equal(one, torch.stack(column))


@pytest.mark.parametrize(
    ("axes", "options", "expected"),
    [
        ((0, 0, 0), {}, 1),
        ((0, 0, None), {"causal": True}, 1),
        ((None, 0, None), {}, 1),
        ((0, None, 0), {}, 1),
        ((1, None, 2), {}, 1),
        ((0, None, 0), {"causal": True}, 3),
    ],
)
def test_vmap_uses_the_batch_axis_or_further_queries(
    monkeypatch: pytest.MonkeyPatch, axes: Any, options: dict[str, Any], expected: int
) -> None:
    batch = selection((3,))
    arguments = tuple(
        a[0] if axis is None else a.movedim(0, axis).contiguous() for a, axis in zip(batch, axes, strict=True)
    )
    ran = calls(monkeypatch)
    torch.func.vmap(lambda *given: mla.sparse_mla_fwd(*given, **options), axes)(*arguments)
    assert ran == ["sparse_mla_fwd"] * expected
    require_mapped(lambda *given: mla.sparse_mla_fwd(*given, **options), axes, arguments)


def test_vmap_of_a_batched_call_and_of_a_vmap() -> None:
    q, kv, indices = selection((2, 3))
    require_mapped(mla.sparse_mla_fwd, (0, 0, 0), (q, kv, indices))
    require_mapped(torch.func.vmap(mla.sparse_mla_fwd), (0, 0, 0), (q, kv, indices))
    require_mapped(torch.func.vmap(mla.sparse_mla_fwd, (0, None, 0)), (0, 0, 0), (q, kv[:, 0], indices))


def test_vmap_of_nothing() -> None:
    """A mapped axis of extent 0, in every way of mapping."""
    q, kv, indices = (array[:0] for array in selection((2,)))
    one = selection()
    sinks = torch.zeros(0, 4)
    vmap = torch.func.vmap
    assert vmap(mla.sparse_mla_fwd)(q, kv, indices)[0].shape == (0, 6, 4, 512)
    assert vmap(mla.sparse_mla_fwd, (0, None, None))(q, one[1], one[2])[0].shape == (0, 6, 4, 512)
    made = vmap(lambda q, sink: mla.sparse_mla_fwd(q, one[1], one[2], attn_sink=sink))(q, sinks)
    assert [list(result.shape) for result in made] == [[0, 6, 4, 512], [0, 6, 4], [0, 6, 4]]
    assert made[0].dtype == torch.bfloat16


def test_vmap_of_operators_that_return_lists() -> None:
    """As many results as the call asks for."""
    q, kv, indices = selection((3,))
    sinks = torch.randn(3, 4)
    out, _, lse = torch.func.vmap(lambda *given: mla.sparse_mla_fwd(*given[:3], attn_sink=given[3]))(
        q, kv, indices, sinks
    )
    dout = torch.randn(out.shape).bfloat16()

    def plain(*given: Any) -> Any:
        return mla.sparse_mla_bwd(*given)

    def full(q: Any, kv: Any, out: Any, dout: Any, lse: Any, indices: Any, sink: Any) -> Any:
        return mla.sparse_mla_bwd(q, kv, out, dout, lse, indices, attn_sink=sink, return_attn_dist=True)

    require_mapped(plain, (0,) * 6, (q, kv, out, dout, lse, indices))
    require_mapped(full, (0,) * 7, (q, kv, out, dout, lse, indices, sinks))
    require_mapped(full, (0, None, 0, 0, 0, 0, None), (q, kv[0], out, dout, lse, indices, sinks[0]))


def test_vmap_of_gemv_and_of_what_has_no_batch_axis_of_its_own() -> None:
    a, b = (torch.randint(0, 256, (3, rows, 32), dtype=torch.uint8) for rows in (8, 2))
    sfa, sfb = (torch.full((3, rows, 4), 56, dtype=torch.uint8) for rows in (8, 2))
    require_mapped(mla.nvfp4_gemv, (0, 0, 0, 0), (a, b, sfa, sfb))
    require_mapped(mla.nvfp4_gemv, (0, None, 0, None), (a, b[0], sfa, sfb[0]))
    require_mapped(lambda a, sfa: mla.nvfp4_gemv(a, b[0], sfa, sfb[0], alpha=0.5), (0, 0), (a, sfa))
    x = torch.randn(3, 4, 32)
    require_mapped(lambda x: mla.quantize_nvfp4(x, global_scale=0.25), (0,), (x,))
    require_mapped(
        lambda x, scale: mla.quantize_nvfp4(x, global_scale=scale), (0, 0), (x, torch.tensor([1.0, 2.0, 4.0]))
    )


def test_vmap_of_what_is_written_in_place() -> None:
    """Each mapped call writes its own part, also through an axis in the middle; a cache of all has no such parts."""
    latents, rope = torch.randn(3, 2, 512), torch.randn(2, 3, 64)
    slots = torch.tensor([[0, 70, -1], [127, 5, 6]])
    wanted = torch.zeros(2, 2, 64, 656, dtype=torch.uint8)
    write = functools.partial(mla.concat_and_cache_mla, cache_format="v32_fp8")
    for number in range(2):
        write(latents[:, number], rope[number], wanted[number], slots[number])
    cache = torch.zeros_like(wanted)
    written = torch.func.vmap(write, in_dims=(1, 0, 1, 0))(latents, rope, cache.transpose(0, 1), slots)
    assert written.data_ptr() == cache.data_ptr() and torch.equal(written, wanted) and torch.equal(cache, wanted)
    with pytest.raises(InputError, match="'cache': expected a mapped tensor, as each mapped call writes its own"):
        torch.func.vmap(write, in_dims=(1, 0, None, 0))(latents, rope, cache[0], slots)


def loss(q: Any, kv: Any, indices: Any) -> Any:
    out, _, lse = mla.sparse_mla_fwd(q, kv, indices)
    target = mla.attn_dist(q, kv, indices, lse, normalize="l1")
    return out.float().square().sum() + target.sum()


def expected_gradients(q: Any, kv: Any, indices: Any) -> tuple[Any, ...]:
    leaves = [array.clone().requires_grad_() for array in (q, kv)]
    return tuple(torch.autograd.grad(loss(leaves[0], leaves[1], indices), leaves))


def test_gradients_of_torch_func_are_autograds() -> None:
    q, kv, indices = selection()
    expected = expected_gradients(q, kv, indices)
    for made in (
        torch.func.grad(loss, argnums=(0, 1))(q, kv, indices),
        torch.func.vjp(lambda q, kv: loss(q, kv, indices), q, kv)[1](torch.ones(())),
        torch.func.jacrev(loss, argnums=(0, 1))(q, kv, indices),
    ):
        assert all(map(torch.equal, made, expected))


def test_gradients_of_many_problems_at_once() -> None:
    """A gradient for each sample, and the gradient of a sum over samples."""
    batch = selection((3,))
    rows = [expected_gradients(*problem) for problem in zip(*batch, strict=True)]
    made = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)))(*batch)
    outer = torch.func.grad(lambda q, kv: torch.func.vmap(loss)(q, kv, batch[2]).sum(), argnums=(0, 1))(*batch[:2])
    for results in (made, outer):
        for one, column in zip(results, zip(*rows, strict=True), strict=True):
            assert torch.equal(one, torch.stack(column))
    leaves = [array.clone().requires_grad_() for array in batch[:2]]
    torch.func.vmap(loss)(*leaves, batch[2]).sum().backward()
    for leaf, column in zip(leaves, zip(*rows, strict=True), strict=True):
        assert torch.equal(leaf.grad, torch.stack(column))


def test_a_shared_key_gets_the_sum_of_its_gradients() -> None:
    q, kv, indices = selection((3,))
    made = torch.func.grad(lambda kv: torch.func.vmap(loss, (0, None, 0))(q, kv, indices).sum())(kv[0])
    rows = [expected_gradients(q[i], kv[0], indices[i])[1].double() for i in range(3)]
    torch.testing.assert_close(
        made.double(), sum(rows), rtol=2**-6, atol=2**-6 * float(max(r.abs().max() for r in rows))
    )


def test_a_second_gradient_is_refused_here_as_well() -> None:
    q, kv, indices = selection()

    def first(q: Any) -> Any:
        return torch.func.grad(loss)(q, kv, indices).float().square().sum()

    with pytest.raises(UnsupportedError, match="a gradient of its gradient"):
        torch.func.grad(first)(q)


def test_forward_mode_is_refused() -> None:
    """Not taken for zero."""
    q, kv, indices = selection()
    lse = mla.sparse_mla_fwd(q, kv, indices)[2]
    for name, function in (
        ("sparse_mla_fwd", lambda q: mla.sparse_mla_fwd(q, kv, indices)),
        ("attn_dist", lambda q: mla.attn_dist(q, kv, indices, lse)),
    ):
        with pytest.raises(UnsupportedError, match=f"{name}: forward-mode differentiation"):
            torch.func.jvp(function, (q,), (torch.ones_like(q),))
    with pytest.raises(UnsupportedError, match="forward-mode differentiation"):
        torch.func.hessian(lambda q: loss(q, kv, indices))(q)


def test_tangents_of_dual_tensors_are_refused() -> None:
    """Torch hands an operator of `torch.library` the tensors without them."""
    q, kv, indices = selection()
    with torch.autograd.forward_ad.dual_level():
        made = mla.sparse_mla_fwd(q, kv, indices)
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(UnsupportedError, match="sparse_mla_fwd: forward-mode differentiation"):
            mla.sparse_mla_fwd(dual, kv, indices)
        with pytest.raises(UnsupportedError, match="attn_dist: forward-mode differentiation"):
            mla.attn_dist(dual, kv, indices, made[2])
    with pytest.raises(UnsupportedError, match="forward-mode differentiation"):
        torch.func.linearize(lambda q: mla.sparse_mla_fwd(q, kv, indices)[0], q)


def test_functionalize() -> None:
    """By itself, around `vmap` and inside of it."""
    batch = selection((3,))
    alone = torch.func.functionalize(mla.sparse_mla_fwd)
    rows = [mla.sparse_mla_fwd(*problem) for problem in zip(*batch, strict=True)]
    for made in (
        [alone(*problem) for problem in zip(*batch, strict=True)],
        list(zip(*torch.func.functionalize(torch.func.vmap(mla.sparse_mla_fwd))(*batch), strict=True)),
        list(zip(*torch.func.vmap(alone)(*batch), strict=True)),
    ):
        for one, row in zip(made, rows, strict=True):
            assert all(map(torch.equal, one, row))
    q, kv, indices = selection()
    lse = mla.sparse_mla_fwd(q, kv, indices)[2]
    expected = mla.attn_dist(q, kv, indices, lse)
    assert torch.equal(torch.func.functionalize(lambda lse: mla.attn_dist(q, kv, indices, lse))(lse), expected)


def test_no_gradient_through_what_has_none() -> None:
    """A distribution is a target: it is a constant to `torch.func.grad`, as it is to autograd."""
    q, kv, indices = selection()
    lse = mla.sparse_mla_fwd(q, kv, indices)[2]
    made = torch.func.grad(lambda q: mla.attn_dist(q, kv, indices, lse).sum() + q.float().sum())(q)
    assert torch.equal(made, torch.ones_like(q))
