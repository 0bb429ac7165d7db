"""How a launch is emulated, and the records that the model reads and reports with."""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from cupymla.errors import InputError

from ..ptx.approximation import APPROXIMATIONS, Approximation
from ..ptx.races import RACES, Races

Mode = Literal["eager", "lazy", "random"]
Check = Literal["tcgen05", "proxy", "init", "written"]

MODES: tuple[Mode, ...] = ("eager", "lazy", "random")
CHECKS: dict[Check, int] = {"tcgen05": 1, "proxy": 2, "init": 4, "written": 8}


class LaunchState(ctypes.Structure):
    """`Launch` of cupymla_lab/emulate/model/state.cuh, 80 bytes."""

    _fields_ = (
        ("failure", ctypes.c_uint64),
        ("ctas", ctypes.c_uint64),
        ("cta_count", ctypes.c_uint32),
        ("mode", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("checks", ctypes.c_uint32),
        ("removed", ctypes.c_uint32),
        ("stop", ctypes.c_uint32),
        ("patience_ns", ctypes.c_uint64),
        ("clock", ctypes.c_uint64),
        ("progress_ns", ctypes.c_uint64),
        ("maps", ctypes.c_uint64),
        ("map_count", ctypes.c_uint32),
        ("stalls", ctypes.c_uint32),
    )


class Report(ctypes.Structure):
    """`Failure` of cupymla_lab/emulate/model/state.cuh, 56 bytes."""

    _fields_ = (
        ("raised", ctypes.c_uint32),
        ("code", ctypes.c_uint32),
        ("site", ctypes.c_uint32),
        ("cta", ctypes.c_uint32),
        ("thread", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("values", ctypes.c_uint64 * 4),
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """How a launch is emulated.

    Attributes:
        mode: "eager" executes asynchronous operations when they are issued, "lazy" when somebody waits for them,
            "random" at a time that `seed` decides.
        seed: of mode "random".
        checks: rules that are enforced although breaking them changes no value here: "tcgen05" (tcgen05.fence and
            tcgen05.wait::ld), "proxy" (fence.proxy.async), "init" (fence.mbarrier_init), and on the host where races
            are looked for "written" (ordinary reads of shared memory that nothing has written; left out, as compilers
            load more than they use).
        patience_seconds: how long the whole grid may stand still before that is a failure.
        stalls: whether in mode "random" single threads, and what was put off, are late while others run ahead.
        removed: number of a site that does nothing, for mutation tests; 0 for none.
        approximation: on the host, where in its error ex2.approx lies; a GPU's is its own.
        resident_clusters: how many clusters run at a time, 0 for all. The others begin when one ends, or are handed to
            those that ask by clusterlaunchcontrol.try_cancel. On the host only.
        races: whether accesses to shared, Tensor and global memory that nothing orders are an error, as hardware or the
            specification of the ISA has it, and waits for an mbarrier that could miss their phase. On the host only.
    """

    mode: Mode = "eager"
    seed: int = 0
    checks: Collection[Check] = ("tcgen05", "proxy", "init")
    patience_seconds: float = 2.0
    stalls: bool = True
    removed: int = 0
    approximation: Approximation = "exact"
    resident_clusters: int = 0
    races: Races = "unchecked"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InputError("mode", "one of " + ", ".join(MODES), repr(self.mode))
        for check in self.checks:
            if check not in CHECKS:
                raise InputError("checks", "among " + ", ".join(CHECKS), repr(check))
        if self.approximation not in APPROXIMATIONS:
            raise InputError("approximation", "one of " + ", ".join(APPROXIMATIONS), repr(self.approximation))
        if self.races not in RACES:
            raise InputError("races", "one of " + ", ".join(RACES), repr(self.races))
        if self.resident_clusters < 0:
            raise InputError("resident_clusters", "a number of clusters, or 0 for all", self.resident_clusters)
