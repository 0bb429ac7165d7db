"""`raw_module`: a kernel on its own, and the script that shows its use."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from variants_kit import PLANNED, on_first_use, sources

import cupymla
from cupymla import InputError, UnsupportedError, build, driver
from cupymla.ops import registry
from cupymla.ops.sparse_mla_fwd import cuda as binding
from cupymla.ops.sparse_mla_fwd import plan

EXAMPLES = Path(__file__).resolve().parent.parent / "scripts" / "examples"


@pytest.fixture
def no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything of raw_module but CuPy's own loading, which needs a driver."""
    monkeypatch.setattr(build, "raw_module", lambda cubin: cubin)


@pytest.mark.compile
def test_facts_and_record_are_those_of_the_kernel(no_module: None) -> None:
    kernel = cupymla.raw_module("sparse_mla_fwd", arch="sm_90a", d_qk=512, dtype="float16")
    assert kernel.entry == "sparse_mla_fwd"
    assert kernel.facts["threads"] % 128 == 0
    assert kernel.facts["parameter_bytes"] == ctypes.sizeof(kernel.parameters)
    assert kernel.parameter_sizes == (128, ctypes.sizeof(binding.Parameters))


VARIANTS: dict[str, dict[str, object]] = {
    "sparse_mla_fwd": {"d_qk": 512, "dtype": "float16"},
    "attn_dist": {"d_qk": 512},
    "xl_paged_attention": {"head_size": 64},
    "sparse_mla_decode": {"heads": 32},
}
"""Of those that other tests compile, where the one by default is not."""


@pytest.mark.compile
@pytest.mark.parametrize("entry", PLANNED, ids=lambda entry: entry.name)
def test_every_operator_has_a_raw_kernel(no_module: None, entry: registry.OperatorEntry) -> None:
    kernel = cupymla.raw_module(entry.name, arch=entry.targets[0], **VARIANTS.get(entry.name, {}))
    assert ctypes.sizeof(kernel.parameters) == kernel.facts["parameter_bytes"]


@pytest.mark.parametrize("entry", PLANNED, ids=lambda entry: entry.name)
def test_the_kernel_by_default_is_one_that_calls_may_want(
    entry: registry.OperatorEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[build.KernelSource] = []

    def kept(source: build.KernelSource) -> object:
        asked.append(source)
        return SimpleNamespace(facts={}, parameters=())

    monkeypatch.setattr(build, "cubin", kept)
    monkeypatch.setattr(build, "raw_module", lambda cubin: None)
    cupymla.raw_module(entry.name, arch=entry.targets[0])
    assert asked[0] in (*sources(entry.module), *on_first_use(entry.module))


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("operator", lambda: cupymla.raw_module("nothing", arch="sm_90a")),
        ("arch", lambda: cupymla.raw_module("sparse_mla_fwd", arch="sm_91")),
        ("d_qk", lambda: cupymla.raw_module("sparse_mla_fwd", arch="sm_90a", d_qk=128)),
        ("dtype", lambda: cupymla.raw_module("sparse_mla_fwd", arch="sm_90a", dtype="float32")),
        ("variant", lambda: cupymla.raw_module("sparse_mla_fwd", arch="sm_90a", tile=64)),
    ],
)
def test_wrong_arguments_are_named(argument: str, call: object) -> None:
    with pytest.raises(InputError) as caught:
        call()  # type: ignore[operator]
    assert caught.value.argument == argument


@pytest.mark.compile
def test_work_assignment_gives_the_grid_and_its_fields(no_module: None) -> None:
    kernel = cupymla.raw_module("nvfp4_gemv", arch="sm_90a", n=1)
    assigned = kernel.assign_work(132, m=7168, n=1, k=2048, batches=4)
    assert assigned.ctas == 132
    assert assigned.fields.keys() <= {field[0] for field in kernel.parameters._fields_}
    assert assigned.fields["parts"] * 4 == assigned.fields["items"] == 132
    assert assigned.fields["part_rows"] * assigned.fields["parts"] + assigned.fields["long_parts"] == 7168
    kernel.parameters(**assigned.fields)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("argument", "multiprocessors", "sizes"),
    [
        ("multiprocessors", 0, {"m": 8, "n": 1, "k": 64}),
        ("m", 132, {"m": 8.0, "n": 1, "k": 64}),
        ("m", 132, {"m": -1, "n": 1, "k": 64}),
        ("sizes", 132, {"m": 8, "n": 1}),
        ("sizes", 132, {"m": 8, "n": 1, "k": 64, "l": 1}),
        ("n", 132, {"m": 8, "n": 9, "k": 64}),
        ("k", 132, {"m": 8, "n": 1, "k": 63}),
    ],
)
def test_wrong_sizes_are_named(no_module: None, argument: str, multiprocessors: int, sizes: dict[str, int]) -> None:
    with pytest.raises(InputError) as caught:
        cupymla.raw_module("nvfp4_gemv", arch="sm_90a", n=1).assign_work(multiprocessors, **sizes)
    assert caught.value.argument == argument


@pytest.mark.compile
def test_a_grid_that_cannot_be_is_refused(no_module: None) -> None:
    kernel = cupymla.raw_module("attn_dist", arch="sm_90a", d_qk=512)
    with pytest.raises(UnsupportedError, match="up to 2147483647"):
        kernel.assign_work(132, s_q=2**33, topk=64)


@pytest.mark.compile
def test_an_operator_without_a_work_assignment_by_sizes_says_so(no_module: None) -> None:
    kernel = cupymla.raw_module("sparse_mla_fwd", arch="sm_90a", d_qk=512, heads=32, split=True)
    with pytest.raises(UnsupportedError, match="split=False"):
        kernel.assign_work(132, s_q=1, h_q=1)
    with pytest.raises(InputError, match="False with heads=64"):
        cupymla.raw_module("sparse_mla_fwd", arch="sm_90a", split=True)
    assert cupymla.raw_module("sparse_mla_fwd", arch="sm_90a", stage="order").assign_work(132, s_q=7, h_q=1).ctas == 7
    kernel = cupymla.raw_module("sparse_mla_bwd", arch="sm_90a")
    with pytest.raises(UnsupportedError, match=r"plan\.py"):
        kernel.assign_work(132, s_q=1)


def test_target_without_a_kernel() -> None:
    with pytest.raises(UnsupportedError, match="sm_80"):
        cupymla.raw_module("sparse_mla_fwd", arch="sm_80")


@pytest.mark.skipif(driver.available(), reason="there is a GPU to take the target from")
def test_without_a_gpu_the_target_has_to_be_named() -> None:
    with pytest.raises(UnsupportedError, match="arch="):
        cupymla.raw_module("sparse_mla_fwd")


SCRIPTS = {
    "standalone_launch": "for sm_90a, and CuPy finds no GPU of compute capability 9.0",
    "standalone_gemv": "for sm_80 and later, and CuPy finds no GPU of compute capability 8.0",
}
"""Each with what it says where there is no GPU."""


@pytest.mark.skipif(driver.available(), reason="there is a GPU")
@pytest.mark.parametrize("script", SCRIPTS)
def test_standalone_script_says_that_it_needs_a_gpu(script: str) -> None:
    """In a checkout where nothing is installed, too."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(EXAMPLES / f"{script}.py")]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 1
    assert run.stderr == f"this launches a kernel {SCRIPTS[script]}\n"


def test_every_variant_is_a_source() -> None:
    sources = plan.sources("sm_90a")
    assert len(set(sources)) == len(sources) == 40 + 1
    blackwell = plan.sources("sm_100f")
    assert len(set(blackwell)) == len(blackwell) == 32
    assert plan.sources() == (*sources, *blackwell)
    assert plan.sources("sm_80") == ()
