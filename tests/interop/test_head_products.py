"""Products for each head of transformers' models: the same as products and parts put together, and their gradients."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from cupymla.interop.transformers.products import by_heads  # noqa: E402


def arrays(rest: int, frozen: bool = False) -> tuple[Any, Any]:
    """[T, H, a + rest] with the head outermost in memory, as transformers' queries are, and weights [H, a, b]."""
    torch.manual_seed(1)
    x = torch.randn(3, 5, 4 + rest, dtype=torch.float64).transpose(0, 1).requires_grad_()
    return x, torch.randn(3, 4, 6, dtype=torch.float64).requires_grad_(not frozen)


def put_together(x: Any, weight: Any) -> Any:
    return torch.cat((torch.einsum("tha,hab->thb", x[..., :4], weight), x[..., 4:]), -1)


@pytest.mark.parametrize("rest", [0, 2])
def test_products_and_their_gradients(rest: int) -> None:
    x, weight = arrays(rest)
    made = by_heads(x, weight)
    torch.testing.assert_close(made, put_together(x, weight))
    assert made.is_contiguous()
    with torch.no_grad():
        assert torch.equal(by_heads(x, weight), made)
    torch.autograd.gradcheck(by_heads, (x, weight))


def test_a_frozen_weight_has_no_gradient() -> None:
    x, weight = arrays(2, frozen=True)
    by_heads(x, weight).sum().backward()
    assert weight.grad is None and x.grad is not None


def test_weights_of_another_dtype_are_cast() -> None:
    """As autocast does it for projections: a model's weights stay float32."""
    x, weight = arrays(2)
    narrow = x.detach().to(torch.bfloat16).requires_grad_()
    made = by_heads(narrow, weight)
    assert made.dtype == torch.bfloat16
    made.sum().backward()
    assert weight.grad.dtype == torch.float64 and narrow.grad.dtype == torch.bfloat16
    expected = torch.autograd.grad(put_together(x, weight).sum(), weight)[0]
    torch.testing.assert_close(weight.grad, expected, rtol=0.02, atol=0.02)
