"""A call as data: what a compiled program keeps of it, and how it runs once the program knows its addresses.

A framework that compiles (XLA) fixes everything about a call but the addresses. `Call` is that everything, written as a
text that travels inside the program, also into another process. `run` binds it once in each thread, on a GPU, and runs
it with the addresses of the day (docs/how_a_call_flows.md).
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np

from .. import driver
from ..device import CPU, Device
from ..errors import InputError, shown
from ..ops.arguments import dtype_label, whole
from ..ops.calls import BoundCall, bound, numbers_of
from ..tensor import View
from ..tensor.fast import ALIGNMENT
from ..tensor.types import NUMPY_DTYPES, strides_of
from .declaration import Arrays, Declaration, Facts, Options, Results
from .table import declared

VERSION = 1
"""Of the text. A program that was exported by another version is refused, not guessed at."""

Plain: TypeAlias = "bool | int | float | str | None"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a public function, without addresses.

    Attributes:
        declaration: of the function.
        arrays: its arrays by name, in the order in which their addresses come.
        results: its results, likewise; those that are named as an array are that array, written in place. The last may
            be a workspace, which nobody looks at.
        options: everything else.
    """

    declaration: Declaration
    arrays: Arrays
    results: Results
    options: Options

    @staticmethod
    def of(declaration: Declaration, arrays: Arrays, options: Options) -> Call:
        """The call that these arguments make.

        Raises InputError for an option that is no plain value, and where the arguments do not fit each other.
        """
        chosen = {name: plain(declaration.name, name, value) for name, value in options.items()}
        made = Call(declaration, arrays, results_of(declaration, arrays, chosen), chosen)
        # With its results, of which an operator may be asked for one by giving it a place.
        if declaration.has_workspace and (problem := made.check()) is not None:
            plan: Any = import_module(f"cupymla.ops.{declaration.name}.plan")
            size = plan.workspace_limit(problem)
            if size or not declaration.replayable:
                made.results["workspace"] = Facts((size,), "uint8")
        return made

    @property
    def is_static(self) -> bool:
        """Whether every extent is a number."""
        each = (*self.arrays.values(), *self.results.values())
        return all(isinstance(n, int) for facts in each for n in facts.shape)

    def text(self) -> str:
        """The call in words that `parsed` understands; where extents are symbols, shapes are left to the run."""
        static = self.is_static
        named = {
            kind: [[n, facts.dtype, [*map(int, facts.shape)] if static else None] for n, facts in arrays.items()]
            for kind, arrays in (("arrays", self.arrays), ("results", self.results))
        }
        fields = {"version": VERSION, "name": self.declaration.name, **named, "options": self.options}
        return json.dumps(fields, separators=(",", ":"))

    def check(self) -> Any:
        """The operator's problem that the call is, if it is static. Raises InputError."""
        if not self.is_static:
            return None
        # Addresses that nobody reads, far apart.
        places = [place << 80 for place in range(1, len(self.arrays) + len(self.results) + 1)]
        given = dict.fromkeys(self.declaration.required) | self.arguments(CPU, places)
        return self.declaration.calls().read(**given)[1]

    def arguments(self, device: Device, addresses: Sequence[int]) -> dict[str, Any]:
        """Those of the function, with arrays as views; what is written in place is seen at its result's address."""
        each = (*self.arrays.items(), *self.results.items())
        views = {
            n: View(at, facts.shape, strides_of(facts.shape), facts.dtype, device, n not in self.results, "raw", None)
            for (n, facts), at in zip(each, addresses, strict=True)
        }
        return self.declaration.arguments(views, self.options)


def results_of(declaration: Declaration, arrays: Arrays, options: Options) -> Results:
    """The results of a call.

    Raises InputError, by the operator's own checks, where the arguments are such that there is no telling.
    """
    try:
        results = declaration.results(arrays, options)
        for facts in results.values():
            # An extent is a number, or a framework's symbol.
            sound = [n >= 0 if type(n) is int else not isinstance(n, int | float | str | None) for n in facts.shape]
            if facts.dtype not in NUMPY_DTYPES or not all(sound):
                raise ValueError(f"{declaration.name}: no array is {facts.dtype} {list(facts.shape)}")
    except Exception:
        Call(declaration, arrays, {}, options).check()
        raise
    return results


def parsed(text: str, shapes: Sequence[tuple[Any, ...]] = ()) -> Call:
    """The call of that text: with these shapes of arrays and results, where the text leaves them to the run.

    It is not static where nobody says them. Raises ValueError for another version's.
    """
    fields = json.loads(text)
    version = fields.get("version")
    if version != VERSION:
        raise ValueError(f"a call of format {version}, made by another version of cupymla; this has {VERSION}")
    entries, count = fields["arrays"] + fields["results"], len(fields["arrays"])
    told = shapes or [(None,) if shape is None else tuple(shape) for *_, shape in entries]
    named = [(name, Facts(shape, dtype)) for (name, dtype, _), shape in zip(entries, told, strict=True)]
    return Call(declared(fields["name"]), dict(named[:count]), dict(named[count:]), fields["options"])


def plain(function: str, name: str, value: Any) -> Plain:
    """An option as a value that can be written down: dtypes become labels. Raises InputError."""
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or isinstance(value, (bool, float, str)):
        return value
    known: Plain = whole(value)
    if known is None and (known := dtype_label(value)) is None:
        expected = "a plain value that is known before the program runs"
        raise InputError(name, expected, type(value).__name__, operator=function)
    return known


def label_of(dtype: Any, function: str, name: str) -> str:
    """The label of an array's dtype. Raises InputError for one that has none."""
    # JAX has some that NumPy knows nothing of, such as those of random keys.
    label = dtype_label(dtype) or shown(dtype, str)
    if label not in NUMPY_DTYPES:
        raise InputError(name, "a numeric dtype", label, operator=function)
    return label


# Running -------------------------------------------------------------------------------------------------------------


class Compiled(BoundCall):
    """A bound call of a compiled program.

    Kernels do not overlap: XLA records a call as a child graph, which it updates when addresses change, and whether
    that may be done to edges of dependent launches no document says.
    """

    def __init__(self, call: Call, device: Device, addresses: Sequence[int]) -> None:
        """Bind for contiguous arrays. Raises what the operator raises."""
        given, calls = call.arguments(device, addresses), call.declaration.calls()
        super().__init__(calls, given, recorded=True)
        names = calls.arguments.names
        self._like, self._given_numbers = given[names[0]], numbers_of(map(given.get, names))
        places = {name: place for place, name in enumerate((*call.arrays, *call.results))}
        self._order = [places[name] for name in names if name in places]
        self._latest: tuple[list[int], list[int]] = [], []

    def at(self, addresses: list[int], stream: int) -> bool:
        """Run with these addresses, of the program's arrays and results in their order. Raises DriverError.

        Returns False, and does nothing, where one is such that only the operator's checks know what to do.
        """
        latest, ordered = self._latest
        if addresses != latest:
            if not _aligned(addresses):
                return False
            ordered = [addresses[place] for place in self._order]
            self._latest = addresses, ordered
        self.run(ordered, self._given_numbers, stream, self._like)
        return True


def run(key: Hashable, call: Call, device: Device, addresses: list[int], stream: int) -> None:
    """Run a call with these addresses, of its arrays and its results. Raises what the operator raises.

    On a CUDA device that means to enqueue on `stream`, without waiting; on the CPU the results are there on return.
    `key` is what tells the call and the device from all others.
    """
    if device.kind == "cpu" or not _aligned(addresses):
        # Whether a kernel can do with such an address only the operator's checks know.
        call.declaration.function()(**call.arguments(device, addresses), stream=stream)
        return
    with driver.on_device(device.index):
        made: Any = bound.free(key) or bound.keep(key, Compiled(call, device, addresses))
        made.at(addresses, stream)


def run_bound(key: Hashable, index: int, addresses: list[int], stream: int) -> bool:
    """Run a call that this thread has bound, as `run` does; False where `run` has to.

    `index` is that of the device: where it is not current, `run` has to.
    """
    made: Any = bound.calls.get(key)
    return made is not None and not made.in_use and driver.is_current(index) and made.at(addresses, stream)


def _aligned(addresses: Sequence[int]) -> bool:
    """Whether all are multiples of what kernels take without a look at the call."""
    return functools.reduce(operator.or_, addresses) % ALIGNMENT == 0
