"""Correctness cases of every operator, a module each: what kernels are checked with, and users never call."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Problems:
    """All of an operator's cases.

    It has what the operator's own `cases` module has (`cupymla.ops.case`), `CASES`, small enough for the NumPy
    reference in float64, and, where there are any, `LARGE`, for a GPU alone.
    """

    def __init__(self, operator: str, own: Any) -> None:
        self._modules = import_module(f"{__name__}.{operator}"), own

    def __getattr__(self, name: str) -> Any:
        for module in self._modules:
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(f"{self._modules[0].__name__} and {self._modules[1].__name__} have no {name}")
