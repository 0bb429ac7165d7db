"""What the host tells the kernel: the parameter record, and how queries and their slots are dealt to CTAs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_kit import MLA, queries_of, require_twin

from cupymla import InputError, UnsupportedError, arch, raw_module
from cupymla.errors import shown
from cupymla.ops.attn_dist import cuda, plan
from cupymla.ops.attn_dist.spec import Problem


def problem(normalize: str | None = None, **sizes: int) -> Problem:
    return Problem(replace(MLA, **sizes), normalize)  # type: ignore[arg-type]


def test_parameter_record_is_the_one_that_the_kernel_reads() -> None:
    require_twin(cuda.Parameters, "attn_dist/sm90/params.cuh")


def covered(dealt: plan.Deal, row_blocks: int) -> list[tuple[int, int]]:
    """(query, block) of each CTA in turn; the twin of `Walk` in walk.cuh."""
    places = []
    for cta in range(dealt.ctas):
        index, part = divmod(cta, dealt.slices)
        blocks = range(part * dealt.slice_blocks, min((part + 1) * dealt.slice_blocks, row_blocks))
        assert blocks, "a CTA without work"
        places += [(query, block) for query in queries_of(dealt, index) for block in blocks]
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
