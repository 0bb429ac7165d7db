"""What every public operator is: a call, and a prepared form of the same call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar

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


class Operator(functools.partial[R], Generic[P, R]):
    """A public operator: `op(...)` runs once, `op.prepare(...)` takes the same arguments and returns a `Prepared`.

    A call of it is a call of the public function that it was made of.

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

    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
            """Run once."""

    def __reduce__(self) -> str:
        # Copies and pickles of what is global are its name.
        return self.name


def operator(calls: Any) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Decorator that makes a public function the operator of `calls`, an `ops.calls.Calls`."""

    def made_of(call: Callable[P, R]) -> Operator[P, R]:
        made: Operator[P, R] = Operator(call)
        functools.update_wrapper(made, call)
        made.name, made.calls = call.__name__, calls
        made.prepare = _form(call, "prepare", calls.prepare, Prepared[Any], _PREPARE)
        if "workspace" in inspect.signature(call).parameters:
            made.workspace_bytes = _form(call, "workspace_bytes", calls.required_bytes, int, _WORKSPACE_BYTES)
        return made

    return made_of


_PREPARE = """\
Do all of a call of `{name}` but the launch: checks, plan, compilation, allocation and binding.

Takes the arguments of `{name}`, and raises what it raises.

Returns:
    A prepared call: `prepared()` and `prepared(stream=...)` compute from the arrays given here, and write the same
    outputs each time. They allocate, check and synchronise nothing, so that a CUDA graph can capture them.
"""

_WORKSPACE_BYTES = """\
How many bytes the `workspace` of a call of `{name}` with these arguments has to have at least; 0 where none is used.

Nothing is computed or compiled, and the arrays are not read. Raises what `{name}` raises.
"""


def _form(call: Callable[P, Any], name: str, work: Callable[..., R], returns: object, text: str) -> Callable[P, R]:
    """`work` with the signature of `call`: it takes exactly the calls that `call` takes. `text` is its docstring."""
    signature = inspect.signature(call).replace(return_annotation=returns)

    @functools.wraps(call)
    def form(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError as refused:
            raise TypeError(f"{form.__name__}(): {refused}") from None
        return work(**given.arguments)

    form.__name__ = form.__qualname__ = f"{call.__name__}.{name}"
    form.__doc__ = text.format(name=call.__name__)
    form.__annotations__ = {**call.__annotations__, "return": returns}
    setattr(form, "__signature__", signature)  # noqa: B010 - what inspect and help() read
    return form
