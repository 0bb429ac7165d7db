"""Kernels of the fp8 caches: records that are the kernels', targets, axes of rows."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupymla import arch, build
from cupymla.errors import InputError, UnsupportedError
from cupymla.ops.mla_cache import cuda, plan, records

FOLDER = Path(__file__).parents[2] / "cuda/mla_cache/sm80"
PARAMS = "".join((FOLDER / name).read_text() for name in ("params.cuh", "latent_params.cuh"))


@pytest.mark.parametrize("name", re.findall(r"struct (\w+) \{", PARAMS))
def test_the_record_is_the_kernels(name: str) -> None:
    text = PARAMS
    begin = text.index(f"struct {name} {{")
    body = re.sub(r"//.*", "", text[begin : text.index("};", begin)])
    declared = [
        field.partition("[")[0]
        for line in re.findall(r"(?:const )?(?:u?int\d+_t|float)\*? ([^;]+);", body)
        for field in re.split(r",\s*", line.strip())
    ]
    assert declared == [field for field, *_ in getattr(records, name)._fields_]


def test_a_kernel_of_sm_90_serves_the_target_with_an_a() -> None:
    assert plan.kernel("quantize_fp8", arch.named("sm_90a"), "quantize_fp8").arch == "sm_90"
    assert plan.kernel("quantize_fp8", arch.named("sm_89"), "quantize_fp8").arch == "sm_80"


def test_the_family_keeps_its_budget() -> None:
    assert len(plan.sources()) <= 18


AXIS = st.tuples(st.integers(1, 4), st.integers(0, 2), st.integers(0, 2))


@given(st.lists(AXIS, max_size=3), st.booleans())
def test_merged_axes_are_the_same_rows(axes: list[tuple[int, int, int]], nested: bool) -> None:
    """In the same order, at the same offsets in each array."""
    extents = tuple(extent for extent, *_ in axes)
    strides = []
    for number in (1, 2):
        steps, reach = [], 1
        for extent, *gaps in reversed(axes):
            steps.append(reach + gaps[number - 1] * (not nested))
            reach = steps[-1] * extent
        strides.append(tuple(reversed(steps)))
    merged, stepped = plan.merged(extents, *strides)
    for before, after in zip(strides, stepped, strict=True):
        old = [sum(np.multiply(place, before)) for place in np.ndindex(*extents)]
        new = [sum(np.multiply(place, after)) for place in np.ndindex(*merged)]
        assert old == new
    if nested:
        assert merged[:2] == (1, 1)


def test_what_no_kernel_serves_is_refused() -> None:
    class Old:
        name, capability = "sm_75", (7, 5)

    with pytest.raises(UnsupportedError, match="gather"):
        plan.kernel("quantize_fp8", Old(), "gather")  # type: ignore[arg-type]


@pytest.mark.compile
@pytest.mark.parametrize("kernel", plan.KERNELS)
def test_a_kernel_by_itself_has_its_own_record(kernel: str) -> None:
    raw = pytest.importorskip("cupymla.raw")
    pytest.importorskip("cupy", reason="compiling goes through CuPy's NVRTC bindings")
    source = plan.variant(arch.named("sm_90"), kernel_name=kernel)
    record = raw._record(cuda, source)
    assert build.cubin(source).facts["parameter_bytes"] == ctypes.sizeof(record)
    with pytest.raises(InputError, match="kernel_name"):
        plan.variant(arch.named("sm_90"), kernel_name=kernel + "_more")
