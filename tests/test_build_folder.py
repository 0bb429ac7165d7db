"""Compiled kernels are kept where nobody else can put any, and where no such place exists they are not kept."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from build_kit import again, plain, private

from cupymla import build
from cupymla.build import KernelSource, folders
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
