"""Puts into the wheel, as `cupymla/_packed/`: `cuda/`, the CUTLASS headers that our kernels include, the evidence."""

from __future__ import annotations

import sys
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
            from cupymla.build.pack import files
        finally:
            sys.path.remove(self.root)
        for name, file in files().items():
            build_data["force_include"][str(file)] = f"cupymla/_packed/{name}"
        for file in sorted(Path(self.root, "tests", "evidence").glob("*.sm_*.json")):
            build_data["force_include"][str(file)] = f"cupymla/_packed/evidence/{file.name}"
