"""What a measurement or a check has to say of where it was made."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import cupymla

ROOT = Path(cupymla.__file__).resolve().parent.parent


def gpu_slug(name: str) -> str:
    """A GPU's product name as a folder is called: "NVIDIA H200" becomes "h200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia")).strip("-")


def driver_text() -> str:
    """The NVIDIA driver's release, such as "580.159.04"; the CUDA version it supports when the release is not told."""
    from .. import driver

    try:
        told = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        told = ""
    release = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", told)
    if release:
        return release[0]
    major, minor = driver.version()
    return f"CUDA {major}.{minor}"


def commit() -> str:
    """The checkout's commit, with "-dirty" when tracked files differ from it; "unknown" outside a checkout."""
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


def _git(*arguments: str) -> str:
    run = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, encoding="utf-8", errors="replace", check=True
    )
    return run.stdout.strip()


def provenance(known_commit: str | None = None) -> dict[str, str]:
    """What a file of measurements begins with: gpu, driver, date and commit. Git is asked for a commit not known.

    Raises DriverError when there is no GPU.
    """
    from .. import driver

    return {
        "gpu": driver.device_name(0),
        "driver": driver_text(),
        "date": today(),
        "commit": known_commit or commit(),
    }


def today() -> str:
    """The date in UTC, ISO 8601."""
    return time.strftime("%Y-%m-%d", time.gmtime())
