"""Baselines of installed packages: FlashMLA, cuDNN's front end, DeepGEMM and FlashInfer, through torch.

Each is called as its own documentation shows: `flash_mla.flash_mla_sparse_fwd`, `cudnn.DSA` (the backward, with the
score recompute where a case asks for the distribution, and the indexer's backward), `deep_gemm.fp8_mqa_logits`,
`flashinfer.top_k`. This module has run with stand-ins for these packages only, on the CPU.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module, metadata
from typing import Any

Make = Callable[[Any, Any, dict[str, Any]], Any]
"""Of the package, a case and its arguments as tensors: `(call, read)`, or None where it cannot run the case."""

_DISTRIBUTIONS = {"cudnn": "nvidia-cudnn-frontend", "flashinfer": "flashinfer-python"}
_TILE_ENTRIES = 128
"""cuDNN's indexer backward takes multiples of so many entries."""
_HEADS = 64
"""FlashMLA takes multiples."""


def _version(package: Any) -> str:
    name = package.__name__
    try:
        return metadata.version(_DISTRIBUTIONS.get(name, name))
    except metadata.PackageNotFoundError:
        return str(getattr(package, "__version__", "unknown"))


def makers(operator: str) -> dict[str, Callable[[Any, dict[str, Any]], Any]]:
    """The makers of an operator's baselines, by name, whose packages are installed, and torch with them."""
    if importlib.util.find_spec("torch") is None:
        return {}
    known = _MAKERS.get(operator, {}).items()
    return {name: _maker(package, make) for name, (package, make) in known if importlib.util.find_spec(package)}


def _maker(package: str, make: Make) -> Callable[[Any, dict[str, Any]], Any]:
    """A maker as the protocol has it."""

    def maker(case: Any, inputs: dict[str, Any]) -> Any:
        import torch

        module = import_module(package)
        made = make(module, case, {name: _tensor(torch, value) for name, value in inputs.items()})
        return made and (made[0], _version(module), made[1])

    return maker


def _tensor(torch: Any, value: Any) -> Any:
    return torch.from_dlpack(value) if hasattr(value, "__dlpack__") else value


def _plain(case: Any, *options: str) -> bool:
    """Whether a case of an MLA operator is bf16 and asks for nothing beside its sizes, but for these options."""
    rest = {name: value for name, value in case.options.items() if name not in options}
    return not rest and case.dtype == "bfloat16" and case.sink == case.lengths == "none"


def flash_mla_forward(flash_mla: Any, case: Any, given: dict[str, Any]) -> Any:
    """FlashMLA's sparse prefill; heads are padded beforehand."""
    import torch

    if not _plain(case) or case.topk % 128:
        return None
    q, heads = given["q"], case.h_q
    if heads % _HEADS:
        q = torch.nn.functional.pad(q, (0, 0, 0, -heads % _HEADS))
    kv, indices = given["kv"][:, None], given["indices"][:, None]
    scale = case.d_qk**-0.5
    # Versions differ in the base of lse.
    return (
        lambda: flash_mla.flash_mla_sparse_fwd(q, kv, indices, scale),
        lambda result: {"out": result[0][:, :heads]},
    )


def _cudnn_backward(in_any_order: bool) -> Make:
    def make(cudnn: Any, case: Any, given: dict[str, Any]) -> Any:
        import torch

        q, kv, scale = given["q"], given["kv"], case.d_qk**-0.5
        wants_equal_bits = case.options.get("deterministic", False)
        # Before Blackwell its sums have no order.
        has_order = q.is_cuda and torch.cuda.get_device_capability(q.device) >= (10, 0)
        if not _plain(case, "deterministic") or in_any_order != (wants_equal_bits and not has_order):
            return None
        options = {"softmax_scale": scale, "deterministic": wants_equal_bits and has_order}
        sink = torch.full((case.h_q,), float("-inf"), device=q.device)
        arrays = (q, kv, given["out"], given["dout"], given["lse"], sink, given["indices"])
        plan = cudnn.DSA.SparseAttentionBackward(*arrays, **options)
        if not plan.check_support():
            return None
        plan.compile()
        results = {"dq": torch.empty_like(q), "dkv": torch.empty_like(kv)}
        workspace = torch.empty(plan.scratch_workspace_bytes(), dtype=torch.uint8, device=q.device)
        recompute = _recompute(cudnn, case, given)[0] if case.wants_dist else None

        def call() -> Mapping[str, Any]:
            cudnn.DSA.sparse_attention_backward_wrapper(*arrays, **options, workspace=workspace, **results)
            if recompute:
                recompute()
            return results

        return call, dict

    return make


def _recompute(cudnn: Any, case: Any, given: dict[str, Any]) -> tuple[Callable[[], Any], Any]:
    import torch

    out = torch.empty((1, case.s_q, case.topk), dtype=torch.float32, device=given["q"].device)
    arrays = [given[name][None] for name in ("q", "kv", "lse", "indices")]

    def call() -> Any:
        cudnn.DSA.sparse_attn_score_recompute_wrapper(*arrays, case.d_qk**-0.5, out=out)
        return out[0]

    return call, lambda dist: {"dist": dist}


def cudnn_distribution(cudnn: Any, case: Any, given: dict[str, Any]) -> Any:
    """cuDNN's score recompute, whose rows sum to 1."""
    return _recompute(cudnn, case, given) if _plain(case) else None


_LEVEL = 64.0
"""Mass of the target that cuDNN's indexer backward is given."""


def _cudnn_index_gradients(in_any_order: bool) -> Make:
    """cuDNN's indexer backward, which has no order of its sums before Blackwell.

    It makes the gradient of scores itself, (sum of target) * predicted - target, in the place of target. An even target
    and what it has to predict for that to be grad_logits are given; only a first call finds that target, and results
    are read of one.
    """

    def make(cudnn: Any, case: Any, given: dict[str, Any]) -> Any:
        import torch

        options = dict(case.options)
        q, k, weights = (given[name][None].bfloat16() for name in ("q", "k", "weights"))
        has_order = q.is_cuda and torch.cuda.get_device_capability(q.device) >= (10, 0)
        deterministic = options.pop("deterministic", False)
        plain = not options and case.dtype == "bf16" and case.batch is None and not case.lengths
        if not plain or case.topk % _TILE_ENTRIES or in_any_order != (deterministic and not has_order):
            return None
        target = torch.full_like(given["grad_logits"], _LEVEL / case.topk)[None]
        predicted = given["grad_logits"][None] / _LEVEL + 1 / case.topk
        results = {
            "d_index_q": torch.empty_like(q),
            "d_weights": torch.empty_like(weights),
            "d_index_k": torch.empty_like(k),
        }
        chosen = {
            "grad_loss": torch.ones(1, dtype=torch.float32, device=q.device),
            "loss_coeff": float(case.queries),  # what they divide by
            "deterministic": deterministic and has_order,
        }
        indices = given["indices"][None]

        def call() -> None:
            cudnn.DSA.indexer_backward_wrapper(q, weights, k, target, predicted, indices, **chosen, **results)

        def read(result: None) -> dict[str, Any]:
            target.fill_(_LEVEL / case.topk)
            call()
            names = {"dq": "d_index_q", "dk": "d_index_k", "dweights": "d_weights"}
            return {ours: results[theirs][0] for ours, theirs in names.items()}

        return call, read

    return make


def deep_gemm_logits(deep_gemm: Any, case: Any, given: dict[str, Any]) -> Any:
    """DeepGEMM's fp8 logits, with -inf where a key is not seen."""
    import torch

    if case.dtype != "fp8" or case.k_stride != 1 or not case.relu or not hasattr(deep_gemm, "fp8_mqa_logits"):
        return None
    q, k = (given[name].view(torch.float8_e4m3fn) for name in ("q", "k"))
    weights = given["weights"] * given["q_scale"]
    starts = torch.zeros(case.queries, dtype=torch.int32, device=q.device)
    ends = torch.full_like(starts, case.keys)
    if case.causal:
        seen = case.q_start + torch.arange(1, case.queries + 1, dtype=torch.int32, device=q.device)
        ends = torch.minimum(ends, seen)
    return (
        lambda: deep_gemm.fp8_mqa_logits(q, (k, given["k_scale"]), weights, starts, ends, clean_logits=True),
        lambda logits: {"logits": logits},
    )


def _flashinfer_topk(**options: Any) -> Make:
    def make(flashinfer: Any, case: Any, given: dict[str, Any]) -> Any:
        known = inspect.signature(flashinfer.top_k).parameters if hasattr(flashinfer, "top_k") else {}
        if not set(options) <= set(known):
            return None
        scores, k = given["scores"], case.topk
        return lambda: flashinfer.top_k(scores, k, **options), lambda result: {"indices": result[1].int()}

    return make


_MAKERS: Mapping[str, Mapping[str, tuple[str, Make]]] = {
    "sparse_mla_fwd": {"FlashMLA": ("flash_mla", flash_mla_forward)},
    "sparse_mla_bwd": {
        "cuDNN": ("cudnn", _cudnn_backward(in_any_order=False)),
        "cuDNN, not deterministic": ("cudnn", _cudnn_backward(in_any_order=True)),
    },
    "attn_dist": {"cuDNN": ("cudnn", cudnn_distribution)},
    "indexer_bwd": {
        "cuDNN": ("cudnn", _cudnn_index_gradients(in_any_order=False)),
        "cuDNN, not deterministic": ("cudnn", _cudnn_index_gradients(in_any_order=True)),
    },
    "indexer_logits": {"DeepGEMM": ("deep_gemm", deep_gemm_logits)},
    "topk": {
        "FlashInfer": ("flashinfer", _flashinfer_topk()),
        "FlashInfer, deterministic": ("flashinfer", _flashinfer_topk(deterministic=True)),
    },
}
