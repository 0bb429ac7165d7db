"""How a run ends early: a trap names what went wrong and where."""

from __future__ import annotations

from cupymla.errors import CupymlaError


class Trap(CupymlaError, RuntimeError):
    """A kernel did what no kernel may do, or what the interpreter cannot run.

    Attributes:
        what: what went wrong.
        where: kernel, CTA and threads; "" where no thread is at fault.
        line: line of the PTX text, counted from 1; 0 when no instruction is at fault.
        instruction: the instruction as it stands there, or "".
        location: "file:line" of the CUDA source, with its callers where it was inlined, or "".
    """

    def __init__(self, what: str, where: str = "", line: int = 0, instruction: str = "", location: str = "") -> None:
        self.what = what
        self.where = where
        self.line = line
        self.instruction = instruction
        self.location = location
        text = f"{where}: {what}" if where else what
        if line:
            shown = instruction if len(instruction) <= 160 else instruction[:157] + "..."
            text += f"; PTX line {line}: {shown}"
        super().__init__(text + (f" ({location})" if location else ""))


class Unknown(Trap):
    """An instruction, or a form of one, that the interpreter does not have."""
