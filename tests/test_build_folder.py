"""Compiled kernels are kept where nobody else can put any, and where no such place exists they are not kept."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from build_kit import again, plain, private, written

from cupymla import build
from cupymla.build import KernelSource, cache, compiler, folders
from cupymla.errors import InputError

pytest.importorskip("cupy", reason="compiling goes through CuPy's NVRTC bindings")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return private(tmp_path, monkeypatch)


@pytest.fixture
def kernel(tmp_path: Path) -> KernelSource:
    return plain(tmp_path / "src")


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_folder_that_others_can_write_to_is_refused(kernel: KernelSource, folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(InputError, match=r"CUPYMLA_CACHE_DIR.*chmod go-w"):
        build.cubin(kernel)


def test_a_folder_of_another_user_is_refused(
    kernel: KernelSource, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(InputError, match=f"belongs to user {owner}"):
        build.cubin(kernel)


def test_a_folder_that_cannot_be_made_is_named(kernel: KernelSource, folder: Path) -> None:
    folder.write_text("a file", encoding="utf-8")
    with pytest.raises(InputError, match="CUPYMLA_CACHE_DIR"):
        build.cubin(kernel)


def test_a_new_folder_is_private_whatever_the_umask(kernel: KernelSource, folder: Path) -> None:
    before = os.umask(0)
    try:
        build.cubin(kernel)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "sm_90a").stat().st_mode & 0o777 == 0o700
    assert not [file for file in folder.rglob("*.*") if file.stat().st_mode & 0o022]


@pytest.mark.parametrize("kind", ["open to others", "a link"])
def test_a_target_s_folder_that_others_could_fill_is_not_used(
    kernel: KernelSource, folder: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = build.cubin(kernel)
    assert first.path is not None
    inner = first.path.parent
    if kind == "a link":
        inner.rename(tmp_path / "elsewhere")
        inner.symlink_to(tmp_path / "elsewhere")
    else:
        inner.chmod(0o777)
    again(kernel)
    second = build.cubin(kernel)
    assert not second.cached
    assert second.path is None
    assert "not used" in capsys.readouterr().err


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No CUPYMLA_CACHE_DIR, a home and a folder for temporary files of our own."""
    monkeypatch.delenv("CUPYMLA_CACHE_DIR")
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return home


def _raise(error: Exception) -> None:
    raise error


def temporary(tmp_path: Path) -> Path:
    return tmp_path / "tmp" / f"cupymla-{os.getuid()}"


def test_default_is_the_users_cache(home: Path) -> None:
    assert folders.location() == home / ".cache" / "cupymla"


@pytest.mark.parametrize("case", ["absent", "a file", "read-only", "unwritable", "open to others", "unknown"])
def test_without_a_usable_home_a_private_temporary_folder_serves(
    case: str, kernel: KernelSource, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir, access = Path.mkdir, os.access

    def readonly(self: Path, *args: Any, **kwargs: Any) -> None:
        if self.is_relative_to(home):
            raise OSError(errno.EROFS, "Read-only file system", str(self))
        mkdir(self, *args, **kwargs)

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    if case in ("absent", "a file"):
        home.rmdir()
    if case == "a file":
        home.write_text("", encoding="utf-8")
    elif case == "read-only":
        monkeypatch.setattr(Path, "mkdir", readonly)
    elif case == "unwritable":
        monkeypatch.setattr(os, "access", lambda path, mode: not Path(path).is_relative_to(home) and access(path, mode))
    elif case == "open to others":
        (home / ".cache" / "cupymla").mkdir(parents=True)
        (home / ".cache" / "cupymla").chmod(0o777)
    elif case == "unknown":
        monkeypatch.setattr(Path, "home", nobody)
    made = build.cubin(kernel)
    assert made.path is not None
    assert made.path.is_relative_to(temporary(tmp_path))
    assert temporary(tmp_path).stat().st_mode & 0o777 == 0o700
    assert again(kernel).cached
    if case == "absent":
        assert not home.exists()


@pytest.mark.parametrize("case", ["a link", "open", "a file", "of another user", "no room"])
def test_a_temporary_folder_that_is_not_ours_is_left_alone(
    case: str,
    kernel: KernelSource,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    home.rmdir()
    squatted = temporary(tmp_path)
    if case == "a link":
        (tmp_path / "trap").mkdir(mode=0o700)
        squatted.symlink_to(tmp_path / "trap")
    elif case == "open":
        squatted.mkdir(mode=0o755)
    elif case == "a file":
        squatted.write_text("")
    elif case == "of another user":
        uid = os.getuid()
        (tmp_path / "tmp" / f"cupymla-{uid + 1}").mkdir(mode=0o700)
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    else:
        mkdir = Path.mkdir
        full = OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr(
            Path, "mkdir", lambda self, *a, **k: _raise(full) if self == squatted else mkdir(self, *a, **k)
        )
    made = build.cubin(kernel)
    assert made.data
    assert made.path is None
    again(kernel)
    assert capfd.readouterr().err.count("compiled kernels are not kept") == 1
    assert not list(tmp_path.rglob("*.cubin"))


def test_nowhere_to_write_costs_the_entry_and_not_the_kernel(
    kernel: KernelSource, home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As on a read-only root file system, where Python finds no folder for temporary files."""
    home.rmdir()
    none = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "gettempdir", lambda: _raise(none))
        made = [build.cubin(kernel), again(kernel)]
    assert [(bool(cubin.data), cubin.path) for cubin in made] == [(True, None)] * 2
    assert capfd.readouterr().err.count("compiled kernels are not kept: ") == 1


# Shared with others ----------------------------------------------------------------------------------------------


def modes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mode & 0o777 for file in (folder, *folder.rglob("*"))}


def test_what_is_kept_is_as_readable_as_its_folder(kernel: KernelSource, folder: Path) -> None:
    """Whatever the umask: a cache that its owner opened to a group is open whole."""
    folder.mkdir()
    folder.chmod(0o750)
    before = os.umask(0o077)
    try:
        build.cubin(kernel)
    finally:
        os.umask(before)
    found = modes(folder)
    assert found.pop("cache") == found.pop("sm_90a") == 0o750
    assert len(found) == 3 and set(found.values()) == {0o640}


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that other users can enter, which pytest's are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_share_opens_what_is_there_and_what_comes(
    kernel: KernelSource, reachable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = reachable / "cache"
    monkeypatch.setenv("CUPYMLA_CACHE_DIR", str(folder))
    build.cubin(kernel)
    (folder / "sm_90a" / "notes.txt").touch(mode=0o600)
    assert cache.share_entries() == folder
    build.cubin(written(Path(kernel.root), "other.cu", 'extern "C" __global__ void other() {}\n', "other"))
    found = modes(folder)
    assert found.pop("notes.txt") == 0o600, "not ours"
    assert found.pop("cache") == found.pop("sm_90a") == 0o755
    assert len(found) == 6 and set(found.values()) == {0o644}


def test_share_refuses_what_nobody_else_could_reach(
    reachable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (reachable / "mine").mkdir(mode=0o700)
    monkeypatch.setenv("CUPYMLA_CACHE_DIR", str(reachable / "mine" / "cache"))
    with pytest.raises(InputError, match=rf"CUPYMLA_CACHE_DIR.*{reachable}/mine is closed to them \(mode 700\)"):
        cache.share_entries()
    monkeypatch.delenv("CUPYMLA_CACHE_DIR")
    with pytest.raises(InputError, match=r"CUPYMLA_CACHE_DIR.*for --shared"):
        cache.share_entries()


CLOSED = {
    "the layer": (".", 0o700),
    "a target's folder": ("sm_90a", 0o700),
    "the files": ("sm_90a/*", 0o600),
    "the listing": (".", 0o711),
}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("closed", [None, *CLOSED])
def test_another_user_gets_the_kernel_or_one_warning(
    kernel: KernelSource, reachable: Path, closed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a layer that its owner may read alone. The other user has a cache, and a home, of its own."""
    layer = reachable / "layer"
    monkeypatch.setenv("CUPYMLA_CACHE_DIR", str(layer))
    cache.share_entries()
    other = written(Path(kernel.root), "other.cu", 'extern "C" __global__ void other() {}\n', "other")
    for each in (kernel, other):
        build.cubin(each)
    if closed:
        pattern, mode = CLOSED[closed]
        for path in [layer] if pattern == "." else layer.glob(pattern):
            path.chmod(mode)
    (reachable / "own").mkdir()
    os.chown(reachable / "own", NOBODY, NOBODY)
    monkeypatch.setenv("CUPYMLA_CACHE_DIR", str(reachable / "own" / "cache"))
    monkeypatch.setenv("CUPYMLA_READONLY_CACHE", str(layer))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _as_nobody((kernel, other), writing)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as stream:
        told = json.load(stream)
    os.waitpid(child, 0)
    assert told["error"] is None
    assert told["cached"] == [not closed] * 2
    warnings = [text for text in told["warned"] if str(layer) in text]
    assert len(warnings) == bool(closed)
    if closed:
        assert "you may not read them" in warnings[0] and "cupymla precompile --shared" in warnings[0]


NOBODY = 65534


def _as_nobody(kernels: tuple[KernelSource, ...], answer: int) -> NoReturn:
    """In a child process: what another user gets, as JSON. Nothing is compiled: a stand-in says what would be."""
    told: dict[str, Any] = {"error": None, "cached": []}
    try:
        chain = compiler.toolchain()
        # Includes are read first: the sources lie where nobody else can go.
        contents = {each: build.content_hash(each) for each in kernels}
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        for each in kernels:
            told["cached"].append(cache.load(each, cache.key(each, contents[each], chain)) is not None)
            cache.load_ptx(each, cache.key(each, contents[each], chain))
        cache.entries()
    except BaseException as error:
        told["error"] = repr(error)
    told["warned"] = folders.warned()
    with os.fdopen(answer, "w", encoding="utf-8") as stream:
        json.dump(told, stream)
    os._exit(0)


def test_a_file_that_may_not_be_read_is_named_once(
    kernel: KernelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same for who is not root, with a stand-in for the file system's refusal."""
    made = build.cubin(kernel)
    assert made.path is not None
    layer = made.path.parent.parent
    monkeypatch.setenv("CUPYMLA_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("CUPYMLA_READONLY_CACHE", str(layer))
    read = Path.read_text

    def refused(path: Path, *args: Any, **options: Any) -> str:
        if path.is_relative_to(layer):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", refused)
    assert not again(kernel).cached
    assert len(cache.entries()) == 1
    said = capfd.readouterr().err
    assert said.count(f"compiled kernels in {layer} are not used: you may not read them") == 1
    assert f"CUPYMLA_CACHE_DIR={layer} cupymla precompile --shared" in said
