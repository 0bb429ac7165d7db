"""Where a kernel's time would go: what its warps do is recorded while it is interpreted, then replayed against a clock.

`Recorder` watches `interpret` (its argument `watch`); `replay` says when everything would have happened, at given
`Rates`. An estimate, for comparing one schedule with another: docs/cycles.md.
"""

from __future__ import annotations

from .rates import Rates
from .recorder import Recorder
from .replay import Replayed, Stuck, replay
from .trace import Trace

__all__ = ["Rates", "Recorder", "Replayed", "Stuck", "Trace", "replay"]
