"""Calls of two kernels overlap them: the second is a dependent launch that waits for the first, and the interpreter
sees where it does not. That their results are right is for the tests of the functions.

Compiles to PTX, needs no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

import cupymla
from cupymla import build, driver
from cupymla.errors import CupymlaError
from cupymla.launch import Geometry
from cupymla.ops.invert_indices import plan as inversion_plan
from cupymla.ops.nvfp4_gemv import plan as gemv_plan
from cupymla.ops.paged_indexer_topk import plan as paged_plan
from cupymla.ops.sparse_mla_decode import plan as decode_plan
from cupymla.ops.xl_paged_attention import matrix_bd
from cupymla.ops.xl_paged_attention import plan as xl_plan
from cupymla.tensormap import TileMap
from cupymla_lab.emulated import Emulated, Kernel, emulated

pytestmark = pytest.mark.compile

BFLOAT16 = ml_dtypes.bfloat16
X = np.arange(64, dtype=np.float32).reshape(2, 32)
QUERY, TABLE = np.ones((2, 1, 32), np.float32), np.ones((3, 1, 32), np.float32)
CALLS: Mapping[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "quantize_nvfp4": (cupymla.quantize_nvfp4, {"x": X, "global_scale": "amax"}),
    "matrix_bd": (
        matrix_bd,
        {"query": QUERY, "pos_emb": TABLE, "context_lens": np.array([3, 2], np.int32), "max_context": 3},
    ),
    "paged_indexer_topk": (
        cupymla.paged_indexer_topk,
        {
            **{"q": np.ones((1, 1, 3, 64), BFLOAT16), "k_cache": np.ones((2, 8, 64), BFLOAT16), "topk": 3},
            **{"weights": np.ones((1, 1, 3), np.float32), "block_tables": np.ones((1, 2), np.int32)},
            "context_lens": np.array([9], np.int32),
        },
    ),
    # Twelve blocks of entries for two multiprocessors: each has a share of them.
    "sparse_mla_decode": (
        cupymla.sparse_mla_decode,
        {
            **{"q": np.ones((1, 1, 32, 576), BFLOAT16), "k_cache": np.zeros((2, 8, 656), np.uint8)},
            **{"indices": np.ones((1, 1, 768), np.int32), "cache_format": "v32_fp8"},
        },
    ),
    "invert_indices": (cupymla.invert_indices, {"indices": np.ones((2, 3), np.int32), "s_kv": 4}),
}


def launch(machine: Emulated, name: str) -> list[bool]:
    """Make a call; which of its launches were dependent."""
    function, arguments = CALLS[name]
    machine.call(function, **machine.arguments(arguments))
    return [geometry.pdl for geometry in machine.launches]


HOPPER_ALONE = {"paged_indexer_topk", "sparse_mla_decode", "invert_indices"}


@pytest.mark.parametrize(("arch", "second"), [("sm_90a", True), ("sm_80", False)])
@pytest.mark.parametrize("name", CALLS)
def test_the_second_kernel_overlaps_from_hopper_on(name: str, arch: str, second: bool) -> None:
    if name in HOPPER_ALONE and not second:
        return
    with emulated(arch, 2) as machine:
        assert launch(machine, name) == [False, second]


@pytest.mark.parametrize("name", CALLS)
def test_drivers_without_it_get_ordinary_launches(name: str) -> None:
    with emulated("sm_90a", 2) as machine, mock.patch.object(driver, "has_dependent_launch", lambda index: False):
        assert launch(machine, name) == [False, False]


@pytest.mark.parametrize("name", CALLS)
def test_a_wait_that_is_missing_is_noticed(name: str) -> None:
    with emulated("sm_90a", 2) as machine:
        execute = machine.execute

        def mutated(
            kernel: Kernel, geometry: Geometry, parameters: Sequence[bytes], maps: Mapping[int, TileMap]
        ) -> None:
            waits = [site for site in kernel.host.translation.sites if site.text.startswith("griddepcontrol.wait")]
            assert len(waits) == len(machine.launches)
            removed = waits[0].number if waits else 0
            machine.settings = replace(machine.settings, removed=removed)
            return execute(kernel, geometry, parameters, maps)

        with (
            mock.patch.object(machine, "execute", mutated),
            pytest.raises(CupymlaError, match=r"before its griddepcontrol\.wait"),
        ):
            launch(machine, name)
        assert len(machine.launches) == 1


@pytest.mark.parametrize(
    "source",
    [
        next(s for s in gemv_plan.sources() if s.path.endswith("/quantize.cu") and s.arch == "sm_90"),
        xl_plan.auxiliary("spread_bias", "sm_90", query=32),
        *(s for s in paged_plan.sources("sm_90a") if s.entry == "paged_indexer_topk"),
        *(s for s in decode_plan.sources("sm_90a") if s.entry == decode_plan.MERGE),
        *(s for s in inversion_plan.sources("sm_90a") if s.entry == "invert_indices"),
    ],
    ids=str,
)
def test_what_the_first_kernel_writes_is_not_read_past_the_cache(source: build.KernelSource) -> None:
    """ld.global.nc is for memory that nothing writes while the grid runs, its wait included."""
    assert "ld.global.nc" not in build.ptx(source)
