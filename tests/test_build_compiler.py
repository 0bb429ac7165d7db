"""Both compilers take the same sources, and what they complain about reaches the reader with file and line."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from build_kit import BACKENDS, SPILLING, private, python, written

from cupymla.build import compiler
from cupymla.build.compiler import Toolchain
from cupymla.build.cubin import Image, Resources
from cupymla.errors import CompileError, InputError, UnsupportedError

pytest.importorskip("cupy", reason="compiling goes through CuPy's NVRTC bindings")

EMPTY = 'extern "C" __global__ void k() {}\n'

REGISTERS_UNKNOWN = """\
extern "C" __global__ void k(float* x) {
  if (threadIdx.x >= 128) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
  x[threadIdx.x] = 1;
}
"""

ACCUMULATOR_TOUCHED = """\
extern "C" __global__ void __launch_bounds__(128) k(float* x, unsigned long long a, unsigned long long b) {
  float d[4] = {x[0], x[1], x[2], x[3]};
  asm volatile("wgmma.fence.sync.aligned;");
  for (int i = 0; i < 4; ++i) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, 1, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %4, %5, p, 1, 1, 0, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b + i));
    d[0] += 1.0f;
  }
  asm volatile("wgmma.commit_group.sync.aligned;");
  asm volatile("wgmma.wait_group.sync.aligned 0;");
  for (int i = 0; i < 4; ++i) x[threadIdx.x * 4 + i] = d[i];
}
"""

LOG = """\
ptxas info    : 37 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
ptxas         .     40 bytes stack frame, 44 bytes spill stores, 48 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 40 bytes cumulative stack size, 128 bytes smem
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
"""


@pytest.fixture(autouse=True)
def _private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private(tmp_path, monkeypatch)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CUPYMLA_COMPILER", request.param)
    return str(request.param)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_90a", "sm_100f"])
def test_every_target_compiles_without_a_gpu(tmp_path: Path, backend: str, arch: str) -> None:
    compiled = compiler.compile(written(tmp_path, "k.cu", EMPTY, "k", arch=arch))
    assert Image(compiled.data).kernels == ("k",)


def test_the_target_is_exact(tmp_path: Path, backend: str) -> None:
    # Only the "a" targets have this instruction.
    text = 'extern "C" __global__ void k() { asm volatile("wgmma.fence.sync.aligned;"); }\n'
    assert compiler.compile(written(tmp_path, "k.cu", text, "k", arch="sm_90a")).data
    with pytest.raises(CompileError, match="wgmma"):
        compiler.compile(written(tmp_path, "k.cu", text, "k", arch="sm_90"))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100f"])
def test_ptx_alone_is_what_a_whole_compilation_assembles(tmp_path: Path, backend: str, arch: str) -> None:
    kernel = written(tmp_path, "k.cu", SPILLING, "spilling", arch=arch)
    assert compiler.ptx(kernel) == compiler.compile(kernel).ptx


def test_definitions_reach_the_source(tmp_path: Path, backend: str) -> None:
    text = 'extern "C" __global__ void k() { static_assert(N == 3 && sizeof(WORD) == 2, ""); }\n'
    assert compiler.compile(written(tmp_path, "k.cu", text, "k", defines=(("N", 3), ("WORD", "unsigned short")))).data


def test_errors_name_the_real_file_and_line(tmp_path: Path, backend: str) -> None:
    (tmp_path / "part.cuh").write_text("#pragma once\n\n\n__device__ int broken = undeclared;\n")
    kernel = written(tmp_path, "k.cu", '#include "part.cuh"\n' + EMPTY, "k")
    with pytest.raises(CompileError) as caught:
        compiler.compile(kernel)
    assert f"{tmp_path}/part.cuh(4)" in caught.value.log
    assert "undeclared" in caught.value.log
    assert caught.value.source == f"{tmp_path}/k.cu"


def test_a_mistake_in_our_files_is_an_error(tmp_path: Path, backend: str) -> None:
    (tmp_path / "part.cuh").write_text("__device__ inline int part() {\n  int unused;\n  return 1;\n}\n")
    kernel = written(tmp_path, "k.cu", '#include "part.cuh"\n' + EMPTY, "k")
    with pytest.raises(CompileError, match=r"part\.cuh\(2\): .*unused"):
        compiler.compile(kernel)


def test_a_warning_in_cutlass_is_not(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Below our own root, as the submodule is.
    folder = tmp_path / "third_party" / "include"
    (folder / "cutlass").mkdir(parents=True)
    (folder / "cute").mkdir()
    (folder / "cute" / "part.hpp").write_text("__device__ inline int part() {\n  int unused;\n  return 1;\n}\n")
    monkeypatch.setenv("CUPYMLA_CUTLASS", str(folder))
    compiled = compiler.compile(written(tmp_path, "k.cu", "#include <cute/part.hpp>\n" + EMPTY, "k"))
    assert "unused" in compiled.log


@pytest.mark.parametrize(
    ("text", "complaint"),
    [(REGISTERS_UNKNOWN, "setmaxnreg"), (ACCUMULATOR_TOUCHED, "serialized")],
    ids=["setmaxnreg-ignored", "wgmma-serialised"],
)
def test_a_pipeline_that_ptxas_gave_up_on_is_an_error(tmp_path: Path, backend: str, text: str, complaint: str) -> None:
    with pytest.raises(CompileError, match=rf"compiles with defects:(.|\n)*{complaint}"):
        compiler.compile(written(tmp_path, "k.cu", text, "k"))


def test_spills_are_counted(tmp_path: Path, backend: str) -> None:
    resources = compiler.compile(written(tmp_path, "k.cu", SPILLING, "spilling")).resources
    assert resources.spills
    assert resources.spill_store_bytes > 0
    assert resources.spill_load_bytes > 0
    assert resources.stack_bytes > 0
    assert resources.registers == 32


def test_spills_of_a_callee_count(tmp_path: Path, backend: str) -> None:
    text = (
        "__device__ __noinline__ float callee(float* x) {\n"
        "  volatile float local[8];\n  for (int i = 0; i < 8; i++) local[i] = x[i];\n"
        "  return local[threadIdx.x & 7];\n}\n"
        'extern "C" __global__ void k(float* x) { x[0] = callee(x); }\n'
    )
    assert compiler.compile(written(tmp_path, "k.cu", text, "k")).resources.stack_bytes >= 32


@pytest.mark.parametrize(
    ("entry", "expected"),
    [("first", Resources(32, 44, 48, 40, 128)), ("second", Resources(168, 44, 48, 40, 0))],
)
def test_log_is_read_per_kernel(entry: str, expected: Resources) -> None:
    # ptxas lists frames by function, so what a kernel calls cannot be told from what another kernel is: all count.
    assert compiler.resources(LOG, entry) == expected


def test_cuda_and_cccl_headers_are_found(tmp_path: Path, backend: str) -> None:
    text = "#include <cuda/std/cstdint>\n#include <cuda_bf16.h>\n" + EMPTY
    assert compiler.compile(written(tmp_path, "k.cu", text, "k")).data


def test_options_hold_no_path(backend: str) -> None:
    options = compiler.flags(compiler.toolchain().backend, "sm_90a")
    assert options
    assert not [option for option in options if "/" in option or option.startswith("-I")]


def test_version_is_the_full_one(backend: str) -> None:
    chain = compiler.toolchain()
    assert chain.backend == backend
    assert len(chain.version.split(".")) == 3
    assert chain.release >= (12, 9)


@pytest.mark.parametrize(("arch", "version"), [("sm_100f", "12.8.93"), ("sm_90a", "11.8.89")])
def test_a_compiler_that_is_too_old_is_named(arch: str, version: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"{arch} is not supported on nvrtc {version}"):
        compiler.check_arch(arch, Toolchain("nvrtc", version, ""))


def test_an_unknown_target_is_refused(tmp_path: Path, backend: str) -> None:
    with pytest.raises(InputError, match="sm_90b"):
        compiler.compile(written(tmp_path, "k.cu", EMPTY, "k", arch="sm_90b"))


def test_missing_cupy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    compiler._nvrtc_toolchain.cache_clear()
    with pytest.raises(CompileError, match=r"pip install 'cupymla\[cuda12\]'.*CUPYMLA_COMPILER=nvcc"):
        compiler.toolchain()


def test_cupy_without_nvrtc_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install cupy-cuda12x` brings the bindings alone, which load the library when they are first used."""

    def create(*arguments: object) -> None:
        raise RuntimeError('Failure finding "libnvrtc.so.12"\nmore about it')

    monkeypatch.setattr(compiler, "_nvrtc", lambda: SimpleNamespace(createProgram=create))
    compiler._nvrtc_toolchain.cache_clear()
    with pytest.raises(
        CompileError, match=r"cannot be loaded: pip install 'cupymla\[cuda12\]'.*libnvrtc.so.12"
    ) as error:
        compiler.toolchain()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("program", ["/nonexistent/nvcc", "false", "true"])
def test_an_nvcc_that_is_none_is_refused(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYMLA_COMPILER", "nvcc")
    monkeypatch.setenv("CUPYMLA_NVCC", program)
    with pytest.raises(CompileError, match="nvcc"):
        compiler.toolchain()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
def test_nvcc_without_a_temporary_folder_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYMLA_COMPILER", "nvcc")
    kernel = written(tmp_path, "k.cu", EMPTY, "k")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(CompileError, match="set TMPDIR"):
        compiler.compile(kernel)


def test_an_unknown_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYMLA_COMPILER", "gcc")
    with pytest.raises(InputError, match="CUPYMLA_COMPILER"):
        compiler.toolchain()


def test_a_slow_compilation_is_announced_on_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiler, "SAY_AFTER_SECONDS", 0.0)
    # Long enough for the line to come before the end.
    text = EMPTY + "__device__ int f() { return 0" + " + 1" * 40000 + "; }\n"
    compiler.compile(written(tmp_path, "k.cu", text, "k", defines=(("N", 3),)))
    said = capfd.readouterr().err
    assert said.startswith("cupymla: compiling k N=3 for sm_90a ... ")
    assert said.count("\n") == 1
    assert said.endswith(" s\n")


@pytest.mark.parametrize("case", ["quiet", "fast"])
def test_nothing_is_said_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    if case == "quiet":
        monkeypatch.setattr(compiler, "SAY_AFTER_SECONDS", 0.0)
        monkeypatch.setenv("CUPYMLA_QUIET", "1")
    else:
        monkeypatch.setattr(compiler, "SAY_AFTER_SECONDS", 60.0)
    compiler.compile(written(tmp_path, "k.cu", EMPTY, "k"))
    assert capfd.readouterr().err == ""


TOOLCHAIN = """\
import os
import shutil
from cupymla.build import compiler
print(compiler.toolchain().backend, os.environ.get("CUPY_CACHE_DIR"))
"""


@pytest.mark.parametrize("below", ["file", "absent"])
def test_a_home_where_nothing_can_be_made_stops_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    """CuPy cannot be imported where it cannot make its cache folder, and only its NVRTC bindings are wanted."""
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    (tmp_path / "file").touch()
    done = python(TOOLCHAIN, HOME=str(tmp_path / below / "home"), TMPDIR=str(tmp_path))
    assert not (tmp_path / "absent").exists()
    assert done.stdout.split() == ["nvrtc", str(tmp_path / f"cupymla-{os.getuid()}" / "cupy")], done.stderr


def test_a_cache_that_the_user_names_for_cupy_is_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    named = str(tmp_path / "named")
    done = python(TOOLCHAIN, HOME=str(tmp_path / "file" / "home"), CUPY_CACHE_DIR=named)
    assert done.stdout.split() == ["nvrtc", named], done.stderr
    done = python(TOOLCHAIN, CUPY_CACHE_DIR=str(tmp_path / "file" / "named"))
    assert "CompileError" in done.stderr
    assert "set CUPY_CACHE_DIR" in done.stderr
