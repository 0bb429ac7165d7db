"""Translation units of operators whose calls launch several kernels: each is one kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..build.source import KernelSource


@dataclass(frozen=True, slots=True)
class Unit:
    """A translation unit.

    Attributes:
        operator: the operator, and its folder in `cuda`.
        kernel: the name of the kernel, and of its file in `cuda/<operator>/<folder>`.
        takes: its definitions, without their "CUPYMLA_".
        folder: that of the first target that it serves: "sm90" where it is written for Hopper, or for Hopper and newer.
    """

    operator: str
    kernel: str
    takes: tuple[str, ...] = ()
    folder: str = "sm90"

    def source(self, arch_name: str, values: Mapping[str, int]) -> KernelSource:
        """What to compile for a target, with its definitions among `values`."""
        defines = tuple((f"CUPYMLA_{name}", values[name]) for name in self.takes)
        return KernelSource(f"{self.operator}/{self.folder}/{self.kernel}.cu", self.kernel, defines, arch_name)
