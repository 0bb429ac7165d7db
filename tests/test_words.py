"""No private words: names that only this project had have given way to the field's own (docs/glossary.md).

The list holds identifiers, file names and phrases that were used once. English words used as such are not on it.
"""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

EXEMPT = ("docs/log/", "tests/test_words.py")
"""What tells of the past, and the list itself."""

IDENTIFIERS = r"""
    kWho registers_take registers_give_back pin_registers forget_registers
    bunch bunches Bunch\w* all_bunches kBunch\w+ \w+_bunch(?:es)? deal_bunches
    kSlots kSlotsArg k(?:Block|Cta|Warp|Group|Part|Row|Max|MaxOrder)Slots kSlot(?:Tile|TileBytes|Steps|Words)
    block_slots row_slots slot_list slot_lists slot_gather stored_slots list_slots count_slots place_slots read_slots
    (?:PAIR|JOINT|PACKED|ORDER|_CTA|_BLOCK|_PAIR)_SLOTS slot_shape slots_flops counts_slot
    Joint\w+ joint_\w+ \w+_joint(?:_\w+)? _?JOINT(?:_\w+)?
    FewHeads\w* few_heads_\w+ kFewHeads FewConfig deal_few few_clusters _?FEW_(?!CASES|REGISTERS)\w+
    Pair(?:Atoms|Config|Consumer|Gradients|Places|Producer|Storage) PAIR_RUN kRun is_pair _is_pair attends_in_pairs
    (?:Weights|Columns)(?:Atoms|Config|Consumer|Producer|Storage) kIs(?:Weights|Columns) This(?:Weights|Columns|Walk)
    (?:weights|columns)_(?:consumer|producer|stage|storage) kWeight(?:Slots|Heads|Groups) stored_weights
    companion companions companion_\w+ \w+_companions? kCompanionThreads COMPANIONS
    kDeal kDealThreads raw_deal deal_at_once deal_in_turn dealt Dealt
    in_halves _can_take_halves halves_fixed in_shares _SHARE_ROOM _WHOLE_ROOM
    strange Strange strange_\w+ \w+_strange_\w+ STRANGE_\w+ kApart
    stretch stretches kAlone kTogether takes_rows_together kMaxTokensAlone
    Share share_of_cta find_share kTurnTile kTurnBarrier kWalkRead kWalkMoved PlainPlaces PackedPlaces
    narrow_(?:descriptor|k_major_descriptor|mn_major_descriptor|tiles) kNarrow(?:Conversions|Swizzle\w+|StepBytes)
    CUPYMLA_NARROW_CONVERSIONS wait_for_grid_ahead
    [Tt]wins? require_twin door doors Door DOOR indexer_door
    unheard rival rivals SpreadRow may_be_short practice_
"""

FILES = r"""
    narrow\.cuh narrow_tiles\.cuh slot_gather\.cuh slot_lists\.cuh bunch\.cuh walk\.cuh place\.cuh turn\.cuh share\.cuh
    joint_\w+\.cuh few_heads_\w+\.cuh weights_(?:consumer|producer|stage|storage)\.cuh columns_\w+\.cuh
    pair_(?:atoms|attention|config|consumer|gradients|producer|rows|statistics|storage|work)\.cuh stored_weights\.cuh
    companion_params\.cuh \w+_joint\.cu xl_paged_attention_few\.cu companions\.py door\.py halves\.py shares\.py
    strange_kit\.py spread\.py spread\.json test_\w+_joint\.py test_\w*companions\w*\.py test_xl_few\.py
"""

PHRASES = (
    "the law", "comparison law", "short way", "long way", "to the letter", 'races="practice"', 'races="letter"',
    "--against", "grid ahead", "rows together", "deal out", "deals out", "stage `weights`", "stage `columns`",
    "a pair of CTAs",
)  # fmt: skip

_TOKEN = re.compile(r"\w+", re.ASCII)
_IDENTIFIER = re.compile("|".join(IDENTIFIERS.split()), re.ASCII)
_FILE = re.compile(r"(?<![\w-])(?:" + "|".join(FILES.split()) + r")(?!\w)", re.ASCII)
_PHRASE = re.compile("|".join(map(re.escape, PHRASES)))


@functools.cache
def is_private(word: str) -> bool:
    """Whether an identifier is on the list; most occur often, so each is looked up once."""
    return _IDENTIFIER.fullmatch(word) is not None


def tracked() -> list[str]:
    """The files of the checkout that git knows."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
    if listed.returncode:
        pytest.skip("no git checkout")
    return [name for name in listed.stdout.split("\0") if name and not name.startswith(EXEMPT)]


def found_in(text: str) -> list[tuple[int, str]]:
    """Line and word of each word of the list."""
    words = list(filter(is_private, set(_TOKEN.findall(text))))
    at = [match for word in words for match in re.finditer(rf"(?<!\w){word}(?!\w)", text, re.ASCII)]
    at += [*_FILE.finditer(text), *_PHRASE.finditer(text)]
    return sorted((text.count("\n", 0, match.start()) + 1, match[0]) for match in at)


def test_no_file_has_a_private_word() -> None:
    found = []
    for name in tracked():
        file = ROOT / name
        if not file.is_file():
            continue
        found += [f"{name}: {word}" for _, word in found_in(name.replace("/", " "))]
        content = file.read_bytes()
        if b"\0" not in content[:4096]:
            found += [f"{name}:{line}: {word}" for line, word in found_in(content.decode("utf-8", "replace"))]
    assert not found, "use the field's word instead (docs/log/words.md)\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("int kWho = 0;\nbunch of them", [(1, "kWho"), (2, "bunch")]),
        ("const Share share = share_of_cta(params); all share it", [(1, "Share"), (1, "share_of_cta")]),
        ("see narrow.cuh, and what keeps the law", [(1, "narrow.cuh"), (1, "the law")]),
        ('#include "walk.cuh"', [(1, "walk.cuh")]),
        ("os.walk(place); a narrow pass, run in turn; kWhole; disjoint_sets; doorstep", []),
    ],
)
def test_the_list_finds_words_and_leaves_english_alone(text: str, words: list[tuple[int, str]]) -> None:
    assert found_in(text) == words
