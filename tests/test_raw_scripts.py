"""Kernels that are launched on their own: what scripts launch, run in the PTX interpreter, and deals by sizes alone."""

from __future__ import annotations

from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from script_kit import Driver, compiled, loaded, script

import cupymla
from cupymla_lab.emulated import emulated
from cupymla_lab.subjects import Subject
from cupymla_lab.without_gpu import settings_for

pytestmark = pytest.mark.compile


@pytest.mark.parametrize(("arch", "multiprocessors", "n"), [("sm_90", 20, 2), ("sm_90", 3, 2), ("sm_80", 8, 1)])
def test_gemv_on_its_own_gets_the_bits_of_the_call(
    arch: str, multiprocessors: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the script's two columns, and of one, for which other tests compile a kernel for sm_80."""
    module = script("standalone_gemv")
    monkeypatch.setattr(module, "N", n)
    kernel, source = compiled("nvfp4_gemv", arch, n=module.N)
    with emulated(arch, multiprocessors, settings_for("nvfp4_gemv", arch, 1)) as machine:
        monkeypatch.setattr(module, "driver", Driver(machine))
        arrays = [machine.array(array) for array in module.problem(np)]
        c = machine.empty((module.BATCHES, module.M, module.N), np.float16)
        module.launch(loaded(kernel, source, machine), *arrays, c, multiprocessors, 0)
        expected = machine.call(cupymla.nvfp4_gemv, *arrays, batch_axis=0)
        assert machine.launched == ["nvfp4_gemv"] * 2
        assert machine.launches[0] == machine.launches[1]
        assert np.array_equal(c.host.view(np.uint16), expected.host.view(np.uint16))


def test_attention_on_its_own_gets_the_bits_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("standalone_launch")
    module.S_Q = 4
    kernel, source = compiled("sparse_mla_fwd", "sm_90a", d_qk=module.D_QK, dtype="bfloat16")
    rng = np.random.default_rng(0)
    q = rng.standard_normal((module.S_Q, module.H_Q, module.D_QK), np.float32).astype(ml_dtypes.bfloat16)
    kv = rng.standard_normal((module.S_KV, module.D_QK), np.float32).astype(ml_dtypes.bfloat16)
    indices = rng.integers(0, module.S_KV, (module.S_Q, module.TOPK), np.int32)
    # Fewer than CTAs of 64 heads, as on a GPU: with more, the call would divide its four queries among smaller ones.
    multiprocessors = 6
    with emulated("sm_90a", multiprocessors) as machine:
        monkeypatch.setattr(module, "driver", Driver(machine))
        arrays = [machine.array(array) for array in (q, kv, indices)]
        out = machine.empty((module.S_Q, module.H_Q, module.D_V), ml_dtypes.bfloat16)
        max_logits, lse = (machine.empty((module.S_Q, module.H_Q), np.float32) for _ in range(2))
        module.launch(loaded(kernel, source, machine), *arrays, out, max_logits, lse, multiprocessors, 0)
        expected = machine.call(cupymla.sparse_mla_fwd, *arrays)
        assert machine.launched == ["sparse_mla_fwd"] * 2
        for found, wanted in zip((out, max_logits, lse), expected, strict=True):
            assert np.array_equal(found.host.view(np.uint16), wanted.host.view(np.uint16))


@pytest.mark.parametrize(
    ("operator", "case", "variant", "sizes"),
    [
        (
            "sparse_mla_fwd",
            "h16_d576_k63_q3_kv300",
            {"d_qk": 576, "heads": 16},
            {"s_q": 3, "h_q": 16},
        ),
        (
            "attn_dist",
            "h8_d576_k130_q3_kv300",
            {"d_qk": 576, "block_heads": 64},
            {"s_q": 3, "topk": 130},
        ),
        (
            "xl_paged_attention",
            "gqa4-2x64_b4_c0-90_lse2",
            {"head_size": 64, "dtype": "bfloat16"},
            {"num_seqs": 4, "num_heads": 4, "num_kv_heads": 2, "capacity": 112},
        ),
    ],
    ids=["sparse_mla_fwd", "attn_dist", "xl_paged_attention"],
)
def test_a_deal_by_sizes_is_that_of_the_call(
    operator: str, case: str, variant: dict[str, Any], sizes: dict[str, int]
) -> None:
    kernel, source = compiled(operator, "sm_90a", **variant)
    subject = Subject(operator)
    (found,) = subject.those(subject.cases.CASES, [case])
    records: list[bytes] = []
    with emulated("sm_90a", multiprocessors=7) as machine:
        run = machine.execute

        def execute(known: Any, geometry: Any, parameters: Any, maps: Any) -> None:
            records.append(parameters[-1])
            run(known, geometry, parameters, maps)

        with mock.patch.object(machine, "execute", execute):
            machine.check(operator, found)
        assert [program.name for program in machine.kernels] == [kernel.entry] == [source.entry]
        (geometry,), (content,) = machine.launches, records
    assigned = kernel.assign_work(7, **sizes)
    record = kernel.parameters.from_buffer_copy(content)
    assert geometry.grid == (assigned.ctas, 1, 1)
    assert assigned.fields == {name: getattr(record, name) for name in assigned.fields}
