"""Lists of entries by the token that they name: the stage by itself, in the emulator, against NumPy; its grid.

Compiles, needs no GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from backward_plan_kit import HOPPER, ORDERED, planned

from cupymla import arch
from cupymla.launch import Geometry
from cupymla.ops import entry_lists
from cupymla.ops.sparse_mla_bwd import cuda, plan
from cupymla_lab.emulate import MODES, Settings, load
from cupymla_lab.emulate.host.memory import Arrays, Watcher

Int32 = npt.NDArray[np.int32]
NOTHING = -7
"""What is where the kernel writes nothing."""

STRANGE = np.array([-1, -(2**31), 2**31 - 1], np.int32)


@dataclass(frozen=True)
class Lists:
    """A launch of the stage.

    Attributes:
        s_q, s_kv, topk, batch: the sizes.
        ranges: of rows of kv.
        chunk_queries: of each chunk but the last.
        queries: from which query on, and up to which one, over all batch entries.
        lengths: topk_length, or None.
        k_stride: positions of a key of a causal call, or None.
        padding: what is between two queries' indices, and before the first, in elements.
        named: of how many tokens indices are chosen; None for all, and some that are not there.
    """

    s_q: int
    s_kv: int
    topk: int
    batch: int = 1
    ranges: int = 1
    chunk_queries: int = 1 << 20
    queries: tuple[int, int] | None = None
    lengths: Sequence[int] | None = None
    k_stride: int | None = None
    padding: int = 0
    named: int | None = None

    @property
    def begin_end(self) -> tuple[int, int]:
        return self.queries or (0, self.batch * self.s_q)

    @property
    def chunks(self) -> list[range]:
        begin, end = self.begin_end
        return [range(k, min(k + self.chunk_queries, end)) for k in range(begin, end, self.chunk_queries)]

    @property
    def room(self) -> int:
        """Entries of a chunk that is not the last."""
        return len(self.chunks[0]) * self.topk

    def indices(self) -> Int32:
        """[batch * s_q, topk], a view with that padding."""
        rng = np.random.default_rng(5)
        stride = self.topk + self.padding
        memory = np.full(self.padding + self.batch * self.s_q * stride, -2, np.int32)
        view = memory[self.padding :].reshape(-1, stride)[:, : self.topk]
        view[...] = rng.integers(0, self.named or self.s_kv, view.shape)
        if self.named is None:
            is_strange = rng.random(view.shape) < 0.1
            view[is_strange] = rng.choice([*STRANGE, self.s_kv], is_strange.sum())
        return view

    def expected(self, indices: Int32) -> tuple[Int32, list[Int32]]:
        """Where rows end, [chunks, batch * s_kv], and each chunk's entries in order."""
        ends, lists = [], []
        for chunk in self.chunks:
            rows = []
            for number, token in enumerate(chunk):
                batch, query = divmod(token, self.s_q)
                length = self.topk if self.lengths is None else min(self.topk, self.lengths[token])
                last = self.s_kv if self.k_stride is None else int((query + 1 - self.k_stride) / self.k_stride)
                limit = min(self.s_kv, last + 1)
                for entry, named in enumerate(indices[token, : max(length, 0)].tolist()):
                    if 0 <= named < limit:
                        rows.append((batch * self.s_kv + named, number * self.topk + entry))
            rows.sort()
            of_rows = np.array([row for row, _ in rows], np.int64)
            ends.append(np.cumsum(np.bincount(of_rows, minlength=self.batch * self.s_kv)))
            lists.append(np.array([entry for _, entry in rows], np.int32))
        return np.array(ends, np.int32), lists

    def run(
        self, indices: Int32, settings: Settings, target: arch.Arch = HOPPER, watcher: Watcher | None = None
    ) -> tuple[Int32, Int32]:
        """What the kernel makes: where rows end, and the list of each chunk."""
        memory = Arrays()

        def placed(name: str, array: Int32, writable: bool = False) -> int:
            memory.add(name, array.ctypes.data, array.nbytes, writable)
            return array.ctypes.data

        row_ends = np.full((len(self.chunks), self.batch * self.s_kv), NOTHING, np.int32)
        begin, end = self.begin_end
        entry_list = np.full((end - begin) * self.topk, NOTHING, np.int32)
        lengths = None if self.lengths is None else np.array(self.lengths, np.int32)
        own = indices.base if isinstance(indices.base, np.ndarray) else indices
        placed("indices", own)
        common = cuda.Parameters(
            indices=indices.ctypes.data,
            indices_query=indices.strides[0] // 4,
            indices_batch=indices.strides[0] // 4 * self.s_q,
            row_ends=placed("row_ends", row_ends, True),
            entry_list=placed("entry_list", entry_list, True),
            topk_length=None if lengths is None else placed("topk_length", lengths),
            topk_length_batch=self.s_q,
            topk_length_query=1,
            kv_rows=self.batch * self.s_kv,
            k_stride=self.k_stride or 1,
            causal=int(self.k_stride is not None),
            **{"s_q": self.s_q, "s_kv": self.s_kv, "topk": self.topk, "query_begin": begin, "query_end": end},
        )
        if watcher is not None:
            memory.watch(own.ctypes.data, own.nbytes, watcher)
        kernel = load(plan.variant(target, stage="list"), on="host")
        facts = dict(kernel.translation.facts)
        grid = self.ranges * facts["cluster"], len(self.chunks), 1
        geometry = Geometry(grid, facts["threads"], facts["smem_bytes"], facts["cluster"], pdl=True)
        kernel.launch(geometry, [cuda.ListParameters(common, self.chunk_queries)], settings, arrays=memory)
        return row_ends, entry_list


def settings(mode: Any, seed: int = 1) -> Settings:
    return Settings(mode, seed, patience_seconds=60.0, races="hardware")


def require_right(lists: Lists, mode: Any, target: arch.Arch = HOPPER) -> None:
    indices = lists.indices()
    row_ends, entry_list = lists.run(indices, settings(mode), target)
    expected_ends, expected_lists = lists.expected(indices)
    np.testing.assert_array_equal(row_ends, expected_ends)
    for number, (ends, expected) in enumerate(zip(expected_ends, expected_lists, strict=True)):
        own = entry_list[number * lists.room :][: len(lists.chunks[number]) * lists.topk]
        rows = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
        got = own[: len(rows)]
        np.testing.assert_array_equal(got[np.lexsort((got, rows))], expected)
        assert (own[len(rows) :] == NOTHING).all()


CASES = {
    "parts of a query": Lists(3, 300, 1040, ranges=3),
    "no alignment": Lists(3, 300, 1041, ranges=2),
    "a query each aligned otherwise": Lists(5, 90, 513, ranges=2, padding=2),
    "chunks, the last one shorter": Lists(11, 200, 65, ranges=2, chunk_queries=4),
    "from some query on": Lists(11, 200, 64, chunk_queries=4, queries=(2, 9)),
    "batch entries": Lists(3, 70, 40, batch=3, ranges=2, chunk_queries=5, padding=4),
    "lengths": Lists(6, 50, 600, ranges=2, lengths=(0, -3, 1, 600, 512, 2**31 - 1)),
    "causal": Lists(30, 20, 40, batch=2, ranges=3, k_stride=4, chunk_queries=25),
    "fewer rows than ranges": Lists(4, 2, 12, ranges=3),
    "one token": Lists(9, 1, 530, named=1),
    "one range, few tokens named": Lists(4, 5000, 520, named=40),
    "rows of a CTA in several steps": Lists(2, 5000, 2048, lengths=(2048, 1500)),
    "ranges as large as can be": Lists(2, 2 * entry_lists.MOST_RANGE_ROWS, 2048, ranges=2),
}


def in_modes() -> Iterator[object]:
    """(case, mode) for `pytest.mark.parametrize`: each in one mode, with `--interpret-all` in every."""
    for k, name in enumerate(CASES):
        for mode in MODES:
            marks = [] if mode == MODES[k % len(MODES)] else [pytest.mark.interpret_all]
            yield pytest.param(name, mode, id=f"{name}-{mode}", marks=marks)


@pytest.mark.compile
@pytest.mark.parametrize(("name", "mode"), in_modes())
def test_lists_are_those_of_numpy(name: str, mode: str) -> None:
    require_right(CASES[name], mode)


@pytest.mark.compile
@pytest.mark.parametrize("name", ["parts of a query", "chunks, the last one shorter"])
def test_so_are_those_of_blackwell(name: str) -> None:
    require_right(CASES[name], "random", arch.named("sm_100f"))


@pytest.mark.compile
@pytest.mark.parametrize("ranges", [1, 2])
@pytest.mark.parametrize("topk", [1024, 513])
@pytest.mark.parametrize("back", [False, True])
def test_indices_that_change_between_two_reads_do_no_harm(topk: int, ranges: int, back: bool) -> None:
    """They name the last token when they are read again, behind all others' entries, or did so at first. All stays in
    its arrays, of which the emulator knows the bounds. Two entries may then have one place, which is a race."""
    lists = Lists(3, 200, topk, ranges=ranges, named=199)
    indices = lists.indices()
    first, base = indices.copy(), indices.ctypes.data
    read: Counter[int] = Counter()
    at_first, again = (np.full_like(first, 199), first) if back else (first, np.full_like(first, 199))

    def changing(address: int, size: int, loads: bool, stores: bool) -> None:
        own = slice((address - base) // 4, (address - base + size) // 4)
        indices.reshape(-1)[own] = (at_first if read[address] < ranges else again).reshape(-1)[own]
        read[address] += 1

    row_ends, entry_list = lists.run(indices, replace(settings("random"), races="unchecked"), watcher=changing)
    assert row_ends.min() >= 0 and row_ends.max() <= lists.room
    assert set(read.values()) == {2 * ranges}
    others = [number for number in entry_list.tolist() if number != NOTHING]
    assert all(0 <= number < lists.room for number in others)


@pytest.mark.parametrize(
    ("kv_rows", "chunks", "multiprocessors", "ranges"),
    [
        (8192, 8, 132, 2),
        (32768, 8, 132, 2),
        (8192, 1, 132, 16),
        (8192, 16, 132, 1),
        (200, 1, 132, 4),
        (1, 1, 1, 1),
        (1 << 20, 8, 132, 43),
        (24577, 30, 132, 2),
        (0, 1, 132, 0),
    ],
)
def test_ranges_fill_the_machine_and_fit(kv_rows: int, chunks: int, multiprocessors: int, ranges: int) -> None:
    assert entry_lists.list_ranges(kv_rows, chunks, multiprocessors) == ranges
    if ranges:
        assert -(-kv_rows // ranges) <= entry_lists.MOST_RANGE_ROWS


def test_the_last_lists_have_more_ranges_where_they_are_of_fewer_chunks() -> None:
    chosen = planned(options=ORDERED, s_q=528 * 33, topk=2048, s_kv=8192)
    lists = [launch for launch in chosen.launches() if launch.stage == "list"]
    assert [(launch.grid[0] // entry_lists.LIST_CTAS, launch.lists) for launch in lists] == [(1, 30), (5, 3)]
