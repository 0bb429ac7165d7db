"""The folders that compiled kernels are kept in and searched in, and whom they may belong to."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
import threading
from pathlib import Path

from .. import config
from ..errors import InputError

_warned: set[str] = set()
_warned_lock = threading.Lock()


def warn_once(text: str) -> None:
    """Say something on stderr the first time it comes up in this process."""
    with _warned_lock:
        if text in _warned:
            return
        _warned.add(text)
    print(f"cupymla: {text}", file=sys.stderr, flush=True)


def warned() -> list[str]:
    """What `warn_once` has said in this process."""
    with _warned_lock:
        return sorted(_warned)


def _distrust(folder: Path) -> str | None:
    """Why code from a folder cannot be trusted, or None: others own it or may write to it."""
    state = folder.stat()
    if state.st_uid != os.getuid():
        return f"{folder} belongs to user {state.st_uid}, not to you ({os.getuid()})"
    return open_to_others(folder, state)


def open_to_others(folder: Path, state: os.stat_result) -> str | None:
    """Why others can write to a folder, or None where they cannot."""
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{folder} can be written by others (mode {stat.S_IMODE(state.st_mode):o}); chmod go-w {folder}"
    return None


def warn_unreadable(layer: Path) -> None:
    """Say once that a layer's kernels are not used because this user cannot read them, and how that is mended."""
    cure = f"their owner can run `CUPYMLA_CACHE_DIR={layer} cupymla precompile --shared`"
    warn_once(f"compiled kernels in {layer} are not used: you may not read them; {cure}")


def readable(folder: Path) -> bool:
    """Whether this user can list a folder and open what it holds."""
    return os.access(folder, os.R_OK | os.X_OK)


def _asked_folder(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InputError("CUPYMLA_CACHE_DIR", "a folder that exists or can be made", f"{folder} ({error})") from error
    reason = _distrust(folder)
    if reason:
        raise InputError("CUPYMLA_CACHE_DIR", "a folder that only you can write to", reason)
    return folder.absolute()


def _home_folder() -> Path | None:
    try:
        home = Path.home()
    except RuntimeError:
        return None
    folder = home / ".cache" / "cupymla"
    try:
        # A home that is not there is no place to create one, even for a user who could.
        if not home.is_dir():
            return None
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            return None
        reason = _distrust(folder)
    except OSError:
        return None
    if reason:
        warn_once(f"not using the cache: {reason}")
        return None
    return folder


def temporary_folder() -> Path | None:
    """A private folder among the temporary files; None, with a warning, when there is none that can be trusted."""
    try:
        # A machine whose disks are all full, or read-only, has no folder for temporary files.
        folder = Path(tempfile.gettempdir()) / f"cupymla-{os.getuid()}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        state = folder.lstat()
    except OSError as error:
        warn_once(f"compiled kernels are not kept: {error}")
        return None
    # Anybody may make a name in the temporary folder, so it counts only as a real folder that is ours alone.
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or stat.S_IMODE(state.st_mode) & 0o077:
        warn_once(f"compiled kernels are not kept: {folder} is not a private folder of yours")
        return None
    return folder


def location() -> Path | None:
    """The folder that new entries go to; None when there is none that can be trusted.

    CUPYMLA_CACHE_DIR, else `~/.cache/cupymla`, else a private folder among the temporary files. Raises InputError
    when CUPYMLA_CACHE_DIR cannot be made or others can write to it.
    """
    asked = config.cache_dir()
    if asked is not None:
        return _asked_folder(asked)
    return _home_folder() or temporary_folder()


def _readonly_layers() -> list[Path]:
    layers = []
    for folder in config.readonly_caches():
        try:
            facts = folder.stat()
        except OSError as refused:
            warn_once(f"CUPYMLA_READONLY_CACHE: no folder {folder} ({refused.strerror})")
            continue
        if not stat.S_ISDIR(facts.st_mode):
            warn_once(f"CUPYMLA_READONLY_CACHE: {folder} is no folder")
            continue
        reason = open_to_others(folder, facts)
        if reason:
            raise InputError("CUPYMLA_READONLY_CACHE", "folders that only their owner can write to", reason)
        if not readable(folder):
            warn_unreadable(folder.absolute())
            continue
        layers.append(folder.absolute())
    return layers


def share(suffixes: tuple[str, ...]) -> Path:
    """Let others read the folder of CUPYMLA_CACHE_DIR: it, its targets' folders, and their files of these suffixes.

    What is kept there later is readable, too (`cache.keep`). Others name it in CUPYMLA_READONLY_CACHE. Returns it.

    Raises InputError when the variable is not set, or when others cannot enter a folder on the way there.
    """
    asked = config.cache_dir()
    if asked is None:
        raise InputError("CUPYMLA_CACHE_DIR", "the folder to be shared, for --shared", "nothing")
    folder = _asked_folder(asked)
    for above in folder.resolve().parents:
        mode = stat.S_IMODE(above.stat().st_mode)
        if not mode & (stat.S_IXGRP | stat.S_IXOTH):
            got = f"{folder}, as {above} is closed to them (mode {mode:o})"
            raise InputError("CUPYMLA_CACHE_DIR", "a folder that others can reach, for --shared", got)
    folder.chmod(0o755)
    for inner in folder.glob("sm_*"):
        if inner.is_dir() and not inner.is_symlink():
            inner.chmod(0o755)
            for file in inner.iterdir():
                if file.suffix in suffixes and file.is_file() and not file.is_symlink():
                    file.chmod(0o644)
    return folder


def layers() -> list[Path]:
    """Every folder that is searched, first to last. Raises InputError when one that was asked for is unsafe."""
    first = location()
    return [*([first] if first else []), *_readonly_layers()]
