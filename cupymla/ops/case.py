"""What every operator's `cases.py` holds: what problems are, as data, and those that are timed. Those that kernels are
checked with are the laboratory's (`cupymla_lab/problems`).

An operator's `cases` module offers

- `BENCH`: timing cases, named as the benchmark files name them;
- `DEMO`: the case that `python -m cupymla demo` checks anywhere;
- `inputs(case, seed, xp=numpy)`: fresh arguments for the public function, as a dict of its parameter names; `xp` is
  numpy or cupy, whose `random.default_rng` makes the arrays;
- `flops(case)` and `bytes_moved(case)`: the least arithmetic and the least memory traffic of one call;
- `BOUND_BY_COPYING`, where its memory ceiling is that of a copy and not that of reading;
- `CHOICES`, where a target has several kernels: for each of them what makes it run (`Choice`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem. Operators subclass it with their own sizes and options.

    Attributes:
        name: spells the sizes, such as "h128_d576_k2048_q4096_kv8192".
        intent: the group, in a word or two: "shapes", "masks", "poison", "strides", "dtypes", "options", "speed".
    """

    name: str
    intent: str


@dataclass(frozen=True, slots=True)
class Choice:
    """What makes one of a target's kernels run wherever it can, whatever the plan would choose.

    Attributes:
        setting: constants of the operator's package with their values, as `python -m cupymla_lab ab --set` takes them,
            one or several.
        intents: of the cases that the kernel can run; empty for all.
        further: for cases of an intent another setting, which has the kernel do what they are about.
        beside: other kernels of the target that prepare and finish its work.
    """

    setting: str | tuple[str, ...]
    intents: tuple[str, ...] = ()
    further: tuple[tuple[str, str], ...] = ()
    beside: tuple[str, ...] = ()

    def serves(self, case: Case) -> bool:
        """Whether the kernel can run a case."""
        return not self.intents or case.intent in self.intents

    @property
    def chosen(self) -> tuple[str, ...]:
        """What every case wants."""
        return (self.setting,) if isinstance(self.setting, str) else self.setting

    def settings(self, case: Case) -> tuple[str, ...]:
        """All that a case wants."""
        return (*self.chosen, *(setting for intent, setting in self.further if intent == case.intent))


def on(xp: Any, array: Any) -> Any:
    """A NumPy array as one of `xp`, numpy or cupy, which knows no bfloat16 but its bits."""
    if xp is np:
        return array
    if array.dtype == ml_dtypes.bfloat16:
        return xp.asarray(array.view(np.uint16)).view(ml_dtypes.bfloat16)
    return xp.asarray(array)


def all_on(xp: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call whose arrays are `on` xp."""
    return {name: on(xp, value) if isinstance(value, np.ndarray) else value for name, value in arguments.items()}


def spread(array: Any, rows: bool, gap: int = 32) -> Any:
    """The same values with gaps: of `gap` elements behind each row, else between all numbers."""
    if rows:
        wide = np.zeros((*array.shape[:-1], array.shape[-1] + gap), array.dtype)
        wide[..., : array.shape[-1]] = array
        return wide[..., : array.shape[-1]]
    apart = np.zeros((*array.shape, 3), array.dtype)
    apart[..., 0] = array
    return apart[..., 0]
