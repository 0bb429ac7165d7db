"""Scores that are exact in natural units, and large: where the accuracy criterion leaves no room for what a kernel
rounds that works in units of log2. In the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupymla.ops.mla_cases import sized
from cupymla.ops.xl_paged_attention import cases as xl_cases
from cupymla.testing import compare
from cupymla_lab.emulate import Settings
from cupymla_lab.emulated import emulated
from cupymla_lab.subjects import Subject

pytestmark = pytest.mark.compile

ARCHS = ("sm_90a", "sm_100f")


def exact_inputs(subject: Subject, heads: int, d_qk: int, score: float, **options: Any) -> dict[str, Any]:
    """Scores that are `score` less 0 to 3, without any rounding, of all heads with all keys."""
    inputs: dict[str, Any] = subject.cases.inputs(
        sized(heads, d_qk, 64, 1, 64, "_exact", "options", selection="full", **options), 1
    )
    inputs["q"][:] = 0
    inputs["q"][..., :2] = 1
    inputs["kv"][..., 0] = score
    inputs["kv"][..., 1] = -np.arange(len(inputs["kv"])) % 4 - 3
    return inputs


def require(subject: Subject, arch: str, inputs: dict[str, Any]) -> None:
    made = emulated(arch, 2, seed=1) if arch == "sm_90a" else emulated(arch, 2, Settings("lazy", patience_seconds=20.0))
    with made as machine:
        results = machine.results(subject, inputs)
    compare.require(subject.reports(inputs, results))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("heads", "score", "sm_scale"), [(16, 1024.0, 1.0), (66, 16384.0, 1024.0)])
def test_backward(arch: str, heads: int, score: float, sm_scale: float) -> None:
    """P, which goes into the distribution as it is, and into dkv rounded to the dtype of q."""
    subject = Subject("sparse_mla_bwd")
    inputs = exact_inputs(subject, heads, 576, score, wants_dist=True, dkv_dtype="float32")
    lse = np.full_like(inputs["lse"], score * sm_scale + 3)
    require(subject, arch, inputs | {"sm_scale": sm_scale, "lse": lse})


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("heads", "score", "sm_scale"), [(16, 777.0, 1.0), (66, 1001.0, 1.0), (16, 100.0, 0.1), (66, -1000.0, 1.0)]
)
def test_forward(arch: str, heads: int, score: float, sm_scale: float) -> None:
    """max_logits and lse."""
    subject = Subject("sparse_mla_fwd")
    inputs = exact_inputs(subject, heads, 512 if heads > 64 else 576, score, dtype="float16")
    require(subject, arch, inputs | {"sm_scale": sm_scale})


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("score", "scale"), [(777.0, 1.0), (-1000.0, 1.0), (1024.0, 1024.0)])
def test_paged(arch: str, score: float, scale: float) -> None:
    """Weights, where an fp32 result shows them."""
    case = xl_cases.make(
        "dtypes",
        "exact",
        num_heads=2,
        num_kv_heads=1,
        head_size=32,
        context_lens=(37, 5),
        dtype="float32",
        kv_layout="NHD",
    )
    inputs = xl_cases.inputs(case, 3)
    inputs["query"][:] = 0
    inputs["query"][..., :2] = 1
    keys = inputs["k_cache"]
    keys[..., 0] = score
    keys[..., 1] = -(np.arange(keys[..., 1].size) % 4).reshape(keys.shape[:-1])
    require(Subject("xl_paged_attention"), arch, inputs | {"scale": scale})
