"""transformers' models with DeepSeek sparse attention, run by cupymla: `enable(model)`.

    from cupymla.interop import transformers as dsa
    print(dsa.enable(model))      # what was replaced, what was left alone and why
    model.generate(...)           # or train it; parameters, checkpoints and caches stay the model's own
    dsa.disable(model)

Nothing of T x L is held: the indexer's selection runs as `indexer_topk`, attention on the latent rows as
`sparse_mla_fwd` with its backward. The families are in `families.FAMILIES`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import InputError, UnsupportedError
from .families import CACHE_NAMES, FAMILIES, FP8, VERSIONS, Family, family_of

__all__ = ["Report", "disable", "enable", "enabled"]

NAME = "cupymla"
"""Of the attention and mask functions that are registered with transformers."""

_BEFORE, _ATTENTION = "_cupymla_before", "_cupymla_attention"
"""Attributes of a replaced module: its class, and the attention that its configuration named."""

_NORMS = ("q_a_layernorm", "kv_a_layernorm")
"""Attributes of an attention module: RMS norms of its latents."""


@dataclass(frozen=True)
class Report:
    """What `enable` did to a model."""

    replaced: tuple[str, ...]
    """Names of modules that run on cupymla now."""
    left: dict[str, str]
    """Names of attention modules that were left alone, with the reason."""

    def __str__(self) -> str:
        lines = [f"{len(self.replaced)} modules run on cupymla: {', '.join(self.replaced)}"]
        return "\n".join(lines + [f"left alone: {name}: {reason}" for name, reason in self.left.items()])


def enable(model: Any, *, cache: Literal["fp8"] | None = None) -> Report:
    """Run a loaded model's indexers, selections and sparse attention on cupymla, forward and backward.

    Modules keep their parameters; their classes and the configuration's attention function change until `disable`.
    A second call changes nothing more but the kind of caches.

    Args:
        model: a transformers model in bfloat16 or float16, of a family in `families.FAMILIES`.
        cache: "fp8" to have dynamic and static caches hold 656 bytes of a token's latent row and 132 of its index key
            in each layer (`fp8`); None for rows of the model's dtype. A cache that holds rows keeps its kind.

    Returns:
        What was replaced and what was left alone.

    Raises:
        InputError: `model` is no torch module, or `cache` something else.
        UnsupportedError: the version of transformers, the family, a shape, a dtype or a module's signature does not
            fit; nothing was changed.
    """
    if cache not in (None, "fp8"):
        raise InputError("cache", "'fp8' or None", repr(cache), "enable")
    import torch
    import transformers
    from transformers import masking_utils, modeling_utils

    from . import attention, masks

    _check_model(model, "enable")
    _check_version(transformers.__version__)
    found, left = _modules_of(model)
    if not found:
        names = ", ".join(family.name for family in FAMILIES)
        raise UnsupportedError(f"{type(model).__name__}{_because(left)}", "any device", f"models of {names}")
    for name, module, family in found:
        _check(name, module, family, cache == "fp8")
    modeling_utils.ALL_ATTENTION_FUNCTIONS.register(NAME, attention.attention)
    # It looks at functions and, of padding, at values: what a compiler would have to break at anyway.
    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, torch.compiler.disable(masks.key_ranges))
    replaced = []
    for name, module, family in found:
        replaced.append(name)
        if _BEFORE not in module.__dict__:
            _replace(module, attention.attention_class)
        module.__dict__[FP8] = cache == "fp8"
        parts: dict[str, Callable[[type], type]] = {
            "indexer": functools.partial(attention.indexer_class, family=family),
            **{norm: attention.norm_class for norm in _NORMS if _has_norm(module, norm)},
        }
        for part, class_for in parts.items():
            inner = getattr(module, part)
            if inner is not None:
                replaced.append(f"{name}.{part}")
                if _BEFORE not in inner.__dict__:
                    _replace(inner, class_for)
    # Modules remember, not the configuration, which may be saved. Attention modules first: they are in every submodel.
    for holder in [*(module for _, module, _ in found), model]:
        config = getattr(holder, "config", None)
        if config is not None and config._attn_implementation != NAME:
            holder.__dict__[_ATTENTION] = config._attn_implementation
            config._attn_implementation_internal = NAME
    return Report(tuple(replaced), left)


def disable(model: Any) -> None:
    """Give a model its own classes and attention back. Without effect where `enable` was not called.

    Args:
        model: what `enable` was given.

    Raises:
        InputError: `model` is no torch module.
    """
    _check_model(model, "disable")
    for module in model.modules():
        before = module.__dict__.pop(_BEFORE, None)
        module.__dict__.pop(FP8, None)
        if before is not None:
            module.__class__ = before
        if _ATTENTION in module.__dict__:
            attention = module.__dict__.pop(_ATTENTION)
            if module.config._attn_implementation == NAME:
                module.config._attn_implementation_internal = attention


@contextlib.contextmanager
def enabled(model: Any, *, cache: Literal["fp8"] | None = None) -> Iterator[Report]:
    """`enable`, and `disable` at the end. A model that is enabled already stays so, and gets its kind of caches back.

    Args:
        model: as of `enable`.
        cache: the same.

    Returns:
        A context manager that gives what `enable` returned.

    Raises:
        InputError: as of `enable`.
        UnsupportedError: the same.
    """
    _check_model(model, "enabled")
    before = {module: module.__dict__.get(FP8) for module in model.modules() if _BEFORE in module.__dict__}
    report = enable(model, cache=cache)
    try:
        yield report
    finally:
        if not before:
            disable(model)
        for module, kind in before.items():
            if kind is not None:
                module.__dict__[FP8] = kind


def _check_model(model: Any, function: str) -> None:
    from torch.nn import Module

    if not isinstance(model, Module):
        raise InputError("model", "a torch.nn.Module", type(model).__name__, function)


def _replace(module: Any, class_for: Callable[[type], type]) -> None:
    own: type = type(module)
    module.__dict__[_BEFORE] = own
    module.__class__ = class_for(own)


def _has_norm(module: Any, name: str) -> bool:
    """Whether a module has an RMS norm of that name that is its class's own, in the dtype of what it gets."""
    norm: Any = getattr(module, name, None)
    known = type(norm).__name__.endswith("RMSNorm") and hasattr(norm, "variance_epsilon")
    return known and "forward" not in norm.__dict__ and norm.weight.dtype == module.kv_b_proj.weight.dtype


def _modules_of(model: Any) -> tuple[list[tuple[str, Any, Family]], dict[str, str]]:
    found, left, others = [], {}, {}
    for name, module in model.named_modules():
        family = family_of(module)
        if family is not None and (module.indexer is not None or getattr(module, "skip_topk", False)):
            found.append((name, module, family))
        elif family is not None:
            left[name] = "a layer without a selection: it runs as transformers' SDPA"
        elif type(module).__name__.endswith("Attention"):
            others[name] = f"{type(module).__name__}: no DeepSeek sparse attention"
    return found, left | others if found else left


def _because(left: dict[str, str]) -> str:
    return f" ({'; '.join(sorted(set(left.values())))})" if left else ""


def _check_version(version: str) -> None:
    major, minor = (int(part) for part in version.split(".")[:2])
    oldest, newest = VERSIONS
    if not oldest <= (major, minor) <= newest:
        fits = f"{oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
        raise UnsupportedError(f"transformers {version}", "any device", f"transformers {fits}")


def _check(name: str, module: Any, family: Family, fp8: bool) -> None:
    """Refuse, by name, what the kernels cannot take: before anything is changed."""
    import torch

    from .attention import PLAIN, is_plain

    weight: Any = getattr(module.kv_b_proj, "weight", None)
    device = "any device" if weight is None else str(weight.device)

    def need(holds: bool, what: str, fits: str) -> None:
        if not holds:
            raise UnsupportedError(f"{name}: {what}", device, fits)

    for part in (module, module.indexer):
        own = part is None or "forward" not in part.__dict__
        need(own, f"{type(part).__name__} with a forward bound to it", "modules whose forward is their class's")
    need(is_plain(module.kv_b_proj), f"kv_b_proj is {type(module.kv_b_proj).__name__}, or hooked", PLAIN)
    need(weight.device.type != "meta", "weights on the device meta", "weights that are loaded")
    need(weight.dtype in (torch.bfloat16, torch.float16), f"{weight.dtype} weights", "bfloat16 or float16")
    need(module.kv_lora_rank == 512, f"kv_lora_rank={module.kv_lora_rank}", "512")
    need(module.qk_rope_head_dim in (0, 64), f"qk_rope_head_dim={module.qk_rope_head_dim}", "64, or none")
    need(not fp8 or module.qk_rope_head_dim == 64, "an fp8 cache of rows without RoPE", "qk_rope_head_dim=64")
    need(module.num_heads <= 128, f"{module.num_heads} heads", "at most 128")
    parts = inspect.signature(module.expand_kv).parameters
    need(list(parts) == ["kv_nope", "k_rot"], f"expand_kv({', '.join(parts)})", "expand_kv(kv_nope, k_rot)")
    names = _forward_of(module)
    known = {"hidden_states", "attention_mask"} <= set(names) and not CACHE_NAMES.isdisjoint(names)
    need(known, f"forward({', '.join(names)})", "forward(hidden_states, ..., attention_mask, ..., cache, ...)")
    if module.indexer is not None:
        *taken, last = _forward_of(module.indexer)
        wanted = family.indexer_arguments
        what = f"{type(module.indexer).__name__}.forward({', '.join([*taken, last])})"
        need(tuple(taken) == wanted and last in CACHE_NAMES, what, f"forward({', '.join(wanted)}, cache)")
        need(module.indexer.head_dim in (64, 128), f"index_head_dim={module.indexer.head_dim}", "64 or 128")
        need(not fp8 or module.indexer.head_dim == 128, "an fp8 cache of index keys of 64 channels", "128 channels")
        need(module.indexer.n_heads <= 128, f"{module.indexer.n_heads} index heads", "at most 128")


def _forward_of(module: Any) -> list[str]:
    """Names of what its own class's forward takes."""
    own = module.__dict__.get(_BEFORE, type(module))
    return list(inspect.signature(own.forward).parameters)[1:]
