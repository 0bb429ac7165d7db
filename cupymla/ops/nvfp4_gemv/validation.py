"""The checks that `nvfp4_gemv` and its related functions share, with their messages.

All of them speak of matrices `[rows, columns]` with an optional batch axis l, which the caller keeps last (the public
shapes) or first (`batch_axis=0`); behind validation it is always last.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat, TypeGuard

import numpy as np
import numpy.typing as npt

from ... import tensor
from ...errors import shown
from ...tensor import View
from ..arguments import Arguments, OptionsT
from ..checks import Checks
from .formats import BlockFormat, padded

Dim = tuple[str, int | None]
"""An axis in the public terms, and its extent when it is already known."""

E2M1_DTYPES = ("uint8", "float4_e2m1fn_x2")
FLOAT_DTYPES = ("float32", "float16", "bfloat16")
SCALE_LAYOUTS = ("linear", "128x4")


@dataclass(frozen=True, slots=True)
class Operand:
    """A caller's array with its batch axis, real or implied, last.

    Attributes:
        view: the array as the caller shaped it.
        shape: extents; the last is l, 1 when the caller has no batch axis.
        strides: in elements of `view.dtype`, one per entry of `shape`; 0 along an implied batch axis.
        batch: where the batch axis is in `view`, or None.
    """

    view: View
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    batch: int | None

    def array(self) -> npt.NDArray[Any]:
        """The CPU array in the shape of `shape`, over the caller's memory."""
        seen = tensor.to_numpy(self.view)
        return seen[..., np.newaxis] if self.batch is None else np.moveaxis(seen, self.batch, -1)

    def bytes(self) -> npt.NDArray[np.uint8]:
        """`array()` of a one-byte dtype, as its bytes."""
        return self.array().view(np.uint8)


def _spelled(dims: Sequence[Dim]) -> str:
    return "[" + ", ".join(text if size is None else f"{text} = {size}" for text, size in dims) + "]"


class Validation(Checks):
    """The checks of one call. The first array that it reads fixes the device and whether there is a batch axis."""

    def __init__(self, operator: str) -> None:
        super().__init__(operator)
        self.batches = 1
        self.batched = False
        self.batch_first = False

    def taken(self, arguments: Arguments[Any, OptionsT], *values: object) -> OptionsT:
        """An operator's options, in their order, checked; where the batch axis is counts from now on."""
        options: Any = self.chosen(arguments, *values)
        self.batch_first = options.batch_axis == 0
        return options  # type: ignore[no-any-return]

    def _caller_order(self, dims: Sequence[Dim], batched: bool) -> tuple[Dim, ...]:
        if not batched:
            return tuple(dims)
        l_dim: Dim = ("l", self.batches)
        return (l_dim, *dims) if self.batch_first else (*dims, l_dim)

    def _operand(self, seen: View, batched: bool) -> Operand:
        if not batched:
            return Operand(seen, (*seen.shape, 1), (*seen.strides, 0), None)
        batch = 0 if self.batch_first else len(seen.shape) - 1
        shape, strides = list(seen.shape), list(seen.strides)
        shape.append(shape.pop(batch))
        strides.append(strides.pop(batch))
        return Operand(seen, tuple(shape), tuple(strides), batch)

    def first(self, seen: View, argument: str, dims: Sequence[Dim]) -> Operand:
        """The matrix that decides whether this call is batched, and l."""
        if len(seen.shape) not in (2, 3):
            expected = f"shape {_spelled(dims)} or {_spelled(self._caller_order(dims, True))}"
            raise self.error(argument, expected, f"shape {list(seen.shape)}")
        if len(seen.shape) == 3:
            self.take_batches(seen)
        return self.matrix(seen, argument, dims)

    def take_batches(self, seen: View) -> None:
        """Let an array whose other axes are checked later decide that this call is batched, and l."""
        self.batched = len(seen.shape) > 1
        if self.batched:
            self.batches = seen.shape[0 if self.batch_first else -1]

    def matrix(self, seen: View, argument: str, dims: Sequence[Dim], contiguous: bool = True) -> Operand:
        """A matrix of this shape, by default with contiguous columns."""
        wanted = self._caller_order(dims, self.batched)
        if len(seen.shape) != len(wanted) or any(
            size not in (None, extent) for (_, size), extent in zip(wanted, seen.shape, strict=True)
        ):
            raise self.error(argument, f"shape {_spelled(wanted)}", f"shape {list(seen.shape)}")
        operand = self._operand(seen, self.batched)
        if contiguous and operand.shape[1] > 1 and operand.strides[1] != 1 and 0 not in operand.shape:
            axis = 2 if self.batched and self.batch_first else 1
            expected = f"stride 1 along axis {axis} ({dims[1][0]})"
            if self.batched and not self.batch_first:
                expected += ", or the batch axis first and batch_axis=0"
            raise self.error(argument, expected, f"strides {seen.strides}")
        return operand

    def swizzled(self, seen: View, argument: str, rows: int, columns: int) -> Operand:
        """Scales in the 128x4 layout: whole blocks, as a matrix or flat, contiguous but for the batch axis."""
        all_rows, all_columns = padded(rows, columns)
        shaped = self._caller_order([("rows", all_rows), ("columns", all_columns)], self.batched)
        flat = self._caller_order([("bytes", all_rows * all_columns)], self.batched)
        if seen.shape not in (tuple(size for _, size in shaped), tuple(size for _, size in flat)):
            expected = f"128x4 scales of shape {_spelled(shaped)} or {_spelled(flat)}"
            raise self.error(argument, expected, f"shape {list(seen.shape)}")
        operand = self._operand(seen, self.batched)
        step = 1
        for extent, stride in zip(reversed(operand.shape[:-1]), reversed(operand.strides[:-1]), strict=True):
            if extent > 1 and stride != step and 0 not in operand.shape:
                raise self.error(argument, "contiguous 128x4 blocks", f"strides {seen.strides}")
            step *= extent
        return operand

    def scales(
        self,
        array: object,
        argument: str,
        fmt: BlockFormat,
        layout: str,
        extent: tuple[str, int, int],
        output: bool = False,
    ) -> Operand:
        """Block scales of a matrix whose `extent` is (name of the rows, rows, k), in either layout."""
        why = f" for format='{fmt.name}'"
        seen = self.view(array, argument, ("uint8", fmt.scale_dtype), why, output)
        row_name, rows, k = extent
        columns = fmt.scale_columns(k)
        if layout == "128x4":
            return self.swizzled(seen, argument, rows, columns)
        return self.matrix(seen, argument, [(row_name, rows), (f"ceil(k/{fmt.block})", columns)])

    def per_row(self, seen: View, argument: str, rows: int, scalar: bool = False) -> Operand:
        """A value per row, `[m]` or `[m, l]`, or where `scalar` allows it one value, `[]` or `[1]`."""
        if scalar and seen.shape in ((), (1,)):
            return Operand(seen, (*seen.shape, 1), (*seen.strides, 0), None)
        if seen.shape == (rows,):
            return self._operand(seen, batched=False)
        if self.batched and seen.shape == tuple(size for _, size in self._caller_order([("m", rows)], True)):
            return self._operand(seen, batched=True)
        accepted = [_spelled(self._caller_order([("m", rows)], batched)) for batched in sorted({False, self.batched})]
        if scalar:
            accepted = ["[]", "[1]", *accepted]
        raise self.error(argument, "shape " + " or ".join(accepted), f"shape {list(seen.shape)}")

    def host_float(self, value: SupportsFloat, argument: str) -> float:
        """A number of the caller's, as float32 holds it."""
        expected = "a number that float32 can hold"
        try:
            exact = float(value)
        except Exception:
            raise self.error(argument, expected, shown(value)) from None
        with np.errstate(over="ignore"):
            rounded = float(np.float32(exact))
        if np.isinf(rounded) != np.isinf(exact):
            raise self.error(argument, expected, shown(value))
        return rounded


def is_number(value: object) -> TypeGuard[SupportsFloat]:
    """Whether this is a Python or NumPy number and no array."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
