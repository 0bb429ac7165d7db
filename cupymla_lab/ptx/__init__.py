"""PTX text as a tree: `parse` gives a `Module` in which every node knows its place in the text.

The engine reads kernels through it.
"""

from __future__ import annotations

from .lexer import PtxError, Source
from .parser import parse
from .places import Places

__all__ = ["Places", "PtxError", "Source", "parse"]
