"""What a kernel that is launched on its own takes from its operator's plan. Pure: no array, no driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class WorkAssignment(NamedTuple):
    """Which CTA does what: the part of a launch that depends on sizes and on the GPU.

    Attributes:
        ctas: the grid along x, clusters included; along y and z it is 1.
        fields: of the parameter record, those that go with this grid, by their names.
    """

    ctas: int
    fields: Mapping[str, int]
