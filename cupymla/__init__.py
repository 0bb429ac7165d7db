"""Fast attention and low-precision kernels for any array that speaks DLPack.

Importing this package loads neither a framework nor a CUDA library; each operator brings in what it needs when it
is first called. Editors and type checkers read `__init__.pyi`.
"""

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "CupymlaError",
    "DriverError",
    "InputError",
    "UnsupportedError",
    "attn_dist",
    "concat_and_cache_mla",
    "copy_blocks",
    "dequantize_fp8",
    "dequantize_nvfp4",
    "gather_indexer_cache",
    "gather_mla_cache",
    "hadamard",
    "indexer_bwd",
    "indexer_k_quant_and_cache",
    "indexer_logits",
    "indexer_loss",
    "indexer_loss_dense",
    "indexer_topk",
    "invert_indices",
    "matrix_bd",
    "merge_attention",
    "nvfp4_gemv",
    "paged_indexer_logits",
    "paged_indexer_topk",
    "quantize_fp8",
    "quantize_nvfp4",
    "raw_module",
    "rel_shift",
    "reshape_and_cache",
    "sparse_mla_bwd",
    "sparse_mla_bwd_phase1",
    "sparse_mla_decode",
    "sparse_mla_fwd",
    "swizzle_scales",
    "topk",
    "unswizzle_scales",
    "xl_paged_attention",
]

_ERRORS = frozenset({"CupymlaError", "InputError", "UnsupportedError", "CompileError", "DriverError"})


def __getattr__(name: str) -> object:
    """Bring in an operator, a related function or an error class when it is first named; from then on it is an
    attribute."""
    # Imported here, for what stands above is what editors complete. Imports go through import_module: `from . import x`
    # asks this very function for x.
    from importlib import import_module

    if name in _ERRORS:
        module = f"{__name__}.errors"
    elif name == "raw_module":
        module = f"{__name__}.raw"
    else:
        registry = import_module(f"{__name__}.ops.registry")
        modules = {n: entry.module for entry in registry.OPERATORS for n in entry.functions}
        if name not in modules:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = modules[name]
    found = globals()[name] = getattr(import_module(module), name)
    return found


def __dir__() -> list[str]:
    return __all__
