"""GPU architectures as plain data: what NVRTC calls them and what one thread block may use there.

Source: CUDA C++ Programming Guide, "Compute Capabilities" (shared memory per block, opt-in) and "Feature Set Compiler
Targets" (which GPUs run the code of an "a" or "f" target).
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InputError


@dataclass(frozen=True, slots=True)
class Arch:
    """One compile target.

    Attributes:
        name: the NVRTC target, such as "sm_90a".
        capability: the lowest compute capability (major, minor) that runs it.
        smem_bytes: the most shared memory one block can opt in to, in bytes.
        only: the compute capabilities that run it, where these are listed: one for an "a" target, a family's for an
            "f" target. Empty for a target that later ones of the same major number run as well.
    """

    name: str
    capability: tuple[int, int]
    smem_bytes: int
    only: tuple[tuple[int, int], ...] = ()

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a cubin for this target loads on a GPU of that compute capability."""
        if self.only:
            return capability in self.only
        return capability[0] == self.capability[0] and capability[1] >= self.capability[1]

    @property
    def preference(self) -> tuple[bool, tuple[int, int]]:
        """Of the targets that a GPU runs, it takes that of the largest preference: listed GPUs first, then later."""
        return bool(self.only), self.capability


ARCHES: tuple[Arch, ...] = (
    Arch("sm_80", (8, 0), 163 * 1024),
    Arch("sm_89", (8, 9), 99 * 1024),
    Arch("sm_90", (9, 0), 227 * 1024),
    Arch("sm_90a", (9, 0), 227 * 1024, only=((9, 0),)),
    Arch("sm_100f", (10, 0), 227 * 1024, only=((10, 0), (10, 3))),
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a plan depends on of a GPU, whether there is one or not.

    Attributes:
        arch: the target whose code it runs.
        capability: its compute capability.
        multiprocessors: how many it has.
    """

    arch: Arch
    capability: tuple[int, int]
    multiprocessors: int


def serving(capability: tuple[int, int]) -> Arch | None:
    """The target for a GPU of that compute capability: the one that lists it, else the newest it can load."""
    fitting = (arch for arch in ARCHES if arch.runs_on(capability))
    return max(fitting, key=lambda arch: arch.preference, default=None)


def served() -> str:
    """The GPUs that some target runs on, in words: "compute capability 8.0 and later 8.x (sm_80), ..."."""
    kinds = []
    for arch in ARCHES:
        listed = " and ".join(f"{major}.{minor}" for major, minor in arch.only or (arch.capability,))
        later = "" if arch.only else f" and later {arch.capability[0]}.x"
        kinds.append(f"{listed}{later} ({arch.name})")
    return "compute capability " + ", ".join(kinds)


def named(name: str) -> Arch:
    """The architecture of that NVRTC name. Raises InputError naming the known ones."""
    for arch in ARCHES:
        if arch.name == name:
            return arch
    raise InputError("arch", "one of " + ", ".join(a.name for a in ARCHES), repr(name))
