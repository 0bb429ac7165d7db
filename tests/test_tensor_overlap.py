"""Which arrays an output may lie between: shared bytes are always found, and interleaving is not taken for sharing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupymla import InputError, nvfp4_gemv, tensor
from cupymla.tensor import Device, View, overlap


def addresses(array: Any) -> set[int]:
    """Every byte of an array, counted one by one."""
    places = np.zeros(array.shape, np.int64)
    for axis, stride in enumerate(array.strides):
        steps = np.arange(array.shape[axis]) * stride
        places += steps.reshape([-1 if axis == other else 1 for other in range(array.ndim)])
    first = array.ctypes.data
    return {first + int(place) + byte for place in places.ravel() for byte in range(array.itemsize)}


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_overlap_never_misses_a_shared_byte(data: st.DataObject) -> None:
    """Two arrays laid anywhere into one buffer: found to overlap whenever a byte is shared."""
    buffer = np.zeros(4096, np.uint8)
    views = []
    for _ in range(2):
        dtype = np.dtype(data.draw(st.sampled_from(["float32", "float16"])))
        shape = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple))
        strides = tuple(
            dtype.itemsize * data.draw(st.sampled_from([0, 1, 2, 3, 6, 8, 12, 24, -1, -3, -12])) for _ in shape
        )
        start = 1024 + 4 * data.draw(st.integers(0, 40))
        views.append(np.lib.stride_tricks.as_strided(buffer[start:].view(dtype), shape, strides))
    one, other = (tensor.view(array, "x") for array in views)
    shared = bool(addresses(views[0]) & addresses(views[1]))
    assert not shared or overlap(one, other)


@pytest.mark.parametrize("split", range(6))
def test_overlap_sees_between_interleaved_arrays(split: int) -> None:
    """Halves of one allocation, interleaved along any axis, are apart; moved by one element they are not."""
    shape = [3, 4, 2, 3, 5]
    shape.insert(split, 2)
    buffer = np.zeros(int(np.prod(shape)) + 1, np.float32)
    whole, moved = buffer[:-1].reshape(shape), buffer[1:].reshape(shape)
    first, second = (np.moveaxis(whole, split, 0)[half] for half in range(2))
    assert not overlap(tensor.view(first, "x"), tensor.view(second, "x"))
    assert overlap(tensor.view(np.moveaxis(moved, split, 0)[0], "x"), tensor.view(second, "x"))


def test_overlap_sees_the_next_row() -> None:
    """Rows of one array that reach past the period meet the other's next row, not its own."""
    buffer = np.zeros(60, np.float32)

    def rows(start: int) -> Any:
        return np.lib.stride_tricks.as_strided(buffer[start:], (5, 2), (24, 4))

    for start, shared in ((1, True), (2, False), (4, False), (5, True), (7, True), (8, False)):
        assert overlap(tensor.view(rows(0), "x"), tensor.view(rows(start), "x")) == shared
        assert overlap(tensor.view(rows(start), "x"), tensor.view(rows(0), "x")) == shared


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_columns_of_one_buffer_are_apart_whatever_their_rank_order_and_length(rows: int) -> None:
    """A matrix, a vector beside it and a row further down share an allocation but no byte."""
    buffer = np.zeros((rows, 8), np.float16)
    left, middle, column = buffer[:, :1], buffer[::-1, 3:5], buffer[:, 5]
    seen = [tensor.view(array, "x") for array in (left, middle, column, buffer[-1:, 6:])]
    for number, one in enumerate(seen):
        for other in seen[:number]:
            assert not overlap(one, other)
            assert not overlap(other, one)
        assert overlap(one, tensor.view(buffer, "x"))
        assert overlap(one, one)


def test_devices_never_overlap_each_other() -> None:
    def at(device: Device) -> View:
        return View(1024, (4,), (1,), "float32", device, False, "dlpack", None)

    assert not overlap(at(Device("cpu")), at(Device("cuda", 0)))
    assert overlap(at(Device("cuda", 0)), at(Device("cuda", 0)))


def test_nvfp4_gemv_takes_an_output_between_an_inputs_elements() -> None:
    """c and bias as columns of one buffer share no byte; c on bias's own column does."""
    codes, scales = np.full((8, 16), 0x22, np.uint8), np.full((8, 2), 0x38, np.uint8)
    arguments: dict[str, Any] = {"a": codes, "b": codes[:1], "sfa": scales, "sfb": scales[:1]}
    buffer = np.zeros((8, 6), np.float16)
    buffer[:, 5] = 3
    nvfp4_gemv(**arguments, bias=buffer[:, 5], c=buffer[:, :1])
    # Codes and scales are 1.0, so each of the 32 products is 1.
    assert (buffer[:, 0] == 35).all()
    assert (buffer[:, 1:5] == 0).all()
    with pytest.raises(InputError, match="bias"):
        nvfp4_gemv(**arguments, bias=buffer[:, 5], c=buffer[:, 5:])
