"""Tools of argument validation: arrays read by axis names.

Every function here raises `InputError` and nothing else, whatever it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from ...tensor import View
from ..checks import Checks

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


class Reader(Checks):
    """Reads the arguments of one call; the first array fixes the device, named axes must agree.

    Attributes:
        sizes: axis name -> size, filled by the first array that shows the axis.
    """

    def __init__(self, operator: str) -> None:
        super().__init__(operator)
        self.sizes: dict[str, int] = {}

    def reject(self, argument: str, expected: str, got: object) -> NoReturn:
        """Raise the InputError of this operator."""
        raise self.error(argument, expected, got)

    # Arrays ------------------------------------------------------------------------------------------------

    def array(self, array: Any, argument: str, axes: str, dtypes: Sequence[str], *, output: bool = False) -> View:
        """An array of named axes, such as "num_seqs num_heads head_size", and one of `dtypes`.

        An axis seen before must have the same size again; a number stands for itself.
        """
        seen = self.look(array, argument, dtypes, output=output)
        self.check_shape(seen, argument, axes)
        return seen

    def look(self, array: Any, argument: str, dtypes: Sequence[str] = (), *, output: bool = False) -> View:
        """Any array of one of `dtypes`, with strides that kernels can follow; see `view`."""
        seen = self.view(array, argument, dtypes, output=output)
        if 0 not in seen.shape and any(stride < 0 for stride in seen.strides):
            self.reject(argument, "strides of zero or more", f"strides {list(seen.strides)}")
        return seen

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
        item = seen.itemsize
        steps = [s * item for n, s in zip(seen.shape[:outer], seen.strides[:outer], strict=True) if n > 1]
        if any(step % alignment for step in steps):
            self.reject(argument, f"strides of whole {alignment}-byte units", f"strides of {steps} bytes")
        if seen.ptr % alignment:
            self.reject(argument, f"an address aligned to {alignment} bytes", hex(seen.ptr))

    def check_rows_of_heads(self, argument: str) -> None:
        """No more than MAX_COUNT rows of `num_seqs` times `num_heads`."""
        rows = self.sizes["num_seqs"] * self.sizes["num_heads"]
        if rows > MAX_COUNT:
            self.reject(argument, f"num_seqs * num_heads up to {MAX_COUNT}", rows)
