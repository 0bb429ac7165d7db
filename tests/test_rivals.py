"""What is timed beside an operator computes the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupymla import xl_paged_attention
from cupymla.bench.baselines import attention
from cupymla.ops.xl_paged_attention import cases

torch = pytest.importorskip("torch")

SIZES: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "float32"}


@pytest.mark.parametrize("lens", [(300, 128, 5), (256,)], ids=str)
@pytest.mark.parametrize("form", [{}, {"bias": "dense"}, {"bias": "relative", "extent": 40}], ids=str)
def test_torchs_attention_agrees(lens: tuple[int, ...], form: dict[str, Any]) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    case = cases.make("speed", context_lens=lens, **SIZES, **form)
    inputs = cases.inputs(case, 3)
    wanted = xl_paged_attention(**inputs)[0]
    named = dict(attention.attention(torch, case, inputs, flex_attention))
    assert list(named) == [
        "torch SDPA, gathered",
        "torch FlexAttention, gathered",
        f"torch FlexAttention, pages of {attention.PAGE}",
    ]
    for name, call in named.items():
        found = call()
        assert isinstance(found, torch.Tensor)
        np.testing.assert_allclose(found[:, :, 0].numpy(), wanted, atol=2e-5, err_msg=name)


def test_pages_that_are_listed_are_a_sequences_own() -> None:
    """The compiled attention reads what the lists name, the one above all pages."""
    lens = torch.tensor([300, 128, 5])
    keys = torch.arange(3.0 * 2 * 300 * 4).view(3, 2, 300, 4)
    laid, _, numbers, mask = attention._paged(torch, keys, keys, lens)
    listed = mask.to_dense()[:, 0, 0].bool()
    assert (listed == ((numbers >= 0) & (numbers * attention.PAGE < lens[:, None]))).all()
    assert mask.full_kv_num_blocks[:, 0, 0].tolist() == [2, 1, 0]
    for sequence, length in enumerate(lens.tolist()):
        whole, ends = length // attention.PAGE, length % attention.PAGE != 0
        assert mask.kv_num_blocks[sequence, 0, 0] == ends
        pages = mask.full_kv_indices[sequence, 0, 0, :whole], mask.kv_indices[sequence, 0, 0, : int(ends)]
        assert [numbers[sequence, part.long()].tolist() for part in pages] == [list(range(whole)), [whole] * ends]
    for sequence, page in torch.nonzero(listed).tolist():
        number = int(numbers[sequence, page])
        rows = min(int(lens[sequence]) - number * attention.PAGE, attention.PAGE)
        found = laid[0, :, page * attention.PAGE :][:, :rows]
        assert torch.equal(found, keys[sequence, :, number * attention.PAGE :][:, :rows])
