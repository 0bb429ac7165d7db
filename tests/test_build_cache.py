"""A kernel is compiled once, by whoever comes first, and nothing that happens to the disk changes what a call gets."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from build_kit import PART, SPILLING, again, plain, private, written
from threads_kit import in_threads

from cupymla import build
from cupymla.build import KernelSource, cache, compiler
from cupymla.errors import CompileError, InputError

pytest.importorskip("cupy", reason="compiling goes through CuPy's NVRTC bindings")

COMPILE = (
    "import sys; from cupymla.build import KernelSource, cubin\n"
    "made = cubin(KernelSource('plain.cu', 'plain', root=sys.argv[1])); print(made.cached, made.path)"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return private(tmp_path, monkeypatch)


@pytest.fixture
def kernel(tmp_path: Path) -> KernelSource:
    return plain(tmp_path / "src")


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[KernelSource]:
    """Every source that reaches the compiler."""
    seen: list[KernelSource] = []
    original = compiler.compile

    def counted(source: KernelSource) -> compiler.Compiled:
        seen.append(source)
        return original(source)

    monkeypatch.setattr(compiler, "compile", counted)
    return seen


def record(path: Path | None) -> Path:
    assert path is not None
    return path.with_suffix(".json")


# Hits and misses -----------------------------------------------------------------------------------------------


def test_second_process_finds_what_the_first_compiled(kernel: KernelSource, compilations: list[KernelSource]) -> None:
    first, second = build.cubin(kernel), again(kernel)
    assert len(compilations) == 1
    assert (first.cached, second.cached) == (False, True)
    assert first.path == second.path
    for name in ("data", "entry", "arch", "facts", "parameters", "resources", "log", "toolchain"):
        assert getattr(first, name) == getattr(second, name), name


def test_one_process_asks_the_disk_once(kernel: KernelSource) -> None:
    assert build.cubin(kernel) is build.cubin(kernel)


def test_layout_is_arch_then_entry_and_key(kernel: KernelSource, folder: Path) -> None:
    path = build.cubin(kernel).path
    assert path is not None
    assert path.parent == folder / "sm_90a"
    assert path.name.startswith("plain-")
    assert len(path.stem) == len("plain-") + 64
    assert sorted(file.suffix for file in path.parent.iterdir()) == [".cubin", ".gz", ".json"]


def test_a_moved_checkout_still_hits(tmp_path: Path, compilations: list[KernelSource]) -> None:
    first = build.cubin(plain(tmp_path / "here"))
    second = build.cubin(plain(tmp_path / "there"))
    assert len(compilations) == 1
    assert first.path == second.path


def test_a_header_edit_misses(kernel: KernelSource, tmp_path: Path, compilations: list[KernelSource]) -> None:
    first = build.cubin(kernel)
    (tmp_path / "src" / "part.cuh").write_text(PART.replace("1.0f", "2.25f"))
    second = again(kernel)
    assert len(compilations) == 2
    assert first.path != second.path
    assert first.data != second.data


@pytest.mark.parametrize("field", ["version", "headers"])
def test_another_toolchain_misses(kernel: KernelSource, field: str) -> None:
    content, chain = build.content_hash(kernel), compiler.toolchain()
    values = {"backend": chain.backend, "version": chain.version, "headers": chain.headers, field: "0.0"}
    assert cache.key(kernel, content, compiler.Toolchain(**values)) != cache.key(kernel, content, chain)  # type: ignore[arg-type]


def test_other_options_miss(kernel: KernelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    content, chain = build.content_hash(kernel), compiler.toolchain()
    before = cache.key(kernel, content, chain)
    monkeypatch.setattr(compiler, "FLAGS", compiler.FLAGS[:-1])
    assert cache.key(kernel, content, chain) != before


def test_a_source_edited_while_it_compiles_is_not_kept(
    kernel: KernelSource, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = compiler.compile

    def edited(source: KernelSource) -> compiler.Compiled:
        (tmp_path / "src" / "part.cuh").write_text(PART + "// edited meanwhile\n")
        return original(source)

    monkeypatch.setattr(compiler, "compile", edited)
    assert build.cubin(kernel).path is None
    assert not list(folder.rglob("*.cubin"))


def test_a_wrong_entry_is_refused_and_not_kept(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(CompileError, match="has no kernel 'wrong'; its kernels: right"):
        build.cubin(written(tmp_path, "k.cu", 'extern "C" __global__ void right() {}\n', "wrong"))
    assert not list(folder.rglob("*.cubin"))


def test_a_prepared_cache_serves_a_machine_without_a_compiler(
    kernel: KernelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = build.cubin(kernel)

    def missing() -> compiler.Toolchain:
        raise CompileError("NVRTC", "is missing")

    monkeypatch.setattr(compiler, "toolchain", missing)
    assert again(kernel).data == made.data
    (tmp_path / "src" / "part.cuh").write_text(PART + "// edited\n")
    with pytest.raises(CompileError, match="is missing"):
        again(kernel)


# Damage --------------------------------------------------------------------------------------------------------


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _other_record(**change: Any) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        file = record(path)
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))

    return damage


def _folder(path: Path) -> None:
    record(path).unlink()
    record(path).mkdir()


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "cubin truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "cubin empty": lambda path: path.write_bytes(b""),
    "one bit flipped": _flip,
    "cubin gone": lambda path: path.unlink(),
    "record truncated": lambda path: record(path).write_text(record(path).read_text()[:50]),
    "record empty": lambda path: record(path).write_text(""),
    "record no text": lambda path: record(path).write_bytes(b"\xff\xfe\x00"),
    "record a list": lambda path: record(path).write_text("[1, 2]"),
    "record gone": lambda path: record(path).unlink(),
    "record of another layout": _other_record(schema=cache.SCHEMA + 1),
    "record with wrong resources": _other_record(resources={"registers": 1, "unknown": 2}),
    "record with no seconds": _other_record(seconds=None),
    "record a folder": _folder,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_entry_is_compiled_anew_and_replaced(
    kernel: KernelSource, damage: Callable[[Path], Any], compilations: list[KernelSource]
) -> None:
    made = build.cubin(kernel)
    assert made.path is not None
    damage(made.path)
    assert again(kernel).data == made.data
    assert len(compilations) == 2
    if not record(made.path).is_dir():
        assert again(kernel).cached
        assert len(compilations) == 2


def test_a_damaged_entry_is_not_listed(kernel: KernelSource) -> None:
    made = build.cubin(kernel)
    assert made.path is not None
    _flip(made.path)
    assert cache.entries() == []


# Many at once --------------------------------------------------------------------------------------------------


def test_processes_compile_a_kernel_once(kernel: KernelSource, folder: Path) -> None:
    root = str(Path(__file__).resolve().parent.parent)
    command = [sys.executable, "-c", COMPILE, kernel.root]
    environment = {**os.environ, "PYTHONPATH": root, "CUPYMLA_CACHE_DIR": str(folder)}
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(4)]
    said = [rank.communicate(timeout=120)[0].split() for rank in ranks]
    assert sorted(cached for cached, _ in said) == ["False", "True", "True", "True"]
    assert len({path for _, path in said}) == 1
    assert sorted(file.suffix for file in (folder / "sm_90a").iterdir()) == [".cubin", ".gz", ".json"]


def test_threads_compile_a_kernel_once(kernel: KernelSource, compilations: list[KernelSource]) -> None:
    made: list[build.Cubin] = []
    in_threads([lambda: made.append(build.cubin(kernel))] * 8)
    assert len(compilations) == 1
    assert len({id(cubin) for cubin in made}) == 1
    assert len(made) == 8


def lock_file(kernel: KernelSource, folder: Path) -> Path:
    key = cache.key(kernel, build.content_hash(kernel), compiler.toolchain())
    file = folder / kernel.arch / f"{kernel.entry}-{key}.lock"
    file.parent.mkdir(parents=True, mode=0o700)
    folder.chmod(0o700)
    return file


def test_a_lock_left_by_a_dead_process_does_not_matter(
    kernel: KernelSource, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LOCK_TIMEOUT_SECONDS", 0.0)
    lock_file(kernel, folder).write_text("process 1 on elsewhere")
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", lambda _: pytest.fail("waited for nobody"))
        assert build.cubin(kernel).path


@pytest.mark.parametrize(
    ("held", "holder"),
    [(b"process 77 on node3", "process 77 on node3"), (b"\xff\xfe\xff", "\ufffd\ufffd\ufffd")],
    ids=["as written", "no text"],
)
def test_who_waits_says_for_whom_and_gives_up(
    kernel: KernelSource,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    held: bytes,
    holder: str,
) -> None:
    monkeypatch.setattr(compiler, "SAY_AFTER_SECONDS", 0.05)
    monkeypatch.setattr(cache, "LOCK_TIMEOUT_SECONDS", 0.3)
    with lock_file(kernel, folder).open("wb") as file:
        file.write(held)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        assert build.cubin(kernel).path
    said = capfd.readouterr().err
    assert said.count(f"waiting for {holder}, which is compiling plain for sm_90a") == 1


def test_who_waits_takes_what_the_holder_made(
    kernel: KernelSource, folder: Path, monkeypatch: pytest.MonkeyPatch, compilations: list[KernelSource]
) -> None:
    other = tempfile.mkdtemp(dir=folder.parent)
    with monkeypatch.context() as patch:
        patch.setenv("CUPYMLA_CACHE_DIR", other)
        made = build.cubin(kernel)
    assert made.path is not None
    file = lock_file(kernel, folder)
    held = file.open("w")
    fcntl.flock(held, fcntl.LOCK_EX)
    build.forget()
    found: list[build.Cubin] = []
    waiting = threading.Thread(target=lambda: found.append(build.cubin(kernel)))
    waiting.start()
    for suffix in (".cubin", ".json"):
        made.path.with_suffix(suffix).rename(file.with_suffix(suffix))
    held.close()
    waiting.join(timeout=60)
    assert found[0].cached
    assert len(compilations) == 1


def test_a_file_system_without_locks_is_no_obstacle(kernel: KernelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    assert build.cubin(kernel).path


# A full disk ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["writing", "renaming", "making folders", "locking"])
def test_a_full_disk_costs_the_entry_and_not_the_kernel(
    when: str,
    kernel: KernelSource,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder.mkdir(mode=0o700)
    full = OSError(errno.ENOSPC, "No space left on device")

    def refuse(*_: Any, **__: Any) -> Any:
        raise full

    def begin(file: Path, data: bytes) -> int:
        with file.open("wb") as stream:
            stream.write(data[:10])
        raise full

    mkdir = Path.mkdir
    with monkeypatch.context() as patch:
        if when == "writing":
            patch.setattr(Path, "write_bytes", begin)
        elif when == "renaming":
            patch.setattr(Path, "replace", refuse)
        elif when == "making folders":
            patch.setattr(
                Path, "mkdir", lambda self, *a, **k: refuse() if self.name == "sm_90a" else mkdir(self, *a, **k)
            )
        else:
            patch.setattr(os, "open", refuse)
            patch.setattr(cache, "_write", refuse)
        made = [build.cubin(kernel), again(kernel)]
    assert [(bool(cubin.data), cubin.path) for cubin in made] == [(True, None)] * 2
    assert capfd.readouterr().err.count("are not kept in") == 1
    assert not list(folder.rglob("*.*"))
    assert again(kernel).path


# Read-only layers ----------------------------------------------------------------------------------------------


def filled(kernel: KernelSource, folder: Path, monkeypatch: pytest.MonkeyPatch) -> build.Cubin:
    with monkeypatch.context() as patch:
        patch.setenv("CUPYMLA_CACHE_DIR", str(folder))
        return again(kernel)


def test_layers_are_searched_first_to_last_and_never_written(
    kernel: KernelSource, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [tmp_path / "near", tmp_path / "far"]
    for layer in layers:
        filled(kernel, layer, monkeypatch)
    before = sorted(tmp_path.glob("*ar/**/*"))
    monkeypatch.setenv("CUPYMLA_READONLY_CACHE", os.pathsep.join(str(layer) for layer in layers))
    found = again(kernel)
    assert found.cached
    assert found.path is not None
    assert found.path.is_relative_to(layers[0])
    _flip(found.path)
    found = again(kernel)
    assert found.path is not None
    assert found.path.is_relative_to(layers[1])
    assert sorted(tmp_path.glob("*ar/**/*")) == before
    assert not list(folder.rglob("*.cubin"))
    assert [entry.writable for entry in cache.entries()] == [False]
    assert cache.clear() == 0
    assert sorted(tmp_path.glob("*ar/**/*")) == before


def test_our_own_folder_comes_before_the_layers(
    kernel: KernelSource, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(kernel, tmp_path / "far", monkeypatch)
    filled(kernel, folder, monkeypatch)
    monkeypatch.setenv("CUPYMLA_READONLY_CACHE", str(tmp_path / "far"))
    found = again(kernel)
    assert found.path is not None
    assert found.path.is_relative_to(folder)


def test_a_layer_that_others_can_write_to_is_refused(
    kernel: KernelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far").chmod(0o777)
    monkeypatch.setenv("CUPYMLA_READONLY_CACHE", str(tmp_path / "far"))
    with pytest.raises(InputError, match="CUPYMLA_READONLY_CACHE"):
        build.cubin(kernel)


def test_a_layer_that_is_not_there_is_mentioned(
    kernel: KernelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUPYMLA_READONLY_CACHE", str(tmp_path / "nowhere"))
    assert build.cubin(kernel).path
    assert f"no folder {tmp_path / 'nowhere'}" in capfd.readouterr().err


def test_a_layer_that_cannot_be_reached_is_mentioned(
    kernel: KernelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Behind a folder of somebody else's, say, or a file."""
    (tmp_path / "file").touch()
    stat = Path.stat

    def refused(path: Path, **options: Any) -> os.stat_result:
        if path.name == "secret":
            raise PermissionError(errno.EACCES, "Permission denied")
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refused)
    layers = [tmp_path / "secret", tmp_path / "file", tmp_path / "file" / "within"]
    monkeypatch.setenv("CUPYMLA_READONLY_CACHE", os.pathsep.join(map(str, layers)))
    assert build.cubin(kernel).path
    said = capfd.readouterr().err
    assert f"no folder {layers[0]} (Permission denied)" in said
    assert f"{layers[1]} is no folder" in said
    assert f"no folder {layers[2]} (Not a directory)" in said


# Housekeeping --------------------------------------------------------------------------------------------------


def test_entries_tell_what_is_there(tmp_path: Path) -> None:
    text = '#ifdef N\nextern "C" __global__ void k() {}\n#endif\n'
    made = build.cubin(written(tmp_path / "src", "sub/k.cu", text, "k", defines=(("N", 4),), arch="sm_100f"))
    (entry,) = cache.entries()
    assert (entry.path, entry.entry, entry.arch, entry.source) == (made.path, "k", "sm_100f", "sub/k.cu")
    assert (entry.defines, entry.toolchain) == (("N=4",), str(compiler.toolchain()))
    assert (entry.size_bytes, entry.resources, entry.writable) == (len(made.data), made.resources, True)


def test_clear_removes_ours_and_nothing_else(kernel: KernelSource, folder: Path) -> None:
    made = build.cubin(kernel)
    (folder / "sm_90a" / ".plain-x.part").write_bytes(bytes(100))
    (folder / "sm_90a" / "plain-x.lock").write_bytes(b"")
    (folder / "sm_90a" / "notes.txt").write_text("mine")
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "k.cubin").write_bytes(b"mine")
    for name in ("kernel-x.so", "kernel-x.json", "model-x.o", "header-x/runtime.hpp.gch", "notes.txt"):
        (folder / "host" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "host" / name).write_bytes(bytes(10))
    assert made.path is not None
    text = made.path.with_suffix(".ptx.gz").stat().st_size
    expected = len(made.data) + record(made.path).stat().st_size + text + 100 + 40
    assert sum(file.stat().st_size for file in cache.host_files()) == 40
    assert cache.clear() == expected
    left = sorted(str(file.relative_to(folder)) for file in folder.rglob("*.*"))
    assert left == ["elsewhere/k.cubin", "host/notes.txt", "sm_90a/notes.txt"]
    assert cache.entries() == []
    assert not again(kernel).cached


def test_ptx_is_made_once_and_without_a_cubin(
    kernel: KernelSource, compilations: list[KernelSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = build.ptx(kernel)
    assert compilations == [] and cache.entries() == []
    monkeypatch.delattr(compiler, "ptx")
    assert build.ptx(kernel) == text
    made = build.cubin(kernel)
    assert not made.cached and build.ptx(kernel) == text


def test_clear_of_an_empty_cache_is_nothing(folder: Path) -> None:
    assert cache.clear() == 0


# Spills --------------------------------------------------------------------------------------------------------


def test_a_spill_fails_only_when_it_should_cached_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = written(tmp_path, "k.cu", SPILLING, "spilling")
    with pytest.raises(CompileError, match=r"spills registers: \d+ bytes stored, \d+ loaded"):
        build.cubin(kernel, fail_on_spill=True)
    assert again(kernel).resources.spills
    monkeypatch.setenv("CUPYMLA_FAIL_ON_SPILL", "1")
    for forget in (False, True):
        if forget:
            build.forget()
        with pytest.raises(CompileError, match="spills registers"):
            build.cubin(kernel)
    assert build.cubin(kernel, fail_on_spill=False).cached


def test_nobody_sees_half_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "made.so"

    def fails(part: Path) -> None:
        part.write_text("half", encoding="utf-8")
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        cache.keep(file, fails)
    assert not list(tmp_path.iterdir())
    cache.keep(file, lambda part: part.write_text("whole"))
    assert [each.name for each in tmp_path.iterdir()] == ["made.so"] and file.read_text() == "whole"
