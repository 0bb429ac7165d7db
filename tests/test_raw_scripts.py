"""Kernels that are launched on their own: what scripts launch, run in the PTX interpreter."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from script_kit import Driver, compiled, loaded, script

import cupymla
from cupymla.testing.interpreted import interpreted

pytestmark = pytest.mark.compile


def test_attention_on_its_own_gets_the_bits_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("standalone_launch")
    module.S_Q = 4
    kernel, source = compiled("sparse_mla_fwd", "sm_90a", d_qk=module.D_QK, dtype="bfloat16")
    rng = np.random.default_rng(0)
    q = rng.standard_normal((module.S_Q, module.H_Q, module.D_QK), np.float32).astype(ml_dtypes.bfloat16)
    kv = rng.standard_normal((module.S_KV, module.D_QK), np.float32).astype(ml_dtypes.bfloat16)
    indices = rng.integers(0, module.S_KV, (module.S_Q, module.TOPK), np.int32)
    with interpreted("sm_90a", multiprocessors=16) as machine:
        machine.races = "practice"
        monkeypatch.setattr(module, "driver", Driver(machine))
        arrays = [machine.array(array) for array in (q, kv, indices)]
        out = machine.empty((module.S_Q, module.H_Q, module.D_V), ml_dtypes.bfloat16)
        max_logits, lse = (machine.empty((module.S_Q, module.H_Q), np.float32) for _ in range(2))
        module.launch(loaded(kernel, source, machine), *arrays, out, max_logits, lse, 0)
        expected = machine.call(cupymla.sparse_mla_fwd, *arrays)
        assert machine.launched == ["sparse_mla_fwd"] * 2
        for found, wanted in zip((out, max_logits, lse), expected, strict=True):
            assert np.array_equal(found.host.view(np.uint16), wanted.host.view(np.uint16))
