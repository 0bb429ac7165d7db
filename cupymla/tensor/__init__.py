"""Arrays of other libraries: seen as `View`s, without copies, casts or device moves.

- `view`, `view_output`: any array that speaks DLPack, by the shortest way its framework offers (`read`);
- `to_numpy`, `fetched`, `from_numpy`, `allocate`, `empty`: NumPy's view of an array, and results in the caller's
  framework, on the caller's device (`make`);
- `launch_stream`, `current_stream`, `cupy_stream`, `stream_pointer`, `hold`, `release`: whose stream a kernel runs on
  (`streams`);
- `overlap`, `reach`: whether two views may share memory, and what a view spans (`checks`);
- `fast`: arrays of a loop, without a `View`.
"""

from __future__ import annotations

from ..device import Device
from .checks import overlap, reach
from .make import Allocation, allocate, cupy_arrays, empty, fetched, from_numpy, to_numpy
from .read import view, view_output
from .streams import cupy_stream, current_stream, hold, launch_stream, release, stream_pointer
from .types import View, contiguous

__all__ = [
    "Allocation",
    "Device",
    "View",
    "allocate",
    "contiguous",
    "cupy_arrays",
    "cupy_stream",
    "current_stream",
    "empty",
    "fetched",
    "from_numpy",
    "hold",
    "launch_stream",
    "overlap",
    "reach",
    "release",
    "stream_pointer",
    "to_numpy",
    "view",
    "view_output",
]
