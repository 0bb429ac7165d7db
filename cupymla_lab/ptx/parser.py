"""PTX text to its parts: module directives, functions, nested scopes, instructions with their operands.

Source: PTX ISA 9.0, "Syntax", "Directives" and "Instruction Operands".
"""

from __future__ import annotations

import re

from .lexer import Source, Token, tokens
from .syntax import (
    Address,
    Block,
    Constant,
    Directive,
    Function,
    Group,
    Guard,
    Instruction,
    Label,
    Module,
    Name,
    Negated,
    Offset,
    Operand,
    Pair,
    Statement,
    Variable,
    Vector,
)

# These directives end with their line; all others end with a semicolon or a brace.
_LINE_DIRECTIVES = {".version", ".target", ".address_size", ".file", ".loc"}
_LINKAGE = {".extern", ".visible", ".weak", ".common"}
_SPACES = {".reg", ".local", ".shared", ".global", ".const", ".param", ".tex", ".sreg"}
_CLOSING = {"{": "}", "(": ")", "[": "]"}


# Lines that say where in CUDA an instruction comes from, and what debuggers read: more than half of a kernel's tokens.
_DEBUG = re.compile(r"^[ \t]*\.loc[ \t][^\n]*$|^[ \t]*\.section\b[^{};]*\{[^{}]*\}", re.MULTILINE)


def parse(text: str, name: str = "<ptx>", debug: bool = True) -> Module:
    """The module that a PTX text is. Raises PtxError with the line where it is not PTX.

    Args:
        text: what to read.
        name: what errors call it.
        debug: whether to look at `.loc` and `.section` too; without, nothing of them is in the module but its text.
    """
    looked_at = text if debug else _DEBUG.sub(lambda found: re.sub(r"[^\n]+", _blank, found[0]), text)
    return _Parser(Source(text, name), Source(looked_at, name)).module()


def _blank(found: re.Match[str]) -> str:
    return " " * len(found[0])


class _Parser:
    def __init__(self, source: Source, looked_at: Source) -> None:
        self._source = source
        self._tokens = list(tokens(looked_at))
        self._at = 0
        self._calling = False
        self._names: dict[str, Name] = {}

    # Tokens ----------------------------------------------------------------------------------------------------

    @property
    def _next(self) -> Token:
        return self._tokens[self._at]

    def _take(self) -> Token:
        token = self._tokens[self._at]
        if token.kind == "end":
            raise self._source.error(token.start, "the text ends here, too early")
        self._at += 1
        return token

    def _is(self, text: str) -> bool:
        return self._tokens[self._at].text == text  # of a string the quotes are part

    def _accept(self, text: str) -> bool:
        if self._tokens[self._at].text == text:
            self._at += 1
            return True
        return False

    def _expect(self, text: str) -> Token:
        if not self._is(text):
            raise self._source.error(self._next.start, f"expected '{text}', found '{self._next.text}'")
        return self._take()

    def _words(self, first: int) -> tuple[str, ...]:
        return tuple(token.text for token in self._tokens[first : self._at])

    def _skip_balanced(self) -> None:
        """Past a bracket of any kind and all up to its partner."""
        closing = _CLOSING[self._take().text]
        while not self._is(closing):
            if self._next.kind == "mark" and self._next.text in _CLOSING:
                self._skip_balanced()
            else:
                self._take()
        self._take()

    # Module ----------------------------------------------------------------------------------------------------

    def module(self) -> Module:
        items: list[Directive | Variable | Function] = []
        while self._next.kind != "end":
            if not self._accept(";"):
                items.append(self._item())
        return Module(self._source, tuple(items))

    def _item(self) -> Directive | Variable | Function:
        first = self._at
        if self._next.kind != "directive":
            raise self._source.error(self._next.start, f"expected a directive, found '{self._next.text}'")
        if self._next.text in _LINE_DIRECTIVES:
            return self._line_directive()
        while self._next.text in _LINKAGE:
            self._take()
        if self._next.text in (".entry", ".func"):
            return self._function(first)
        if self._next.text in _SPACES:
            return self._variable(first)
        if self._next.text == ".section":
            self._take()
            self._take()
            self._skip_balanced()
            return self._directive(first)
        return self._directive_to_semicolon(first)

    def _directive(self, first: int) -> Directive:
        return Directive(self._words(first), self._tokens[first].start, self._tokens[self._at - 1].end)

    def _line_directive(self) -> Directive:
        first = self._at
        line = self._source.line(self._next.start)
        while self._next.kind != "end" and self._source.line(self._next.start) == line:
            self._take()
        return self._directive(first)

    def _directive_to_semicolon(self, first: int) -> Directive:
        while not self._accept(";"):
            if self._next.kind == "mark" and self._next.text in _CLOSING:
                self._skip_balanced()
            else:
                self._take()
        return self._directive(first)

    def _variable(self, first: int) -> Variable:
        external = any(token.text == ".extern" for token in self._tokens[first : self._at])
        space, kind, alignment = self._take().text, "", 0
        while self._next.kind == "directive":
            word = self._take().text
            if word == ".align":
                alignment = int(self._take().text)
            else:
                kind = word
        names: list[tuple[str, int | None]] = []
        while not self._is(";"):
            names.append(self._declarator())
            if not self._accept(","):
                break
        self._expect(";")
        start, end = self._tokens[first].start, self._tokens[self._at - 1].end
        type_name = kind.removeprefix(".").split(".")[-1]
        return Variable(self._words(first), space[1:], type_name, tuple(names), external, alignment, start, end)

    def _declarator(self) -> tuple[str, int | None]:
        name, count = self._take().text, None
        if self._accept("<"):
            count = int(self._take().text)
            self._expect(">")
        while self._is("["):
            self._skip_balanced()
        if self._accept("="):
            while not (self._is(",") or self._is(";")):
                if self._next.kind == "mark" and self._next.text in _CLOSING:
                    self._skip_balanced()
                else:
                    self._take()
        return name, count

    def _function(self, first: int) -> Function:
        kernel = self._take().text == ".entry"
        if not kernel and self._is("("):
            self._skip_balanced()
        name = self._take().text
        while not (self._is("{") or self._is(";")):
            if self._is("("):
                self._skip_balanced()
            else:
                self._take()
        heading = self._words(first)
        body = self._block() if self._is("{") else None
        if body is None:
            self._expect(";")
        return Function(kernel, name, heading, body, self._tokens[first].start, self._tokens[self._at - 1].end)

    # Statements ------------------------------------------------------------------------------------------------

    def _block(self) -> Block:
        start = self._expect("{").start
        statements: list[Statement] = []
        while not self._is("}"):
            if not self._accept(";"):
                statements.append(self._statement())
        return Block(tuple(statements), start, self._expect("}").end)

    def _statement(self) -> Statement:
        token, first = self._next, self._at
        if self._is("{"):
            return self._block()
        if token.kind == "directive":
            if token.text in _LINE_DIRECTIVES:
                return self._line_directive()
            while self._next.text in _LINKAGE:
                self._take()
            return self._variable(first) if self._next.text in _SPACES else self._directive_to_semicolon(first)
        following = self._tokens[min(self._at + 1, len(self._tokens) - 1)]
        if token.kind == "word" and following.text == ":":
            self._at += 2
            # A table of branch targets or a prototype belongs to its label and is one declaration with it.
            if self._next.text in (".branchtargets", ".calltargets", ".callprototype"):
                return self._directive_to_semicolon(first)
            return Label(token.text, token.start, following.end)
        return self._instruction()

    def _instruction(self) -> Instruction:
        start, guard = self._next.start, None
        if self._accept("@"):
            negated = self._accept("!")
            guard = Guard(self._take().text, negated)
        opcode = self._take()
        if opcode.kind != "word":
            raise self._source.error(opcode.start, f"expected an instruction, found '{opcode.text}'")
        operands: list[Operand] = []
        # Parentheses hold what a call passes; elsewhere they belong to a constant expression.
        self._calling = opcode.text.split(".", 1)[0] == "call"
        while not self._is(";"):
            operands.append(self._operand())
            if not self._accept(","):
                break
        return Instruction(opcode.text, tuple(operands), guard, start, self._expect(";").end)

    # Operands --------------------------------------------------------------------------------------------------

    def _operand(self) -> Operand:
        first = self._simple()
        if isinstance(first, Name) and self._accept("|"):
            return Pair(first, self._simple())
        return first

    def _list(self, closing: str) -> tuple[Operand, ...]:
        items: list[Operand] = []
        while not self._is(closing):
            items.append(self._operand())
            if not self._accept(","):
                break
        self._expect(closing)
        return tuple(items)

    def _simple(self) -> Operand:
        if self._tokens[self._at].kind == "word":
            return self._name()
        if self._accept("!"):
            return Negated(self._simple())
        if self._accept("{"):
            return Vector(self._list("}"))
        if self._accept("["):
            return Address(self._list("]"))
        if self._calling and self._accept("("):
            return Group(self._list(")"))
        return Constant(self._constant())

    def _name(self) -> Operand:
        text = self._take().text
        name = self._names.get(text)
        if name is None:
            name = self._names[text] = Name(text)
        sign = self._tokens[self._at].text
        if sign == "[":
            self._at += 1
            return Address(self._list("]"), text)
        if sign in ("+", "-"):
            self._at += 1
            rest = self._constant()
            return Offset(name, f"-{rest}" if sign == "-" else rest)
        return name

    def _constant(self) -> str:
        words = []
        depth = 0
        while True:
            token = self._next
            if token.text in (",", ";", "]", "}") or (token.text == ")" and depth == 0):
                break
            depth += (token.text == "(") - (token.text == ")")
            words.append(self._take().text)
        if not words:
            raise self._source.error(self._next.start, f"expected an operand, found '{self._next.text}'")
        return "".join(words)
