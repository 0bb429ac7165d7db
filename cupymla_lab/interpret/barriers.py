"""The state of barriers: mbarriers in shared memory, named barriers of a CTA, the barrier of a cluster.

Source: PTX ISA 9.0, "Parallel Synchronization and Communication Instructions".
"""

from __future__ import annotations

from .causality import Releases, Waits
from .traps import Trap

_MOST = 2**20 - 1
"""Arrivals, and bytes either way, that a phase of an mbarrier can count (PTX ISA, "Size and alignment of mbarrier")."""


class MBarrier:
    """An mbarrier object.

    Attributes:
        count: arrivals that complete a phase.
        pending: arrivals the present phase still waits for.
        bytes: bytes of copies that it still waits for; below zero when they came before they were announced.
        phase: completed phases.
        releases: what arrivals made known.
        maker: the thread that initialised it, and when.
        column: of what copies bring that it counts, see `causality.py`.
        waits: by whom it was found complete; None where races are not looked for.
    """

    __slots__ = ("bytes", "column", "count", "maker", "pending", "phase", "releases", "waits")

    def __init__(
        self, count: int, maker: tuple[int, int] = (0, 0), column: int = 0, waits: Waits | None = None
    ) -> None:
        if not 1 <= count <= _MOST:
            raise Trap(f"mbarrier.init with a count of {count}")
        self.count = count
        self.pending = count
        self.bytes = 0
        self.phase = 0
        self.releases = Releases()
        self.maker = maker
        self.column = column
        self.waits = waits

    def arrive(self, count: int = 1) -> None:
        """That many arrivals. Raises Trap when the phase does not wait for so many."""
        if not 1 <= count <= _MOST:
            raise Trap(f"{count} arrivals on an mbarrier at once")
        self.pending -= count
        if self.pending < 0:
            raise Trap(f"mbarrier underflow: more than {self.count} arrivals in one phase")
        self.settle()

    def expect(self, bytes_: int) -> None:
        """The phase waits for so many bytes more. Raises Trap past what it can count."""
        self.bytes += bytes_
        if not (-_MOST <= bytes_ <= _MOST and -_MOST <= self.bytes <= _MOST):
            raise Trap(f"an mbarrier expects {bytes_} more bytes, {self.bytes} in all, where it can count {_MOST}")

    def expect_arrival(self) -> None:
        """The phase waits for an arrival more. Raises Trap past what it can count."""
        self.pending += 1
        if self.pending > _MOST:
            raise Trap(f"an mbarrier expects {self.pending} arrivals")

    def settle(self) -> None:
        """Complete the phase when nothing is missing."""
        if self.pending == 0 and self.bytes == 0:
            self.pending = self.count
            self.phase += 1
            self.releases.complete()
            if self.waits is not None:
                self.waits.require_over()


class NamedBarrier:
    """One of the 16 barriers of a CTA.

    Attributes:
        arrived: threads that have arrived in this generation.
        expected: threads it waits for; 0 before the first arrival.
        generation: how often it has been passed.
        reduces: whether the arrived threads came to reduce.
        vote: what the arrived threads' predicates add up to, for barriers that reduce.
        result: the vote of the generation before.
        releases: what arrivals made known.
    """

    __slots__ = ("arrived", "expected", "generation", "reduces", "releases", "result", "vote")

    def __init__(self) -> None:
        self.arrived = 0
        self.expected = 0
        self.generation = 0
        self.reduces = False
        self.vote = 0
        self.result = 0
        self.releases = Releases()

    def arrive(self, threads: int, expected: int, vote: int | None = None) -> None:
        """Threads arrive, to reduce where they `vote`. Raises Trap when they disagree with others, or are too many."""
        if self.arrived and expected != self.expected:
            raise Trap(f"named barrier: threads expect {self.expected} and {expected} participants")
        if self.arrived and self.reduces != (vote is not None):
            raise Trap("named barrier: some threads came to reduce, others to wait")
        self.expected, self.reduces, vote = expected, vote is not None, vote or 0
        self.arrived += threads
        self.vote += vote
        if self.arrived > expected:
            raise Trap(f"named barrier overrun: {self.arrived} threads arrived where {expected} were expected")
        self.settle()

    def settle(self) -> None:
        """Let the threads pass when all have arrived."""
        if self.arrived and self.arrived == self.expected:
            self.arrived = 0
            self.result, self.vote = self.vote, 0
            self.generation += 1
            self.releases.complete()


class ClusterBarrier:
    """The barrier of a cluster.

    Attributes:
        live: threads of the cluster that have not exited.
        arrived: threads that have arrived in this generation.
        generation: how often it has been passed.
        releases: what arrivals made known.
    """

    __slots__ = ("arrived", "generation", "live", "releases")

    def __init__(self, threads: int) -> None:
        self.live = threads
        self.arrived = 0
        self.generation = 0
        self.releases = Releases()

    def settle(self) -> None:
        """Let the threads pass when all that live have arrived."""
        if self.arrived and self.arrived >= self.live:
            self.arrived = 0
            self.generation += 1
            self.releases.complete()
