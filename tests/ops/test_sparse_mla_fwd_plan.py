"""What the host tells the kernel: the parameter record, and how queries are assigned to CTAs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_kit import MLA, queries_of, require_mirrored

from cupymla import InputError, UnsupportedError, arch, build, driver, raw_module
from cupymla.device import Device
from cupymla.errors import shown
from cupymla.ops import query_assignment
from cupymla.ops.mla import SoftmaxOptions
from cupymla.ops.sparse_mla_fwd import binding, cuda, plan


def test_parameter_record_is_the_one_that_the_kernel_reads() -> None:
    require_mirrored(cuda.Parameters, "sparse_mla_fwd/sm90/params.cuh")


@given(tokens=st.integers(0, 20_000), head_blocks=st.integers(1, 8), multiprocessors=st.integers(1, 200))
def test_every_query_is_assigned_once(tokens: int, head_blocks: int, multiprocessors: int) -> None:
    assigned = query_assignment.assign_queries(tokens, head_blocks, multiprocessors)
    assert [token for cta in range(assigned.ctas) for token in queries_of(assigned, cta)] == list(range(tokens))


def test_few_queries_go_one_to_a_cta() -> None:
    assert query_assignment.assign_queries(132, 1, 132) == query_assignment.QueryAssignment(0, 1, 132)


def test_many_queries_end_in_single_ones() -> None:
    assigned = query_assignment.assign_queries(4096, 2, 132)
    assert assigned.group_tokens == 4
    assert assigned.ctas - assigned.groups >= 4 * 66


def parts_of(blocks: int, parts: int) -> list[range]:
    """The KV blocks of each CTA of a cluster; as `Query` in query.cuh."""
    own = 2 * (-(-((blocks + 1) // 2) // parts))
    firsts = [min(part * own, blocks) for part in range(parts)]
    return [range(first, first + min(blocks - first, own)) for first in firsts]


@given(blocks=st.integers(0, 2000), parts=st.sampled_from([1, 2, 4, 8, 16]))
def test_every_block_falls_to_one_part_and_pairs_stay_together(blocks: int, parts: int) -> None:
    assigned = parts_of(blocks, parts)
    assert [block for part in assigned for block in part] == list(range(blocks))
    assert all(part.start % 2 == 0 for part in assigned if part)


@pytest.mark.parametrize(
    ("work", "topk", "parts"),
    [
        (2, 2048, 16),
        (32, 2048, 4),
        (256, 2048, 1),
        (132, 2048, 1),
        (80, 2048, 1),
        (1, 128, 1),
        (1, 129, 1),
        (4, 512, 4),
    ],
)
def test_entries_are_split_while_multiprocessors_are_idle(work: int, topk: int, parts: int) -> None:
    """A pair of KV blocks each is the least a part can be given; a merge costs as much again."""
    assert plan.parts(work, topk, 132) == parts


@given(work=st.integers(1, 4000), topk=st.integers(1, 100_000), multiprocessors=st.integers(1, 200))
def test_a_split_never_asks_for_more_ctas_than_run_at_once(work: int, topk: int, multiprocessors: int) -> None:
    """Beyond one wave the whole queries keep every multiprocessor busy, so splitting only adds merges."""
    parts = plan.parts(work, topk, multiprocessors)
    assert parts == 1 or parts * work <= multiprocessors


# What 132 multiprocessors in GPCs of 16 and 18 hold at once, and a GPU where no cluster is larger than eight.
H200_CLUSTERS = {2: 66, 4: 32, 8: 16, 16: 8}
SMALL_CLUSTERS = {2: 60, 4: 28, 8: 12, 16: 0}


@pytest.mark.parametrize(
    ("active", "s_q", "parts"),
    [
        (H200_CLUSTERS, 1, 16),
        (H200_CLUSTERS, 16, 2),
        (H200_CLUSTERS, 8, 4),
        (H200_CLUSTERS, 0, 16),
        (H200_CLUSTERS | {4: 31}, 8, 2),
        (SMALL_CLUSTERS, 1, 8),
        (SMALL_CLUSTERS, 33, 1),
        (dict.fromkeys((2, 4, 8, 16), 0), 1, 1),
    ],
)
def test_clusters_that_do_not_all_run_at_once_are_not_asked_for(
    active: dict[int, int], s_q: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"threads": 384, "smem_bytes": 1024}
    monkeypatch.setattr(driver, "arch_of", lambda device: arch.named("sm_90a"))
    monkeypatch.setattr(driver, "multiprocessor_count", lambda index: 132)
    monkeypatch.setattr(build, "kernel", lambda source, device: SimpleNamespace(function=1, facts=facts))
    monkeypatch.setattr(binding, "active_clusters", lambda kernel, geometry: active[geometry.cluster])
    chosen = binding.running_plan(plan.plan, replace(MLA, s_q=s_q, topk=2048), Device("cuda", 0))
    assert chosen.parts == parts
    assert dict(chosen.source.defines)["CUPYMLA_SPLIT"] == int(parts > 1)
    assert parts == 1 or chosen.tokens * chosen.head_blocks <= active[parts] or not s_q


def test_few_queries_take_the_split_kernel_as_clusters() -> None:
    chosen = plan.plan(replace(MLA, s_q=1, topk=2048), arch.named("sm_90a"), 132)
    assert dict(chosen.source.defines)["CUPYMLA_SPLIT"] == 1
    assert (chosen.heads, chosen.parts, chosen.ctas) == (16, 16, 128)


@pytest.mark.parametrize(
    ("h_q", "s_q", "heads", "parts"),
    [(128, 1, 16, 16), (128, 4, 32, 8), (128, 16, 32, 2), (128, 32, 32, 1), (128, 60, 64, 1), (64, 8, 32, 8)],
)
def test_few_queries_divide_their_heads_among_more_ctas(h_q: int, s_q: int, heads: int, parts: int) -> None:
    chosen = plan.plan(replace(MLA, h_q=h_q, s_q=s_q, topk=2048), arch.named("sm_90a"), 132)
    assert (chosen.heads, chosen.parts) == (heads, parts)
    assert chosen.head_blocks == h_q // heads and chosen.ctas <= 132


@given(h_q=st.integers(1, 300), s_q=st.integers(0, 300), topk=st.integers(1, 9000), count=st.integers(1, 200))
def test_ctas_of_the_most_heads_share_no_query(h_q: int, s_q: int, topk: int, count: int) -> None:
    chosen = plan.plan(replace(MLA, h_q=h_q, s_q=s_q, topk=topk), arch.named("sm_90a"), count)
    assert chosen.heads < 64 or chosen.parts == 1
    assert chosen.heads <= plan.cta_heads(h_q) and chosen.heads * chosen.head_blocks >= h_q
    assert chosen.source in plan.sources("sm_90a")


@pytest.mark.parametrize(
    ("h_q", "heads", "head_blocks"), [(1, 16, 1), (16, 16, 1), (17, 32, 1), (32, 32, 1), (33, 64, 1), (65, 64, 2)]
)
def test_few_heads_are_not_padded_to_many(h_q: int, heads: int, head_blocks: int) -> None:
    chosen = plan.plan(replace(MLA, h_q=h_q, s_q=4096), arch.named("sm_90a"), 132)
    assert dict(chosen.source.defines)["CUPYMLA_HEADS"] == chosen.heads == heads
    assert chosen.head_blocks == head_blocks


@pytest.mark.parametrize(("sm_scale", "any_scale"), [(0.1, 0), (0.0, 1), (-0.1, 1), (1e-38, 1), (1e30, 0)])
def test_scales_that_are_not_surely_positive_take_the_general_variant(sm_scale: float, any_scale: int) -> None:
    chosen = plan.plan(replace(MLA, options=SoftmaxOptions(sm_scale=sm_scale)), arch.named("sm_90a"), 132)
    assert dict(chosen.source.defines)["CUPYMLA_ANY_SCALE"] == any_scale


def test_grid_limit_is_an_error_before_anything_is_launched() -> None:
    with pytest.raises(UnsupportedError, match="heads"):
        plan.plan(replace(MLA, batch=2**10, s_q=2**20), arch.named("sm_90a"), 132)


@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_100f"])
def test_other_architectures_are_named(name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        plan.plan(MLA, arch.named(name), 132)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        *[(word, value) for word in ("any_scale", "split") for value in ("no", 1, None, 10**5000)],
        *[("heads", value) for value in (48, "16", 16.0, None, 10**5000)],
        *[("d_qk", value) for value in (128, "576", 576.0, None, 10**5000)],
        *[("dtype", value) for value in ("float32", 16, None, 10**5000)],
    ],
    ids=shown,
)
def test_a_variant_that_does_not_exist_is_refused_by_name(word: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        raw_module("sparse_mla_fwd", arch="sm_90a", **{word: value})
    assert (caught.value.operator, caught.value.argument) == ("sparse_mla_fwd", word)
