"""Checks on several views."""

from __future__ import annotations

from .types import View

_Axes = list[tuple[int, int]]


def overlap(a: View, b: View) -> bool:
    """Whether two arrays may share memory.

    Exact for arrays that interleave by equal strides in their outer axes and are apart, or touch, within them: the K
    and V halves of one allocation, columns of one matrix, a matrix and a vector beside it. Where the inner axes of one
    reach past the step of an outer one it answers True, so that it never says no wrongly.
    """
    if a.device != b.device or 0 in a.shape or 0 in b.shape:
        return False
    a_first, a_axes = _ascending(a)
    b_first, b_axes = _ascending(b)
    return _meet(a_axes, a.itemsize, b_axes, b.itemsize, b_first - a_first)


def _ascending(seen: View) -> tuple[int, _Axes]:
    """The lowest address, and (step in bytes, extent) of every axis that moves from there, largest step first."""
    first, axes = seen.ptr, []
    for stride, extent in zip(seen.strides_bytes, seen.shape, strict=True):
        first += min(0, stride * (extent - 1))
        if stride and extent > 1:
            axes.append((abs(stride), extent))
    return first, sorted(axes, reverse=True)


def _span(axes: _Axes, itemsize: int) -> int:
    return itemsize + sum(step * (extent - 1) for step, extent in axes)


def _meet(a: _Axes, a_item: int, b: _Axes, b_item: int, distance: int) -> bool:
    """Whether an array at byte 0 meets an array at byte `distance`."""
    if distance >= _span(a, a_item) or -distance >= _span(b, b_item):
        return False
    if not a and not b:
        return True
    period = max(axes[0][0] for axes in (a, b) if axes)
    a_extent, a_rest = _outermost(a, period)
    b_extent, b_rest = _outermost(b, period)
    if max(_span(a_rest, a_item), _span(b_rest, b_item)) > period:
        return True
    # What repeats fits into one period, so only the two nearest relative placements can meet.
    nearest = -(distance // period)
    return any(
        -a_extent < shift < b_extent and _meet(a_rest, a_item, b_rest, b_item, distance + shift * period)
        for shift in (nearest, nearest - 1)
    )


def _outermost(axes: _Axes, period: int) -> tuple[int, _Axes]:
    """How often an array repeats every `period` bytes, and the axes of what repeats."""
    return (axes[0][1], axes[1:]) if axes and axes[0][0] == period else (1, axes)


def reach(seen: View) -> tuple[int, int]:
    """Where a view's memory begins and ends, in bytes from its address."""
    if 0 in seen.shape:
        return 0, 0
    low = high = 0
    for stride, extent in zip(seen.strides_bytes, seen.shape, strict=True):
        step = stride * (extent - 1)
        low, high = low + min(step, 0), high + max(step, 0)
    return low, high + seen.itemsize
