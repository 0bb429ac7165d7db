"""Whole kernels: ours and one of CUTLASS compute right results in every mode, and broken ones are found out."""

from __future__ import annotations

import ctypes
from pathlib import Path

import gemm
import ml_dtypes
import numpy as np
import pytest
import tutorials
from device import Kernel, Memory, Where

from cupymla.bench.processes import Processes
from cupymla.build import KernelSource, ptx
from cupymla.launch import Geometry
from cupymla_lab.emulate import EmulationError, Settings, mutation
from cupymla_lab.emulate.host import library
from cupymla_lab.emulate.settings import MODES, Check, Mode

pytestmark = pytest.mark.compile

HERE = str(Path(__file__).resolve().parent)
ALL: tuple[Check, ...] = ("tcgen05", "proxy", "init")

# Fences of the GEMM that order nothing: what is before the first synchronisation is an allocation, which is no
# asynchronous operation, and before the last one every load has been fenced off already.
ORDER_NOTHING = 3


class Record(ctypes.Structure):
    """`Parameters` of weight_stationary.cu."""

    _fields_ = (("a", ctypes.c_uint64), ("b", ctypes.c_uint64), ("d", ctypes.c_uint64))


@pytest.fixture(scope="module")
def runners() -> dict[Where, gemm.Runner]:
    return {}


def runner(runners: dict[Where, gemm.Runner], where: Where) -> gemm.Runner:
    if where not in runners:
        runners[where] = gemm.Runner(where)
    return runners[where]


@pytest.mark.parametrize("mode", MODES)
def test_the_gemm_is_right_in_every_mode_with_every_check(
    mode: Mode, where: Where, runners: dict[Where, gemm.Runner]
) -> None:
    for seed in range(3):
        assert runner(runners, where).run(Settings(mode, seed, ALL)) == 0


@pytest.mark.slow
@pytest.mark.skipif(not library.available(), reason="needs a C++ compiler on x86-64")
@pytest.mark.parametrize("mode", ["lazy", "random"])
def test_the_gemm_is_right_with_the_model_as_a_gpu_has_it(mode: Mode) -> None:
    """The model's PTX, recompiled like the kernel's: what NVRTC makes of it, with threads that share products.

    One CTA with three tiles, and six steps through a ring of fewer. In mode eager products have that model in
    `test_mma.py`.
    """
    assert gemm.Runner("host", 128, 192, 128, 1, model="ptx").run(Settings(mode, 1, ALL)) == 0


def test_a_wait_that_is_missing_shows_in_mode_lazy_and_not_in_eager(
    where: Where, runners: dict[Where, gemm.Runner]
) -> None:
    """The reason for the modes: executed in place, an MMA is always done when somebody reads its result."""
    loaded = runner(runners, where)
    (site,) = [site for site in loaded.kernel.sites if "wait_group.read" in site.text]
    assert loaded.run(Settings("eager", removed=site.number)) == 0 or where == "gpu"
    assert loaded.run(Settings("lazy", removed=site.number)) != 0


def test_a_missing_commit_is_a_message_not_a_hang(where: Where, runners: dict[Where, gemm.Runner]) -> None:
    loaded = runner(runners, where)
    site = next(site for site in loaded.kernel.sites if site.text.startswith("tcgen05.commit"))
    with pytest.raises(EmulationError, match="nothing moves any more") as caught:
        loaded.run(Settings("lazy", removed=site.number, patience_seconds=0.5))
    assert caught.value.line > 0


@pytest.mark.parametrize(("rows", "mode"), [(32, "eager"), (64, "lazy"), (128, "random")])
def test_weight_stationary_products_by_the_librarys_functions(rows: int, mode: Mode, where: Where) -> None:
    """A in shared memory and A in Tensor Memory, a copy for each group of lanes that has columns of D."""
    defines = (("ROWS", rows),)
    source = KernelSource("weight_stationary.cu", "weight_stationary", arch="sm_100f", root=HERE, defines=defines)
    loaded = Kernel(ptx(source), "weight_stationary.ptx", where)
    rng = np.random.default_rng(rows)
    a, b = (rng.integers(-3, 4, (count, 64)).astype(ml_dtypes.bfloat16) for count in (rows, 128))
    memory = [Memory(array, where) for array in (a, b, np.full((2, rows, 128), np.nan, np.float32))]
    try:
        record = Record(*(part.pointer for part in memory))
        loaded.launch(Geometry((1, 1, 1), 128, 2 * 64 * (rows + 128) + 1024), [record], Settings(mode, 1, ALL))
        wanted = a.astype(np.float32) @ b.astype(np.float32).T
        np.testing.assert_array_equal(memory[2].read(), np.stack([wanted, wanted]))
    finally:
        for part in memory:
            part.free()


@pytest.mark.slow
def test_every_removal_that_can_misbehave_is_caught(where: Where, runners: dict[Where, gemm.Runner]) -> None:
    """At least 95% of waits, fences, commits, expect_tx, arrivals and barriers are missed when they are gone."""
    loaded = runner(runners, where)
    # A mutant may fault, which leaves a process without its GPU.
    with Processes(gemm.run_on_gpu, 1, 60.0, (EmulationError,)) as processes:
        run = loaded.run if where == "host" else processes.result
        total = sum(site.mutation in mutation.KINDS for site in loaded.kernel.sites)
        left = mutation.uncaught(run, loaded.kernel.sites)
    caught = total - len(left)
    assert total >= 25 and caught >= 0.95 * (total - ORDER_NOTHING), [site.text for site in left]
    assert all(site.mutation == "fence" for site in left)


@pytest.mark.slow
@pytest.mark.skipif(not tutorials.can_compile(), reason="needs nvcc and the package nvidia-cutlass")
def test_a_gemm_that_nvidia_wrote_equals_numpys(where: Where, tmp_path: Path) -> None:
    """The last of CuTe's tutorials has what the others show: copies to sixteen CTAs, products of pairs, TMA both ways.

    It and CUTLASS's GEMM of block scales (`cutlass_nvfp4.py`) are run at full size by hand.
    """
    tutorial = tutorials.TUTORIALS[-1]
    runner = tutorials.Runner(tutorial, tutorials.compile_ptx(tutorial, tmp_path).read_text(), where, k=64)
    for mode in MODES:
        assert runner.run(Settings(mode, 1, ALL[1:2], stalls=False)) == 0
