"""attn_dist's lse: what large, tiny and infinite ones do, in the interpreter (sm_90a) and the emulator (sm_100f)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cupymla.ops.log2_scales import log2_scales, lse_scales
from cupymla.ops.mla_cases import sized
from cupymla.testing import compare
from cupymla.testing.operators import Array
from cupymla_lab.emulate import Settings
from cupymla_lab.emulated import emulated
from cupymla_lab.subjects import Subject

SUBJECT = Subject("attn_dist")


def require(arch: str, inputs: dict[str, Any]) -> Array:
    """The kernel's dist, which meets the accuracy criterion."""
    made = (
        emulated(arch, 2, seed=1)
        if arch == "sm_90a"
        else emulated(arch, 2, Settings("lazy", patience_seconds=20.0, races="hardware"))
    )
    with made as machine:
        results = machine.results(SUBJECT, inputs)
    compare.require(SUBJECT.reports(inputs, results))
    return results["dist"]


def exact_inputs(score: float, sm_scale: float = 1.0, lse_base: str = "e") -> dict[str, Any]:
    """Scores that are `score` less 0 to 3 in units of sm_scale, without any rounding."""
    inputs: dict[str, Any] = SUBJECT.cases.inputs(sized(16, 512, 64, 1, 64, "_lse", "options", selection="full"), 1)
    inputs["q"][:] = inputs["kv"][:] = 0
    inputs["q"][..., :2] = 1
    inputs["kv"][..., 0] = score
    inputs["kv"][..., 1] = -np.arange(len(inputs["kv"])) % 4 - 3
    inputs |= {"sm_scale": sm_scale, "lse_base": lse_base}
    return inputs


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100f"])
@pytest.mark.parametrize(
    ("score", "sm_scale"), [(1024.0, 1.0), (16384.0, 1.0), (2.0**19, 1.0), (16384.0, 1 / 32), (2.0**24, 1.0)]
)
def test_a_large_score_and_a_large_lse_lose_nothing_to_each_other(arch: str, score: float, sm_scale: float) -> None:
    """In natural units these differences are exact, so the criterion leaves no room: a kernel that takes them in others
    has to make up for what it rounds."""
    inputs = exact_inputs(score, sm_scale)
    inputs["lse"] = np.full_like(inputs["lse"], score * sm_scale + 3)
    require(arch, inputs)


SCALES = (1.0, -1.0, 0.0, 2.0**-140, 2.0**126, -(2.0**126))


# Each scale with both bases and on both targets; of every scale and base together the host is asked below.
@pytest.mark.compile
@pytest.mark.parametrize(
    ("sm_scale", "lse_base", "arch"),
    [
        (scale, base, ("sm_90a", "sm_100f")[(number + (base == "2")) % 2])
        for number, scale in enumerate(SCALES)
        for base in ("e", "2")
    ],
)
def test_every_lse_means_what_the_reference_says(arch: str, lse_base: str, sm_scale: float) -> None:
    """Infinite, NaN, huge and tiny ones, each in a query of its own: NaN or infinity would hide what others make."""
    values = [math.inf, -math.inf, math.nan, 1e30, -1e30, 3.3e38, -3.3e38, 1e-40, -1e-45, 0.0, 2.0**20]
    inputs = exact_inputs(1.0, sm_scale, lse_base)
    count = len(values)
    inputs["q"] = np.repeat(inputs["q"], count, axis=0)
    inputs["indices"] = np.repeat(inputs["indices"], count, axis=0)
    lse = np.array(values, np.float32)[:, None]
    inputs["lse"] = np.broadcast_to(lse, (count, inputs["q"].shape[1])).copy()
    require(arch, inputs)


@pytest.mark.parametrize("lse_base", ["e", "2"])
@pytest.mark.parametrize("sm_scale", [1.0, -0.37, 576**-0.5, 2.0**126, 2.0**-126, 2.0**-127, 2.0**-149, 2.0**-160, 0.0])
def test_scores_and_lse_are_scaled_alike(sm_scale: float, lse_base: str) -> None:
    """Both by log2(e), with the same error, however the former is rounded."""
    scale_log2, unit, rest = log2_scales(sm_scale, lse_base)
    assert scale_log2 == float(np.float32(sm_scale * math.log2(math.e)))
    of_lse = (unit + rest) * (1.0 if lse_base == "e" else math.log2(math.e))
    assert abs(of_lse / math.log2(math.e) - 1) <= 2.0**-24
    if abs(sm_scale) >= 2.0**-126:
        assert scale_log2 / sm_scale == pytest.approx(of_lse, rel=1e-15)
    # What comes out again is the inverse.
    assert (unit + rest) * sum(lse_scales(sm_scale, lse_base)[1:]) == pytest.approx(1, rel=1e-15)


@given(
    lse=st.floats(-(2.0**31), 2.0**31, width=32),
    sm_scale=st.floats(1e-6, 1e6),
    lse_base=st.sampled_from(["e", "2"]),
)
@example(lse=-1485911808.0, sm_scale=0.0721688, lse_base="e")
def test_what_makes_up_for_the_rounding_of_an_lse_is_a_float(lse: float, sm_scale: float, lse_base: str) -> None:
    """`log2_lse` in cuda/common/math.cuh, in exact arithmetic: masked weights are multiplied by the factor too."""
    scales = log2_scales(sm_scale, lse_base)
    rounded = float(np.float32(lse * scales.unit))
    if abs(rounded) < 2.0**30:
        assert abs(lse * scales.unit - rounded + lse * scales.unit_rest) < 120
