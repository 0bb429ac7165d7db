"""What stands for an attention mask: the range of keys that each query sees, [B, 1, S, 2] int32, not [B, 1, S, L]."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import InputError, UnsupportedError

_VISIBLE = "_cupymla_visible"
"""Attribute of ranges: what `visible_keys` made of them, behind what it was made for."""


def key_ranges(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: Any = None,
    **options: Any,
) -> Any:
    """The first visible key of each query and the one after the last, [B, 1, S, 2] int32; -1 is never in it.

    A mask function of transformers, with the arguments of those. A mask that is not causal, such as a sliding window's,
    is made by transformers' own function for SDPA, as a bool tensor.

    Raises:
        InputError: the padding mask ends before the queries do, as one of new tokens alone would.
        UnsupportedError: the padding mask of a sequence has holes: its ones do not stand together.
    """
    from transformers import masking_utils

    causal, sequences = (True, None) if mask_function is None else _parts(mask_function)
    if not causal:
        return masking_utils.sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            **{**options, "allow_is_causal_skip": False},
        )
    device = attention_mask.device if attention_mask is not None else options.get("device")
    if device is None:
        device = q_offset.device if isinstance(q_offset, torch.Tensor) else "cpu"
    both, starts, ends = _empty_ranges(batch_size, q_length, device)
    if q_length == 1 and isinstance(q_offset, int):
        ends.fill_(q_offset - kv_offset + 1)
    else:
        ends.copy_(torch.arange(1, q_length + 1, device=device) + (q_offset - kv_offset))
    if attention_mask is not None and isinstance(q_offset, int) and attention_mask.shape[-1] < q_offset + q_length:
        expected = f"a padding mask of all keys, [{batch_size}, {q_offset + q_length}]"
        raise InputError("attention_mask", expected, str([*attention_mask.shape]))
    kept = None if attention_mask is None else attention_mask[:, :kv_length].to(torch.bool)
    # What `generate` gives without padding. The host waits, once a step.
    if kept is not None and not kept.all():
        first = kept.to(torch.int32).argmax(-1, keepdim=True)
        last = first + kept.sum(-1, keepdim=True)
        if not _together(kept, first, last):
            raise UnsupportedError("a padding mask with zeros between ones", str(device), "padding at the ends")
        starts.copy_(first)
        ends.copy_(torch.minimum(ends, last))
    if sequences is not None:
        # A sequence begins where the number of its neighbour is another one.
        positions = torch.arange(q_length, device=device).expand(batch_size, q_length)
        sequences = sequences.to(device).expand(batch_size, q_length)
        before = torch.nn.functional.pad(sequences[:, :-1], (1, 0), value=-1)
        first = torch.where(sequences != before, positions, 0).cummax(-1).values
        starts.copy_(torch.maximum(starts, first))
    return both[:, None]


def visible_keys(ranges: Any, width: int, apart: int = 0) -> tuple[Any, Any]:
    """All keys that queries see, ids [B, S, width] int32 ascending, and how many of each row count, [B, S] int32.

    ranges [B, 1, S, 2] see at most `width` keys; those of the next sequence lie `apart` keys behind. All layers of a
    forward pass have the same ranges, which keep what was made first.
    """
    # A compiler finds what is made twice. A CUDA graph must not read what was made outside of it.
    kept = not (torch.compiler.is_compiling() or (ranges.is_cuda and torch.cuda.is_current_stream_capturing()))
    key = width, apart, 0 if ranges.is_inference() else ranges._version
    if kept and getattr(ranges, _VISIBLE, (None,))[0] == key:
        _, ids, count = getattr(ranges, _VISIBLE)
        return ids, count
    starts, ends = ranges[:, 0].unbind(-1)
    count = (ends - starts).clamp_(min=0)
    if apart:
        batch = len(ranges)
        starts = starts + torch.arange(0, batch * apart, apart, device=ranges.device, dtype=torch.int32)[:, None]
    ids = starts[..., None] + torch.arange(width, device=ranges.device, dtype=torch.int32)
    if kept:
        setattr(ranges, _VISIBLE, (key, ids, count))
    return ids, count


def _empty_ranges(batch: int, queries: int, device: Any) -> tuple[Any, Any, Any]:
    """[B, S, 2] int32, 0 where they start, and both parts of it.

    The parts lie contiguous, each at a multiple of 16 bytes: other addresses cost the host.
    """
    count = batch * queries
    whole = torch.zeros(2, -(-count // 4) * 4, device=device, dtype=torch.int32)
    parts = whole[:, :count].view(2, batch, queries)
    return parts.permute(1, 2, 0), parts[0], parts[1]


def _parts(mask_function: Any) -> tuple[bool, Any]:
    """Whether a mask is causal, perhaps of packed sequences, and then the number [B, S] of each token's sequence.

    transformers composes masks of functions. Their names and variables are those of 5.17 to 5.24, masking_utils.py.
    """
    from transformers import masking_utils

    if mask_function is masking_utils.causal_mask_function:
        return True, None
    maker = getattr(mask_function, "__qualname__", "").partition(".")[0]
    if maker not in ("packed_sequence_mask_function", "remap_positions_for_packed_sequence", "and_masks"):
        return False, None
    cells = [cell.cell_contents for cell in mask_function.__closure__]
    held = dict(zip(mask_function.__code__.co_freevars, cells, strict=True))
    if maker == "packed_sequence_mask_function":
        return True, held["packed_sequence_mask"]
    if maker == "remap_positions_for_packed_sequence":
        return _parts(held["mask_function"])
    found = [_parts(part) for part in held["mask_functions"]]
    numbers = [sequences for _, sequences in found if sequences is not None]
    return all(causal for causal, _ in found) and len(numbers) <= 1, numbers[0] if numbers else None


def _together(kept: Any, first: Any, last: Any) -> bool:
    keys = torch.arange(kept.shape[-1], device=kept.device)
    return bool((kept == ((keys >= first) & (keys < last))).all())


def dense_mask(ranges: Any, keys: int) -> Any:
    """The bool mask [B, 1, S, keys] of ranges, for attention that is not sparse; True where a query sees a key."""
    ids = torch.arange(keys, device=ranges.device)
    return (ids >= ranges[..., :1]) & (ids < ranges[..., 1:])
