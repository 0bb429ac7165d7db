"""Fast attention and low-precision kernels for any array that speaks DLPack.

Importing this package loads neither a framework nor a CUDA library; each operator brings in what it needs when it
is first called.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import CompileError as CompileError
    from .errors import CupymlaError as CupymlaError
    from .errors import DriverError as DriverError
    from .errors import InputError as InputError
    from .errors import UnsupportedError as UnsupportedError
    from .ops.attn_dist import attn_dist as attn_dist
    from .ops.indexer_logits import indexer_logits as indexer_logits
    from .ops.nvfp4_gemv import dequantize_nvfp4 as dequantize_nvfp4
    from .ops.nvfp4_gemv import nvfp4_gemv as nvfp4_gemv
    from .ops.nvfp4_gemv import quantize_nvfp4 as quantize_nvfp4
    from .ops.nvfp4_gemv import swizzle_scales as swizzle_scales
    from .ops.nvfp4_gemv import unswizzle_scales as unswizzle_scales
    from .ops.sparse_mla_bwd import sparse_mla_bwd as sparse_mla_bwd
    from .ops.sparse_mla_bwd_phase1 import sparse_mla_bwd_phase1 as sparse_mla_bwd_phase1
    from .ops.sparse_mla_fwd import sparse_mla_fwd as sparse_mla_fwd
    from .ops.topk import topk as topk
    from .ops.xl_paged_attention import copy_blocks as copy_blocks
    from .ops.xl_paged_attention import matrix_bd as matrix_bd
    from .ops.xl_paged_attention import rel_shift as rel_shift
    from .ops.xl_paged_attention import reshape_and_cache as reshape_and_cache
    from .ops.xl_paged_attention import xl_paged_attention as xl_paged_attention
    from .raw import raw_module as raw_module

__version__ = "0.1.0"

_ERRORS = ("CupymlaError", "InputError", "UnsupportedError", "CompileError", "DriverError")


def __getattr__(name: str) -> Any:
    """Bring in an operator, a companion or an error class when it is first named; from then on it is an attribute."""
    # Imports go through import_module: `from . import x` asks this very function for x.
    registry = import_module(f"{__name__}.ops.registry")
    homes = {n: entry.module for entry in registry.OPERATORS for n in (entry.name, *entry.companions)}
    homes |= dict.fromkeys(_ERRORS, f"{__name__}.errors")
    homes["raw_module"] = f"{__name__}.raw"
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(homes[name]), name)
    return found


def __dir__() -> list[str]:
    registry = import_module(f"{__name__}.ops.registry")
    names = [n for entry in registry.OPERATORS for n in (entry.name, *entry.companions)]
    return sorted([*globals(), *names, *_ERRORS, "raw_module"])
