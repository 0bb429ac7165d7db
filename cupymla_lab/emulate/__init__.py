"""Kernels for Blackwell (sm_100f) on a Hopper GPU: their PTX translated, with a checked model of what Hopper lacks.

`load` makes PTX a kernel that can be launched, `build` does all of it that needs no GPU. docs/emulation.md says what
this proves and what it does not.
"""

from __future__ import annotations

from ..ptx import PtxError
from .failures import EmulationError, HostError
from .maps import ForeignMap
from .program import Program, build
from .run import EmulatedKernel, load
from .settings import CHECKS, MODES, Settings
from .translate import Site, Translation, translate

__all__ = [
    "CHECKS",
    "MODES",
    "EmulatedKernel",
    "EmulationError",
    "ForeignMap",
    "HostError",
    "Program",
    "PtxError",
    "Settings",
    "Site",
    "Translation",
    "build",
    "load",
    "translate",
]
