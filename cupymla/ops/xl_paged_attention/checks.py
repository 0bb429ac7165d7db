"""The door's tools: arrays read by axis names, options read by type, outputs kept apart from everything else.

Every function here raises `InputError` and nothing else, whatever it is given.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, NoReturn

from ... import tensor
from ...errors import InputError, shown
from ...tensor import Device, View, overlap
from ..arguments import truth, whole
from ..dtypes import dtype_got

FLOATS = ("float32", "float16", "bfloat16")
FP8 = ("float8_e4m3fn", "float8_e5m2")
INDICES = ("int32", "int64")

MAX_COUNT = 2**31 - 64
"""Of keys, distances and rows of heads: kernels count in 32 bits and round up to whole tiles, of at most 32."""

ITEMSIZE = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
}


class Reader:
    """Reads the arguments of one call; the first array fixes the device, named axes must agree.

    Attributes:
        operator: the name that errors carry.
        sizes: axis name -> size, filled by the first array that shows the axis.
        device: where every array must be; None until the first one is read.
        alignments: argument -> bytes that its address must be a multiple of, where that was checked.
    """

    def __init__(self, operator: str) -> None:
        self.operator = operator
        self.sizes: dict[str, int] = {}
        self.device: Device | None = None
        self.alignments: dict[str, int] = {}
        self._first = ""
        self._inputs: list[tuple[str, View]] = []
        self._outputs: list[tuple[str, View]] = []

    def reject(self, argument: str, expected: str, got: object) -> NoReturn:
        """Raise the InputError of this operator."""
        raise InputError(argument, expected, got, operator=self.operator)

    # Arrays ------------------------------------------------------------------------------------------------

    def array(self, array: Any, argument: str, axes: str, dtypes: Sequence[str], *, output: bool = False) -> View:
        """An array of named axes, such as "num_seqs num_heads head_size", and one of `dtypes`.

        An axis seen before must have the same size again; a number stands for itself.
        """
        seen = self.look(array, argument, output=output)
        self.check_dtype(seen, argument, dtypes)
        self.check_shape(seen, argument, axes)
        return seen

    def look(self, array: Any, argument: str, *, output: bool = False) -> View:
        """Any array on the call's device. Outputs are writable and no two of their elements share memory."""
        try:
            seen = tensor.view_output(array, argument) if output else tensor.view(array, argument)
        except InputError as error:
            raise InputError(error.argument, error.expected, error.got, operator=self.operator) from None
        if self.device is None:
            self.device, self._first = seen.device, argument
        elif seen.device != self.device:
            self.reject(argument, f"an array on {self.device}, where '{self._first}' is", f"an array on {seen.device}")
        if 0 not in seen.shape and any(stride < 0 for stride in seen.strides):
            self.reject(argument, "strides of zero or more", f"strides {list(seen.strides)}")
        (self._outputs if output else self._inputs).append((argument, seen))
        return seen

    def check_dtype(self, seen: View, argument: str, dtypes: Sequence[str]) -> None:
        """One of `dtypes`."""
        if seen.dtype not in dtypes:
            self.reject(argument, "dtype " + " or ".join(dtypes), f"dtype {dtype_got(seen, argument, dtypes)}")

    def check_shape(self, seen: View, argument: str, axes: str, why: str = "") -> None:
        """The named axes, in order; see `array`. `why` ends what an error says was expected."""
        names = axes.split()
        wanted = [int(name) if name.isdigit() else self.sizes.get(name) for name in names]
        fits = len(seen.shape) == len(names) and all(
            want is None or want == size for want, size in zip(wanted, seen.shape, strict=True)
        )
        if not fits:
            known = zip(names, wanted, strict=True)
            sizes = (name if want is None or name.isdigit() else f"{name} = {want}" for name, want in known)
            self.reject(argument, f"shape [{', '.join(sizes)}]{why}", f"shape {list(seen.shape)}")
        for name, size in zip(names, seen.shape, strict=True):
            if not name.isdigit():
                self.sizes[name] = size

    def check_rows(self, seen: View, argument: str, alignment: int = 1) -> None:
        """The last axis contiguous; the address and every other stride whole multiples of `alignment` bytes."""
        if 0 in seen.shape:
            return
        if seen.shape[-1] > 1 and seen.strides[-1] != 1:
            self.reject(argument, "a contiguous last axis", f"strides {list(seen.strides)}")
        self._check_alignment(seen, argument, alignment, len(seen.shape) - 1)

    def check_dense(self, seen: View, argument: str, axes: int, alignment: int) -> None:
        """The last `axes` axes contiguous together; the address and the other strides aligned to bytes."""
        if 0 in seen.shape:
            return
        dense = 1
        for size, stride in zip(reversed(seen.shape[-axes:]), reversed(seen.strides[-axes:]), strict=True):
            if size > 1 and stride != dense:
                self.reject(argument, f"the last {axes} axes contiguous", f"strides {list(seen.strides)}")
            dense *= size
        self._check_alignment(seen, argument, alignment, len(seen.shape) - axes)

    def _check_alignment(self, seen: View, argument: str, alignment: int, outer: int) -> None:
        self.alignments[argument] = alignment
        item = seen.itemsize
        steps = [s * item for n, s in zip(seen.shape[:outer], seen.strides[:outer], strict=True) if n > 1]
        if any(step % alignment for step in steps):
            self.reject(argument, f"strides of whole {alignment}-byte units", f"strides of {steps} bytes")
        if seen.ptr % alignment:
            self.reject(argument, f"an address aligned to {alignment} bytes", hex(seen.ptr))

    def check_outputs_apart(self) -> None:
        """No output shares memory with an input or with another output."""
        for number, (argument, output) in enumerate(self._outputs):
            for other, seen in [*self._inputs, *self._outputs[:number]]:
                if overlap(output, seen):
                    self.reject(argument, f"memory apart from '{other}'", f"memory that overlaps '{other}'")

    # Options -----------------------------------------------------------------------------------------------

    def flag(self, value: object, argument: str) -> bool:
        """True or False."""
        flag = truth(value)
        if flag is None:
            self.reject(argument, "True or False", _short(value))
        return flag

    def choice(self, value: object, argument: str, options: Sequence[str]) -> str:
        """One of the words in `options`."""
        # A subclass of str may compare as it likes; its characters are what counts.
        if isinstance(value, str) and (word := str.__str__(value)) in options:
            return word
        self.reject(argument, "one of " + ", ".join(map(repr, options)), _short(value))

    def number(self, value: object, argument: str) -> float:
        """A finite number."""
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            self.reject(argument, "a finite number", _short(value))
        try:
            result = float(value)
        except Exception:
            # An int too large for a float, or whatever a caller's own kind of number raises.
            result = math.inf
        if not math.isfinite(result):
            self.reject(argument, "a finite number", _short(value))
        return result

    def size(self, value: object, argument: str) -> int:
        """A whole number from 0 to MAX_COUNT."""
        number = whole(value)
        if number is None or not 0 <= number <= MAX_COUNT:
            self.reject(argument, f"a whole number from 0 to {MAX_COUNT}", _short(value))
        return number

    def check_rows_of_heads(self, argument: str) -> None:
        """No more than MAX_COUNT rows of `num_seqs` times `num_heads`."""
        rows = self.sizes["num_seqs"] * self.sizes["num_heads"]
        if rows > MAX_COUNT:
            self.reject(argument, f"num_seqs * num_heads up to {MAX_COUNT}", rows)


def _short(value: object) -> str:
    return shown(value, lambda given: f"{type(given).__name__} {given!r}")
