"""Room to grow in transformers' dynamic cache: new rows are written behind the old ones, not into a copy of all.

Static caches hold whole rows, where transformers from 5.24 on keeps their parts apart.

A layer of the cache keeps its class's behaviour (crop, reorder, offload): its tensors are views of a buffer that is
larger than them. Kernels get the whole buffer, so the shapes of calls stay the same from step to step, and a further
call costs the host microseconds. Rows that hold no token are never selected.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

MARK, _FILLED = "_cupymla_has_room", "_cupymla_filled"
"""Attributes of a layer's class, and of a buffer: how many of its rows hold tokens."""

_BUFFERS = ("_rows", "_index_rows", "_shared")
"""Attributes of a layer that are no part of what it holds."""

STEP = 256
"""A buffer has room for a multiple of so many tokens."""


def whole(rows: Any) -> Any:
    """The buffer [B, capacity, d] that rows [B, L, d] are the first L of, or rows themselves.

    What lies behind row L is memory of the same storage: it may be read by nobody.
    """
    batch, length, width = rows.shape
    outer, inner, one = rows.stride()
    if one != 1 or inner != width or outer % width or outer <= length * width:
        return rows
    held = rows.untyped_storage().nbytes() // rows.element_size() - rows.storage_offset()
    return rows.as_strided((batch, outer // width, width), (outer, width, 1)) if batch * outer <= held else rows


def fits(topk: int, cache: Any, layer_idx: int, fresh: int) -> bool:
    """Whether a layer has at most `topk` index keys with `fresh` more, as far as the host knows without waiting."""
    if cache is None:
        return fresh <= topk
    layer = cache.layers[layer_idx]
    most = getattr(layer, "max_cache_len", None)  # of a static layer, whose length the device alone knows
    if most is None:
        most = fresh
        if layer.is_indexer_initialized:
            held = getattr(layer, "_index_length", None)  # of fp8 blocks, which have room behind it
            most += layer.indexer_keys.shape[1] if held is None else held
    return bool(most <= topk)


def joined(first: Any, last: Any) -> Any:
    """Two parts of rows as one array: a view where they lie side by side, as a layer with room returns them."""
    width = first.shape[-1] + last.shape[-1]
    side_by_side = (
        first.data_ptr() + first.shape[-1] * first.element_size() == last.data_ptr()
        and first.stride() == last.stride()
        and first.stride(-2) == width
        and first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    )
    if side_by_side and not (first.requires_grad or last.requires_grad):
        return first.as_strided((*first.shape[:-1], width), first.stride())
    return torch.cat((first, last), -1)


def grown(old: Any, parts: tuple[Any, ...], fresh: int) -> tuple[Any, int]:
    """A buffer [B, capacity, d] with room for `fresh` more rows than parts [B, L, ..] have, and L.

    `old` is taken when the parts still are all of its rows. Whoever replaced them (beam search) or dropped some, which
    somebody may hold, gets a new one.
    """
    length = parts[0].shape[-2] if parts[0].numel() else 0
    batch, width = parts[0].shape[0], sum(part.shape[-1] for part in parts)
    same = (
        old is not None
        and length == getattr(old, _FILLED)
        and old.shape[0] == batch
        and parts[0].data_ptr() == old.data_ptr()
        and (not old.is_inference() or torch.is_inference_mode_enabled())
    )
    if same and old.shape[1] >= length + fresh:
        return old, length
    buffer = parts[0].new_empty(batch, room_for(length, fresh), width)
    if length:
        _put(buffer, parts, 0)
    return buffer, length


def room_for(length: int, fresh: int) -> int:
    """Rows of a new buffer that gets `fresh` ones behind `length`."""
    room = max(length + fresh, length + length // 2)
    return -(-room // STEP) * STEP


def mark_filled(buffer: Any, count: int) -> None:
    """Remember how many of a buffer's rows hold tokens."""
    setattr(buffer, _FILLED, count)


def _put(buffer: Any, parts: tuple[Any, ...], at: int) -> None:
    mark_filled(buffer, at + parts[0].shape[-2])
    column = 0
    for part in parts:
        buffer[:, at : at + part.shape[-2], column : column + part.shape[-1]] = part
        column += part.shape[-1]


def _made(kind: type, state: dict[str, Any]) -> Any:
    """A layer of the class that everybody has, from another's attributes."""
    layer: Any = object.__new__(kind)
    layer.__dict__.update(state)
    return layer


def derived(base: type, **methods: Any) -> type:
    """A layer's class with other methods. Copied and pickled it is a layer of the class that everybody has.

    It derives from that class alone: an object can only change to a class of the same layout.
    """

    def reduced(self: Any, protocol: int) -> Any:
        return _made, (base, {name: value for name, value in self.__dict__.items() if name not in _BUFFERS})

    body = {"__module__": __name__, "__doc__": base.__doc__, MARK: True, "__reduce_ex__": reduced}
    return type(base.__name__, (base,), body | methods)


@functools.cache
def static_class(base: type) -> type:
    """A `StaticIndexedLayer` whose keys are whole rows: parts would have to be copied together in each step."""

    def update(self: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if value_states.shape[-1] and not (self.is_initialized and self.values.shape[-1]):
            key_states, value_states = torch.cat((key_states, value_states), -1), value_states[..., :0]
        found: tuple[Any, Any] = base.update(self, key_states, value_states, *args, **kwargs)  # type: ignore[attr-defined]
        return found

    return derived(base, update=update)


@functools.cache
def roomy_class(base: type) -> type:
    """A `DynamicIndexedLayer` whose rows lie in a buffer with room."""

    def update(self: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        # Where gradients may come, rows that were read must stay as they are.
        if key_states.shape[1] != 1 or torch.is_grad_enabled():
            self._rows = None
            found: tuple[Any, Any] = base.update(self, key_states, value_states, *args, **kwargs)  # type: ignore[attr-defined]
            return found
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        new = key_states[:, 0], value_states[:, 0]
        buffer, length = grown(self.__dict__.get("_rows"), (self.keys[:, 0], self.values[:, 0]), new[0].shape[1])
        _put(buffer, new, length)
        rows = buffer[:, None, : length + new[0].shape[1]]
        self._rows = buffer
        self.keys, self.values = rows[..., : new[0].shape[-1]], rows[..., new[0].shape[-1] :]
        return self.keys, self.values

    def update_indexer(self: Any, indexer_key_states: Any) -> Any:
        if not self.is_indexer_initialized:
            self.lazy_initialization_indexer(indexer_key_states)
            self.indexer_keys = indexer_key_states[:, :0]
        new = indexer_key_states.shape[1]
        buffer, length = grown(self.__dict__.get("_index_rows"), (self.indexer_keys,), new)
        _put(buffer, (indexer_key_states,), length)
        self._index_rows = buffer
        self.indexer_keys = buffer[:, : length + new]
        return self.indexer_keys

    def offload(self: Any) -> None:
        base.offload(self)  # type: ignore[attr-defined]
        self._rows = self._index_rows = None

    return derived(base, update=update, update_indexer=update_indexer, offload=offload)
