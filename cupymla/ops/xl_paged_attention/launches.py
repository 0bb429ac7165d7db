"""Kernels of the related functions: their parameter records and launches."""

from __future__ import annotations

import ctypes

from ... import build, driver
from ...build.source import KernelSource
from ...device import Device
from ...launch import Geometry, Launcher
from ...tensor import View
from ..gpu import check_record
from . import plan

# A grid-stride loop with this many CTAs on every SM hides its latency; more would only be started and ended.
_CTAS_PER_SM = 16

_P, _I64, _I32, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class RelativeParameters(ctypes.Structure):
    """Mirrored struct of the record in cuda/xl_paged_attention/sm80/relative_scores.cu."""

    _fields_ = (
        *((name, _P) for name in ("query", "pos_bias_v", "pos_emb", "scores")),
        *((name, _I64) for name in ("query_seq_bytes", "query_head_bytes", "v_head_bytes")),
        *((name, _I64) for name in ("emb_distance_bytes", "emb_head_bytes")),
        *((name, _I32) for name in ("num_seqs", "num_heads", "width", "v_wide")),
    )


class SpreadParameters(ctypes.Structure):
    """Mirrored struct of the record in cuda/xl_paged_attention/sm80/spread_bias.cu."""

    _fields_ = (
        *((name, _P) for name in ("scores", "context_lens", "out")),
        *((name, _I64) for name in ("lens_seq", "out_seq", "out_head")),
        *((name, _I32) for name in ("num_seqs", "num_heads", "width", "max_context", "extent", "clamp")),
    )


class ShiftParameters(ctypes.Structure):
    """Mirrored struct of the record in cuda/xl_paged_attention/sm80/rel_shift.cu."""

    _fields_ = (
        *((name, _P) for name in ("x", "out")),
        *((name, _I64 * 4) for name in ("extent", "x_stride", "out_stride")),
    )


class CopyParameters(ctypes.Structure):
    """Mirrored struct of the record in cuda/xl_paged_attention/sm80/copy_blocks.cu."""

    _fields_ = (
        *((name, _P) for name in ("cache", "mapping")),
        ("block_bytes", _I64),
        *((name, _I64 * 4) for name in ("extent", "stride_bytes")),
        *((name, _I64) for name in ("pair_stride", "side_stride", "num_pairs", "num_blocks")),
        ("mapping_wide", _I32),
    )


class ReshapeParameters(ctypes.Structure):
    """Mirrored struct of the record in cuda/xl_paged_attention/sm80/reshape_and_cache.cu."""

    _fields_ = (
        *((name, _P) for name in ("key", "value", "k_cache", "v_cache", "slots", "k_scales", "v_scales")),
        *((name, _I64) for name in ("key_token", "key_head", "value_token", "value_head")),
        *((name, _I64) for name in ("k_block", "k_head", "k_token", "k_chunk")),
        *((name, _I64) for name in ("v_block", "v_head", "v_token", "v_channel")),
        *((name, _I64) for name in ("slots_token", "k_scales_head", "v_scales_head", "num_tokens", "num_slots")),
        *((name, _I32) for name in ("num_kv_heads", "head_size", "block_size", "chunk", "slots_wide")),
        *((name, _F32) for name in ("k_scale", "v_scale")),
    )


def elementwise(
    source: KernelSource, device: Device, parameters: ctypes.Structure, elements: int, follows: bool = False
) -> Launcher | None:
    """A launch of a grid-stride kernel; None when there is nothing to do. Raises CompileError, DriverError.

    `follows`: whether it comes right behind another one of the same call, which it may overlap with.
    """
    kernel = build.kernel(source, device.index)
    check_record(source, kernel.facts, type(parameters))
    most = _CTAS_PER_SM * driver.multiprocessor_count(device.index)
    number = min(-(-elements // kernel.facts["threads"]), most)
    pdl = follows and driver.has_dependent_launch(device.index)
    geometry = Geometry((number, 1, 1), kernel.facts["threads"], kernel.facts["smem_bytes"], pdl=pdl)
    return Launcher(kernel, geometry, (parameters,)) if number else None


class RelativeScores:
    """(q + v) . pos_emb for the first `width` distances, into fp32 [num_seqs, num_heads, width].

    Attributes:
        launcher: the launch; None when there is nothing to compute. `point` gives it its addresses.
    """

    def __init__(self, query: View, pos_emb: View, pos_bias_v: View | None, width: int, device: Device) -> None:
        """Bind arrays of these layouts. Raises CompileError, DriverError."""
        num_seqs, num_heads, head_size = query.shape
        self.launcher: Launcher | None = None
        self._parameters = RelativeParameters(
            query_seq_bytes=query.strides_bytes[0],
            query_head_bytes=query.strides_bytes[1],
            v_head_bytes=0 if pos_bias_v is None else pos_bias_v.strides_bytes[0],
            emb_distance_bytes=pos_emb.strides_bytes[0],
            emb_head_bytes=pos_emb.strides_bytes[1],
            num_seqs=num_seqs,
            num_heads=num_heads,
            width=width,
            v_wide=int(pos_bias_v is not None and pos_bias_v.dtype == "float32"),
        )
        if 0 in (num_seqs, num_heads, width):
            return
        source = plan.auxiliary(
            "relative_scores", driver.arch_of(device).name, head_size=head_size, query=plan.QUERY_CODE[query.dtype]
        )
        kernel = build.kernel(source, device.index)
        check_record(source, kernel.facts, RelativeParameters)
        facts = kernel.facts
        blocks = -(-width // facts["cta_distances"]) * num_heads * -(-num_seqs // facts["seqs"])
        number = min(blocks, _CTAS_PER_SM * driver.multiprocessor_count(device.index))
        geometry = Geometry((number, 1, 1), facts["threads"], facts["smem_bytes"])
        self.launcher = Launcher(kernel, geometry, (self._parameters,))

    def point(self, query: int, pos_emb: int, pos_bias_v: int | None, scores: int) -> None:
        """Set every address."""
        parameters = self._parameters
        parameters.query = query
        parameters.pos_emb = pos_emb
        parameters.pos_bias_v = pos_bias_v
        parameters.scores = scores
