"""merge_attention against a softmax over all keys at once, on the CPU; what is refused; the record and the grid."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupymla
from cupymla.errors import InputError
from cupymla.ops.merge_attention.cuda import Parameters
from cupymla_lab.emulated import emulated
from cupymla_lab.subjects import Subject

ROOT = Path(__file__).parents[2]
Array = np.ndarray[Any, Any]


def attention(scores: Array, values: Array, sink: Array | None = None) -> tuple[Array, Array]:
    """Softmax of scores [t, h, s] over values [t, s, d] in float64; lse +inf for no key."""
    t, h, s = scores.shape
    if not s:
        return np.full((t, h, values.shape[-1]), np.nan), np.full((t, h), np.inf)
    weights = np.exp(scores)
    lse = np.log(weights.sum(-1))
    below = weights.sum(-1) + (0 if sink is None else np.exp(sink.astype(np.float64)))
    return np.einsum("ths,tsd->thd", weights / below[..., None], values), lse


@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.booleans(), st.sampled_from(["e", "2"]))
def test_parts_of_the_keys_give_attention_over_all(sizes: list[int], has_sink: bool, base: Any) -> None:
    """Parts without a key hold NaN, which nobody reads; the sink counts once, and not in lse."""
    rng = np.random.default_rng(sum(sizes))
    scores, values = 3 * rng.standard_normal((4, 3, sum(sizes))), rng.standard_normal((4, sum(sizes), 8))
    sink = rng.standard_normal(3).astype(np.float32) if has_sink else None
    ends = np.cumsum([0, *sizes])
    made = [attention(scores[..., a:b], values[:, a:b]) for a, b in itertools.pairwise(ends)]
    outs = np.stack([out for out, _ in made]).astype(np.float32)
    lses = np.stack([lse for _, lse in made]) * (1 if base == "e" else np.log2(np.e))
    out, lse = cupymla.merge_attention(outs, lses.astype(np.float32), attn_sink=sink, lse_base=base)
    want, want_lse = attention(scores, values, sink)
    if not sum(sizes):
        assert not out.any() and np.isposinf(lse).all()
        return
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse * (1 if base == "e" else np.log(2)), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("empty", [np.inf, -np.inf])
def test_an_empty_part_is_not_read(empty: float) -> None:
    outs, lses = np.full((2, 1, 8), np.nan, np.float32), np.array([[empty], [3.5]], np.float32)
    outs[1] = 7
    out, lse = cupymla.merge_attention(outs, lses)
    assert out.tolist() == [[7.0] * 8] and lse.tolist() == [3.5]
    out, lse = cupymla.merge_attention(outs[:1], lses[:1], attn_sink=np.ones(1, np.float32))
    assert out.tolist() == [[0.0] * 8] and lse.tolist() == [np.inf]


@pytest.mark.parametrize(("sink", "share"), [(np.inf, 0.0), (300.0, 0.0), (-300.0, 1.0), (-np.inf, 1.0), (2.0, 0.5)])
def test_sinks_of_any_size(sink: float, share: float) -> None:
    outs, lses = np.ones((1, 1, 8), np.float32), np.full((1, 1), 2, np.float32)
    out, lse = cupymla.merge_attention(outs, lses, attn_sink=np.array([sink], np.float32))
    assert out.tolist() == [[share] * 8] and lse.tolist() == [2.0]


def test_nan_stays_in_its_row_and_head() -> None:
    outs, lses = np.ones((2, 3, 2, 8), np.float32), np.zeros((2, 3, 2), np.float32)
    lses[1, 1, 0] = np.nan
    out, lse = cupymla.merge_attention(outs, lses)
    wrong = np.zeros((3, 2), bool)
    wrong[1, 0] = True
    assert (np.isnan(lse) == wrong).all() and (np.isnan(out).all(-1) == wrong).all()
    assert (out[~wrong] == 1).all()


def test_arrays_that_are_given_are_written_and_returned() -> None:
    rng = np.random.default_rng(0)
    outs, lses = rng.standard_normal((3, 2, 4, 16), dtype=np.float32), rng.standard_normal((3, 2, 4), dtype=np.float32)
    want = cupymla.merge_attention(outs, lses)
    out, lse = np.zeros((2, 4, 20), np.float32)[..., :16], np.zeros((4, 2), np.float32).T
    made = cupymla.merge_attention(outs, lses, out=out, lse=lse)
    assert made[0] is out and made[1] is lse
    np.testing.assert_array_equal(out, want[0])
    np.testing.assert_array_equal(lse, want[1])


OUTS, LSES = np.zeros((2, 3, 4, 16), ml_dtypes.bfloat16), np.zeros((2, 3, 4), np.float32)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"outs": OUTS.astype(np.float64)}, "'outs': expected dtype"),
    ({"outs": OUTS[:0], "lses": LSES[:0]}, "'outs': expected 1 to .* parts"),
    ({"outs": OUTS[0, 0]}, "'outs': expected shape"),
    ({"outs": OUTS[..., :12]}, "'outs': expected d_v a multiple of 8"),
    ({"outs": OUTS[..., ::2]}, "'outs': expected a contiguous last axis"),
    ({"lses": LSES[:1]}, "'lses': expected shape"),
    ({"lses": None}, "'lses'"),
    ({"lses": LSES.astype(np.float64)}, "'lses': expected dtype float32"),
    ({"attn_sink": np.zeros(3, np.float32)}, "'attn_sink': expected shape"),
    ({"lse_base": "10"}, "'lse_base'"),
    ({"out": np.zeros((3, 4, 16), np.float32)}, "'out': expected dtype bfloat16"),
    ({"lse": LSES[0]}, "'lse': expected memory of its own"),
]


@pytest.mark.parametrize(("changed", "message"), BAD)
def test_what_cannot_be_used_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"merge_attention: argument {message}"):
        cupymla.merge_attention(**{"outs": OUTS, "lses": LSES, **changed})


def test_the_record_mirrors_the_kernels() -> None:
    text = (ROOT / "cuda/merge_attention/sm80/params.cuh").read_text(encoding="utf-8")
    body = re.sub(r"//.*", "", text.split("struct Parameters {")[1].split("};")[0])
    names = [name for line in body.split(";") for name in re.findall(r"(\w+)(?:\[\w+\])?\s*(?:,|$)", line.strip())]
    assert names == [field[0] for field in Parameters._fields_]


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_every_case_in_the_emulator(arch: str) -> None:
    """One kernel serves all, so one machine runs them; more CTAs than it has make the loop go round."""
    from cupymla.testing import compare

    subject = Subject("merge_attention")
    with emulated(arch, 1) as machine:
        for case in subject.cases.CASES:
            compare.require(machine.check("merge_attention", case))
