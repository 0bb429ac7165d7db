"""Mutants of a kernel as edits of its PTX: one wait, fence, arrival, expected byte count, commit, barrier or bound is
taken out. Whatever runs PTX takes the same mutants.

A mutant is known by its kind, by its instruction without the numbers of registers and labels, and by its place among
the kernel's instructions that read the same. So it is found again where other code of the kernel has changed.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cupymla_lab.ptx import Places, parse
from cupymla_lab.ptx.syntax import Block, Function, Guard, Instruction, Label, Statement

KINDS = ("wait", "fence", "arrive", "expect_tx", "commit", "barrier", "bound")
"""What may be taken out. "barrier" is one of a warp, of a CTA or a named one; those of a cluster count as "arrive" and
"wait". A "bound" is a predicate that guards an access, or the comparison of an index with its limit."""

CHOSEN = "cupymla_mutant"
"""A variable of the texts that hold several mutants: the number of the one that is in force."""

NOTE = 0x10000
"""The number with which they note what is executed."""

SEEN = "cupymla_mutants_seen"
"""Where: a variable with a word for each mutant's number."""

MOST = 40
"""Mutants of a kernel that are drawn."""

SEED = 1

_COPIES = 3

_STARTS: Mapping[str, tuple[str, ...]] = {
    "wait": (
        "mbarrier.try_wait", "mbarrier.test_wait", "cp.async.wait", "cp.async.bulk.wait", "wgmma.wait_group",
        "tcgen05.wait", "barrier.cluster.wait", "griddepcontrol.wait",
    ),
    "fence": ("fence.", "membar.", "wgmma.fence", "tcgen05.fence"),
    "expect_tx": ("mbarrier.arrive.expect_tx", "mbarrier.expect_tx"),
    "arrive": ("mbarrier.arrive", "cp.async.mbarrier.arrive", "barrier.cluster.arrive"),
    "commit": ("cp.async.commit", "cp.async.bulk.commit", "wgmma.commit", "tcgen05.commit"),
    "barrier": ("bar.", "barrier."),
}  # fmt: skip
_ORDERED = ("lt", "le", "gt", "ge", "lo", "ls", "hi", "hs")
_BELOW = ("lt", "le", "lo", "ls")
_INTEGERS = ("s16", "u16", "s32", "u32", "s64", "u64")
_SKIPPED = 60  # instructions: what is farther apart is another role of a kernel, and no access behind its bound


@dataclass(frozen=True, slots=True)
class Mutant:
    """One instruction taken out of a kernel.

    Attributes:
        kind: one of `KINDS`.
        text: the instruction, its registers and labels without numbers; of a bound with its comparison.
        ordinal: which of the kernel's that have this kind and text, from 0.
        place: where it comes from in CUDA sources.
        line: its line in the PTX.
        start, end: what is replaced in the text.
        guard: the predicate that the instruction runs under.
        original: the instruction without it.
        replacement: what stands in its place, "" for nothing.
        unguarded: whether the replacement runs whatever the guard says.
        binds: of a bound the predicate that holds behind the instruction, or in front of a branch, where taking the
            bound out changes something; else "".
    """

    kind: str
    text: str
    ordinal: int
    place: str
    line: int
    start: int
    end: int
    guard: Guard | None
    original: str
    replacement: str
    unguarded: bool
    binds: str = ""

    @property
    def identity(self) -> tuple[str, str, int]:
        """What it is known by."""
        return self.kind, self.text, self.ordinal


# Finding them -----------------------------------------------------------------------------------------------------


def found(ptx: str, entry: str) -> tuple[Mutant, ...]:
    """Every mutant of a kernel, in the order of its text. Raises PtxError, and KeyError without such a kernel."""
    function = _kernel(ptx, entry)
    assert function.body is not None
    source, places = parse(ptx, entry).source, Places(ptx)
    made: list[Mutant] = []
    counts: Counter[tuple[str, str]] = Counter()
    for instruction, kind, text, replacement, unguarded, binds in _candidates(function.body):
        line = source.line(instruction.start)
        guard = instruction.guard
        original = str(instruction).removeprefix(f"{guard} " if guard else "")
        ordinal = counts[kind, text]
        counts[kind, text] += 1
        made.append(
            Mutant(kind, text, ordinal, _without_folders(places.of(line)), line, instruction.start, instruction.end,
                   guard, original, replacement, unguarded, binds)
        )  # fmt: skip
    return tuple(made)


def _kernel(ptx: str, entry: str) -> Function:
    kernel = parse(ptx, entry).kernel(entry)
    if kernel is None or kernel.body is None:
        raise KeyError(entry)
    return kernel


def _without_folders(place: str) -> str:
    """The innermost three places, files without their folders."""
    return ", ".join(part.rpartition("/")[2].removeprefix("from ") for part in place.split(", ")[:3])


_Candidate = tuple[Instruction, str, str, str, bool, str]


def _candidates(body: Block) -> Iterator[_Candidate]:
    """Instruction, kind, text, replacement, whether it runs whatever the guard says, and what `Mutant.binds` is."""
    statements = [statement for statement, _ in body.walk()]
    comparisons = _comparisons(statements)
    bounds = dict(_bounds(statements, comparisons))
    for number, statement in enumerate(statements):
        if not isinstance(statement, Instruction):
            continue
        kind = next((k for k, starts in _STARTS.items() if statement.opcode.startswith(starts)), None)
        if kind is not None:
            yield statement, kind, plain(str(statement)), _replacement(kind, statement), False, ""
        elif number in bounds:
            yield statement, "bound", *bounds[number]


def _replacement(kind: str, instruction: Instruction) -> str:
    """A poll answers true at once, an arrival that expects bytes expects none, all else is gone."""
    if instruction.opcode.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
        return f"setp.eq.u32 {instruction.operands[0]}, 0, 0;"
    if kind == "expect_tx" and instruction.parts[1] == "arrive":
        opcode = ".".join(part for part in instruction.parts if part != "expect_tx")
        return f"{opcode} {instruction.operands[0]}, {instruction.operands[1]};"
    return ""


def plain(text: str) -> str:
    """An instruction without the numbers of its registers and labels."""
    return re.sub(r"\$L__BB\d+_\d+", "$L", re.sub(r"%([a-z]+)\d+\b", r"%\1", text))


def _comparisons(statements: Sequence[Statement]) -> dict[str, Instruction]:
    """What sets each predicate that one instruction alone sets."""
    setters: dict[str, list[Instruction]] = {}
    for statement in statements:
        if isinstance(statement, Instruction) and statement.operands and statement.parts[0] in ("setp", "and", "or"):
            setters.setdefault(str(statement.operands[0]), []).append(statement)
    return {name: each[0] for name, each in setters.items() if len(each) == 1 and name.startswith("%")}


def _is_ordered(instruction: Instruction) -> bool:
    parts = instruction.parts
    return parts[0] == "setp" and parts[1] in _ORDERED and parts[-1] in _INTEGERS


def _ordered(name: str, comparisons: Mapping[str, Instruction], depth: int = 3) -> Instruction | None:
    """The comparison of integers by their order that a predicate comes from, through conjunctions too."""
    setter = comparisons.get(name)
    if setter is None or _is_ordered(setter):
        return setter
    if depth == 0 or setter.parts[0] not in ("and", "or") or setter.parts[-1] != "pred":
        return None
    parts = (_ordered(str(operand), comparisons, depth - 1) for operand in setter.operands[1:])
    return next((part for part in parts if part is not None), None)


def _is_access(statement: Statement) -> bool:
    if not isinstance(statement, Instruction):
        return False
    parts = statement.parts
    if parts[0] in ("ld", "st", "atom", "red"):
        return not {"param", "local", "const"}.intersection(parts)
    return parts[:2] == ("cp", "async") and "bulk" not in parts and len(statement.operands) > 1


def _bounds(
    statements: Sequence[Statement], comparisons: Mapping[str, Instruction]
) -> Iterator[tuple[int, tuple[str, str, bool, str]]]:
    """Number of a statement and, of its mutant, what `_candidates` tells behind the kind."""
    labels = {each.name: number for number, each in enumerate(statements) if isinstance(each, Label)}
    uses: dict[str, set[str]] = {}
    for each in statements:
        if isinstance(each, Instruction):
            if each.guard is not None:
                uses.setdefault(each.guard.register, set()).add("guard")
            for operand in each.operands:
                uses.setdefault(str(operand).lstrip("!"), set()).add(each.parts[0])
    for number, each in enumerate(statements):
        if not isinstance(each, Instruction):
            continue
        if each.guard is not None and _is_access(each):
            binds = f"{'' if each.guard.negated else '!'}{each.guard.register}"
            yield number, (plain(str(each)), plain_of(each), True, binds)
        elif each.guard is not None and each.parts[0] == "bra":
            comparison = _ordered(each.guard.register, comparisons)
            target = labels.get(str(each.operands[0]), -1)
            between = statements[number:target]
            if comparison is not None and 0 < len(between) <= _SKIPPED and any(map(_is_access, between)):
                binds = f"{'!' if each.guard.negated else ''}{each.guard.register}"
                yield number, (f"{plain(str(comparison))} {plain(str(each))}", "", False, binds)
        elif _is_ordered(each) and uses.get(str(each.operands[0])) == {"setp", "selp"}:
            # What is selected otherwise is the place or the size of an access.
            inside = each.parts[1] in _BELOW
            constant = f"setp.{'eq' if inside else 'ne'}.u32 {each.operands[0]}, 0, 0;"
            yield number, (plain(str(each)), constant, False, f"{'!' if inside else ''}{each.operands[0]}")


def plain_of(instruction: Instruction) -> str:
    """An instruction without its guard."""
    return str(instruction).removeprefix(f"{instruction.guard} ")


# Drawing them -----------------------------------------------------------------------------------------------------


def drawn(executed: Iterable[Mutant], most: int = MOST, seed: int = SEED) -> list[Mutant]:
    """At most so many mutants, of each kind in turn and of each place in turn, so that neither one kind nor what a
    compiler has unrolled takes all; in the order of the text. Of one kind and place there are `_COPIES` at most."""
    by_kind: dict[str, list[Mutant]] = {kind: [] for kind in KINDS}
    for mutant in executed:
        by_kind[mutant.kind].append(mutant)
    for kind, mutants in by_kind.items():
        random.Random(f"{seed} {kind}").shuffle(mutants)
        turns: Counter[str] = Counter()
        turn = {}
        for mutant in mutants:
            turn[mutant.identity] = turns[mutant.place]
            turns[mutant.place] += 1
        mutants[:] = [mutant for mutant in mutants if turn[mutant.identity] < _COPIES]
        mutants.sort(key=lambda mutant: -turn[mutant.identity])
    chosen: list[Mutant] = []
    while len(chosen) < most and any(by_kind.values()):
        chosen += [mutants.pop() for mutants in by_kind.values() if mutants]
    return sorted(chosen[:most], key=lambda mutant: mutant.start)


def resolved(ptx: str, entry: str, identities: Iterable[tuple[str, str, int]]) -> list[Mutant]:
    """The mutants of these identities. Raises KeyError for one that the kernel does not have."""
    known = {mutant.identity: mutant for mutant in found(ptx, entry)}
    return [known[identity] for identity in identities]


# Texts ------------------------------------------------------------------------------------------------------------


def mutated(ptx: str, mutant: Mutant) -> str:
    """The text with one mutant in force."""
    guard = f"{mutant.guard} " if mutant.guard and not mutant.unguarded else ""
    made = f"{guard}{mutant.replacement}" if mutant.replacement else ""
    return ptx[: mutant.start] + made + ptx[mutant.end :]


def together(ptx: str, entry: str, mutants: Sequence[Mutant]) -> str:
    """The text with all of the mutants, of which the one that the variable `CHOSEN` numbers, from 1, is in force.

    Where that is `NOTE` the kernel does what it should, and notes in `SEEN` which of the instructions it executes: a
    guarded one where its guard holds, but for that of a bound. Of bounds it notes behind all these which of them bind.
    """
    edits = []
    for number, mutant in enumerate(mutants, 1):
        held = f", {'!' if mutant.guard.negated else ''}{mutant.guard.register}" if mutant.guard else ""
        noted, note = "", "%mutant_note"
        if held and mutant.kind != "bound":
            noted, note = f"setp.eq.and.u32 %mutant_on, %mutant_chosen, {NOTE}{held};\n", "%mutant_on"
        text = f"{noted}@{note} st.global.u32 [{SEEN}+{4 * number}], {NOTE};\n"
        text += f"setp.ne{'.and' if held else ''}.u32 %mutant_off, %mutant_chosen, {number}{held};\n"
        if mutant.replacement:
            other = "" if mutant.unguarded else held
            text += f"setp.eq{'.and' if other else ''}.u32 %mutant_on, %mutant_chosen, {number}{other};\n"
        text += f"@%mutant_off {mutant.original}"
        if mutant.replacement:
            text += f"\n@%mutant_on {mutant.replacement}"
        if mutant.binds:
            place = f"[{SEEN}+{4 * (1 + len(mutants) + number)}]"
            noted = f"setp.eq.and.u32 %mutant_on, %mutant_chosen, {NOTE}, {mutant.binds};\n@%mutant_on st.global.u32 "
            noted += f"{place}, {NOTE};"
            text = f"{noted}\n{text}" if mutant.original.startswith("bra") else f"{text}\n{noted}"
        edits.append((mutant.start, mutant.end, text))
    kernel = _kernel(ptx, entry)
    assert kernel.body is not None
    begin = next(each.start for each in kernel.body.statements if isinstance(each, Instruction | Label | Block))
    variables = f".visible .const .align 4 .u32 {CHOSEN} = 0;\n"
    variables += f".visible .global .align 4 .b8 {SEEN}[{8 + 8 * len(mutants)}];\n"
    registers = "\n.reg .pred %mutant_on, %mutant_off, %mutant_note;\n.reg .b32 %mutant_chosen;\n"
    first = f"ld.const.u32 %mutant_chosen, [{CHOSEN}];\nsetp.eq.u32 %mutant_note, %mutant_chosen, {NOTE};\n"
    edits += [(kernel.start, kernel.start, variables), (kernel.body.start + 1, kernel.body.start + 1, registers)]
    parts, at = [], 0
    for start, end, text in sorted((*edits, (begin, begin, first)), key=lambda edit: edit[:2]):
        parts += [ptx[at:start], text]
        at = end
    return "".join((*parts, ptx[at:]))
