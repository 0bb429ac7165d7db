"""A call as data: what a compiled program keeps of it, and how it runs once the program knows its addresses.

A framework that compiles (XLA) fixes everything about a call but the addresses. `Call` is that everything, written as a
text that travels inside the program, also into another process. `run` binds it once in each thread, on a GPU, and runs
it with the addresses of the day (docs/how_a_call_flows.md).
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np

from .. import driver
from ..device import CPU, Device
from ..errors import CupymlaError, InputError, shown
from ..ops.arguments import whole
from ..ops.bound import BoundCall, bound, captured, kept, numbers_of, taken
from ..ops.workspace import require
from ..tensor import View
from ..tensor.types import NUMPY_DTYPES, strides_of
from .declaration import Arrays, Declaration, Facts, Options, Results
from .table import declared

VERSION = 1
"""Of the text. A program that was exported by another version is refused, not guessed at."""

Plain: TypeAlias = "bool | int | float | str | None"
Named: TypeAlias = "tuple[tuple[str, Facts], ...]"

_CHECK_ADDRESS = 1 << 40
_PAGE = 4096
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a public function, without addresses.

    Attributes:
        name: the function.
        arrays: its arrays in the order in which their addresses come.
        results: its results, likewise; those that are named as an array are that array, written in place.
        options: everything else.
    """

    name: str
    arrays: Named
    results: Named
    options: tuple[tuple[str, Plain], ...]

    @staticmethod
    def of(declaration: Declaration, arrays: Mapping[str, Facts], options: Mapping[str, Any]) -> Call:
        """The call that these arguments make. Raises InputError for an option that is no plain value."""
        chosen = {name: plain(declaration.name, name, value) for name, value in options.items()}
        results = complete(declaration, arrays, chosen)
        return Call(declaration.name, tuple(arrays.items()), tuple(results.items()), tuple(chosen.items()))

    @property
    def is_static(self) -> bool:
        """Whether every extent is a number."""
        return all(isinstance(n, int) for _, facts in (*self.arrays, *self.results) for n in facts.shape)

    def text(self) -> str:
        """The call in words that `parsed` understands; extents that are symbols are left to the run."""
        fields = {
            "version": VERSION,
            "name": self.name,
            "arrays": [_spelled(name, facts) for name, facts in self.arrays],
            "results": [_spelled(name, facts) for name, facts in self.results],
            "options": dict(self.options),
        }
        return json.dumps(fields, separators=(",", ":"))

    def with_shapes(self, shapes: Sequence[tuple[int, ...]]) -> Call:
        """The same call with these extents, first of the arrays, then of the results."""
        count = len(self.arrays)
        arrays = tuple((n, Facts(s, f.dtype)) for (n, f), s in zip(self.arrays, shapes[:count], strict=True))
        results = tuple((n, Facts(s, f.dtype)) for (n, f), s in zip(self.results, shapes[count:], strict=True))
        return Call(self.name, arrays, results, self.options)

    def check(self) -> None:
        """Send the call through the operator's validation, with addresses that nobody reads. Raises InputError."""
        self.problem()

    def problem(self) -> Any:
        """The operator's problem that the call is. Raises InputError."""
        declaration = declared(self.name)
        return declaration.calls().read(**declaration.arguments(_placed(self), dict(self.options)))[1]


def results_of(declaration: Declaration, arrays: Arrays, options: Options) -> Results:
    """The results of a call.

    Raises InputError, by the operator's own checks, where the arguments are such that there is no telling.
    """
    try:
        results = declaration.results(arrays, options)
        for facts in results.values():
            if facts.dtype not in NUMPY_DTYPES or not all(map(_may_be_extent, facts.shape)):
                raise ValueError(f"{declaration.name}: no array is {facts.dtype} {list(facts.shape)}")
    except CupymlaError:
        raise
    except Exception:
        if all(isinstance(n, int) for facts in arrays.values() for n in facts.shape):
            alone = Call(declaration.name, tuple(arrays.items()), (), ())
            missing = dict.fromkeys(declaration.required)
            declaration.calls().read(**declaration.arguments(missing | _placed(alone), options))
        raise
    return results


def _may_be_extent(value: object) -> bool:
    """Whether it is one, or a framework's symbol."""
    if isinstance(value, int):
        return not isinstance(value, bool) and value >= 0
    return value is not None and not isinstance(value, (float, str))


def complete(declaration: Declaration, arrays: Arrays, options: Options) -> Results:
    """The results of a call, and a last one that nobody looks at where the call works in memory that it is given.

    Raises InputError where the arguments do not fit each other.
    """
    results = results_of(declaration, arrays, options)
    facts = (*arrays.values(), *results.values())
    if not declaration.has_workspace or not all(isinstance(n, int) for each in facts for n in each.shape):
        return results
    plan: Any = import_module(f"cupymla.ops.{declaration.name}.plan")
    # With its results, of which an operator may be asked for one by giving it a place.
    made = Call(declaration.name, tuple(arrays.items()), tuple(results.items()), tuple(options.items()))
    size = plan.workspace_limit(made.problem())
    if not size and declaration.replayable:
        return results
    return {**results, "workspace": Facts((size,), "uint8")}


def is_replayable(declaration: Declaration, call: Call) -> bool:
    """Whether recordings of a call may be replayed at any time; see `Declaration.replayable`."""
    return declaration.replayable or any(name == "workspace" for name, _ in call.results)


def _placed(call: Call) -> dict[str, View]:
    """Views of all arrays and results at addresses that nobody reads."""
    views = _views(call, CPU)
    free = _CHECK_ADDRESS
    for (_, seen), (_, facts) in zip(views, (*call.arrays, *call.results), strict=True):
        seen.ptr = free
        dtype = NUMPY_DTYPES.get(facts.dtype)
        size = (dtype.itemsize if dtype else _ALIGNMENT) * int(np.prod([int(n) for n in facts.shape], dtype=object))
        free += -(-size // _PAGE) * _PAGE + _PAGE
    return dict(views)


def _spelled(name: str, facts: Facts) -> list[Any]:
    known = all(isinstance(n, int) for n in facts.shape)
    return [name, facts.dtype, [int(n) for n in facts.shape] if known else None]


def parsed(text: str) -> Call:
    """The call of that text; shapes that the run has to supply are empty. Raises ValueError for another version's."""
    fields = json.loads(text)
    if fields.get("version") != VERSION:
        raise ValueError(
            f"a call of format {fields.get('version')}, made by another version of cupymla; this has {VERSION}"
        )

    def named(rows: Iterable[Any]) -> Named:
        return tuple((name, Facts(tuple(shape or ()), dtype)) for name, dtype, shape in rows)

    return Call(fields["name"], named(fields["arrays"]), named(fields["results"]), tuple(fields["options"].items()))


def lacks_shapes(text: str) -> bool:
    """Whether the call was made for extents that only the run knows."""
    fields = json.loads(text)
    return any(shape is None for _, _, shape in (*fields["arrays"], *fields["results"]))


def plain(function: str, name: str, value: Any) -> Plain:
    """An option as a value that can be written down: dtypes become labels. Raises InputError."""
    number = whole(value)
    if number is not None:
        return number
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        known: Plain = value
        return known
    label: str = shown(value, str).removeprefix("torch.")
    if label in NUMPY_DTYPES:
        return label
    try:
        label = np.dtype(value).name
    except Exception:
        expected = "a plain value that is known before the program runs"
        raise InputError(name, expected, type(value).__name__, operator=function) from None
    return label


def label_of(dtype: Any, function: str, name: str) -> str:
    """The label of an array's NumPy dtype. Raises InputError for one that has none."""
    label: str
    try:
        label = np.dtype(dtype).name
    except TypeError:
        # JAX's own, such as those of random keys, which NumPy knows nothing of.
        label = shown(dtype, str)
    if label not in NUMPY_DTYPES:
        raise InputError(name, "a numeric dtype", label, operator=function)
    return label


# Running -------------------------------------------------------------------------------------------------------------


def _views(call: Call, device: Device) -> list[tuple[str, View]]:
    """A view per address, arrays first, without the addresses. An array that is written in place has one view, which
    is listed under both its addresses, so that the result's is the one that stays."""
    results = dict(call.results)
    made: dict[str, View] = {}
    for name, facts in (*call.arrays, *call.results):
        if name not in made:
            readonly = name not in results
            shape = tuple(facts.shape)
            made[name] = View(0, shape, strides_of(shape), facts.dtype, device, readonly, "raw", None)
    return [(name, made[name]) for name, _ in (*call.arrays, *call.results)]


class Compiled(BoundCall):
    """A bound call of a compiled program.

    Attributes:
        latest: the addresses that it has run with last, as the program lists them.
    """

    __slots__ = ("_allocates", "_constants", "_given", "_order", "_ordered", "latest")

    def __init__(self, call: Call, device: Device, addresses: Sequence[int]) -> None:
        """Bind, with the device's context current, for contiguous arrays. Raises what the operator raises.

        Kernels do not overlap: XLA records a call as a child graph, which it updates when addresses change, and whether
        that may be done to edges of dependent launches no document says.
        """
        declaration = declared(call.name)
        calls, views = declaration.calls(), _views(call, device)
        for (_, seen), address in zip(views, addresses, strict=True):
            seen.ptr = address
        given = dict(views)
        inputs, options, outputs = calls.arguments.placed({**given, **declaration.passed(dict(call.options))})
        seen_all = calls.arguments.viewed(inputs, outputs)
        super().__init__(calls, calls.checked(seen_all, options), recorded=True)
        if calls.arguments.has_workspace and seen_all[-1] is not None:
            require(seen_all[-1], self.workspace_bytes, call.name)
        self._constants = numbers_of(seen_all)
        self._given = views[0][1]
        places = {name: place for place, (name, _) in enumerate(views)}
        results = [name for name in calls.arguments.results if name in places]
        workspace = ["workspace"] if "workspace" in places else []
        self._order = [places[name] for name in (*self.names, *results, *workspace)]
        self._allocates = bool(self.workspace_bytes) and len(self._order) == len(self.names) + len(self.results)
        self.latest: list[int] | None = None
        self._ordered: list[int] = []

    def at(self, addresses: list[int], stream: int) -> None:
        """Run with these addresses, of the program's arrays and results in their order. Raises DriverError."""
        if addresses != self.latest:
            self.latest = None
            self._ordered = [addresses[place] for place in self._order]
            self.latest = addresses
        if not self._allocates:
            self.run(self._ordered, self._constants, stream)
            return
        place, keep = self.memory(lambda: self._given, stream, stream)
        self.run([*self._ordered, place], self._constants, stream)
        if keep is not None and driver.capturing(stream):
            captured.keep(keep)


def run(key: Hashable, call: Call, device: Device, addresses: list[int], stream: int) -> None:
    """Run a call with these addresses, of its arrays and its results.

    On a CUDA device that means to enqueue on `stream`, without waiting; on the CPU the results are there on return.
    Raises what the operator raises.

    Args:
        key: what tells the call and the device from all others.
        call: the call.
        device: where.
        addresses: in the call's order.
        stream: address of the stream.
    """
    if device.kind == "cpu":
        _by_function(call, device, addresses)
    elif not _aligned(addresses):
        # Whether a kernel can do with such an address only the operator's checks know.
        _by_function(call, device, addresses, stream=stream)
    else:
        with driver.on_device(device.index):
            made = taken(key) or kept(key, Compiled(call, device, addresses))
            made.at(addresses, stream)  # type: ignore[attr-defined]


def run_bound(key: Hashable, index: int, addresses: list[int], stream: int) -> bool:
    """Run a call that this thread has bound, as `run` does; False where `run` has to.

    Args:
        key, addresses, stream: as for `run`.
        index: of the device, which has to be current.
    """
    made = bound.calls.get(key)
    if made is None or made.in_use or not driver.is_current(index):
        return False
    assert isinstance(made, Compiled)
    if addresses != made.latest and not _aligned(addresses):
        return False
    made.in_use = True
    made.at(addresses, stream)
    return True


def _aligned(addresses: Sequence[int]) -> bool:
    """Whether all are multiples of what kernels take without a look at the call."""
    bits = 0
    for address in addresses:
        bits |= address
    return bits % _ALIGNMENT == 0


def _by_function(call: Call, device: Device, addresses: Sequence[int], **where: int) -> None:
    declaration, views = declared(call.name), _views(call, device)
    for (_, seen), address in zip(views, addresses, strict=True):
        seen.ptr = address
    declaration.function()(**declaration.arguments(dict(views), dict(call.options)), **where)
