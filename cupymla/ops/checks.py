"""The checks of one call's arguments that all operators make: options, devices, dtypes, memory of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import tensor
from ..errors import InputError
from ..tensor import Device, View
from .arguments import Arguments, Check, OptionsT
from .dtypes import dtype_got
from .entry_lists import lists_by_token


class Checks:
    """The checks of one call. The first array fixes the device.

    Every failure is an `InputError` that names the operator and the argument.

    Attributes:
        operator: the name that errors carry.
        device: where every array must be; None until the first one is read.
    """

    def __init__(self, operator: str) -> None:
        self.operator = operator
        self.device: Device | None = None
        self._first = ""
        self._seen: list[tuple[str, View, bool]] = []

    def error(self, argument: str, expected: str, got: object) -> InputError:
        """A refusal, ready to be raised."""
        return InputError(argument, expected, got, operator=self.operator)

    def option(self, check: Check, argument: str, value: object) -> Any:
        """What a check makes of a value."""
        try:
            return check(argument, value)
        except InputError as refused:
            raise self.error(refused.argument, refused.expected, refused.got) from None

    def chosen(self, arguments: Arguments[Any, OptionsT], *values: object) -> OptionsT:
        """An operator's options, in their order, checked."""
        try:
            return arguments.chosen(values)
        except InputError as refused:
            raise self.error(refused.argument, refused.expected, refused.got) from None

    def view(
        self, array: object, argument: str, dtypes: Sequence[str] = (), why: str = "", output: bool = False
    ) -> View:
        """An array on the call's device, of one of `dtypes` where there are some.

        Outputs are writable and no two of their elements share memory. `why` ends what an error says of the dtype.
        """
        try:
            seen = tensor.view_output(array, argument) if output else tensor.view(array, argument)
        except InputError as refused:
            raise self.error(refused.argument, refused.expected, refused.got) from None
        if dtypes and seen.dtype not in dtypes:
            got = seen.dtype if output else dtype_got(seen, argument, dtypes)
            if got == "float4_e2m1fn":
                got += " with one code per byte (pack two per byte, low nibble first)"
            raise self.error(argument, "dtype " + " or ".join(dtypes) + why, got)
        if self.device is None:
            self.device, self._first = seen.device, argument
        elif seen.device != self.device:
            expected = f"an array on {self.device}, where '{self._first}' is"
            raise self.error(argument, expected, f"an array on {seen.device}")
        self._seen.append((argument, seen, output))
        return seen

    def separate(self) -> None:
        """Refuse an output that shares memory with an input or with another output."""
        outputs = [entry for entry in self._seen if entry[2]]
        for number, (argument, output, _) in enumerate(outputs):
            others = [entry for entry in self._seen if not entry[2]] + outputs[:number]
            for other, seen, _ in others:
                if tensor.overlap(output, seen):
                    raise self.error(argument, "memory of its own", f"memory that overlaps argument '{other}'")


def require_entries(ids: Any, lengths: Any, limit: int, argument: str, operator: str | None = None) -> None:
    """Raise InputError naming the first of `ids` [..., topk] outside [-1, limit), among the first `lengths` of its row.

    NumPy arrays both; lengths have the shape of the rows, or one that broadcasts to it, None for all entries.
    """
    wrong = (ids < -1) | (ids >= limit)
    if lengths is not None:
        wrong &= np.arange(ids.shape[-1]) < lengths[..., None]
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        expected = f"values from -1 to {limit - 1}"
        raise InputError(argument, expected, f"{int(ids[place])} at {list(place)}", operator)


def look_at_lists(
    lists: View | None, indices: View, topk_length: View | None, s_kv: int, stream: object, operator: str
) -> None:
    """Raise InputError for lists that `invert_indices` does not return for these indices and lengths. Waits for
    `stream`, None for the current one, when the arrays are on a GPU."""
    if lists is None:
        return
    lengths = None if topk_length is None else tensor.fetched(topk_length, stream)
    rows, found = tensor.fetched(indices, stream), tensor.fetched(lists, stream)
    # The optional axis of extent 1 taken out.
    expected = lists_by_token(rows[..., 0, :] if rows.ndim == found.ndim + 2 else rows, s_kv, lengths)
    for place in map(tuple, np.argwhere(found != expected)[:1].tolist()):
        wanted = f"what invert_indices returns for these indices: {expected[place]} at {list(place)}"
        raise InputError("lists", wanted, int(found[place]), operator)
