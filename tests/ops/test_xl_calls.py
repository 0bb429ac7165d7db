"""Ordinary calls of xl_paged_attention that follow each other in one thread: what is remembered must fit the next call.

The kernel runs in the interpreter; compiles to PTX, needs no GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupymla.ops.xl_paged_attention import xl_paged_attention
from cupymla.ops.xl_paged_attention.cases import inputs, make
from cupymla.ops.xl_paged_attention.reference import xl_paged_attention as reference
from cupymla.testing import compare
from cupymla.testing.interpreted import Interpreted, interpreted

pytestmark = pytest.mark.compile

SMALL: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_size": 32, "context_lens": (37, 5)}


def on_device(machine: Interpreted, host: dict[str, Any]) -> dict[str, Any]:
    return {n: machine.array(v, name=n) if isinstance(v, np.ndarray) else v for n, v in host.items()}


def require_each_right(machine: Interpreted, calls: list[dict[str, Any]]) -> None:
    """Every call, one after the other in one thread, gives what the reference gives."""
    arguments = [on_device(machine, host) for host in calls]
    results = machine.call(lambda: [xl_paged_attention(**each, return_lse=True) for each in arguments])
    for host, (out, lse) in zip(calls, results, strict=True):
        same, exact = reference(**host, return_lse=True, precision="same"), reference(**host, return_lse=True)
        compare.require(
            [
                compare.compare(name, got.get(), near, right)
                for name, got, near, right in zip(("out", "lse"), (out, lse), same, exact, strict=True)
            ]
        )


def test_a_scale_is_that_of_its_own_call() -> None:
    """Numbers for k_scale and v_scale may change from call to call."""
    host = inputs(make("dtypes", **SMALL, dtype="float32", kv_dtype="float8_e4m3fn"), seed=1)
    host = {name: value for name, value in host.items() if name not in ("return_lse", "k_scale", "v_scale")}
    with interpreted("sm_90a", 2) as machine:
        scales = ((0.5, 2.0), (0.125, 2.0), (0.5, 0.25))
        require_each_right(machine, [{**host, "k_scale": k, "v_scale": v} for k, v in scales])


def test_u_does_not_pass_for_v() -> None:
    """pos_bias_u and pos_bias_v have the same shape; a call with one is not a call with the other."""
    host = inputs(make("options", **SMALL, dtype="float32"), seed=2)
    host = {name: value for name, value in host.items() if name not in ("return_lse", "pos_bias_u", "pos_bias_v")}
    rng = np.random.default_rng(3)
    host["pos_emb"] = rng.standard_normal((9, 2, 32), dtype=np.float32)
    offset = rng.standard_normal((2, 32), dtype=np.float32)
    with interpreted("sm_90a", 2) as machine:
        require_each_right(machine, [{**host, name: offset} for name in ("pos_bias_v", "pos_bias_u", "pos_bias_v")])
