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
_LATER = "its products join the group of the next commit, which the same wait is for"
WHY: Sequence[tuple[str, str, str, str, str]] = (
    ("", "wait", "", "griddepcontrol", "the first launch of a call has none ahead of it"),
    ("", "wait", r"producer\.cuh", "mbarrier", _ONE_QUERY),
    ("fwd|bwd|dist", "arrive", r"(consumer|attention|sums)\.cuh", "mbarrier.arrive.shared", _ONE_QUERY),
    ("dist", "barrier", r"(sums|producer)\.cuh", "", _ONE_QUERY),
    ("", "barrier", r"producer\.cuh", "bar.warp.sync", "brings lanes together behind what one of them does alone"),
    ("bwd-pair", "barrier", "pair_gradients", "bar.warp.sync", "stands before an arrival for what products have read"),
    (
        "",
        "fence",
        "",
        "fence.proxy.async",
        "the letter alone asks for it: TMA may write next what ordinary code has read",
    ),
    ("", "commit", "", "wgmma", _LATER),
    ("", "fence", "", "wgmma", "nothing has used the registers since the fence before it"),
    ("", "wait", "joint_consumer", "mbarrier", "says who multiplies first"),
    (
        "",
        "wait",
        "joint_consumer",
        "wgmma",
        "the wait behind it is for all groups, and the half is not filled anew in the case",
    ),
    (
        "",
        "barrier",
        "merge|slot_lists",
        "bar.sync",
        "nothing behind it uses what lies before it but for what one before has ordered",
    ),
    ("gemv", "barrier", r"any\.cuh", "barrier.sync", "makes half of the warps later than the others"),
    ("gemv", "barrier|commit", "", "", "no stage is filled twice in the case"),
    ("", "bound", "", "", "what lies beyond is there to be read and changes no result"),
)
"""Patterns of a kernel's name, a kind, a place and a text, and why what fits them survives: the first that fits."""

_HEAD = """# Survey of mutants

{date}. One wait, fence, arrival, expected byte count, commit, barrier or bound was taken out of a kernel at a time, as
an edit of its PTX. The PTX interpreter and the host engine (PTX as C++) ran the mutants. The survey was to decide
whether the interpreter can go: the host engine has to catch whatever the interpreter catches.

- Mutants: at most {most} a kernel, drawn with seed {seed} from all whose instructions a small case executes in which
  the kernel's rings come round, of each kind and of each place in turn. `tests/emulate/mutants.json` lists them, with
  the case and with how either engine caught each.
- Runs: `races="practice"`. The interpreter ran seed 0. The host engine ran mode lazy, and modes random (two seeds) and
  eager where the interpreter alone had caught a mutant.
- Caught means an error, a result that the comparison law refuses, or no end.
- A bound is idle where it holds for every thread of the case, so that nothing changes without it.
- "-": the interpreter has no tcgen05, so kernels for sm_100a are the host engine's alone.
- Commands: `python tests/emulate/survey_mutants.py --engine interpreter`, `--engine host`, `--table`.
"""


def write(known: Mapping[str, _Entry], date: str) -> None:
    """Write the page."""
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n".join(_page(known, date)) + "\n")


def _page(known: Mapping[str, _Entry], date: str) -> Iterator[str]:
    yield _HEAD.format(date=date, most=MOST, seed=SEED)
    every = [{"kernel": name, **each} for name, entry in known.items() for each in entry["mutants"] if "host" in each]
    yield "## By kernel"
    yield ""
    yield from _table("kernel", ((name, [m for m in every if m["kernel"] == name]) for name in known))
    yield ""
    yield "## By kind"
    yield ""
    yield from _table("taken out", ((kind, [m for m in every if m["kind"] == kind]) for kind in KINDS))
    yield ""
    yield "## Caught by one engine alone"
    yield ""
    yield from _one_sided(every, "interpreter", "host")
    yield from _one_sided(every, "host", "interpreter")
    yield ""
    yield "## Caught by neither"
    yield ""
    yield from _survivors(every)


def _table(title: str, groups: Iterable[tuple[str, Sequence[_Entry]]]) -> Iterator[str]:
    yield f"| {title} | mutants | interpreter | host engine | both | neither | of these idle |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    total = [0] * 6
    for name, group in groups:
        if not group:
            continue
        neither = [each for each in group if not each.get("interpreter") and each["host"] == ""]
        row = [
            len(group),
            *(sum(bool(each.get(engine)) for each in group) for engine in ("interpreter", "host")),
            sum(bool(each.get("interpreter") and each["host"]) for each in group),
            len(neither),
            sum(bool(each.get("idle")) for each in neither),
        ]
        total = [a + b for a, b in zip(total, row, strict=True)]
        cells = list(map(str, row))
        if all("interpreter" not in each for each in group):
            cells[1] = cells[3] = "-"
        yield f"| {name} | {' | '.join(cells)} |"
    yield f"| all | {' | '.join(map(str, total))} |"


def _one_sided(every: Sequence[_Entry], catches: str, misses: str) -> Iterator[str]:
    found = [each for each in every if each.get(catches) and each.get(misses) == ""]
    named = {"interpreter": "the interpreter", "host": "the host engine"}
    yield f"By {named[catches]}: {len(found) or 'none'}."
    for each in found:
        yield f"- {each['kernel']}: {each['kind']} `{each['text'][:60]}` ({each['place']}): {each[catches]}"
    yield ""


def _survivors(every: Sequence[_Entry]) -> Iterator[str]:
    left = [each for each in every if not each.get("interpreter") and each.get("host") == "" and not each.get("idle")]
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
