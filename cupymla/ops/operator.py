"""What every public operator is: a call, and a prepared form of the same call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Generic, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class Prepared(Protocol[R]):
    """A call whose checks, plan, compilation, allocation and binding are done.

    `prepared()` runs on the arrays that were given to `prepare`, writes the same output arrays each time and returns
    them: nothing is allocated, checked or synchronised, so it can be captured into a CUDA graph. `stream` replaces
    the stream chosen at preparation for this one run.
    """

    def __call__(self, *, stream: object = None) -> R: ...


class Operator(Generic[P, R]):
    """A public operator: `op(...)` runs once, `op.prepare(...)` takes the same arguments and returns a `Prepared`.

    Attributes:
        name: the operator's one name, the same in Python, `cuda/`, tests and docs.
    """

    def __init__(self, call: Callable[P, R], prepare: Callable[P, Prepared[R]]) -> None:
        functools.update_wrapper(self, call)
        self.name: str = call.__name__
        self._call = call
        self._prepare = prepare

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._call(*args, **kwargs)

    def prepare(self, *args: P.args, **kwargs: P.kwargs) -> Prepared[R]:
        """Do everything of a call but the launch; see `Prepared`."""
        return self._prepare(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<operator cupymla.{self.name}>"


class CpuCall(Generic[R]):
    """A prepared call on the CPU: the NumPy reference, bound to its arrays."""

    def __init__(self, run: Callable[[], R]) -> None:
        self._run = run

    def __call__(self, *, stream: object = None) -> R:
        return self._run()
