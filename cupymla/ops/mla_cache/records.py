"""Parameter records: mirrored structs of those in params.cuh and latent_params.cuh of cuda/mla_cache/sm80."""

from __future__ import annotations

import ctypes

_P, _I64, _I32, _U32, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_uint32, ctypes.c_float
_AXES = _I64 * 3


class QuantizeParameters(ctypes.Structure):
    """Mirrors `QuantizeParameters`."""

    _fields_ = (
        *((name, _P) for name in ("x", "codes", "scales", "slots")),
        *((name, _AXES) for name in ("extents", "x_strides", "codes_strides", "scales_strides")),
        *((name, _I64) for name in ("scales_group", "slots_row", "block_bytes", "num_slots")),
        ("page", _I32),
        ("page_reciprocal", _U32),
        *((name, _I32) for name in ("slots_wide", "groups", "lanes_log2", "type", "pow2")),
    )


class DequantizeParameters(ctypes.Structure):
    """Mirrors `DequantizeParameters`."""

    _fields_ = (
        *((name, _P) for name in ("codes", "scales", "out")),
        *((name, _AXES) for name in ("extents", "codes_strides", "scales_strides", "out_strides")),
        ("scales_group", _I64),
        *((name, _I32) for name in ("channels", "group_log2")),
    )


class GatherParameters(ctypes.Structure):
    """Mirrors `GatherParameters`."""

    _fields_ = (
        *((name, _P) for name in ("cache", "slots", "block_tables", "cu_lens", "k", "k_scale")),
        *((name, _I64) for name in ("slots_row", "tables_request", "tables_block", "lens_request")),
        *((name, _I64) for name in ("k_row", "k_scale_row", "block_bytes", "num_slots", "rows")),
        *((name, _I32) for name in ("page", "blocks", "slots_wide", "requests", "width")),
    )


class ConcatParameters(ctypes.Structure):
    """Mirrors `ConcatParameters` of latent_params.cuh."""

    _fields_ = (
        *((name, _P) for name in ("kv_c", "k_pe", "cache", "slots")),
        *((name, _I64) for name in ("kv_c_row", "k_pe_row", "slots_row", "block_bytes", "num_slots", "tokens")),
        ("page", _I32),
        ("page_reciprocal", _U32),
        *((name, _I32) for name in ("slots_wide", "type", "rope", "codes", "row_bytes", "rope_begin")),
        *((name, _I32) for name in ("lanes_log2", "exponents", "pow2")),
    )


class GatherLatentParameters(ctypes.Structure):
    """Mirrors `GatherLatentParameters` of latent_params.cuh."""

    _fields_ = (
        *((name, _P) for name in ("cache", "slots", "block_tables", "cu_lens", "kv")),
        *((name, _I64) for name in ("slots_row", "tables_request", "tables_block", "lens_request")),
        *((name, _I64) for name in ("kv_row", "block_bytes", "num_slots", "rows")),
        *((name, _I32) for name in ("page", "blocks", "slots_wide", "requests", "width", "channels", "codes")),
        *((name, _I32) for name in ("row_bytes", "wide_begin", "group_log2", "exponents")),
    )


class HadamardParameters(ctypes.Structure):
    """Mirrors `HadamardParameters`."""

    _fields_ = (
        *((name, _P) for name in ("x", "out")),
        *((name, _AXES) for name in ("extents", "x_strides", "out_strides")),
        *((name, _I32) for name in ("lanes_log2", "type")),
        ("factor", _F32),
    )
