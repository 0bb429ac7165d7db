"""What a replay says, as rows of tables: how busy what warps share was, and where each warpgroup's time went."""

from __future__ import annotations

from dataclasses import dataclass

from .replay import Ended, Replayed
from .trace import Trace

_WARPS = 4  # of a warpgroup
# Kinds of events that are the warp's own instructions.
_OWN = ("Run", "Use", "Shared", "Exchange", "Arrive", "GatherArrive", "Prefetch")


@dataclass(frozen=True, slots=True)
class Share:
    """Cycles of a warp.

    Attributes:
        what: kind of event; "instructions" for those that nothing is waited for.
        place: where in the CUDA sources, outermost caller last; "" for all places.
        cycles: how many.
    """

    what: str
    place: str
    cycles: float


def last_end(replayed: Replayed, cta: int = 0) -> float:
    """When the last warp of a CTA ended, in cycles."""
    return max((w.end for w in replayed.warps if w.recorded.cta == cta), default=0.0)


def busy(replayed: Replayed, cta: int = 0) -> dict[str, float]:
    """How long what the warps of a CTA share was at work, by name, over the time until its last warp ended.

    With several CTAs to a multiprocessor it is what all of these share, until the last of them ends.
    """
    sm = replayed.multiprocessors[cta]
    sharing = [k for k, other in enumerate(replayed.multiprocessors) if other is sm]
    last = max(last_end(replayed, k) for k in sharing) or 1.0
    cycles = {
        "issue": sm.issue[0].busy,
        "tensor core": sm.tensor[0].busy + sm.multiplier[0].busy,
        "shared memory": sm.shared.busy,
        "integer pipe": sm.alu[0].busy,
        "fp32 pipe": sm.fma[0].busy,
        "integer products": sm.imad[0].busy,
        "special functions": sm.xu[0].busy,
        "from L2": sm.gather.busy,
        "from memory": sm.memory.busy,
        "stores": sm.store.busy,
        "reductions": sm.reduce.busy,
        "to the cluster": sm.cluster.busy,
    }
    return {name: spent / last for name, spent in cycles.items()}


def place(location: str, depth: int = 3) -> str:
    """A place in CUDA sources without shared helpers and headers of others, as file:line, innermost first."""
    steps = [step.strip().removeprefix("from ") for step in location.split(", ")]
    own = [step for step in steps if step.startswith("cuda/") and not step.startswith("cuda/common/")]
    return " < ".join(step.rsplit("/", 1)[-1] for step in (own or steps)[:depth])


def shares(trace: Trace, warp: Ended, by_place: bool) -> list[Share]:
    """Where a warp's time went, most first."""
    sums: dict[tuple[str, str], float] = {}
    for (kind, line), cycles in warp.spent().items():
        what = "instructions" if kind in _OWN else kind
        where = place(trace.lines.get(line, "")) if by_place else ""
        sums[what, where] = sums.get((what, where), 0.0) + cycles
    ordered = sorted(sums.items(), key=lambda item: -item[1])
    return [Share(what, where, cycles) for (what, where), cycles in ordered if cycles >= 0.5]


def leaders(replayed: Replayed, cta: int = 0) -> list[Ended]:
    """The first warp of each warpgroup of a CTA."""
    found = [w for w in replayed.warps if w.recorded.cta == cta and w.recorded.warp % _WARPS == 0]
    return sorted(found, key=lambda w: w.recorded.warp)
