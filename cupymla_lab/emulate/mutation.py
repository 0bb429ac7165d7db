"""Does the emulation notice a missing wait, fence, commit or expected byte? Take each away in turn and see.

Nothing is translated again: a launch names one site, which then does nothing (`Settings.removed`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from cupymla.errors import CupymlaError

from .failures import EmulationError, HostError
from .settings import Settings
from .translate import Site

KINDS = ("wait", "fence", "commit", "expect_tx", "arrive", "barrier", "warp")
"""What `Site.mutation` may be; "barrier" is a named barrier or __syncthreads, "warp" is bar.warp.sync."""

RUNS: tuple[Settings, ...] = (
    Settings("eager", patience_seconds=0.5),
    Settings("lazy", patience_seconds=0.5),
    *(Settings("random", seed=seed, patience_seconds=0.5) for seed in range(1, 7)),
)
"""What every mutant is run with: each mode, six seeds of mode random."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One mutant in one mode.

    Attributes:
        site: what was taken away.
        mode: in which mode, all its seeds together.
        how: what gave it away, "" where it survived.
    """

    site: Site
    mode: str
    how: str


def survey(
    run: Callable[[Settings], float],
    sites: Iterable[Site],
    runs: Sequence[Settings] = RUNS,
    kinds: Collection[str] = KINDS,
) -> list[Verdict]:
    """Run every mutant in every mode.

    Args:
        run: runs the kernel and returns its largest error, 0 for a right result and NaN for one with holes; it may
            raise any error of this package.
        sites: the kernel's, those of other kinds are passed over.
        runs: settings; a mode catches a mutant when one of its runs does.
        kinds: which removals to try.

    Returns:
        A verdict for each site and mode.

    Raises RuntimeError where a mutant did away with the GPU: no kernel runs in this process any more, whatever is wrong
    with it. On a GPU `run` had better start another process then, as `cupymla.bench.processes` does.
    """
    verdicts = []
    for site in sites:
        if site.mutation not in kinds:
            continue
        for mode in dict.fromkeys(settings.mode for settings in runs):
            how = ""
            for settings in runs:
                if settings.mode == mode and not how:
                    how = _caught(run, settings, site)
            verdicts.append(Verdict(site, mode, how))
    return verdicts


def uncaught(run: Callable[[Settings], float], sites: Iterable[Site], runs: Sequence[Settings] = RUNS) -> list[Site]:
    """The sites whose removal no run catches; what one has caught, the others need not. Raises like `survey`."""
    left = [site for site in sites if site.mutation in KINDS]
    for settings in runs:
        left = survivors(survey(run, left, [settings]))
    return left


def _caught(run: Callable[[Settings], float], settings: Settings, site: Site, again: bool = True) -> str:
    try:
        error = run(replace(settings, removed=site.number))
    except EmulationError as failure:
        return f"failure {failure.code}"
    except HostError as failure:  # no GPU is lost, and nothing comes late
        return type(failure).__name__
    except CupymlaError as fault:
        try:
            left = run(settings)
        except CupymlaError:
            left = math.nan
        if left != 0:
            mutant = f"{site.mutation} {site.number} (line {site.line}: {site.text}) in {settings.mode}"
            raise RuntimeError(f"nothing runs any more since {mutant} was removed: {fault}") from fault
        # A kernel that faults behind its own end leaves that to the next one: it was this one's if it comes again.
        return _caught(run, settings, site, again=False) if again else type(fault).__name__
    return "" if error == 0 else "wrong result"


def shares(verdicts: Iterable[Verdict]) -> dict[str, tuple[int, int]]:
    """Caught and all mutants, by mode and for all modes together ("any")."""
    caught: Counter[str] = Counter()
    total: Counter[str] = Counter()
    by_site: dict[int, bool] = {}
    for verdict in verdicts:
        total[verdict.mode] += 1
        caught[verdict.mode] += bool(verdict.how)
        by_site[verdict.site.number] = by_site.get(verdict.site.number, False) or bool(verdict.how)
    found = {mode: (caught[mode], total[mode]) for mode in total}
    return {**found, "any": (sum(by_site.values()), len(by_site))}


def survivors(verdicts: Sequence[Verdict]) -> list[Site]:
    """What no mode catches the removal of."""
    caught = {verdict.site.number for verdict in verdicts if verdict.how}
    found = {verdict.site.number: verdict.site for verdict in verdicts}
    return [site for number, site in found.items() if number not in caught]
