"""PTX text cut into tokens. Nothing is lost: between two tokens lies only white space and comments.

Source: PTX ISA 9.0, "Syntax" (identifiers, constants, comments).
"""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from cupymla.errors import CupymlaError

# A word is an identifier with everything that is dotted on: an opcode with its qualifiers, or a register such as
# %tid.x. Qualifiers hold double colons, as in .mbarrier::complete_tx::bytes.
_TOKEN = re.compile(
    r"""
    (?:[ \t\r\n\f\v]+|//[^\n]*|/\*.*?\*/)*
    (?:
      (?P<word>(?:[A-Za-z][\w$]*|[_$%][\w$]*)(?:\.[A-Za-z0-9_]+(?:::[A-Za-z0-9_]+)*)*)
    | (?P<number>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?
        |\d+\.\d*(?:[eE][+-]?\d+)?|\d+(?:[eE][+-]?\d+)|\d+U?)
    | (?P<directive>\.[A-Za-z_]\w*(?:::\w+)*(?:\.[A-Za-z0-9_]+(?:::[A-Za-z0-9_]+)*)*)
    | (?P<string>"(?:[^"\\\n]|\\.)*")
    | (?P<mark><<|>>|<=|>=|==|!=|&&|\|\||[{}()\[\],;:<>=+\-*/!@|&^~?%])
    | (?P<end>\Z)
    | (?P<unknown>.)
    )
    """,
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    """One token.

    Attributes:
        kind: "word", "directive" (begins with a dot), "number", "string", "mark" (punctuation) or "end".
        text: as it stands in the source.
        start: offset of its first character.
        end: offset behind its last character.
    """

    kind: str
    text: str
    start: int
    end: int


_token = functools.partial(tuple.__new__, Token)  # a third of the time that calling Token takes


class PtxError(CupymlaError, ValueError):
    """PTX text that cannot be read, translated or assembled.

    Attributes:
        name: what the text is called, usually its file.
        line: where, counted from 1; 0 when no line can be named.
        instruction: the instruction as it stands there, or "".
        what: what is wrong, without these.
    """

    def __init__(self, name: str, line: int, what: str, instruction: str = "") -> None:
        self.name = name
        self.line = line
        self.instruction = instruction
        self.what = what
        where = f"{name}:{line}" if line else name
        super().__init__(f"{where}: {what}" + (f": {instruction}" if instruction else ""))


class Source:
    """A PTX text with its name and the line of each offset."""

    def __init__(self, text: str, name: str = "<ptx>") -> None:
        self.text = text
        self.name = name
        self._starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def line(self, offset: int) -> int:
        """The line that an offset lies in, counted from 1."""
        return bisect.bisect_right(self._starts, offset)

    def error(self, offset: int, what: str, instruction: str = "") -> PtxError:
        """An error about the text at an offset."""
        return PtxError(self.name, self.line(offset), what, " ".join(instruction.split()))


def tokens(source: Source) -> Iterator[Token]:
    """The tokens of a text, then one of kind "end". Raises PtxError at a character that begins no token."""
    for found in _TOKEN.finditer(source.text):
        kind = found.lastgroup or ""
        start, end = found.span(kind)
        if kind == "unknown":
            raise source.error(start, f"a character that PTX does not have: {found[kind]!r}")
        yield _token((kind, found[kind], start, end))
        if kind == "end":
            return
