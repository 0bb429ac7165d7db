"""xl_paged_attention where all that ex2.approx gives is off to one side: few rows, which a reference may get right by
chance, so that the accuracy criterion leaves little room. In the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cupymla.ops.xl_paged_attention.cases import make
from cupymla.testing import compare
from cupymla_lab.emulated import emulated
from cupymla_lab.ptx.approximation import Approximation

SMALL = {"num_heads": 2, "num_kv_heads": 1, "head_size": 32, "context_lens": (37, 5), "kv_layout": "NHD"}

# dtype of the query, that of the cache, scales, seed
DRAWS = [
    ("float32", "float8_e4m3fn", "number", 11),
    ("float32", "float8_e5m2", "number", 3),
    ("float32", "float8_e5m2", "number", 5),
]


@pytest.mark.compile
@pytest.mark.parametrize("approximation", ["above", "below"])
@pytest.mark.parametrize(("dtype", "kv_dtype", "scales", "seed"), DRAWS)
def test_few_rows(dtype: str, kv_dtype: str, scales: str, seed: int, approximation: Approximation) -> None:
    case = make("dtypes", "small", **SMALL, dtype=dtype, kv_dtype=kv_dtype, scales=scales)
    with emulated("sm_90a", 1 + seed % 3, seed=1) as machine:
        machine.settings = replace(machine.settings, approximation=approximation)
        compare.require(machine.check("xl_paged_attention", case, seed))


@pytest.mark.compile
def test_sums_that_become_lse_of_16_bit_queries() -> None:
    """Weights that warps' and CTAs' sums are added with would show as well."""
    case = make("dtypes", "small", **SMALL, dtype="bfloat16", kv_dtype="float8_e4m3fn", scales="head")
    with emulated("sm_90a", 2, seed=1) as machine:
        machine.settings = replace(machine.settings, approximation="scattered")
        compare.require(machine.check("xl_paged_attention", case, 1))
