"""A product for each head, written where it is wanted: absorbed queries beside their RoPE part, values token by token.

`torch.bmm` alone makes arrays with the head outermost, which then are copied to lie as kernels and projections want
them, forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


def by_heads(x: Any, weight: Any) -> Any:
    """[T, H, a + r] times [H, a, b] for each head: [T, H, b + r], where the last r channels are those of x.

    In x's dtype, which `weight` is cast to. Differentiable once with respect to both.
    """
    weight = weight.to(x.dtype)
    if torch.compiler.is_compiling():  # it knows no output with strides, and puts parts together itself
        wide = weight.shape[1]
        product = torch.bmm(x[..., :wide].transpose(0, 1), weight).transpose(0, 1)
        return torch.cat((product, x[..., wide:]), -1) if x.shape[-1] > wide else product
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _ByHeads.apply(x, weight)
    return _product(x, weight)


def _product(x: Any, weight: Any) -> Any:
    heads, wide, made = weight.shape
    out = x.new_empty(x.shape[0], heads, made + x.shape[-1] - wide)
    torch.bmm(x[..., :wide].transpose(0, 1), weight, out=out[..., :made].transpose(0, 1))
    if x.shape[-1] > wide:
        out[..., made:] = x[..., wide:]
    return out


class _ByHeads(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return _product(x, weight)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Any) -> tuple[Any, Any]:
        x, weight = ctx.saved_tensors
        _, wide, made = weight.shape
        of_x = _product(grad, weight.transpose(1, 2)) if ctx.needs_input_grad[0] else None
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = torch.bmm(x[..., :wide].permute(1, 2, 0), grad[..., :made].transpose(0, 1))
        return of_x, of_weight
