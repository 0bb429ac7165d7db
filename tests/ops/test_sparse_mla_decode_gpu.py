"""sparse_mla_decode on a GPU: many rows, equal bits, one graph for changing lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cupymla
from cupymla.ops.sparse_mla_decode import plan
from cupymla.ops.sparse_mla_decode.cases import DecodeCase
from cupymla.testing import compare
from cupymla.testing.operators import arguments_on
from cupymla_lab.subjects import Subject

cupy = pytest.importorskip("cupy")

SUBJECT = Subject("sparse_mla_decode")
PER_REQUEST = ("q", "indices", "topk_length", "extra_indices", "extra_topk_length")


def bits(array: Any) -> Any:
    return cupy.asnumpy(array.view(cupy.uint8))


def of_request(given: dict[str, Any], b: int) -> dict[str, Any]:
    return {name: value[b : b + 1] if name in PER_REQUEST else value for name, value in given.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("case", SUBJECT.cases.LARGE, ids=lambda case: case.name)
def test_large_batches(case: Any) -> None:
    """Some requests of them, for the reference takes long; all have the same bits again."""
    given = SUBJECT.cases.inputs(case, 1)
    on_gpu = arguments_on(cupy, given)
    made = cupymla.sparse_mla_decode(**on_gpu)
    for b in range(0, case.batch, max(1, case.batch // 5)):
        results = {name: cupy.asnumpy(array[b : b + 1]) for name, array in SUBJECT.named(made).items()}
        compare.require(SUBJECT.reports(of_request(given, b), results))
    first = [bits(array) for array in made]
    for _ in range(50):
        for wanted, array in zip(first, cupymla.sparse_mla_decode(**on_gpu), strict=True):
            np.testing.assert_array_equal(bits(array), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "splits"), [(64, 1), (64, 3), (64, 8), (64, 16), (128, 1), (128, 3), (128, 8)])
def test_with_splits_a_row_has_its_bits_in_any_batch(heads: int, splits: int) -> None:
    case = replace(SUBJECT.cases.LARGE[0], batch=9, heads=heads, splits=splits)
    given = arguments_on(cupy, SUBJECT.cases.inputs(case, 2))
    together = cupymla.sparse_mla_decode(**given)
    for b in (0, 4, 8):
        for one, of_many in zip(cupymla.sparse_mla_decode(**of_request(given, b)), together, strict=True):
            np.testing.assert_array_equal(bits(one), bits(of_many[b : b + 1]))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "division"),
    [(64, (64, 1, 1, 4)), (40, (32, 1, 1, 7)), (9, (16, 1, 1, 32)), (128, (64, 1, 2, 3)), (128, (64, 1, 1, 2))],
)
def test_shares_of_rows_are_merged(heads: int, division: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Divisions that the plan has for other sizes; the same bits each time, with other calls between them."""
    monkeypatch.setattr(plan, "division", lambda *_, **__: plan.Division(*division))
    case = replace(SUBJECT.cases.LARGE[0], batch=5, heads=heads, sm_scale=0.05)
    given = SUBJECT.cases.inputs(case, 6)
    on_gpu = arguments_on(cupy, given)
    made = cupymla.sparse_mla_decode(**on_gpu)
    compare.require(SUBJECT.reports(given, {n: cupy.asnumpy(a) for n, a in SUBJECT.named(made).items()}))
    first = [bits(array) for array in made]
    other = on_gpu | {"indices": on_gpu["indices"][:, :, ::-1].copy()}
    for _ in range(200):
        again = cupymla.sparse_mla_decode(**on_gpu)
        cupymla.sparse_mla_decode(**other)
        for wanted, array in zip(first, again, strict=True):
            np.testing.assert_array_equal(bits(array), wanted)


@pytest.mark.gpu
def test_one_graph_serves_changing_lengths() -> None:
    (case,) = SUBJECT.those(SUBJECT.cases.CASES, ["v32_d576_h64_b2_n2_k70+130_second_lengths"])
    assert isinstance(case, DecodeCase)
    given = SUBJECT.cases.inputs(replace(case, batch=3, topk=900), 3)
    on_gpu = arguments_on(cupy, given)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        prepared = cupymla.sparse_mla_decode.prepare(**on_gpu)
        prepared()
        stream.begin_capture()
        made = prepared()
        graph = stream.end_capture()
    rng = np.random.default_rng(4)
    for _ in range(5):
        # Slots past the first lengths hold NaN: only entries that counted from the beginning may.
        lengths = np.minimum(rng.integers(0, 900, (3, 2), dtype=np.int32), given["topk_length"])
        wanted = given | {"topk_length": lengths}
        on_gpu["topk_length"].set(wanted["topk_length"])
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        results = {name: cupy.asnumpy(array) for name, array in SUBJECT.named(made).items()}
        compare.require(SUBJECT.reports(wanted, results))
