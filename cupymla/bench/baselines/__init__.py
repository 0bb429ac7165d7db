"""Other implementations of an operator, timed beside it: those of installed packages, and those of a user's file.

The protocol is the same for both. A maker takes a case and its arguments and returns what is to be timed:

    def make(case, inputs):
        ...                                     # copies, layouts, workspaces: not timed
        return call, version, read              # or call, version; or None where it cannot run the case

`call()` enqueues the work on the current stream; `version` says what was timed. `read(result)` turns what `call`
returned into the operator's outputs by name, some or all of them; without it `call` returns them itself, as a mapping
or in the operator's order. A file of the user's holds `BASELINES`, makers by pattern of operator and case and by name:

    BASELINES = {"sparse_mla_fwd/h128_*": {"another library": make}}
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...ops import registry
from ...ops.case import Case
from ...ops.registry import OperatorEntry
from ...testing.operators import as_tuple
from . import attention, gemv, packages

Call = Callable[[], object]
Maker = Callable[[Any, dict[str, Any]], Any]
"""Of a case and its arguments by name, CuPy arrays among them: `(call, version)`, `(call, version, read)` or None."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """One implementation, ready for a case.

    Attributes:
        name: as rows of benchmark files have it.
        version: of what is timed.
        call: enqueues the work on the current stream.
        outputs: makes the operator's outputs, by name, of what `call` returned.
    """

    name: str
    version: str
    call: Call
    outputs: Callable[[Any], Mapping[str, Any]]


def makers(operator: str, case: str, file: Path | None = None) -> dict[str, Maker]:
    """The makers, by name, of all that may run a case; a file's take the place of an installed package's.

    Raises InputError for a file that does not follow the protocol.
    """
    found: dict[str, Maker] = packages.makers(operator)
    if operator == "nvfp4_gemv":
        found |= gemv.MAKERS
    elif operator == "xl_paged_attention":
        found |= attention.makers()
    for pattern, named in (load(file) if file else {}).items():
        if fnmatchcase(f"{operator}/{case}", pattern):
            found |= named
    return found


def make(name: str, maker: Maker, case: Case, inputs: dict[str, Any], outputs: tuple[str, ...]) -> Baseline | None:
    """What a maker makes for a case, None where it cannot run it.

    Args:
        name: the baseline's.
        maker: of it.
        case: the case.
        inputs: its arguments.
        outputs: names of the operator's outputs, in its order.

    Raises InputError where that is none of what the protocol has, and whatever the maker raises.
    """
    made = maker(case, inputs)
    if made is None:
        return None

    def by_name(result: Any) -> Mapping[str, Any]:
        if isinstance(result, Mapping):
            return result
        arrays = as_tuple(result)
        return dict(zip(outputs[: len(arrays)], arrays, strict=True))

    match made:
        case (call, str(version)) if callable(call):
            return Baseline(name, str(version), call, by_name)
        case (call, str(version), read) if callable(call) and callable(read):
            return Baseline(name, str(version), call, read)
    raise InputError(f"baseline {name}", "(call, version), (call, version, read) or None", _types(made))


def _types(made: object) -> str:
    """Of what a maker returned: the text of a tensor says nothing, and much of it."""
    if isinstance(made, tuple):
        return f"({', '.join(type(part).__name__ for part in made)})"
    return type(made).__name__


@functools.cache
def load(file: Path) -> Mapping[str, Mapping[str, Maker]]:
    """Run a file of baselines; returns its `BASELINES`.

    Raises InputError where it cannot be run, or `BASELINES` is not what the protocol says.
    """
    expected = "a file that defines BASELINES, as docs/baselines.md says"
    try:
        spec = importlib.util.spec_from_file_location("cupymla_baselines_file", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError("--baselines", expected, f"{file}: {type(error).__name__}: {error}") from error
    found = getattr(module, "BASELINES", None)
    if not isinstance(found, Mapping) or not found:
        raise InputError("--baselines", expected, f"{file}: BASELINES is {found!r}")
    known = [f"{entry.name}/{case}" for entry in registry.subjects() for case in _cases(entry)]
    for pattern, named in found.items():
        if not isinstance(named, Mapping) or not all(
            isinstance(name, str) and callable(m) for name, m in named.items()
        ):
            raise InputError("--baselines", "callables by name for each pattern", f"{file}: {pattern!r}: {named!r}")
        if not any(fnmatchcase(name, str(pattern)) for name in known):
            raise InputError("--baselines", "patterns of benchmark cases, OPERATOR/CASE", f"{file}: {pattern!r}")
    return found


def _cases(entry: OperatorEntry) -> list[str]:
    cases: Any = import_module(f"{entry.module}.{entry.cases}")
    return [case.name for case in cases.BENCH]
