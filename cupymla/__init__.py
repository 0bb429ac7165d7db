"""Fast attention and low-precision kernels for any array that speaks DLPack.

Importing this package loads neither a framework nor a CUDA library; each operator brings in what it needs when it
is first called.
"""

from __future__ import annotations

__version__ = "0.1.0"
