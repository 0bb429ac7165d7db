"""Every public function as a torch operator: for autograd, `torch.compile`, FakeTensor and CUDA graphs.

The functions have the names and the arguments of those in `cupymla`, without outputs and streams, which are torch's
affair:

    from cupymla.interop import torch as mla
    out, max_logits, lse = mla.sparse_mla_fwd(q, kv, indices, sm_scale=0.1)

Behind them are operators `torch.ops.cupymla.*` with fake implementations and, where there is one, a gradient. Results
come from torch's allocator, and kernels run on torch's current stream. `parallel` spreads attention over several ranks.
"""

from __future__ import annotations

from typing import Any

from ..table import DECLARATIONS, declared
from ..training import OPERATOR
from .functions import public, register

__all__ = ["register"]
__all__ += [entry.name for entry in DECLARATIONS]
__all__.insert(0, OPERATOR)  # which this module makes when it is named, as all but `register`


def __getattr__(name: str) -> Any:
    """Make a function when it is first named; from then on it is an attribute."""
    made: Any
    if name == OPERATOR:
        from .training import dsa_attention as made
    else:
        try:
            made = public(declared(name))
        except KeyError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    globals()[name] = made
    return made


def __dir__() -> list[str]:
    return __all__
