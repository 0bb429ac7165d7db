"""Which kernels the interpreter keeps."""

from __future__ import annotations

import functools

import pytest

from cupymla.ops.sparse_mla_fwd import plan
from cupymla_lab.interpret import program_of, run


@pytest.mark.compile
def test_those_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run._program.cache_info().maxsize == 12
    monkeypatch.setattr(run, "_program", functools.lru_cache(2)(run._program.__wrapped__))
    first, second, third = plan.sources("sm_90a")[:3]
    kept = [program_of(source) for source in (first, second)]
    assert program_of(first) is kept[0]
    assert program_of(third) is program_of(third)
    assert run._program.cache_info().currsize == 2
    assert program_of(first) is kept[0]
    assert program_of(second) is not kept[1]
