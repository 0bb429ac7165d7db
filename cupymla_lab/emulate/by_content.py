"""What is made of files and texts, kept by their content in the cache's folder for host programs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from cupymla.build import cache, folders


def digest(*parts: str) -> str:
    """A name for what is made of these."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def digests(files: Iterable[Path]) -> tuple[str, ...]:
    """Of each file's content, whatever it is called."""
    return tuple(hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files) if file.is_file())


def folder() -> Path | None:
    """Where things are kept, made where it is not there; None without a cache. Raises OSError."""
    kept = folders.location()
    if kept is None:
        return None
    made = kept / cache.HOST_FOLDER
    made.mkdir(parents=True, exist_ok=True)
    return made
