"""What every public operator is: a call, and a prepared form of the same call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)


class Prepared(Protocol[R_co]):
    """A call whose checks, plan, compilation, allocation and binding are done.

    `prepared()` runs on the arrays that were given to `prepare`, writes the same output arrays each time and returns
    them: nothing is allocated, checked or synchronised, so it can be captured into a CUDA graph. It runs on the stream
    that was given to `prepare`, else on the current stream of the arrays' framework at the time of the call; `stream`
    replaces both for this one run. `prepare` waits on the host until its memory is free for any of them, but in a
    capture (docs/streams_and_graphs.md). One thread at a time may call it.
    """

    def __call__(self, *, stream: object = None) -> R_co:
        """Run once more."""


class Operator(Protocol[P, R_co]):
    """A public operator: `op(...)` runs once, `op.prepare(...)` takes the same arguments and returns a `Prepared`.

    It is the public function itself with attributes, because a wrapper would cost every call half a microsecond.

    Attributes:
        name: the operator's one name, the same in Python, `cuda/`, tests and docs.
    """

    name: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run once."""

    def prepare(self, *args: P.args, **kwargs: P.kwargs) -> Prepared[R_co]:
        """Do everything of a call but the launch; see `Prepared`."""

    def workspace_bytes(self, *args: P.args, **kwargs: P.kwargs) -> int:
        """How large a `workspace` the call needs, in bytes; only operators with that parameter have this."""


def operator(
    call: Callable[P, R],
    prepare: Callable[..., Prepared[R]],
    workspace_bytes: Callable[..., int] | None = None,
) -> Operator[P, R]:
    """Make a public function the operator whose prepared form `prepare` makes.

    `prepare` and `workspace_bytes` get the arguments by name, those that were left out not at all.
    """
    made = cast("Operator[P, R]", call)
    made.name = call.__name__
    # Methods to those who call them, attributes here.
    setattr(made, "prepare", _bound(call, "prepare", prepare, Prepared[Any], _PREPARE))  # noqa: B010
    if workspace_bytes is not None:
        setattr(made, "workspace_bytes", _bound(call, "workspace_bytes", workspace_bytes, int, _WORKSPACE_BYTES))  # noqa: B010
    return made


_PREPARE = """\
Do all of a call of `{name}` but the launch: checks, plan, compilation, allocation and binding.

Takes the arguments of `{name}`, which says what they mean.

Returns:
    A prepared call. `prepared()` computes from the arrays given here, whatever they hold by then, writes the same
    outputs each time and returns them; `prepared(stream=...)` runs on that stream. It allocates, checks and
    synchronises nothing, so a CUDA graph can capture it. One thread at a time may call it.

Raises:
    As `{name}`.
"""

_WORKSPACE_BYTES = """\
How many bytes the `workspace` of a call of `{name}` with these arguments has to have at least; 0 where none is used.

Nothing is computed or compiled, and the arrays are not read.

Raises:
    As `{name}`.
"""


def _bound(call: Callable[P, R], method: str, work: Callable[..., T], returns: object, text: str) -> Callable[P, T]:
    """`work` with the signature of `call`: it takes exactly the calls that `call` takes. `text` is its docstring."""
    name = f"{call.__name__}.{method}"
    signature = inspect.signature(call)

    @functools.wraps(call)
    def bound(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError as refused:
            raise TypeError(f"{name}(): {refused}") from None
        return work(**given.arguments)

    bound.__name__ = bound.__qualname__ = name
    bound.__doc__ = text.format(name=call.__name__)
    bound.__annotations__ = {**call.__annotations__, "return": returns}
    setattr(bound, "__signature__", signature.replace(return_annotation=returns))  # noqa: B010
    return bound


class CpuCall(Generic[R_co]):
    """A prepared call on the CPU: the NumPy reference, bound to its arrays."""

    def __init__(self, run: Callable[[], R_co]) -> None:
        self._run = run

    def __call__(self, *, stream: object = None) -> R_co:
        """Run once more; `stream` means nothing here."""
        return self._run()
