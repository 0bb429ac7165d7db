"""topk_length is read once for a query: roles that read it for themselves could disagree, and wait for ever."""

from __future__ import annotations

import pytest

from cupymla.ops.sparse_mla_bwd import cases, sparse_mla_bwd
from cupymla.ops.sparse_mla_bwd.paths import two_phase
from cupymla_lab.emulated import emulated
from cupymla_lab.problems import sparse_mla_bwd as problems

NAMES = ("h16_d576_k65_q11_kv200_lengths", "h128_d576_k192_q11_kv200_lengths_full")
QUERIES = 2


@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "when", "reads"),
    [(NAMES[0], "never", 1), (NAMES[1], "never", 1), (NAMES[1], "always", 2)],
    ids=["one CTA", "two CTAs", "two_phase"],
)
def test_lengths_that_change_under_way_leave_the_roles_in_agreement(
    name: str, when: str, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two phases either CTA of the first stage reads them for itself, and the second stage goes by what these
    took."""
    monkeypatch.setattr(two_phase, "_WHEN", when)
    case = next(case for case in problems.CASES if case.name == name)
    with emulated(multiprocessors=3) as machine:
        few = {"q", "out", "dout", "lse", "indices", "topk_length", "attn_dist"}
        inputs = cases.inputs(case, 0)
        given = machine.arguments({key: value[:QUERIES] if key in few else value for key, value in inputs.items()})
        lengths = given["topk_length"]
        begin = lengths.data.ptr
        read: list[int] = []

        def changing(address: int, size: int, loads: bool, stores: bool) -> None:
            # What every other reader of the same length gets.
            lengths.host[(address - begin) // 4] = 130 if len(read) % 2 else 1
            read.append(address)

        machine.watch(lengths, changing)
        machine.call(sparse_mla_bwd, **given)
    assert sorted(read) == [begin] * reads + [begin + 4] * reads
