"""fp8 rows in transformers' caches: `enable(model, cache="fp8")`.

Each sequence is one block of latent rows and one of index keys: the indexer reads codes and scales where they lie.
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


def _slots(batch: int, room: int, positions: Any) -> Any:
    """Slots of the same positions of each sequence."""
    if batch == 1:
        return positions
    first = torch.arange(0, batch * room, room, device=positions.device, dtype=positions.dtype)
    return (first[:, None] + positions).flatten()


@functools.cache
def fp8_class(base: type) -> type:
    """A `DynamicIndexedLayer` or `StaticIndexedLayer` whose rows are fp8; a dynamic one has room to grow."""
    own: Any = base
    static = base.__name__ == "StaticIndexedLayer"

    def slots(self: Any, states: Any, room: int, before: Any) -> Any:
        batch, new, device = states.shape[0], states.shape[-2], states.device
        if static:  # where rows begin is known on the device alone
            positions = torch.arange(new, device=device) + before
            if states.ndim == 4:
                # Of latents, which are written first. Behind a sequence's rows are another one's, so a full layer fails
                # where it is indexed, as those of other rows do.
                positions = torch.arange(room, device=device).index_select(0, positions)
            return _slots(batch, room, positions)
        # All layers write to the same slots in a step.
        key = batch, new, room, before, device
        if self._shared.get("key") != key:
            positions = torch.arange(before, before + new, device=device, dtype=torch.int32)
            self._shared.update(key=key, slots=_slots(batch, room, positions))
        return self._shared["slots"]

    def update(self: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        if not _fits(self, key_states, value_states):
            return own.update(self, key_states, value_states, *args, **kwargs)
        batch, _, new, _ = key_states.shape
        if not self.is_initialized:
            empty = key_states.new_empty(batch, 1, 0, LATENT_BYTES, dtype=torch.uint8)
            self.lazy_initialization(empty, empty[..., :0])
            self.keys = self.keys if static else empty
        if static:
            blocks, before = self.keys[:, 0], self.cumulative_length
        else:
            blocks, before = grown(self.__dict__.get("_rows"), (self.keys[:, 0],), new)
        _write_latents(key_states, value_states, blocks, slots(self, key_states, blocks.shape[1], before))
        if static:
            before.add_(new)
        else:
            mark_filled(blocks, before + new)
            self._rows, self.keys = blocks, blocks[:, None, : before + new]
            self.values = self.keys[..., :0]
        return self.keys, self.values

    def update_indexer(self: Any, indexer_key_states: Any) -> Any:
        batch, new, _ = indexer_key_states.shape
        if not self.is_indexer_initialized:
            empty = indexer_key_states.new_empty(batch, 0, INDEX_BYTES, dtype=torch.uint8)
            self.lazy_initialization_indexer(empty)
            self.indexer_keys, self._index_length = empty, 0
            if static:
                # Codes of each sequence begin at a multiple of 16 bytes.
                self.indexer_keys = empty.new_zeros(batch, -(-self.max_cache_len // 4) * 4, INDEX_BYTES)
                torch._dynamo.mark_static_address(self.indexer_keys)
        elif self.indexer_keys.dtype != torch.uint8:
            return own.update_indexer(self, indexer_key_states)
        blocks, before = self.indexer_keys, self.indexer_cumulative_length if static else self._index_length
        frozen = blocks.is_inference() and not torch.is_inference_mode_enabled()
        if not static and (frozen or blocks.shape[1] < before + new):
            self.indexer_keys = blocks.new_empty(batch, room_for(before, new), INDEX_BYTES)
            if before:
                for wider, part in zip(index_parts(self.indexer_keys), index_parts(blocks), strict=True):
                    wider[:, :before] = part[:, :before]
            blocks = self.indexer_keys
        keys = indexer_key_states.reshape(-1, INDEX)
        mla.indexer_k_quant_and_cache(keys, blocks, slots(self, indexer_key_states, blocks.shape[1], before))
        if static:
            before.add_(new)
        else:
            self._index_length = before + new
        return blocks

    def crop(self: Any, tokens_to_remove: int) -> None:
        blocks = self.indexer_keys
        if blocks is None or blocks.dtype != torch.uint8:
            own.crop(self, tokens_to_remove)
            return
        # Codes and scales lie apart, so the class's own crop sees none. Somebody may hold what is dropped: it stays.
        self.indexer_keys = blocks[:, :0]
        own.crop(self, tokens_to_remove)
        self.indexer_keys = blocks.clone()
        left = tokens_to_remove if tokens_to_remove > 0 else self._index_length + tokens_to_remove
        self._index_length = max(0, min(self._index_length, left))

    def offload(self: Any) -> None:
        own.offload(self)
        self._rows = None

    methods = {} if static else {"crop": crop, "offload": offload}
    return derived(base, update=update, update_indexer=update_indexer, **methods)
