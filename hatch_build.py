"""Puts into the wheel, as `cupymla/_packed/`, `cuda/` without comments, the CUTLASS headers it includes, evidence."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CUTLASS = "nvidia-cutlass==4.2.0.0"


class PackHeaders(BuildHookInterface):  # type: ignore[type-arg]
    """A wheel compiles kernels without a checkout; an editable install reads the checkout itself."""

    def _has_cutlass(self) -> bool:
        sys.path.insert(0, self.root)
        try:
            from cupymla.build.source import find_cutlass
        finally:
            sys.path.remove(self.root)
        return find_cutlass() is not None

    def dependencies(self) -> list[str]:
        """What an isolated build environment needs: CUTLASS's package where there is no other CUTLASS."""
        return [] if self._has_cutlass() else [CUTLASS]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files to the wheel. Raises CompileError when CUTLASS is needed and cannot be found."""
        if version == "editable":
            return
        sys.path.insert(0, self.root)
        try:
            from cupymla.build.pack import pack, runs
        finally:
            sys.path.remove(self.root)
        self._packed = Path(tempfile.mkdtemp())
        pack(self._packed)
        (self._packed / "evidence.json").write_text(runs(Path(self.root, "tests", "evidence")), encoding="utf-8")
        build_data["force_include"][str(self._packed)] = "cupymla/_packed"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was written for the wheel alone."""
        if version != "editable":
            shutil.rmtree(self._packed)
