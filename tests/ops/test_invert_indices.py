"""invert_indices against a loop over all entries, on the CPU; what is refused; the record, the grids; mapped calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulated_kit import settings
from hypothesis import given
from hypothesis import strategies as st
from plan_kit import CUDA, require_mirrored

import cupymla
from cupymla import arch
from cupymla.errors import InputError, UnsupportedError
from cupymla.ops import entry_lists
from cupymla.ops.invert_indices import cuda, plan, spec
from cupymla_lab.emulated import emulated
from cupymla_lab.subjects import Subject

Array = np.ndarray[Any, Any]
SUBJECT = Subject("invert_indices")


def parts(lists: Any, s_kv: int) -> tuple[Array, Array]:
    """Offsets and entries."""
    return lists[..., : s_kv + 1], lists[..., s_kv + 1 :]


def listed(indices: Array, s_kv: int, lengths: Array | None) -> tuple[list[int], list[int]]:
    """Offsets and entries of [s_q, topk] indices, token by token."""
    found: list[list[int]] = [[] for _ in range(s_kv)]
    queries, topk = indices.shape
    for query in range(queries):
        for place in range(topk):
            token = int(indices[query, place])
            if 0 <= token < s_kv and (lengths is None or place < lengths[query]):
                found[token].append(query * topk + place)
    offsets = [0, *np.cumsum([len(own) for own in found]).tolist()]
    entries = [entry for own in found for entry in own]
    return offsets, entries + [-1] * (queries * topk - len(entries))


@given(st.integers(0, 6), st.integers(0, 9), st.integers(1, 7), st.booleans(), st.sampled_from([None, 0, 3]))
def test_lists_are_those_of_a_loop(s_q: int, s_kv: int, topk: int, has_lengths: bool, batch: int | None) -> None:
    rng = np.random.default_rng(s_q * 1000 + s_kv * 100 + topk)
    lead = () if batch is None else (batch,)
    indices = rng.integers(-2, s_kv + 2, (*lead, s_q, topk), dtype=np.int32)
    lengths = rng.integers(-2, topk + 2, (*lead, s_q), dtype=np.int32) if has_lengths else None
    # Three axes, the middle one of extent 1, are those of the queries unless lengths say more.
    given_indices = indices[..., None, :] if s_q == 1 and not has_lengths else indices
    lists = cupymla.invert_indices(given_indices, s_kv, topk_length=lengths)
    assert lists.shape == (*lead, s_kv + 1 + s_q * topk) and lists.dtype == np.int32
    offsets, entries = parts(lists, s_kv)
    for number in np.ndindex(lead):
        own = None if lengths is None else lengths[number]
        want = listed(indices[number], s_kv, own)
        assert (offsets[number].tolist(), entries[number].tolist()) == want


@pytest.mark.parametrize("case", SUBJECT.cases.CASES, ids=lambda case: case.name)
def test_every_valid_entry_is_once_in_the_list_of_its_token(case: Any) -> None:
    inputs = SUBJECT.cases.inputs(case, 0)
    offsets, entries = parts(cupymla.invert_indices(**inputs), case.s_kv)
    rows = inputs["indices"].reshape(*case.row, case.topk)
    for number in np.ndindex(case.row[:-1]):
        own, ends, flat = entries[number], offsets[number], rows[number].reshape(-1)
        tokens = np.repeat(np.arange(case.s_kv), np.diff(ends))
        assert (flat[own[: ends[-1]]] == tokens).all() and (own[ends[-1] :] == -1).all()
        # Ascending in each list, so that none is there twice.
        assert (np.diff(own[: ends[-1]])[np.diff(tokens) == 0] > 0).all()
        valid = (rows[number] >= 0) & (rows[number] < case.s_kv)
        if "topk_length" in inputs:
            valid &= np.arange(case.topk) < inputs["topk_length"][number][:, None]
        assert ends[-1] == valid.sum()


def test_three_axes_are_queries_unless_lengths_say_that_they_are_a_batch() -> None:
    indices = np.array([[[0, 1]], [[1, 1]], [[5, 0]]], np.int32)
    lists = cupymla.invert_indices(indices, 2)
    assert lists.tolist() == [0, 2, 5, 0, 5, 1, 2, 3, -1]
    lists = cupymla.invert_indices(indices, 2, topk_length=np.full(3, 2, np.int32))
    assert lists[:3].tolist() == [0, 2, 5]
    lists = cupymla.invert_indices(indices, 2, topk_length=np.full((3, 1), 2, np.int32))
    assert lists.tolist() == [[0, 1, 2, 0, 1], [0, 0, 2, 0, 1], [0, 1, 1, 1, -1]]
    assert cupymla.invert_indices(indices[:, None], 2).tolist() == lists.tolist()


def test_an_array_that_is_given_is_written_and_returned() -> None:
    indices = np.array([[[0, 3, 3], [1, 0, -1]]], np.int32)
    lists = np.zeros((1, 14), np.int32)[:, 1:12]
    assert cupymla.invert_indices(indices, 4, lists=lists, workspace=np.zeros(64, np.uint8)) is lists
    assert lists.tolist() == [[0, 2, 3, 3, 5, 0, 4, 3, 1, 2, -1]]


MEMORY = np.zeros(24, np.int32)
INDICES = MEMORY[12:].reshape(3, 4)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"indices": INDICES.astype(np.int64)}, "'indices': expected dtype int32"),
    ({"indices": INDICES[0]}, "'indices': expected shape"),
    ({"indices": np.zeros((2, 3, 2, 4), np.int32)}, "'indices': expected shape"),
    ({"indices": INDICES[:, :0]}, "'indices': expected 1 to .* entries of a query"),
    ({"indices": INDICES[:, ::2]}, "'indices': expected a contiguous last axis"),
    ({"indices": INDICES[::-1]}, "'indices': expected strides that are not negative"),
    ({"s_kv": -1}, "'s_kv': expected an integer from 0"),
    ({"s_kv": 2**31}, "'s_kv': expected an integer from 0"),
    ({"s_kv": True}, "'s_kv'"),
    ({"topk_length": np.zeros(4, np.int32)}, "'topk_length': expected shape"),
    ({"topk_length": np.zeros(3, np.int64)}, "'topk_length': expected dtype int32"),
    ({"topk_length": np.zeros((3, 1), np.int32)}, "'topk_length': expected shape"),
    ({"lists": np.zeros(17, np.int32)}, "'lists': expected shape"),
    ({"lists": np.zeros(36, np.int32)[::2]}, "'lists': expected a contiguous last axis"),
    ({"lists": MEMORY[:18]}, "'lists': expected memory of its own"),
    ({"workspace": np.zeros(64, np.int32)}, "'workspace': expected dtype uint8"),
]


@pytest.mark.parametrize(("changed", "message"), BAD)
def test_what_cannot_be_used_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"invert_indices: argument {message}"):
        cupymla.invert_indices(**{"indices": INDICES, "s_kv": 5, **changed})


def test_entries_are_counted_in_31_bits() -> None:
    many = np.broadcast_to(np.zeros((1, 1 << 11), np.int32), (1 << 20, 1 << 11))
    with pytest.raises(InputError, match=r"'indices': expected at most 2147482624 entries, s_q \* topk"):
        spec.read(many, 5)
    with pytest.raises(InputError, match="'s_kv': expected with 12 entries fewer than 2147482624 in all"):
        spec.read(INDICES, 2**31 - 1036)


# On a GPU -------------------------------------------------------------------------------------------------------------


def problem(s_q: int, s_kv: int, topk: int, batch: int | None = None) -> spec.Problem:
    lead = () if batch is None else (batch,)
    device = spec.read(INDICES, 0)[1].device
    return spec.Problem(lead, s_q, topk, spec.Options(s_kv), device)


def test_the_record_is_the_one_that_the_kernels_read() -> None:
    require_mirrored(cuda.Parameters, "invert_indices/sm90/params.cuh")


def test_a_plan_goes_by_the_kernels_numbers() -> None:
    text = (CUDA / "invert_indices/sm90/storage.cuh").read_text(encoding="utf-8")
    assert f"kThreads = {plan.WARPS * 32};" in text and f"kShortList = {plan.SHORT_LIST};" in text


@given(
    st.integers(0, 1 << 20), st.integers(0, 2**31 - 1), st.integers(1, 2047), st.integers(0, 65535), st.integers(1, 132)
)
def test_grids_are_within_limits_and_ranges_within_shared_memory(
    s_q: int, s_kv: int, topk: int, batch: int, multiprocessors: int
) -> None:
    chosen = problem(s_q, s_kv, topk, batch)
    made = plan.launches(chosen, arch.named("sm_90a"), multiprocessors)
    assert len(made) == (0 if not batch else 1 if not s_q else 2)
    for launch in made:
        assert launch.grid[2] == 1 and 0 < launch.grid[1] <= 65535 and 0 < launch.grid[0] < 2**31
    entries = s_q * topk
    if made:
        chunks, (ctas, lists, _) = made[0].chunks, made[0].grid
        ranges, rest = divmod(ctas, entry_lists.LIST_CTAS)
        assert rest == 0 and ranges * entry_lists.MOST_RANGE_ROWS >= s_kv
        assert lists == batch * chunks and 1 <= chunks <= plan.MOST_CHUNKS
        # No chunk is empty, and what they need is within what a call asks for on every GPU.
        assert chunks == 1 or (chunks - 1) * -(-s_q // chunks) < s_q
        assert (batch * entries + plan.row_ends(chosen, chunks)) * 4 <= plan.workspace_limit(chosen)
    if len(made) > 1:
        assert made[1].chunks == chunks and 1 <= made[1].group_tokens <= plan.MOST_GROUP_TOKENS
        groups = chunks * -(-s_kv // made[1].group_tokens)
        assert made[1].grid[0] <= max(1, -(-groups // plan.WARPS)) and made[1].grid[1] == batch
    assert plan.workspace_limit(chosen) <= 2 * 4 * batch * entries


def ranges_and_chunks(s_kv: int, multiprocessors: int = 132, batch: int | None = None) -> tuple[int, int]:
    first, _ = plan.launches(problem(4096, s_kv, 2048, batch), arch.named("sm_90a"), multiprocessors)
    return first.grid[0] // entry_lists.LIST_CTAS, first.chunks


def test_entries_are_read_by_as_few_ranges_as_there_can_be_with_a_cta_to_a_multiprocessor() -> None:
    assert [ranges_and_chunks(s_kv) for s_kv in (8192, 24576, 24577, 32768, 131072)] == [
        *((1, 16), (1, 16), (2, 8), (2, 8), (6, 4))
    ]
    assert ranges_and_chunks(8192, 148) == (1, 16)
    assert ranges_and_chunks(1 << 20) == (43, 1)
    assert ranges_and_chunks(8192, batch=2) == (1, 8) and ranges_and_chunks(8192, batch=100) == (1, 1)
    # One multiprocessor has a chunk, so its row ends are offsets.
    assert ranges_and_chunks(8192, 1) == (1, 1)


def test_a_large_batch_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="65536 batch entries"):
        plan.launches(problem(1, 1, 1, 65536), arch.named("sm_90a"), 132)


@pytest.mark.parametrize("shape", [(3,), (1,), (3, 1), (2, 1, 1), (2, 3)])
def test_mapped_calls_are_not_taken_for_queries(shape: tuple[int, ...]) -> None:
    """Where a batch axis in front would make the indices look like those with an axis of extent 1."""
    jax = pytest.importorskip("jax")
    from cupymla.interop import jax as mla

    indices = np.random.default_rng(0).integers(-1, 5, (4, *shape, 6), dtype=np.int32)
    mapped = jax.vmap(lambda each: mla.invert_indices(each, 5))(indices)
    for number in range(4):
        np.testing.assert_array_equal(np.asarray(mapped[number]), cupymla.invert_indices(indices[number], 5))


def test_a_mapped_backward_makes_and_takes_lists() -> None:
    """One argument in every bridge: under `jit` and `vmap` the batch axis is the lists' too. References read none."""
    jax = pytest.importorskip("jax")
    from cupymla.interop import jax as mla

    case = next(c for c in Subject("sparse_mla_bwd").cases.CASES if c.batch and "lists" in c.name)
    given = Subject("sparse_mla_bwd").cases.inputs(case, 0)
    arrays = {name: np.ascontiguousarray(array) for name, array in given.items() if isinstance(array, np.ndarray)}
    options = {name: value for name, value in given.items() if name not in arrays}
    lists = arrays.pop("lists")

    def gradients(one: Any) -> Any:
        made = mla.invert_indices(one["indices"], case.s_kv, topk_length=one.get("topk_length"))
        return made, mla.sparse_mla_bwd(**one, **options, lists=made)[1]

    found, dkv = jax.jit(jax.vmap(gradients))(arrays)
    np.testing.assert_array_equal(np.asarray(found), lists)
    want: Any = cupymla.sparse_mla_bwd(**arrays, **options)[1]  # type: ignore[call-overload]
    np.testing.assert_array_equal(np.asarray(dkv).astype(np.float32), want.astype(np.float32))


# In the interpreter -------------------------------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parametrize(
    "name", ["q60_kv30_k60_random", "q700_kv3_k3_lists", "q40_kv100_k200_same", "q9_kv30_k600_hostile_lengths"]
)
def test_what_changes_between_two_reads_does_no_harm(name: str) -> None:
    """Indices, lengths and a workspace of any numbers: lists are wrong then, and nothing is read or written beside."""
    case: Any = next(c for c in SUBJECT.cases.CASES if c.name == name)
    rng = np.random.default_rng(1)
    with emulated("sm_90a", 3, replace(settings("random"), races="unchecked")) as machine:
        inputs = SUBJECT.cases.inputs(case, 0)
        size = plan.workspace_limit(spec.read(**inputs)[1])
        inputs["workspace"] = rng.integers(0, 256, size + 16, dtype=np.uint8)
        arguments = machine.arguments(inputs, ("workspace",))

        def change(watched: Any, low: int, high: int) -> Any:
            def changing(address: int, size: int, *_: object) -> None:
                place = (address - watched.data.ptr) // 4
                watched.host.reshape(-1)[place : place + size // 4] = rng.integers(low, high)

            return changing

        machine.watch(arguments["indices"], change(arguments["indices"], -1, case.s_kv + 1))
        if "topk_length" in arguments:
            machine.watch(arguments["topk_length"], change(arguments["topk_length"], -1, case.topk + 2))
        machine.call(cupymla.invert_indices, **arguments)
