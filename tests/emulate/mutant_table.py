"""docs/log/mutants.md: what the survey of mutants has found, from `mutants.json`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mutants import KINDS, MOST, SEED

PAGE = Path(__file__).resolve().parents[2] / "docs" / "log" / "mutants.md"

_Entry = Mapping[str, Any]

_ONE_QUERY = "a CTA has one query, or one pass, in the case: nothing waits for room behind it"
WHY: Sequence[tuple[str, str, str, str, str]] = (
    ("", "wait", "", "griddepcontrol", "the first launch of a call has none ahead of it"),
    ("fwd|bwd", "wait", r"producer\.cuh", "mbarrier", _ONE_QUERY),
    ("fwd|bwd", "arrive", r"(consumer|attention)\.cuh", "mbarrier.arrive.shared", _ONE_QUERY),
    ("", "barrier", r"producer\.cuh", "bar.warp.sync", "brings lanes together behind what one of them does alone"),
    (
        "bwd-cluster",
        "barrier",
        "cluster_gradients",
        "bar.warp.sync",
        "stands before an arrival for what products have read",
    ),
    ("", "fence", "", "fence.proxy.async", "TMA may write next what was read: the specification alone asks for it"),
    ("fwd-small-head", "commit", "small_head_scores", "wgmma", "its products join the group of the next commit"),
    ("fwd", "fence", "", "wgmma", "nothing has used the registers since the fence before it"),
    ("gemv", "barrier", r"any\.cuh", "barrier.sync", "makes half of the warps later than the others"),
)
"""Patterns of a kernel's name, a kind, a place and a text, and why what fits them survives, as the sources read: the
first that fits."""

_HEAD = """# Survey of mutants

{date}. One wait, fence, arrival, expected byte count, commit, barrier or bound was taken out of a kernel at a time, as
an edit of its PTX. The PTX interpreter and the host engine (PTX as C++) ran the mutants. The survey was to decide
whether the interpreter can go: the host engine has to catch whatever the interpreter catches.

The column "both ran" is all that the interpreter has run. Of the rest some have run on the host engine, some on none:
`python tests/emulate/survey_mutants.py` runs them.

- Mutants: at most {most} a kernel, drawn with seed {seed} from all whose instructions a small case executes in which
  the kernel's rings come round, of each kind and of each place in turn. `tests/emulate/mutants.json` lists them, with
  the case and with how either engine caught each.
- Runs: `races="hardware"`. The interpreter ran seed 0; where time ran out, a part of the mutants that a seed drew. The
  host engine ran modes lazy, eager and random, a few of them lazy alone, on states of it from 2026-11-27 on. Kernels
  were edited since the interpreter went: a mutant is found again by its instruction.
- Caught means an error, a result that the accuracy criterion refuses, or no end.
- A bound is idle where it holds for every thread of the case, so that nothing changes without it. That is known only of
  what the host engine has run since it was looked at.
"""


def write(known: Mapping[str, _Entry], date: str) -> None:
    """Write the page."""
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n".join(_page(known, date)) + "\n")


def _page(known: Mapping[str, _Entry], date: str) -> Iterator[str]:
    yield _HEAD.format(date=date, most=MOST, seed=SEED)
    every = [{"kernel": name, **each} for name, entry in known.items() for each in entry["mutants"]]
    yield "## By kernel"
    yield ""
    yield from _table("kernel", ((name, [m for m in every if m["kernel"] == name]) for name in known))
    yield ""
    yield "## By kind"
    yield ""
    yield from _table("taken out", ((kind, [m for m in every if m["kind"] == kind]) for kind in KINDS))
    yield ""
    yield "## Of those that both ran, caught by one alone"
    yield ""
    yield from _one_sided(every, "interpreter", "host")
    yield from _one_sided(every, "host", "interpreter")
    yield "## Of those that both ran, caught by neither"
    yield ""
    yield from _survivors(every)


def _table(title: str, groups: Iterable[tuple[str, Sequence[_Entry]]]) -> Iterator[str]:
    yield f"| {title} | drawn | interpreter: caught of run | host engine: caught of run | both ran | caught by both |"
    yield "| --- | --- | --- | --- | --- | --- |"
    everything: list[_Entry] = []
    for name, group in groups:
        if group:
            yield _row(name, group)
            everything += group
    yield _row("all", everything)


def _row(name: str, group: Sequence[_Entry]) -> str:
    both = [each for each in group if "interpreter" in each and "host" in each]
    cells = [str(len(group))]
    for engine in ("interpreter", "host"):
        run = [each for each in group if engine in each]
        cells.append(f"{sum(bool(each[engine]) for each in run)} of {len(run)}" if run else "-")
    cells += [str(len(both)), str(sum(bool(each["interpreter"] and each["host"]) for each in both))]
    return f"| {name} | {' | '.join(cells)} |"


def _one_sided(every: Sequence[_Entry], catches: str, misses: str) -> Iterator[str]:
    found = [each for each in every if each.get(catches) and each.get(misses) == ""]
    named = {"interpreter": "the interpreter", "host": "the host engine"}
    yield f"By {named[catches]}: {len(found) or 'none'}."
    for each in found:
        yield f"- {each['kernel']}: {each['kind']} `{each['text'][:60]}` ({each['place']}): {each[catches]}"
    yield ""


def _survivors(every: Sequence[_Entry]) -> Iterator[str]:
    left = [each for each in every if each.get("interpreter") == each.get("host") == ""]
    idle = sum(bool(each.get("idle")) for each in left)
    yield f"- Bounds known to be idle: {idle}."
    bounds = sum(each["kind"] == "bound" and not each.get("idle") for each in left)
    yield f"- Other bounds, not looked into one by one: {bounds}."
    left = [each for each in left if each["kind"] != "bound"]
    by_reason: dict[str, list[str]] = {}
    for each in left:
        reason = next((why for *patterns, why in WHY if _fits(each, patterns)), "")
        place = each["place"].split(", ")
        by_reason.setdefault(reason, []).append(f"{each['kernel']} {place[min(2, len(place) - 1)]}")
    for reason, places in sorted(by_reason.items(), key=lambda item: (item[0] == "", -len(item[1]))):
        counted = {place: places.count(place) for place in dict.fromkeys(places)}
        shown = "; ".join(place + (f" ({count})" if count > 1 else "") for place, count in counted.items())
        yield f"- {reason or 'Not looked into'} ({len(places)}): {shown}."


def _fits(each: _Entry, patterns: Sequence[str]) -> bool:
    return all(re.search(p, each[key]) for p, key in zip(patterns, ("kernel", "kind", "place", "text"), strict=True))
