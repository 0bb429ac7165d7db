"""What every public operator is: a call, and a prepared form of the same call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Prepared(Protocol[R_co]):
    """A call whose checks, plan, compilation, allocation and binding are done.

    `prepared()` runs on the arrays that were given to `prepare`, whatever they hold by then, writes the same output
    arrays each time and returns them: nothing is allocated, checked or synchronised, so it can be captured into a CUDA
    graph. It runs on the stream that was given to `prepare`, else on the current stream of the arrays' framework at the
    time of the call; `stream` replaces both for this one run. `prepare` waits on the host until its memory is free for
    any of them, but in a capture (docs/streams_and_graphs.md). One thread at a time may call it.
    """

    def __call__(self, *, stream: object = None) -> R_co:
        """Run once more."""


class Operator(Protocol[P, R]):
    """A public operator: a function `op(...)` that runs once; `op.prepare(...)` takes the same arguments and returns a
    `Prepared`.

    Attributes:
        name: the operator's one name, the same in Python, `cuda/`, tests and docs.
        calls: what is behind it.
        prepare: does everything of a call but the launch.
        workspace_bytes: how large a `workspace` the call needs, in bytes; only operators with that parameter have this.
    """

    name: str
    calls: Any
    prepare: Callable[P, Prepared[R]]
    workspace_bytes: Callable[P, int]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run once."""


def operator(calls: Any) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Decorator that makes a public function the operator of `calls`, an `ops.calls.Calls`."""

    def made_of(call: Callable[P, R]) -> Operator[P, R]:
        made = cast("Operator[P, R]", call)
        made.name, made.calls = call.__name__, calls
        made.prepare = _form(call, "prepare", calls.prepare, Prepared[Any])
        if "workspace" in inspect.signature(call).parameters:
            made.workspace_bytes = _form(call, "workspace_bytes", calls.required_bytes, int)
        return made

    return made_of


def _form(call: Callable[P, Any], name: str, work: Callable[..., R], returns: object) -> Callable[P, R]:
    """`work` with the signature of `call`, and with its name for `{name}` in the docstring."""
    signature = inspect.signature(call).replace(return_annotation=returns)

    @functools.wraps(call, updated=())
    def form(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError as refused:
            raise TypeError(f"{form.__name__}(): {refused}") from None
        return work(**given.arguments)

    form.__name__ = form.__qualname__ = f"{call.__name__}.{name}"
    form.__doc__ = (inspect.getdoc(work) or "").format(name=call.__name__)
    form.__annotations__ = {**call.__annotations__, "return": returns}
    setattr(form, "__signature__", signature)  # noqa: B010 - what inspect and help() read
    return form
