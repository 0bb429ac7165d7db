"""What the host tells the kernel: the parameter record, and how queries and their slots are dealt to CTAs."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupymla import InputError, UnsupportedError, arch, raw_module
from cupymla.errors import shown
from cupymla.ops.attn_dist import cuda, plan
from cupymla.ops.attn_dist.spec import Problem
from cupymla.ops.mla import MlaProblem

SHARED = MlaProblem(
    batch=None, s_q=4, s_kv=8, h_q=128, d_qk=576, topk=8, dtype="bfloat16", sm_scale=0.1, causal=False, q_start=0,
    k_stride=1, lse_base="e", has_topk_length=False, has_sink=False, q_strides=(0, 73728, 576), kv_strides=(0, 576),
    indices_strides=(0, 8), topk_length_strides=(0, 0),
)  # fmt: skip

HEADER = Path(__file__).resolve().parents[2] / "cuda" / "attn_dist" / "sm90" / "params.cuh"
C_TYPES = {"int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32, "int64_t": ctypes.c_int64, "float": ctypes.c_float}


def problem(normalize: str | None = None, **sizes: int) -> Problem:
    return Problem(replace(SHARED, **sizes), normalize)  # type: ignore[arg-type]


def record_fields() -> list[tuple[str, object]]:
    """Name and type of each member of the header's `Parameters`, in order."""
    text = re.sub(r"//.*", "", HEADER.read_text())
    body = re.search(r"struct Parameters \{(.*?)\};", text, flags=re.S)
    assert body is not None
    fields: list[tuple[str, object]] = []
    for statement in body[1].split(";")[:-1]:
        declared = re.fullmatch(r"\s*(?:const )?(\w+)(\*?) (.+)", statement, flags=re.S)
        assert declared is not None, statement
        kind = ctypes.c_void_p if declared[2] else C_TYPES[declared[1]]
        fields += [(name.strip(), kind) for name in declared[3].split(",")]
    return fields


def test_parameter_record_is_the_one_that_the_kernel_reads() -> None:
    """Swapped or retyped fields of equal size would pass the comparison of sizes that a binding makes."""
    assert [(field[0], field[1]) for field in cuda.Parameters._fields_] == record_fields()


def covered(dealt: plan.Deal, row_blocks: int) -> list[tuple[int, int]]:
    """(query, block) of each CTA in turn; the twin of `Walk` in walk.cuh and `QueryRange` in sparse_query.cuh."""
    places = []
    for cta in range(dealt.ctas):
        index, part = divmod(cta, dealt.slices)
        grouped = index < dealt.groups
        first = index * dealt.group_tokens if grouped else dealt.groups * (dealt.group_tokens - 1) + index
        blocks = range(part * dealt.slice_blocks, min((part + 1) * dealt.slice_blocks, row_blocks))
        assert blocks, "a CTA without work"
        places += [(first + n, b) for n in range(dealt.group_tokens if grouped else 1) for b in blocks]
    return places


@given(
    tokens=st.integers(0, 1000),
    topk=st.integers(1, 3000),
    multiprocessors=st.integers(1, 200),
    normalize=st.sampled_from([None, "l1"]),
)
def test_every_block_of_every_query_is_dealt_once(
    tokens: int, topk: int, multiprocessors: int, normalize: str | None
) -> None:
    dealt = plan.deal(problem(normalize, topk=topk), tokens, 64, multiprocessors)
    row_blocks = -(-topk // 64)
    assert sorted(covered(dealt, row_blocks)) == [(t, b) for t in range(tokens) for b in range(row_blocks)]
    if normalize:
        assert dealt.slices == 1
    if dealt.slices > 1:
        assert dealt.ctas <= multiprocessors


def test_one_query_keeps_many_multiprocessors_busy() -> None:
    assert plan.deal(problem(topk=2048), 1, 64, 132).ctas == 32
    assert plan.deal(problem(topk=2048), 16, 64, 132).ctas == 16 * 8
    assert plan.deal(problem("l1", topk=2048), 1, 64, 132).ctas == 1


@pytest.mark.parametrize(("h_q", "pass_heads"), [(1, 64), (64, 64), (65, 128), (128, 128), (129, 128), (1000, 128)])
def test_heads_of_a_pass(h_q: int, pass_heads: int) -> None:
    chosen = plan.plan(problem(h_q=h_q), arch.named("sm_90a"))
    assert dict(chosen.source.defines)["CUPYMLA_HEADS"] == pass_heads


def test_grid_limit_is_an_error_before_anything_is_launched() -> None:
    with pytest.raises(UnsupportedError, match="queries"):
        plan.plan(problem(batch=2**12, s_q=2**20), arch.named("sm_90a"))


@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_100a"])
def test_other_architectures_are_named(name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        plan.plan(problem(), arch.named(name))


@pytest.mark.parametrize(
    ("word", "value"),
    [
        *[("pass_heads", value) for value in (32, "64", 64.0, True, None, 10**5000)],
        *[("d_qk", value) for value in (128, "576", 576.0, None, 10**5000)],
        *[("dtype", value) for value in ("float32", 16, None, 10**5000)],
    ],
    ids=shown,
)
def test_a_variant_that_does_not_exist_is_refused_by_name(word: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        raw_module("attn_dist", arch="sm_90a", **{word: value})
    assert (caught.value.operator, caught.value.argument) == ("attn_dist", word)
