"""What plans have in common: the checks of a kernel's variant, and all combinations of what there is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence

from .. import arch as arches
from ..arch import Arch
from ..build.source import KernelSource
from ..errors import InputError, UnsupportedError, shown

HOPPER = "Hopper (sm_90a)"
BOTH = f"{HOPPER}, Blackwell (sm_100f)"

FLAGS = (True, False)


def require_target(operator: str, arch: Arch, targets: Collection[str] = ("sm_90a",), supported: str = HOPPER) -> None:
    """Raise UnsupportedError when an operator has no kernel for an architecture; `supported` spells `targets` out."""
    if arch.name not in targets:
        raise UnsupportedError(operator, f"a GPU of architecture {arch.name}", f"{supported}, or the CPU")


def require_choice(operator: str, where: str = "", /, **choices: tuple[object, Sequence[object]]) -> None:
    """Raise InputError for a value that is none of those there are, or equals one and is of another type.

    Args:
        operator: the operator.
        where: what ends the sentence of what is expected, such as " on sm_90a".
        choices: by their parameters' names the values, each with those there are.
    """
    for name, (value, known) in choices.items():
        if type(value) is not type(known[0]) or value not in known:
            *others, last = map(repr, known)
            expected = f"{', '.join(others)} or {last}" if others else last
            raise InputError(name, expected + where, shown(value), operator)


def every(
    variant: Callable[..., KernelSource], targets: Sequence[str], **choices: Sequence[object]
) -> tuple[KernelSource, ...]:
    """The kernels that a plan's `variant` makes of all combinations, each once."""
    combinations = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    made = (variant(arches.named(target), **chosen) for target in targets for chosen in combinations)
    return tuple(dict.fromkeys(made))
