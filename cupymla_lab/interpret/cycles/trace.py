"""What the warps of a launch did, as far as it takes time: a list of events for each warp, in the order of the program.

A trace says nothing of when. What is in it does not depend on the schedule it was recorded under, but for the polls
that found nothing, which are left out: a wait is one event, with the phase that it waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

SECTOR = 32  # bytes of global memory that come together

# Sectors of global memory, by their numbers: the first of some in a row and the one behind the last, time and again.
Sectors: TypeAlias = tuple[tuple[int, int], ...]


class Run(NamedTuple):
    """Instructions that need nothing but the warp's scheduler and its pipes.

    Attributes:
        issue: issue slots.
        alu: instructions for the pipe of integers, logic and comparisons.
        fma: for that of fp32 and of integer products.
        xu: for that of exponentials, reciprocals and conversions to and from integers.
        imad: those of `fma` that are integer products, which only half of its lanes do.
    """

    issue: int
    alu: int
    fma: int
    xu: int
    imad: int = 0


class Use(NamedTuple):
    """The first use of what loads, shuffles or products of the warp bring, by their numbers among the warp's."""

    loads: tuple[int, ...]


class Shared(NamedTuple):
    """A load from or a store to shared memory.

    Attributes:
        wavefronts: cycles that it takes the banks.
        load: its number among the warp's loads, -1 for a store.
    """

    wavefronts: int
    load: int


class Exchange(NamedTuple):
    """A shuffle, a vote or a reduction over a warp, by its number among the warp's loads."""

    load: int


class Global(NamedTuple):
    """A load from, a store to or an atomic operation on global memory.

    Attributes:
        bytes: in whole sectors of 32 bytes.
        load: its number among the warp's loads, -1 where nothing comes back.
        reduces: whether L2 adds.
        sectors: which they are; none for what is in L2 anyway.
    """

    bytes: int
    load: int
    reduces: bool
    sectors: Sectors = ()


class Gather(NamedTuple):
    """cp.async of a warp's threads.

    Attributes:
        bytes: that come, in whole sectors.
        sectors: as in `Global`.
    """

    bytes: int
    sectors: Sectors = ()


class GatherCommit(NamedTuple):
    """cp.async.commit_group."""


class GatherWait(NamedTuple):
    """cp.async.wait_group or wait_all: how many groups may be left."""

    pending: int


class GatherArrive(NamedTuple):
    """An arrival behind all that a warp's threads gathered so far, of so many threads."""

    barrier: int
    arrivals: int


class Landing(NamedTuple):
    """A bulk copy, or what threads store asynchronously: bytes that an mbarrier of the receiver counts.

    Attributes:
        barrier: the mbarrier.
        bytes: for this receiver.
        to: the receiving CTA.
        stored: whether they come out of registers, by st.async.
    """

    barrier: int
    bytes: int
    to: int
    stored: bool


class Prefetch(NamedTuple):
    """What is asked for into L2.

    Attributes:
        bytes: of it, in whole sectors.
        sectors: as in `Global`.
    """

    bytes: int
    sectors: Sectors = ()


class BulkStore(NamedTuple):
    """Bytes that a bulk copy takes from shared to global memory."""

    bytes: int


class BulkWait(NamedTuple):
    """cp.async.bulk.wait_group."""


class Arrive(NamedTuple):
    """Arrivals at an mbarrier, and bytes that it is told to expect.

    Attributes:
        barrier: the mbarrier.
        arrivals: how many.
        bytes: to expect, or below zero bytes that have come.
        to: the CTA that the mbarrier is in.
    """

    barrier: int
    arrivals: int
    bytes: int
    to: int


class Wait(NamedTuple):
    """A wait for an mbarrier: how many phases must be over."""

    barrier: int
    phases: int


class Named(NamedTuple):
    """A named barrier.

    Attributes:
        number: of the barrier.
        expected: threads; 0 for all of the CTA that have not exited.
        threads: that arrive with this warp.
        waits: whether the warp waits.
    """

    number: int
    expected: int
    threads: int
    waits: bool


class ClusterArrive(NamedTuple):
    """An arrival at the cluster's barrier, of so many threads; relaxed or not."""

    threads: int
    relaxed: bool


class ClusterWait(NamedTuple):
    """A wait for the cluster's barrier."""


class Product(NamedTuple):
    """A warp's quarter of a wgmma.

    Attributes:
        columns: of the accumulator.
        bytes: of shared memory that the four warps read together.
    """

    columns: int
    bytes: int


class WarpProduct(NamedTuple):
    """An mma: a product of a warp by itself.

    Attributes:
        multiplications: multiply-adds.
        load: its number among the warp's loads, as its sums come late too.
    """

    multiplications: int
    load: int


class ProductCommit(NamedTuple):
    """wgmma.commit_group."""


class ProductWait(NamedTuple):
    """wgmma.wait_group: how many groups may be left."""

    pending: int


class Fence(NamedTuple):
    """A fence: "proxy", "cta" or "gpu"."""

    kind: str


Event: TypeAlias = (
    Run
    | Use
    | Shared
    | Exchange
    | Global
    | Gather
    | GatherCommit
    | GatherWait
    | GatherArrive
    | Landing
    | Prefetch
    | BulkStore
    | BulkWait
    | Arrive
    | Wait
    | Named
    | ClusterArrive
    | ClusterWait
    | Product
    | WarpProduct
    | ProductCommit
    | ProductWait
    | Fence
)


@dataclass(slots=True)
class WarpTrace:
    """One warp.

    Attributes:
        cta: its CTA, numbered in the order of the recording.
        warp: its number in the CTA.
        events: what it did.
        places: for each event the line of the PTX text.
        loads: how many loads it has.
    """

    cta: int
    warp: int
    events: list[Event] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    loads: int = 0

    def add(self, event: Event, place: int) -> None:
        """One event more; runs of plain instructions are added up."""
        if type(event) is Run and self.events and type(last := self.events[-1]) is Run:
            self.events[-1] = Run(*(a + b for a, b in zip(last, event, strict=True)))
            return
        self.events.append(event)
        self.places.append(place)


@dataclass(slots=True)
class Trace:
    """A launch, or some clusters of it.

    Attributes:
        warps: of all CTAs.
        clusters: the cluster of each CTA, and how many CTAs there are by that.
        counts: the arrivals that complete a phase of each mbarrier.
        lines: CUDA places by lines of the PTX text.
        threads: per CTA.
        in_l2: sectors that are in L2 from the start.
    """

    warps: list[WarpTrace] = field(default_factory=list)
    clusters: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    lines: dict[int, str] = field(default_factory=dict)
    threads: int = 0
    in_l2: Sectors = ()
