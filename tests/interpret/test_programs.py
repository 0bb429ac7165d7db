"""Which kernels the interpreter keeps."""

from __future__ import annotations

import pytest

from cupymla.interpret import program_of, run
from cupymla.ops.sparse_mla_fwd import plan


@pytest.mark.compile
def test_those_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_programs", {})
    monkeypatch.setattr(run, "_PROGRAMS", 2)
    first, second, third = plan.sources("sm_90a")[:3]
    kept = [program_of(source) for source in (first, second)]
    assert program_of(first) is kept[0]
    assert program_of(third) is program_of(third)
    assert len(run._programs) == 2
    assert program_of(first) is kept[0]
    assert program_of(second) is not kept[1]
