"""What a module's variables take, and what they hold before anything runs."""

from __future__ import annotations

import re

from .syntax import Variable

_NUMBER = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)U?")
_FLOAT = re.compile(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}")
_TYPE = re.compile(r"[a-z]+(\d+)(?:x(\d+))?")


def size_bytes(item: Variable) -> int:
    """Bytes of a variable; 0 for an array without an extent."""
    count, words = 1, item.words
    for at, word in enumerate(words):
        if word == "=":
            break
        if word == "[":
            count *= int(words[at + 1]) if words[at + 1] != "]" else 0
    return count * _element_bytes(item)


def initial_bytes(item: Variable) -> bytes:
    """What a variable holds, `size_bytes` of it, or all that is given where no extent is; zeros where nothing is said,
    or an address is."""
    given: list[str] = []
    if "=" in item.words:
        # A minus is a word of its own.
        text = " ".join(item.words[item.words.index("=") + 1 :]).replace("- ", "-")
        given = [word for word in text.split() if word not in ("{", "}", ",", ";")]
    if not all(_NUMBER.fullmatch(word) or _FLOAT.fullmatch(word) for word in given):
        given = []
    size = _element_bytes(item)
    numbers = (int(word[2:], 16) if _FLOAT.fullmatch(word) else int(word.rstrip("U"), 0) for word in given)
    return b"".join((number % 256**size).to_bytes(size, "little") for number in numbers).ljust(size_bytes(item), b"\0")


def _element_bytes(item: Variable) -> int:
    found = _TYPE.fullmatch(item.type)
    if found is None:
        raise ValueError(f"a variable of type .{item.type}")
    return int(found[1]) * int(found[2] or 1) // 8
