"""Compiled kernels on disk, addressed by content: `<folder>/<arch>/<entry>-<key>.cubin` and a `.json` beside it.

The key holds the content of every file a kernel includes, its definitions, the compiler's version and options; never
a path. An entry is written under a temporary name and renamed, the record after the cubin and with its checksum, so
a reader sees a whole entry or none. A lock per key lets many ranks compile a kernel once; it only spares work, and
nothing depends on it for correctness.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import json
import os
import socket
import stat
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import config
from . import compiler
from .cubin import Cubin, Image, Resources, frozen
from .folders import layers, location, open_to_others, readable, share, warn_once, warn_unreadable
from .source import KernelSource

SCHEMA = 1
LOCK_TIMEOUT_SECONDS = 900.0
_POLL_SECONDS = 0.05
_ENTRY = (".cubin", ".json", ".gz")
_OURS = (*_ENTRY, ".lock", ".part")
HOST_FOLDER = "host"
"""What the emulator compiles, for the host and for a GPU, is kept in this folder of the cache."""
_OURS_OF_HOST = (".so", ".o", ".json", ".gch", ".part", ".cubin")


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One kernel in a cache folder, as its record tells it.

    Attributes:
        path: the cubin.
        entry: the kernel's name.
        arch: its target.
        source: its translation unit, relative to `cuda/`.
        defines: its preprocessor definitions, "NAME=value" each.
        toolchain: what compiled it.
        date: when, in ISO 8601, UTC.
        size_bytes: of the cubin.
        seconds: the compilation took.
        resources: registers, spills, stack, static shared memory.
        writable: False when it lies in a CUPYMLA_READONLY_CACHE folder.
    """

    path: Path
    entry: str
    arch: str
    source: str
    defines: tuple[str, ...]
    toolchain: str
    date: str
    size_bytes: int
    seconds: float
    resources: Resources
    writable: bool


# Entries -------------------------------------------------------------------------------------------------------


def key(source: KernelSource, content: str, chain: compiler.Toolchain) -> str:
    """The name under which a kernel is kept: SHA-256 (hex) of content, compiler, options and layout version."""
    options = compiler.flags(chain.backend, source.arch)
    text = json.dumps([SCHEMA, content, str(chain), options])
    return hashlib.sha256(text.encode()).hexdigest()


def _folder(layer: Path, source: KernelSource) -> Path | None:
    """A layer's folder of one target; None, after one warning, where somebody else could put code into it, or where
    nothing can be read."""
    folder = layer / source.arch
    try:
        state = folder.lstat()
        owners = (os.getuid(), layer.stat().st_uid)
    except FileNotFoundError:
        return folder
    except PermissionError:
        warn_unreadable(layer)
        return None
    reason = open_to_others(folder, state)
    if not stat.S_ISDIR(state.st_mode):
        reason = f"{folder} is no folder of its own"
    elif state.st_uid not in owners:
        reason = f"{folder} belongs to user {state.st_uid}"
    if reason:
        warn_once(f"compiled kernels there are not used: {reason}")
        return None
    if not readable(folder):
        warn_unreadable(layer)
        return None
    return folder


def _file(folder: Path, source: KernelSource, name: str) -> Path:
    return folder / f"{source.entry}-{name}.cubin"


def _folders(source: KernelSource) -> list[Path]:
    return [folder for layer in layers() if (folder := _folder(layer, source))]


def _read(file: Path) -> tuple[bytes, dict[str, Any]] | None:
    """An entry whose record and checksum agree; anything else is as good as absent.

    One that only its owner may read is so after a warning.
    """
    try:
        record = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
        data = file.read_bytes()
    except PermissionError:
        warn_unreadable(file.parent.parent)
        return None
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        return None
    return (data, record) if record.get("sha256") == hashlib.sha256(data).hexdigest() else None


def _cubin(file: Path) -> Cubin | None:
    found = _read(file)
    if found is None:
        return None
    data, record = found
    try:
        image = Image(data)
        return Cubin(
            data=data,
            entry=record["entry"],
            arch=record["arch"],
            facts=frozen(image.facts()),
            parameters=image.parameters(record["entry"]),
            resources=Resources(**record["resources"]),
            log=record["log"],
            path=file,
            cached=True,
            seconds=float(record["seconds"]),
            toolchain=record["toolchain"],
        )
    except (KeyError, TypeError, ValueError):
        return None


def load(source: KernelSource, name: str) -> Cubin | None:
    """The kernel kept under a key, from the first layer that has it whole; None when none has."""
    return next((found for folder in _folders(source) if (found := _cubin(_file(folder, source, name)))), None)


def load_any(source: KernelSource, content: str) -> Cubin | None:
    """The newest kernel of the same content, whatever compiled it; for machines without a compiler."""
    candidates = []
    for folder in _folders(source):
        for file in folder.glob(f"{source.entry}-*.cubin"):
            found = _read(file)
            if found and found[1].get("content") == content:
                candidates.append((str(found[1].get("date")), file))
    return next((hit for _, file in sorted(candidates, reverse=True) if (hit := _cubin(file))), None)


def keep(file: Path, make: Callable[[Path], object]) -> None:
    """Make a file under another name first, so that nobody sees half of it. Raises OSError and what `make` does.

    Whoever may read the folder may read the file.
    """
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name[:40]}-", suffix=".part")
    os.close(descriptor)
    part = Path(name)
    try:
        make(part)
        part.chmod(0o600 | (file.parent.stat().st_mode & 0o044))
        part.replace(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _make_folder(folder: Path) -> None:
    """A target's folder, which others may enter where they may enter the layer."""
    if not folder.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700 | (folder.parent.stat().st_mode & 0o055))


def _write(file: Path, data: bytes) -> None:
    keep(file, lambda part: part.write_bytes(data))


def store(source: KernelSource, name: str, content: str, made: Cubin, ptx: str) -> Path | None:
    """Keep a kernel and its PTX; returns the cubin's file, or None after one warning when the folder cannot take it."""
    file = _own_file(source, name)
    if file is None:
        return None
    record = {
        "schema": SCHEMA,
        "sha256": hashlib.sha256(made.data).hexdigest(),
        "content": content,
        "entry": source.entry,
        "arch": source.arch,
        "source": source.path,
        "defines": [f"{define}={value}" for define, value in source.defines],
        "toolchain": made.toolchain,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(made.seconds, 3),
        "resources": asdict(made.resources),
        "facts": dict(made.facts),
        "log": made.log,
    }
    try:
        _write_ptx(file, ptx)
        _write(file, made.data)
        _write(file.with_suffix(".json"), json.dumps(record, indent=1).encode())
    except OSError as error:
        _warn_not_kept(error)
        return None
    return file


def store_ptx(source: KernelSource, name: str, ptx: str) -> None:
    """Keep a kernel's PTX alone; after one warning not, when the folder cannot take it."""
    file = _own_file(source, name)
    if file is not None:
        try:
            _write_ptx(file, ptx)
        except OSError as error:
            _warn_not_kept(error)


def _own_file(source: KernelSource, name: str) -> Path | None:
    """Where a kernel is kept in this package's own folder; None without one."""
    layer = location()
    folder = _folder(layer, source) if layer else None
    return None if folder is None else _file(folder, source, name)


def _write_ptx(file: Path, ptx: str) -> None:
    """The first file of an entry, whose folder it makes."""
    _make_folder(file.parent)
    _write(file.with_suffix(".ptx.gz"), gzip.compress(ptx.encode(), compresslevel=4, mtime=0))


def _warn_not_kept(error: OSError) -> None:
    warn_once(f"compiled kernels are not kept in {location()}: {error.strerror or error}")


def load_ptx(source: KernelSource, name: str) -> str | None:
    """The PTX kept under a key; None when there is none."""
    for folder in _folders(source):
        try:
            return gzip.decompress(_file(folder, source, name).with_suffix(".ptx.gz").read_bytes()).decode()
        except PermissionError:
            warn_unreadable(folder.parent)
        except (OSError, EOFError, zlib.error, UnicodeDecodeError):
            continue
    return None


# Locks ---------------------------------------------------------------------------------------------------------


def _acquire(descriptor: int, source: KernelSource, lock: Path) -> bool:
    started = time.monotonic()
    said = config.quiet()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            waited = time.monotonic() - started
        if waited > compiler.SAY_AFTER_SECONDS and not said:
            said = True
            holder = lock.read_text(encoding="utf-8", errors="replace").strip() or "another process"
            print(f"cupymla: waiting for {holder}, which is compiling {source}", file=sys.stderr, flush=True)
        if waited > LOCK_TIMEOUT_SECONDS:
            return False
        time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def locked(source: KernelSource, name: str) -> Iterator[None]:
    """Hold the right to compile one key among the processes that share the folder.

    Where there is no folder, no room or no locking, and after LOCK_TIMEOUT_SECONDS, it goes on without: two
    processes may then compile the same kernel, and both results are good.
    """
    layer = location()
    folder = _folder(layer, source) if layer else None
    descriptor = None
    if folder is not None:
        lock = _file(folder, source, name).with_suffix(".lock")
        with contextlib.suppress(OSError):
            _make_folder(lock.parent)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if descriptor is None:
        yield
        return
    try:
        with contextlib.suppress(OSError):
            if _acquire(descriptor, source, lock):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        # Whoever waits on the removed file looks into the cache next, and so does whoever makes a new one.
        with contextlib.suppress(OSError):
            lock.unlink()
        os.close(descriptor)


# Housekeeping --------------------------------------------------------------------------------------------------


def entries() -> list[CacheEntry]:
    """Every whole entry in every layer, sorted by kernel and target."""
    found = []
    first = location()
    for layer in layers():
        if not all(map(readable, layer.glob("sm_*"))):
            warn_unreadable(layer)
        for file in layer.glob("sm_*/*.cubin"):
            known = _read(file)
            hit = _cubin(file) if known else None
            if known is None or hit is None:
                continue
            record = known[1]
            found.append(
                CacheEntry(
                    path=file,
                    entry=hit.entry,
                    arch=hit.arch,
                    source=str(record.get("source")),
                    defines=tuple(record.get("defines", ())),
                    toolchain=hit.toolchain,
                    date=str(record.get("date")),
                    size_bytes=len(hit.data),
                    seconds=hit.seconds,
                    resources=hit.resources,
                    writable=layer == first,
                )
            )
    return sorted(found, key=lambda entry: (entry.entry, entry.arch, entry.defines, entry.date))


def size() -> tuple[int, int]:
    """How many compiled kernels all layers hold, and their bytes, without a look into them."""
    sizes = []
    for file in (file for layer in layers() for file in layer.glob("sm_*/*.cubin")):
        with contextlib.suppress(OSError):
            sizes.append(file.stat().st_size)
    return len(sizes), sum(sizes)


def share_entries() -> Path:
    """Let others read the entries of the folder CUPYMLA_CACHE_DIR, present and future; returns it.

    Raises InputError like `folders.share`.
    """
    return share(_ENTRY)


def host_files() -> list[Path]:
    """What the emulator has compiled into this package's own cache folder."""
    layer = location()
    found = layer.glob(f"{HOST_FOLDER}/**/*") if layer else ()
    return sorted(file for file in found if file.suffix in _OURS_OF_HOST and file.is_file())


def clear() -> int:
    """Remove everything this package put into its own cache folder; returns the bytes freed.

    Read-only layers and files that are not ours stay.
    """
    layer = location()
    kernels = layer.glob("sm_*/*") if layer else ()
    ours = [file for file in kernels if file.suffix in _OURS and file.is_file()]
    freed = 0
    for file in [*ours, *host_files()]:
        with contextlib.suppress(OSError):
            size = file.stat().st_size
            file.unlink()
            freed += size
    return freed
