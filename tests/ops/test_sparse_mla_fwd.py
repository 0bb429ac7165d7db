"""sparse_mla_fwd on the CPU: the reference against torch, the masks by hand, and the public call."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from case_kit import quick
from mla_oracle import assert_close, solve, unlike

from cupymla.errors import InputError
from cupymla.ops.mla_cases import INT_MAX, INT_MIN, MlaCase
from cupymla.ops.sparse_mla_fwd import cases, reference, sparse_mla_fwd
from cupymla_lab.problems import sparse_mla_fwd as problems

BF16 = ml_dtypes.bfloat16


def tiny(indices: list[list[int]], s_kv: int = 8, h_q: int = 1, seed: int = 0) -> dict[str, Any]:
    """Random q and kv [s_kv, 512] around given indices."""
    generator = np.random.default_rng(seed)
    q = generator.standard_normal((len(indices), h_q, 512)).astype(BF16)
    kv = generator.standard_normal((s_kv, 512)).astype(BF16)
    return {"q": q, "kv": kv, "indices": np.array(indices, np.int32)}


def seen(lse: Any) -> list[int]:
    """How many entries each query counted, when every score is 0."""
    return [0 if math.isinf(value) else round(math.exp(value)) for value in np.asarray(lse)[:, 0]]


def counting(indices: list[list[int]], s_kv: int = 8, **options: Any) -> list[int]:
    """Entries that count per query: with q = 0 every score is 0, so exp(lse) counts them."""
    arguments = tiny(indices, s_kv)
    arguments["q"][:] = 0
    return seen(sparse_mla_fwd(**arguments, **options)[2])


@pytest.mark.parametrize("case", quick("sparse_mla_fwd"), ids=lambda case: case.name)
def test_reference_agrees_with_a_dense_softmax(case: MlaCase) -> None:
    """Catches a wrong formula, mask or layout in the reference, which every kernel is judged by."""
    arguments = cases.inputs(case, seed=1)
    expected = solve(**arguments)
    out, max_logits, lse = reference.sparse_mla_fwd(**arguments)
    assert_close("out", out, expected.out)
    assert_close("max_logits", max_logits, expected.max_logits)
    assert_close("lse", lse * (math.log(2) if case.softmax.lse_base == "2" else 1), expected.lse)


@pytest.mark.parametrize("case", quick("sparse_mla_fwd"), ids=lambda case: case.name)
def test_call_and_same_precision(case: MlaCase) -> None:
    """The public path keeps every option on its way to the reference and stores in the documented dtypes.

    The same-precision reference sets kernels' tolerance, so it must itself be close, in the same dtypes.
    """
    arguments = cases.inputs(case, seed=2)
    exact = reference.sparse_mla_fwd(**arguments)
    got = sparse_mla_fwd(**arguments)
    assert [array.dtype for array in got] == [arguments["q"].dtype, np.float32, np.float32]
    for array, expected in zip(got, exact, strict=True):
        np.testing.assert_array_equal(array, expected.astype(array.dtype))
    same = reference.sparse_mla_fwd(**arguments, precision="same")
    assert [array.dtype for array in same] == [arguments["q"].dtype, np.float32, np.float32]
    # P and out are each rounded by at most u, the products and sums of fp32 by far less than another u.
    u = 2.0 ** (-8 if case.dtype == "bfloat16" else -11)
    finite = np.abs(arguments["kv"].astype(np.float64))
    largest = finite[np.isfinite(finite)].max(initial=0)
    assert np.abs(same[0].astype(np.float64) - exact[0]).max(initial=0) <= 3 * u * largest
    for array, expected in zip(same[1:], exact[1:], strict=True):
        # A score sums d_qk products in fp32: 576 roundings of 2**-24 of sums of at most 2**10.
        assert_close("statistics", array, expected, tolerance=576 * 2.0**-24)


def test_same_precision_rounds_p_to_the_input_dtype() -> None:
    """0.3 is no bf16 number: the weights are 1 and bf16(0.3) over the fp32 sum 1.3."""
    q, kv = np.zeros((1, 1, 512), BF16), np.zeros((2, 512), BF16)
    q[0, 0, 0], kv[1, 0], kv[1, 1] = 1, 1, 1
    indices = np.array([[0, 1]], np.int32)
    out = reference.sparse_mla_fwd(q, kv, indices, sm_scale=math.log(0.3), precision="same")[0]
    rounded = float(BF16(0.3)) / 1.3
    assert float(out[0, 0, 1]) == float(BF16(rounded)) != float(BF16(0.3 / 1.3))


def test_blocks_of_queries_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocking that bounds memory must not change results: one query at a time against all at once."""
    case = next(case for case in problems.CASES if case.name.endswith("batch_causal"))
    arguments = cases.inputs(case, seed=4)
    whole = reference.sparse_mla_fwd(**arguments)
    monkeypatch.setattr("cupymla.ops.mla_reference.WORKING_SET_BYTES", 1)
    for array, expected in zip(reference.sparse_mla_fwd(**arguments), whole, strict=True):
        assert_close("blocked", array, expected)


def test_out_of_range_indices_do_not_count() -> None:
    assert counting([[0, 7, 8, -1, INT_MIN, INT_MAX]]) == [2]


def test_duplicates_count_once_per_entry() -> None:
    assert counting([[3, 3, 3, 5]]) == [4]


@pytest.mark.parametrize(("length", "expected"), [(INT_MIN, 0), (-1, 0), (0, 0), (1, 1), (3, 3), (4, 4), (INT_MAX, 4)])
def test_topk_length_cuts_entries(length: int, expected: int) -> None:
    assert counting([[0, 1, 2, 3]], topk_length=np.array([length], np.int32)) == [expected]


def test_topk_length_counts_positions_not_valid_entries() -> None:
    assert counting([[-1, 1, -1, 3]], topk_length=np.array([3], np.int32)) == [1]


@pytest.mark.parametrize(
    ("q_start", "k_stride", "expected"),
    [
        (0, 1, [1, 2, 3, 4, 5, 6]),
        (3, 1, [4, 5, 6, 7, 8, 8]),
        (-2, 1, [0, 0, 1, 2, 3, 4]),
        # (s + 1 - 4) / 4 truncates to 0 for s 0..6: a floor would hide key 0 from the first three.
        (0, 4, [1, 1, 1, 1, 1, 1]),
        (4, 4, [1, 1, 1, 2, 2, 2]),
        # (s - 2 + 1 - 4) / 4 = -5/4, -4/4, -3/4, ...: -1, -1, 0, 0, 0, 0.
        (-2, 4, [0, 0, 1, 1, 1, 1]),
        (2**30, 1, [8] * 6),
        (-(2**30), 2**30, [0] * 6),
    ],
)
def test_causal_limit_by_hand(q_start: int, k_stride: int, expected: list[int]) -> None:
    rows = [list(range(8))] * 6
    assert counting(rows, causal=True, q_start=q_start, k_stride=k_stride) == expected


def test_q_start_means_nothing_without_causal() -> None:
    assert counting([[0, 7]], q_start=-100, k_stride=50) == [2]


def test_softmax_by_hand() -> None:
    """Scores 0 and log 3: weights 1/4 and 3/4, lse log 4, maximum log 3."""
    q, kv = np.zeros((1, 1, 512), np.float16), np.zeros((2, 512), np.float16)
    q[0, 0, 0], kv[1, 0], kv[0, 1], kv[1, 2] = 1, 1, 1, 1
    out, max_logits, lse = sparse_mla_fwd(q, kv, np.array([[0, 1]], np.int32), sm_scale=math.log(3))
    assert out[0, 0, :3].tolist() == [0.75, 0.25, 0.75]
    assert max_logits[0, 0] == np.float32(math.log(3))
    assert lse[0, 0] == np.float32(math.log(4))


def test_lse_base_changes_lse_alone() -> None:
    arguments = tiny([[0, 1, 2], [3, 4, -1]])
    natural, binary = sparse_mla_fwd(**arguments), sparse_mla_fwd(**arguments, lse_base="2")
    np.testing.assert_allclose(binary[2] * math.log(2), natural[2], rtol=2**-22)
    np.testing.assert_array_equal(binary[0], natural[0])
    np.testing.assert_array_equal(binary[1], natural[1])


def test_poison_in_unselected_rows_stays_there() -> None:
    """NaN and Inf in every row that no valid entry names, row 0 (which masked entries fall back to) among them."""
    arguments = tiny([[3, INT_MIN, 6, 5], [-1, -1, -1, -1]])
    clean = sparse_mla_fwd(**arguments, topk_length=np.array([3, 4], np.int32))
    arguments["kv"][[0, 1, 2, 4]] = np.nan
    arguments["kv"][[5, 7]] = np.inf
    for got, expected in zip(sparse_mla_fwd(**arguments, topk_length=np.array([3, 4], np.int32)), clean, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_nan_in_a_selected_row_shows() -> None:
    """A mask that also hid selected NaN would hide a user's bug."""
    arguments = tiny([[3, 4], [5, 6]])
    arguments["kv"][4] = np.nan
    out, max_logits, lse = sparse_mla_fwd(**arguments)
    assert np.isnan(out[0].astype(np.float32)).all() and np.isnan(max_logits[0]).all() and np.isnan(lse[0]).all()
    assert np.isfinite(out[1].astype(np.float32)).all()


def test_empty_rows() -> None:
    arguments = tiny([[-1, -1], [0, 1]], h_q=3)
    for sink in (None, np.array([0, np.inf, -np.inf], np.float32)):
        out, max_logits, lse = sparse_mla_fwd(**arguments, attn_sink=sink)
        assert not out[0].any() and (max_logits[0] == -np.inf).all() and (lse[0] == np.inf).all()


def test_sinks() -> None:
    """-inf is no sink, +inf takes everything, lse itself takes half; lse and max_logits are not changed."""
    arguments = tiny([[0, 1, 2]], h_q=3)
    out, max_logits, lse = reference.sparse_mla_fwd(**arguments)
    sink = np.array([-np.inf, np.inf, lse[0, 2]])
    with_sink = reference.sparse_mla_fwd(**arguments, attn_sink=sink)
    np.testing.assert_array_equal(with_sink[0][0, 0], out[0, 0])
    assert not with_sink[0][0, 1].any()
    assert_close("half", with_sink[0][0, 2], out[0, 2] / 2)
    np.testing.assert_array_equal(with_sink[1], max_logits)
    np.testing.assert_array_equal(with_sink[2], lse)


def test_fp16_is_finer_than_bf16() -> None:
    """The same-precision reference follows the dtype: the same problem is about 8 times closer in fp16."""
    errors = {}
    for dtype in ("bfloat16", "float16"):
        case = next(c for c in problems.CASES if c.name == "h128_d512_k130_q4_kv200_fp16")
        arguments = cases.inputs(case, seed=5)
        rounded = {name: array.astype(BF16) for name, array in arguments.items() if name in ("q", "kv")}
        arguments |= {name: array.astype(dtype if dtype == "float16" else BF16) for name, array in rounded.items()}
        exact = reference.sparse_mla_fwd(**arguments)[0]
        errors[dtype] = unlike(reference.sparse_mla_fwd(**arguments, precision="same")[0], exact)
    assert 0 < errors["float16"] * 16 < errors["bfloat16"] < 1e-5


def test_outputs_given_are_the_ones_returned() -> None:
    """Strided outputs are written in place and nothing beside them."""
    arguments = tiny([[0, 1, 2], [3, 4, 5]], h_q=4)
    memory = np.full((2, 6, 528), 7, BF16)
    out, max_logits = memory[:, :4, :512], np.full((4, 2), 7, np.float32).T
    lse = np.full((2, 8), 7, np.float32)[:, ::2]
    got = sparse_mla_fwd(**arguments, out=out, max_logits=max_logits, lse=lse)
    assert got[0] is out and got[1] is max_logits and got[2] is lse
    for array, expected in zip(got, sparse_mla_fwd(**arguments), strict=True):
        np.testing.assert_array_equal(array, expected)
    assert (memory[:, 4:] == 7).all() and (memory[..., 512:] == 7).all()
    assert lse.base is not None and (lse.base[:, 1::2] == 7).all()


def test_prepared_call_follows_its_arrays() -> None:
    """A prepared call reads its inputs anew each time and writes the same outputs."""
    arguments = tiny([[0, 1, 2]])
    prepared = sparse_mla_fwd.prepare(**arguments)
    first = prepared()
    arguments["q"][:] = -arguments["q"]
    expected = sparse_mla_fwd(**arguments)
    second = prepared(stream=0)
    for before, after, fresh in zip(first, second, expected, strict=True):
        assert before is after
        np.testing.assert_array_equal(after, fresh)


def test_check_indices_names_the_first_bad_value() -> None:
    arguments = tiny([[0, 1, -1], [5, 8, 9]])
    with pytest.raises(InputError, match=r"sparse_mla_fwd: argument 'indices'.*-1 to 7.*got 8 at \[1, 1\]"):
        sparse_mla_fwd(**arguments, check_indices=True)
    with pytest.raises(InputError, match=r"got -2 at \[0, 2\]"):
        sparse_mla_fwd(**(arguments | {"indices": np.array([[0, 1, -2]] * 2, np.int32)}), check_indices=True)


def test_check_indices_looks_at_entries_within_topk_length() -> None:
    arguments = tiny([[0, 1, -1], [5, 8, 9]])
    sparse_mla_fwd(**arguments, topk_length=np.array([3, 1], np.int32), check_indices=True)
    arguments["indices"] = arguments["indices"][:, None, :]
    sparse_mla_fwd(**arguments, topk_length=np.array([3, 1], np.int32), check_indices=True)


def test_float64_mode_computes_in_float64() -> None:
    """A relative step of 1e-9 in q, lost in fp32, is resolved."""
    arguments = tiny([[0, 1, 2]])
    exact = {name: array.astype(np.float64) for name, array in arguments.items() if name != "indices"}
    moved = exact | {"q": exact["q"] * (1 + 1e-9)}
    before = reference.sparse_mla_fwd(**exact, indices=arguments["indices"])
    after = reference.sparse_mla_fwd(**moved, indices=arguments["indices"])
    assert_close("step", (after[1] - before[1]) * 1e9, before[1], tolerance=1e-4)
