"""Every public function as a JAX function: for `jit`, `grad`, `vmap`, `shard_map` and `jax.export`.

The functions have the names and the arguments of those in `cupymla`, without outputs and streams, which are XLA's
affair:

    from cupymla.interop import jax as mla
    out, max_logits, lse = mla.sparse_mla_fwd(q, kv, indices, sm_scale=0.1)

On a GPU they enqueue the kernel on XLA's own stream; on the CPU they run the NumPy references. What is wrong with an
argument is an `InputError` while the program is traced. Functions that write in place (`reshape_and_cache`) return the
new arrays instead; donate the old ones to spare the copy. `parallel` spreads attention over several devices.
"""

from __future__ import annotations

from typing import Any

from ..table import DECLARATIONS, declared
from .functions import causal_indices, export_checks, public, register
from .training import dsa_attention

__all__ = ["causal_indices", "dsa_attention", "export_checks", "register"]
__all__ += [entry.name for entry in DECLARATIONS]


def __getattr__(name: str) -> Any:
    """Make a function when it is first named; from then on it is an attribute."""
    try:
        made = globals()[name] = public(declared(name))
        return made
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return __all__
