"""Which kernel serves a call. There is none yet: arrays on the CPU take the NumPy references."""

from __future__ import annotations

from ...errors import UnsupportedError
from ...tensor import Device


def require_cpu(operator: str, device: Device) -> None:
    """Raise UnsupportedError unless the arrays are on the CPU."""
    if device.kind != "cpu":
        raise UnsupportedError(operator, str(device), "arrays on the CPU, which the NumPy reference serves")
