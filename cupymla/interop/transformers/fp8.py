"""fp8 rows in transformers' caches: `enable(model, cache="fp8")`.

A layer of the cache holds 656 bytes of each latent row (`cache_format="v32_fp8"`) and 132 of its index key, where
bfloat16 takes 1152 and 256. Each sequence is one block: its slots are its positions, and the indexer reads codes and
scales where they lie.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch

from ...errors import UnsupportedError
from .. import torch as mla
from .cache import derived, grown, mark_filled, room_for

FORMAT: Final = "v32_fp8"
LATENT_BYTES, INDEX_BYTES = 656, 132
LATENT, ROPE, INDEX = 512, 64, 128
"""Channels of a latent row, of its rotary part, of an index key."""


def index_parts(rows: Any) -> tuple[Any, Any]:
    """Codes [B, L, 128] fp8 and scales [B, L] fp32 of blocks [B, L, 132] of index keys: views."""
    room, flat = rows.shape[1], rows.flatten(1)
    codes = flat[:, : room * INDEX].view(torch.float8_e4m3fn).unflatten(1, (room, INDEX))
    return codes, flat[:, room * INDEX :].view(torch.float32)


def latents(rows: Any, length: int) -> Any:
    """The first rows of blocks [B, room, 656] as bf16 [B, length, 576]: what prefill attends to."""
    batch, room, _ = rows.shape
    slots = _slots(batch, room, torch.arange(length, device=rows.device, dtype=torch.int32))
    return mla.gather_mla_cache(rows, slots, cache_format=FORMAT).view(batch, length, -1)


def _fits(layer: Any, *states: Any) -> bool:
    """Whether a layer takes these rows as fp8: it holds no others, and nobody wants gradients of them."""
    held = layer.keys if layer.is_initialized and layer.keys is not None and layer.keys.shape[-1] else None
    if torch.is_grad_enabled() and any(array.requires_grad for array in states):
        if held is not None and held.dtype == torch.uint8 and layer.get_seq_length():
            supported = "torch.no_grad(), or a cache without rows"
            raise UnsupportedError("gradients of keys in an fp8 cache", str(held.device), supported)
        return False
    return held is None or held.dtype == torch.uint8


def _write_latents(keys: Any, values: Any, blocks: Any, slots: Any) -> None:
    if keys.shape[-1] == LATENT + ROPE:  # before 5.24 a layer gets whole rows, and no values
        keys, values = keys.split((LATENT, ROPE), -1)
    rows = keys.flatten(0, 2), values.flatten(0, 2)
    # A code times a power of two is exact in bf16: prefill and decode read the same keys.
    mla.concat_and_cache_mla(*rows, blocks, slots, cache_format=FORMAT, scale_rule="pow2")


def _write_index(keys: Any, blocks: Any, slots: Any) -> None:
    mla.indexer_k_quant_and_cache(keys.reshape(-1, INDEX), blocks, slots)


def _bytes(like: Any, *shape: int) -> Any:
    return like.new_empty(shape, dtype=torch.uint8)


def _slots(batch: int, room: int, positions: Any) -> Any:
    """Slots of the same positions of each sequence."""
    if batch == 1:
        return positions
    first = torch.arange(0, batch * room, room, device=positions.device, dtype=positions.dtype)
    return (first[:, None] + positions).flatten()


@functools.cache
def dynamic_class(base: type) -> type:
    """A `DynamicIndexedLayer` whose rows are fp8, in buffers with room."""
    own: Any = base

    def slots(self: Any, length: int, new: int, room: int, like: Any) -> Any:
        # All layers write to the same slots in a step.
        key = like.shape[0], length, new, room
        if self._shared.get("key") != key:
            positions = torch.arange(length, length + new, device=like.device, dtype=torch.int32)
            self._shared.update(key=key, slots=_slots(like.shape[0], room, positions))
        return self._shared["slots"]

    def update(self: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not _fits(self, key_states, value_states):
            found: tuple[Any, Any] = own.update(self, key_states, value_states, *args, **kwargs)
            return found
        batch, _, new, _ = key_states.shape
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys = _bytes(key_states, batch, 1, 0, LATENT_BYTES)
        buffer, length = grown(self.__dict__.get("_rows"), (self.keys[:, 0],), new)
        _write_latents(key_states, value_states, buffer, slots(self, length, new, buffer.shape[1], key_states))
        mark_filled(buffer, length + new)
        self._rows = buffer
        self.keys = buffer[:, None, : length + new]
        self.values = self.keys[..., :0]
        return self.keys, self.values

    def update_indexer(self: Any, indexer_key_states: Any) -> Any:
        batch, new, _ = indexer_key_states.shape
        if not self.is_indexer_initialized:
            self.lazy_initialization_indexer(indexer_key_states)
            self.indexer_keys, self._index_length = _bytes(indexer_key_states, batch, 0, INDEX_BYTES), 0
        elif self.indexer_keys.dtype != torch.uint8:
            return own.update_indexer(self, indexer_key_states)
        blocks, length = self.indexer_keys, self._index_length
        frozen = blocks.is_inference() and not torch.is_inference_mode_enabled()
        if frozen or blocks.shape[1] < length + new:
            self.indexer_keys = _bytes(blocks, batch, room_for(length, new), INDEX_BYTES)
            if length:
                for wider, part in zip(index_parts(self.indexer_keys), index_parts(blocks), strict=True):
                    wider[:, :length] = part[:, :length]
        blocks = self.indexer_keys
        _write_index(indexer_key_states, blocks, slots(self, length, new, blocks.shape[1], indexer_key_states))
        self._index_length = length + new
        return blocks

    def crop(self: Any, tokens_to_remove: int) -> None:
        blocks = self.indexer_keys
        if blocks is None or blocks.dtype != torch.uint8:
            own.crop(self, tokens_to_remove)
            return
        self.indexer_keys = blocks[:, :0]
        own.crop(self, tokens_to_remove)
        # Somebody may hold what is dropped.
        self.indexer_keys = blocks.clone()
        self._index_length = (
            min(self._index_length, tokens_to_remove)
            if tokens_to_remove > 0
            else max(0, self._index_length + tokens_to_remove)
        )

    def offload(self: Any) -> None:
        own.offload(self)
        self._rows = None

    return derived(base, update=update, update_indexer=update_indexer, crop=crop, offload=offload)


@functools.cache
def static_class(base: type) -> type:
    """A `StaticIndexedLayer` of fp8 rows: for CUDA graphs."""
    own: Any = base

    def positions(new: int, before: Any) -> Any:
        return torch.arange(new, device=before.device) + before

    def update(self: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not _fits(self, key_states, value_states):
            found: tuple[Any, Any] = own.update(self, key_states, value_states, *args, **kwargs)
            return found
        batch, _, new, _ = key_states.shape
        if not self.is_initialized:
            self.lazy_initialization(_bytes(key_states, batch, 1, 0, LATENT_BYTES), _bytes(key_states, batch, 1, 0, 0))
        slots = _slots(batch, self.max_cache_len, positions(new, self.cumulative_length))
        _write_latents(key_states, value_states, self.keys[:, 0], slots)
        self.cumulative_length.add_(new)
        return self.keys, self.values

    def update_indexer(self: Any, indexer_key_states: Any) -> Any:
        batch, new, _ = indexer_key_states.shape
        if not self.is_indexer_initialized:
            self.lazy_initialization_indexer(_bytes(indexer_key_states, batch, 0, INDEX_BYTES))
            # Codes of all sequences begin at multiples of 16 bytes.
            missing = -self.max_cache_len % 4
            if missing:
                self.indexer_keys = self.indexer_keys.new_zeros(batch, self.max_cache_len + missing, INDEX_BYTES)
                torch._dynamo.mark_static_address(self.indexer_keys)
        elif self.indexer_keys.dtype != torch.uint8:
            return own.update_indexer(self, indexer_key_states)
        before = self.indexer_cumulative_length
        slots = _slots(batch, self.indexer_keys.shape[1], positions(new, before))
        _write_index(indexer_key_states, self.indexer_keys, slots)
        before.add_(new)
        return self.indexer_keys

    return derived(base, update=update, update_indexer=update_indexer)
