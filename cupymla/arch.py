"""GPU architectures as plain data: what NVRTC calls them and what one thread block may use there.

Source: CUDA C++ Programming Guide, "Compute Capabilities" (shared memory per block, opt-in).
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InputError


@dataclass(frozen=True, slots=True)
class Arch:
    """One compile target.

    Attributes:
        name: the NVRTC target, such as "sm_90a".
        capability: compute capability (major, minor).
        smem_bytes: the most shared memory one block can opt in to, in bytes.
        exact: True when code for this target runs on this compute capability alone ("a" targets).
    """

    name: str
    capability: tuple[int, int]
    smem_bytes: int
    exact: bool

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a cubin for this target loads on a GPU of that compute capability."""
        if self.exact:
            return capability == self.capability
        return capability[0] == self.capability[0] and capability[1] >= self.capability[1]


ARCHES: tuple[Arch, ...] = (
    Arch("sm_80", (8, 0), 163 * 1024, exact=False),
    Arch("sm_89", (8, 9), 99 * 1024, exact=False),
    Arch("sm_90", (9, 0), 227 * 1024, exact=False),
    Arch("sm_90a", (9, 0), 227 * 1024, exact=True),
    Arch("sm_100a", (10, 0), 227 * 1024, exact=True),
    Arch("sm_103a", (10, 3), 227 * 1024, exact=True),
)


def served() -> str:
    """The GPUs that some target runs on, in words: "compute capability 8.0 and later 8.x (sm_80), ..."."""
    kinds = []
    for arch in ARCHES:
        major, minor = arch.capability
        later = "" if arch.exact else f" and later {major}.x"
        kinds.append(f"{major}.{minor}{later} ({arch.name})")
    return "compute capability " + ", ".join(kinds)


def named(name: str) -> Arch:
    """The architecture of that NVRTC name. Raises InputError naming the known ones."""
    for arch in ARCHES:
        if arch.name == name:
            return arch
    raise InputError("arch", "one of " + ", ".join(a.name for a in ARCHES), repr(name))
