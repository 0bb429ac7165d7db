"""Right and wrong calls, for type checkers to tell apart (tests/test_types.py). Nothing here runs.

A line that ends in "wrong" has to be an error to every checker; one that ends in "wrong to pyright" to that one, which
follows JAX's and torch's own types where the project's mypy does not.
"""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np
import numpy.typing as npt
import torch

import cupymla
from cupymla.interop import jax as in_jax
from cupymla.interop import torch as in_torch

Host = npt.NDArray[Any]


class Foreign:
    """Another framework's array."""


def right(x: npt.NDArray[np.float32], foreign: Foreign, anything: Any) -> None:
    assert_type(cupymla.sparse_mla_fwd(x, x, x), tuple[Host, Host, Host])
    assert_type(cupymla.sparse_mla_fwd(foreign, x, x, lse_base="2", causal=True), tuple[Foreign, Foreign, Foreign])
    assert_type(cupymla.sparse_mla_bwd(x, x, x, x, x, x, dkv_dtype="float32"), tuple[Host, Host])
    assert_type(cupymla.sparse_mla_bwd(x, x, x, x, x, x, attn_sink=x), tuple[Host, Host, Host])
    assert_type(cupymla.attn_dist(foreign, x, x, x, normalize="l1"), Foreign)
    assert_type(cupymla.topk(x, 4, order="score"), tuple[Host, Host])
    assert_type(cupymla.topk(foreign, 4, return_values=True), tuple[Foreign, Foreign, Foreign])
    assert_type(cupymla.xl_paged_attention(x, x, x, x, x, kv_layout="NHD"), Host)
    assert_type(cupymla.xl_paged_attention(x, x, x, x, x, return_lse=True), tuple[Host, Host])
    assert_type(cupymla.quantize_nvfp4(x, global_scale=2.0), tuple[Host, Host])
    assert_type(cupymla.quantize_nvfp4(x, global_scale="amax"), tuple[Host, Host, Host])
    assert_type(cupymla.reshape_and_cache(x, x, x, x, x), tuple[Host, Host])
    assert_type(cupymla.sparse_mla_fwd.prepare(x, x, x)(stream=7), tuple[Host, Host, Host])
    assert_type(cupymla.sparse_mla_bwd.workspace_bytes(x, x, x, x, x, x), int)
    assert_type(cupymla.topk.name, str)
    cupymla.sparse_mla_fwd(anything, anything, anything, stream=anything, out=anything)
    cupymla.raw_module("nvfp4_gemv")
    raise cupymla.InputError("q", "an array", "none")


def right_in_bridges(x: Host, t: torch.Tensor) -> None:
    assert_type(in_torch.sparse_mla_fwd(t, t, t, deterministic=True), tuple[torch.Tensor, torch.Tensor, torch.Tensor])
    assert_type(in_torch.attn_dist(t, t, t, t), torch.Tensor)
    in_torch.sparse_mla_bwd(t, t, t, t, t, t, return_attn_dist=True)[2]
    in_torch.nvfp4_gemv(t, t, t, t, alpha=0.5)
    in_torch.dsa_attention(t, t, t, t, t, t, loss_weight=0.5)[2]
    in_jax.dsa_attention(x, x, x, x, x, x, loss_weight=x, axis_name="heads")[2]
    in_jax.topk(x, 3)[1]
    in_jax.causal_indices


def wrong(x: npt.NDArray[np.float32]) -> None:
    from cupymla import sparse_mla_sideways  # wrong

    cupymla.nope  # wrong
    cupymla.sparse_mla_fwd(x, x)  # wrong
    cupymla.sparse_mla_fwd(x, x, x, x)  # wrong
    cupymla.sparse_mla_fwd(x, x, x, scale=1.0)  # wrong
    cupymla.sparse_mla_fwd(x, x, x, lse_base="10")  # wrong
    cupymla.sparse_mla_fwd(x, x, x, causal="yes")  # wrong
    cupymla.sparse_mla_fwd.prepare(x, x, x, lse_base=2)  # wrong
    cupymla.sparse_mla_fwd.prepared(x, x, x)  # wrong
    cupymla.attn_dist.workspace_bytes(x, x, x, x)  # wrong
    cupymla.attn_dist(x, x, x, x, normalize="l2")  # wrong
    cupymla.topk(x)  # wrong
    cupymla.topk(x, 4, order="value")  # wrong
    cupymla.nvfp4_gemv(x, x, x, x, format="fp4")  # wrong
    cupymla.swizzle_scales(x, columns=3)  # wrong
    cupymla.xl_paged_attention(x, x, x, x, x, kv_layout="flash")  # wrong
    cupymla.matrix_bd(x, x, context_lens=x)  # wrong
    _indices, _count, _values = cupymla.topk(x, 4)  # wrong
    _dq, _dkv = cupymla.sparse_mla_bwd(x, x, x, x, x, x, attn_sink=x)  # wrong


def wrong_in_bridges(x: Host, t: torch.Tensor) -> None:
    in_jax.nope  # wrong
    in_torch.nope  # wrong
    in_torch.sparse_mla_fwd(t, t, t, out=t)  # wrong
    in_torch.sparse_mla_fwd(t, t, t, lse_base="10")  # wrong
    in_torch.topk(t, 3, stream=None)  # wrong
    in_jax.sparse_mla_fwd(x, x, x, stream=None)  # wrong
    in_jax.topk(x, 4, order="value")  # wrong
    in_jax.dsa_attention(x, x, x, x, x, x)  # wrong
    in_torch.dsa_attention(t, t, t, t, t, t, loss_weight=t, lse_base="10")  # wrong
    in_torch.sparse_mla_fwd("q", t, t)  # wrong to pyright
    in_jax.topk([1.0], 4)  # wrong to pyright
