"""indexer_loss and indexer_bwd: what cannot be used as it is, is refused by name."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupymla
from cupymla.errors import InputError

Wrong = list[tuple[dict[str, Any], str]]

OWN = {"indexer_loss": "target", "indexer_bwd": "grad_logits"}
"""The operators, each with the argument that the other one has not: float32, for every entry."""

BOTH: Wrong = [
    ({"q": np.zeros((5, 3, 64), np.float32)}, "'q': expected dtype"),
    ({"q": np.zeros((5, 3, 96), np.float16)}, "'q': expected 64 or 128 channels"),
    ({"q": np.zeros((5, 129, 64), np.float16)}, "'q': expected 1 to 128 heads"),
    ({"k": np.zeros((9, 64), ml_dtypes.bfloat16)}, "'k': expected dtype float16"),
    ({"k": np.zeros((9, 128), np.float16)}, "'k': expected shape"),
    ({"weights": None}, "'weights': expected an array"),
    ({"indices": np.zeros((4, 7), np.int32)}, "'indices': expected shape"),
    ({"indices": np.zeros((5, 7), np.int64)}, "'indices': expected dtype int32"),
    ({"topk_length": np.zeros(4, np.int32)}, "'topk_length': expected shape"),
    ({"k_stride": 0}, "'k_stride': expected an integer from 1"),
    ({"grad_logits": np.zeros((5, 7), np.float16)}, "'grad_logits': expected dtype float32"),
    ({"indices": np.full((5, 7), 9, np.int32), "check_indices": True}, "'indices': expected values from -1 to 8"),
]

ONE: dict[str, Wrong] = {
    "indexer_loss": [
        ({"target": np.zeros((5, 6), np.float32)}, "'target': expected shape"),
        ({"lse": np.zeros(5, np.float64)}, "'lse': expected dtype float32"),
    ],
    "indexer_bwd": [
        ({"grad_logits": np.zeros((5, 6), np.float32)}, "'grad_logits': expected shape"),
        ({"deterministic": 1}, "'deterministic': expected True or False"),
        ({"dk_dtype": "bfloat16"}, "'dk_dtype': expected None or 'float32'"),
        ({"lists": np.zeros(44, np.int32)}, "'lists': expected shape"),
        ({"dk": np.zeros((9, 64), np.float32)}, "'dk': expected dtype float16"),
        ({"dweights": np.zeros((5, 3), np.float16)}, "'dweights': expected dtype float32"),
    ],
}


@pytest.mark.parametrize(
    ("operator", "changed", "message"), [(name, *wrong) for name, own in ONE.items() for wrong in BOTH + own]
)
def test_what_cannot_be_used_is_refused(operator: str, changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "q": np.ones((5, 3, 64), np.float16),
        "k": np.ones((9, 64), np.float16),
        "weights": np.ones((5, 3), np.float32),
        "indices": np.zeros((5, 7), np.int32),
        OWN[operator]: np.ones((5, 7), np.float32),
    }
    call = getattr(cupymla, operator)
    call(**given)
    with pytest.raises(InputError, match=f"^{operator}: argument {message}"):
        call(**(given | changed))
