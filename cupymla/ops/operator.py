"""What every public operator is: a call, and a prepared form of the same call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Generic, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class Prepared(Protocol[R_co]):
    """A call whose checks, plan, compilation, allocation and binding are done.

    `prepared()` runs on the arrays that were given to `prepare`, writes the same output arrays each time and returns
    them: nothing is allocated, checked or synchronised, so it can be captured into a CUDA graph. `stream` replaces
    the stream chosen at preparation for this one run.
    """

    def __call__(self, *, stream: object = None) -> R_co:
        """Run once more."""


class Operator(Generic[P, R_co]):
    """A public operator: `op(...)` runs once, `op.prepare(...)` takes the same arguments and returns a `Prepared`.

    Attributes:
        name: the operator's one name, the same in Python, `cuda/`, tests and docs.
    """

    def __init__(self, call: Callable[P, R_co], prepare: Callable[P, Prepared[R_co]]) -> None:
        functools.update_wrapper(self, call)
        self.name: str = call.__name__
        self._call = call
        self._prepare = prepare

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run once."""
        return self._call(*args, **kwargs)

    def prepare(self, *args: P.args, **kwargs: P.kwargs) -> Prepared[R_co]:
        """Do everything of a call but the launch; see `Prepared`."""
        return self._prepare(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<operator cupymla.{self.name}>"


class CpuCall(Generic[R_co]):
    """A prepared call on the CPU: the NumPy reference, bound to its arrays."""

    def __init__(self, run: Callable[[], R_co]) -> None:
        self._run = run

    def __call__(self, *, stream: object = None) -> R_co:
        """Run once more; `stream` means nothing here."""
        return self._run()
