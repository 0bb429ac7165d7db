"""`python -m cupymla_lab stubs`: what editors and type checkers read of the public functions, written from them.

Public functions are made when they are first named, operators carry a prepared form, and bridges are made from
declarations: none of it can be seen in the sources. The stubs beside the packages' `__init__.py` spell it out. They
hold the signatures that run, and from `VARIANTS` what results there are, which depends on arguments.
"""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import cupymla
from cupymla.bench import machine
from cupymla.interop.declaration import Declaration
from cupymla.interop.table import DECLARATIONS
from cupymla.ops import registry

ERRORS = ("CompileError", "CupymlaError", "DriverError", "InputError", "UnsupportedError")

_FLAG: dict[bool | None, str] = {False: "Literal[False] = False", True: "Literal[True]", None: "bool"}
_COUNTS: dict[bool | None, Callable[[int], tuple[int, ...]]] = {
    False: lambda least: (least,),
    True: lambda least: (least + 1,),
    None: lambda least: (least, least + 1),
}
_SINK = {False: "None = None", True: "{array}"}


@dataclass(frozen=True)
class Variant:
    """Calls that return the same.

    Attributes:
        told_by: the parameters that tell them from others, each with its annotation, and its default where it has one.
            "{array}" stands for an array.
        results: how many arrays come back; several numbers where it is not known before the call.
    """

    told_by: Mapping[str, str]
    results: tuple[int, ...]


_SELECTED = (
    *(
        Variant({"return_values": _FLAG[values], "return_lse": _FLAG[lse]}, (2 + values + lse,))
        for lse in (False, True)
        for values in (False, True)
    ),
    Variant({"return_values": _FLAG[None], "return_lse": _FLAG[None]}, (2, 3, 4)),
)

VARIANTS: dict[str, tuple[Variant, ...]] = {
    "sparse_mla_bwd": tuple(Variant({"attn_sink": _SINK[sink]}, (2 + sink,)) for sink in (False, True)),
    **dict.fromkeys(("indexer_topk", "paged_indexer_topk"), _SELECTED),
    "topk": tuple(Variant({"return_values": _FLAG[flag]}, _COUNTS[flag](2)) for flag in _FLAG),
    "xl_paged_attention": tuple(Variant({"return_lse": _FLAG[flag]}, _COUNTS[flag](1)) for flag in _FLAG),
    "quantize_nvfp4": (
        Variant({"global_scale": 'Literal["amax"]'}, (3,)),
        Variant({"global_scale": "float | {array} | None = None"}, (2,)),
    ),
}
"""Functions whose results depend on their arguments; of all others the annotation says it."""

BRIDGED: dict[str, tuple[Variant, ...]] = {
    **VARIANTS,
    "sparse_mla_bwd": tuple(
        Variant({"attn_sink": _SINK[sink], "return_attn_dist": _FLAG[dist]}, _COUNTS[dist](2 + sink))
        for sink in (False, True)
        for dist in _FLAG
    ),
    "quantize_nvfp4": (),
}
"""The same in the bridges, which have requests of their own and no factor that is found."""


@dataclass(frozen=True)
class Bridge:
    """A framework's package.

    Attributes:
        module: its name.
        imports: lines of its stub.
        given: the type of arrays that it takes.
        made: the type of those that it returns.
        further: public names beside the declared functions, by the module that has them.
    """

    module: str
    imports: tuple[str, ...]
    given: str
    made: str
    further: Mapping[str, str]


BRIDGES = (
    Bridge(
        "cupymla.interop.jax",
        ("from jax import Array", "from numpy.typing import NDArray"),
        "Array | NDArray[Any]",
        "Array",
        {
            "causal_indices": "functions",
            "dsa_attention": "training",
            "export_checks": "functions",
            "register": "functions",
        },
    ),
    Bridge(
        "cupymla.interop.torch",
        ("from torch import Tensor",),
        "Tensor",
        "Tensor",
        {"dsa_attention": "training", "register": "functions"},
    ),
)

_ARRAYS = ("NDArray[Any]", "_Array")
"""What arrays are called in the package's stub: NumPy's tell their dtype, which results need not share, and others are
of one type. Where the results are not known before the call it is Any."""

_WIDTH = 120

_HEAD = '''"""Made by `python -m cupymla_lab stubs` from the functions themselves; not to be edited."""
'''


# Signatures ----------------------------------------------------------------------------------------------------------


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return ""
    value = parameter.default
    return f' = "{value}"' if isinstance(value, str) else f" = {value!r}"


def _text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation).replace("typing.", "")


def _parameters(parameters: Iterable[inspect.Parameter], typed: Callable[[inspect.Parameter], str]) -> list[str]:
    """The parameters, a text each, with the star before those that have to be named."""
    lines, starred = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            lines.append("*")
            starred = True
        lines.append(f"{parameter.name}: {typed(parameter)}")
    return lines


def _function(
    name: str, parameters: Sequence[str], returns: str, doc: str = "", indent: str = "", overload: bool = False
) -> list[str]:
    lines = ["@overload"] * overload
    whole = f"def {name}({', '.join(parameters)}) -> {returns}:"
    lines += [whole] if len(indent + whole) <= _WIDTH else [f"def {name}(", *_filled(parameters), f") -> {returns}:"]
    if doc:
        quoted = f'{"r" * (chr(92) in doc)}"""{doc}' + ('\n"""' if "\n" in doc else '"""')
        lines += textwrap.indent(quoted, "    ").splitlines()
    else:
        lines[-1] += " ..."
    return [indent + line if line else line for line in lines]


def _filled(parameters: Sequence[str]) -> list[str]:
    """Lines of as many parameters as there is room for."""
    lines = [" " * 4]
    for parameter in parameters:
        if len(lines[-1]) + len(parameter) > _WIDTH - 8 and lines[-1].strip():
            lines.append(" " * 4)
        lines[-1] += ("" if lines[-1].endswith(" " * 4) else " ") + parameter + ","
    return lines


def _arrays(count: int, made: str) -> str:
    """The type of so many arrays: one is not in a tuple."""
    return made if count == 1 else f"tuple[{', '.join([made] * count)}]"


def _returns(variant: Variant, made: str) -> str:
    return " | ".join(_arrays(count, made) for count in variant.results)


# The package ---------------------------------------------------------------------------------------------------------


def _summary(function: object) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0]


def _operator(name: str) -> Iterator[str]:
    """An operator as a class of its own, whose only instance it is: a call, and a prepared form of the same call.

    Of several overloads the last has the docstring: that is the one that jedi shows.
    """
    call: Any = getattr(cupymla, name)
    signature = inspect.signature(call)
    parameters = list(signature.parameters.values())
    variants = VARIANTS.get(name, ())
    kind = "_" + "".join(part.capitalize() for part in name.split("_"))
    yield from ("", "", f"class {kind}:", f'    """{_summary(call)}"""', "", "    name: str")

    def method(called: str, made: Callable[[str], str], text: str) -> Iterator[str]:
        fits = called != "workspace_bytes"
        each = [
            (variant, array)
            for variant in ((fits and variants) or (None,))
            for array in (_ARRAYS if fits and (variant is None or len(variant.results) == 1) else ("Any",))
        ]
        for number, (variant, array) in enumerate(each):

            def typed(parameter: inspect.Parameter, variant: Variant | None = variant, array: str = array) -> str:
                if parameter is parameters[0]:
                    return array
                if variant is not None and parameter.name in variant.told_by:
                    return variant.told_by[parameter.name].format(array="Any")
                return _text(parameter.annotation) + _default(parameter)

            returned = re.sub(r"\bAny\b", array, _text(signature.return_annotation))
            if variant is not None:
                returned = _returns(variant, array)
            lines = ["self", *_parameters(parameters, typed)]
            yield ""
            yield from _function(
                called, lines, made(returned), text if number == len(each) - 1 else "", "    ", len(each) > 1
            )

    yield from method("__call__", lambda returned: returned, inspect.getdoc(call) or "")
    yield from method("prepare", lambda returned: f"Prepared[{returned}]", _summary(call.prepare))
    if hasattr(call, "workspace_bytes"):
        yield from method("workspace_bytes", lambda _: "int", _summary(call.workspace_bytes))
    yield from ("", "", f"{name}: {kind}")


def package() -> str:
    """The stub of `cupymla`."""
    names = registry.public_functions()
    lines = [_HEAD, "from typing import Any, Literal, TypeVar, overload", "", "from numpy.typing import NDArray", ""]
    lines += [f"from .errors import {name} as {name}" for name in ERRORS]
    lines += ["from .ops.operator import Prepared", "from .raw import raw_module as raw_module", ""]
    lines += _all(cupymla.__all__)
    lines += ["", '_Array = TypeVar("_Array")', '"""Results are arrays of the framework whose arrays are given."""']
    lines += ["", "__version__: str"]
    for name in names:
        lines += _operator(name)
    return _joined(lines)


def _all(names: Iterable[str]) -> list[str]:
    return ["__all__ = [", *(f'    "{name}",' for name in names), "]"]


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(line.rstrip() for line in lines) + "\n"


# The bridges ---------------------------------------------------------------------------------------------------------


def _bridged(bridge: Bridge, declaration: Declaration) -> Iterator[str]:
    name = declaration.name
    doc = inspect.getdoc(getattr(import_module(bridge.module), name)) or ""
    each: Sequence[Variant | None] = BRIDGED.get(name) or (None,)
    for number, variant in enumerate(each):

        def typed(parameter: inspect.Parameter, variant: Variant | None = variant) -> str:
            if variant is not None and parameter.name in variant.told_by:
                return variant.told_by[parameter.name].format(array=bridge.given)
            if parameter.name not in declaration.arrays:
                return _text(parameter.annotation) + _default(parameter)
            kinds = ["float"] * (parameter.name in declaration.either) + [bridge.given]
            kinds += ["None"] * (parameter.default is None or parameter.name in declaration.nullable)
            return " | ".join(kinds) + _default(parameter)

        if variant is not None:
            returned = _returns(variant, bridge.made)
        else:
            returned = _arrays(len(declaration.updates or declaration.outputs), bridge.made)
        lines = _parameters(declaration.signature.parameters.values(), typed)
        yield from ("", "")
        yield from _function(name, lines, returned, doc if number == len(each) - 1 else "", overload=len(each) > 1)


def bridged(bridge: Bridge) -> str:
    """The stub of a bridge. Raises ImportError without its framework."""
    lines = [_HEAD, "from typing import Any, Literal, overload", "", *bridge.imports, ""]
    lines += [f"from .{module} import {name} as {name}" for name, module in bridge.further.items()]
    lines += ["", *_all([*bridge.further, *(declaration.name for declaration in DECLARATIONS)])]
    for declaration in DECLARATIONS:
        lines += _bridged(bridge, declaration)
    text = _joined(lines)
    unused = [line for line in bridge.imports if not re.search(rf"\b{line.split()[-1]}\b", text.replace(line, ""))]
    for line in unused:
        text = text.replace(line + "\n", "")
    return text


# The command ---------------------------------------------------------------------------------------------------------


def stubs() -> dict[Path, Callable[[], str]]:
    """The stubs by their files, as functions that make them."""
    made: dict[Path, Callable[[], str]] = {file("cupymla"): package}
    for bridge in BRIDGES:
        made[file(bridge.module)] = lambda bridge=bridge: bridged(bridge)  # type: ignore[misc]
    return made


def file(module: str) -> Path:
    """Where the stub of a package lies."""
    return machine.ROOT.joinpath(*module.split("."), "__init__.pyi")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the stubs; returns the exit status."""
    argparse.ArgumentParser(prog="python -m cupymla_lab stubs", description=__doc__).parse_args(arguments)
    for place, text in stubs().items():
        place.write_text(text(), encoding="utf-8")
        print(place.relative_to(machine.ROOT))
    return 0
