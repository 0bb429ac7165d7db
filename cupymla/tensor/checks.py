"""Checks on several views."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from ..device import Device
from ..errors import InputError
from .types import View


def require_same_device(views: Mapping[str, View | None]) -> Device:
    """The one device of all views, named by parameter; a None stands for an argument left out.

    Raises InputError naming the first argument that is elsewhere than the first one, and ValueError without any view.
    """
    first: tuple[str, Device] | None = None
    for name, seen in views.items():
        if seen is None:
            continue
        if first is None:
            first = (name, seen.device)
        elif seen.device != first[1]:
            raise InputError(name, f"an array on {first[1]}, where '{first[0]}' is", f"one on {seen.device}")
    if first is None:
        raise ValueError("no views")
    return first[1]


def overlap(a: View, b: View) -> bool:
    """Whether writing to one may change the other.

    Exact for views of the same strides and element size (two halves of a matrix's columns do not overlap) whose strides
    nest. Otherwise by byte ranges: views that share a range count as overlapping although they may interleave.
    """
    if a.device != b.device or 0 in a.shape or 0 in b.shape:
        return False
    a_first, a_end = _reach(a.shape, a.strides, a.itemsize)
    b_first, b_end = _reach(b.shape, b.strides, b.itemsize)
    if a.ptr + a_end <= b.ptr + b_first or b.ptr + b_end <= a.ptr + a_first:
        return False
    if a.strides == b.strides and a.itemsize == b.itemsize:
        return _lattices_meet(a, b)
    return True


@functools.lru_cache(maxsize=1024)
def _reach(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """First byte of a non-empty view and the byte after its last, counted from element 0."""
    reaches = [stride * (extent - 1) * itemsize for extent, stride in zip(shape, strides, strict=True)]
    return sum(reach for reach in reaches if reach < 0), sum(reach for reach in reaches if reach > 0) + itemsize


def _lattices_meet(a: View, b: View) -> bool:
    """Whether some element of `a` shares a byte with one of `b`, both of the same strides and element size.

    An element of `a` at index i and one of `b` at index j are apart by `b.ptr - a.ptr - (i - j) * strides`. Axes are
    taken from the largest stride down; when strides nest, only the two index differences around the quotient can
    bring the rest within reach of the smaller axes, so the search is exact. When they do not, it answers True.
    """
    itemsize = a.itemsize
    axes = sorted(
        ((abs(s), m - 1, n - 1, s < 0) for s, m, n in zip(a.strides_bytes, a.shape, b.shape, strict=True)),
        reverse=True,
    )
    reach = itemsize
    for stride, a_last, b_last, _ in reversed(axes):
        if a_last or b_last:
            if stride < reach:
                return True
            reach += stride * max(a_last, b_last)

    def meet(distance: int, depth: int) -> bool:
        if depth == len(axes):
            return abs(distance) < itemsize
        stride, a_last, b_last, backwards = axes[depth]
        low, high = (-a_last, b_last) if backwards else (-b_last, a_last)
        if low == high == 0:
            return meet(distance, depth + 1)
        quotient = distance // stride
        return any(low <= n <= high and meet(distance - n * stride, depth + 1) for n in (quotient, quotient + 1))

    return meet(b.ptr - a.ptr, 0)
