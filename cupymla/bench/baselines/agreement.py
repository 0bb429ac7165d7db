"""Whether another implementation's outputs are the operator's.

Both are right by the accuracy criterion of `cupymla.testing.compare`, or so it is hoped: there is no float64 reference
at a benchmark's size. Two results that meet it differ at most so much:

- NaN, +inf and -inf stand in the same places;
- 1 - 2<x,y> / (<x,x> + <y,y>) is at most four times the criterion's limit: it grows with the square of the distance,
  and each may be as far off, in opposite directions;
- no element differs by more than 2**-6 of the largest magnitude, eight times half a unit in the last place of bf16.

Integers are equal. Of a top-k the selected scores are compared, as neither order nor choice among equals is promised
by others; of an attention distribution rows that sum to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ...testing.compare import SIMILARITY_LIMIT, Mismatch, is_float

DISSIMILARITY_LIMIT = 4 * SIMILARITY_LIMIT
LARGEST_DIFFERENCE = 2.0**-6
"""Of one element, as a share of the largest magnitude."""

_BLOCK = 1 << 24
"""Elements that are compared at a time."""


def difference(operator: str, inputs: Mapping[str, Any], ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """The largest difference of an element, as a share of its output's largest magnitude, over all outputs given.

    Args:
        operator: its name.
        inputs: the case's arguments; arrays of NumPy or CuPy.
        ours: the operator's outputs by name, arrays of the same kind.
        theirs: the other implementation's, some or all, of any library that speaks DLPack on that device.

    Raises:
        Mismatch: they are not the same.
    """
    unknown = sorted(set(theirs) - {name for name, array in ours.items() if array is not None})
    if unknown or not theirs:
        raise Mismatch(f"outputs {', '.join(unknown) or 'none'}, expected some of {', '.join(ours)}")
    xp = _module(ours[next(iter(theirs))])
    arrays = {name: _array(xp, array) for name, array in theirs.items()}
    for name, array in arrays.items():
        if array.shape != ours[name].shape:
            raise Mismatch(f"{name}: shape {array.shape}, expected {ours[name].shape}")
    comparable = _COMPARABLE.get(operator, lambda xp, inputs, outputs: outputs)
    expected, got = comparable(xp, inputs, ours), comparable(xp, inputs, arrays)
    return max(_apart(xp, name, got[name], expected[name]) for name in got)


def _module(array: Any) -> Any:
    """NumPy or CuPy, whose array it is."""
    import sys

    return sys.modules[type(array).__module__.partition(".")[0]]


def _array(xp: Any, array: Any) -> Any:
    """The array as one of xp's; bfloat16 of torch goes by its bits."""
    if isinstance(array, xp.ndarray):
        return array
    if type(array).__module__.partition(".")[0] != "torch":
        return xp.from_dlpack(array)
    import ml_dtypes
    import torch

    tensor = array.detach()
    if tensor.dtype == torch.bfloat16:
        return xp.from_dlpack(tensor.view(torch.int16)).view(ml_dtypes.bfloat16)
    return xp.from_dlpack(tensor)


def _apart(xp: Any, name: str, got: Any, expected: Any) -> float:
    """Compare one output; returns its largest difference as `difference` does. Raises Mismatch."""
    if not is_float(expected.dtype):
        wrong = int(xp.count_nonzero(got != expected))
        if wrong:
            raise Mismatch(f"{name}: {wrong} of {expected.size} elements are not equal")
        return 0.0
    flat = got.reshape(-1), expected.reshape(-1)
    scale = worst = apart = together = 0.0
    for first in range(0, expected.size, _BLOCK):
        a, b = (array[first : first + _BLOCK].astype(xp.float32) for array in flat)
        for what, where in (("NaN", xp.isnan), ("+inf", xp.isposinf), ("-inf", xp.isneginf)):
            misplaced = int(xp.count_nonzero(where(a) != where(b)))
            if misplaced:
                raise Mismatch(f"{name}: {what} in {misplaced} wrong places")
        finite = xp.isfinite(b)
        a, b = (xp.where(finite, part, 0).astype(xp.float64) for part in (a, b))
        scale = max(scale, float(xp.abs(b).max()))
        worst = max(worst, float(xp.abs(a - b).max()))
        apart += float(((a - b) ** 2).sum())
        together += float((a * a).sum() + (b * b).sum())
    share = worst / scale if scale else math.inf if worst else 0.0
    unlike = apart / together if together else 0.0
    if share > LARGEST_DIFFERENCE:
        raise Mismatch(f"{name}: an element differs by {share:.2g} of the largest, at most {LARGEST_DIFFERENCE:.2g}")
    if unlike > DISSIMILARITY_LIMIT:
        raise Mismatch(f"{name}: dissimilarity {unlike:.2g}, at most {DISSIMILARITY_LIMIT:.2g}")
    return share


def _selected(xp: Any, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> dict[str, Any]:
    """The scores that a top-k selected, in ascending order. Raises Mismatch where one is selected twice."""
    scores, indices = inputs["scores"], outputs["indices"].astype(xp.int64)
    columns = scores.shape[-1]
    inside = (indices >= 0) & (indices < columns)
    in_order = xp.sort(xp.where(inside, indices, -1 - xp.arange(indices.shape[-1])), axis=-1)
    twice = int(xp.count_nonzero(in_order[..., 1:] == in_order[..., :-1]))
    if twice:
        raise Mismatch(f"indices: {twice} are selected twice")
    chosen = xp.take_along_axis(scores, xp.clip(indices, 0, max(columns - 1, 0)), axis=-1).astype(xp.float32)
    # With zeros of one sign, floats are equal where their bits are.
    ordered = xp.sort(xp.where(inside, chosen, -xp.inf), axis=-1) + xp.float32(0)
    return {"selected scores": ordered.view(xp.int32)}


def _selected_keys(xp: Any, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> dict[str, Any]:
    """The same of an indexer, whose scores are computed here: others' last bits differ, and so may a choice."""
    from ... import indexer_logits
    from ...ops.indexer_topk.cases import scored_arguments

    scores = indexer_logits(**scored_arguments(inputs))
    found = _selected(xp, {"scores": scores}, outputs)["selected scores"]
    return {"selected scores": found.view(xp.float32)}


def _selected_paged_keys(xp: Any, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> dict[str, Any]:
    """The same of paged keys, whose slots become positions again. No block is named twice among those that count."""
    from ... import paged_indexer_logits
    from ...ops.paged_indexer_topk.cases import scored_arguments

    tables, page = inputs["block_tables"].astype(xp.int64), inputs["k_cache"].shape[1]
    slots = outputs["indices"].astype(xp.int64)
    places = slots
    if inputs.get("positions", "slot") == "slot":
        blocks, columns = inputs["k_cache"].shape[0], xp.arange(tables.shape[1])
        longest = inputs["context_lens"].reshape(len(tables), -1).max(axis=1)
        used = xp.where(columns * page < longest[:, None], tables, blocks)
        column = xp.full((len(tables), blocks + 1), -1, xp.int64)
        xp.put_along_axis(column, used, xp.broadcast_to(columns, tables.shape), axis=1)
        block = xp.clip(slots, 0, None) // page
        held = xp.take_along_axis(column, block.reshape(len(tables), -1), axis=1).reshape(slots.shape)
        places = xp.where((slots >= 0) & (held >= 0), held * page + slots % page, -1)
    scores = paged_indexer_logits(**scored_arguments(inputs))
    found = _selected(xp, {"scores": scores}, {"indices": places})["selected scores"]
    return {"selected scores": found.view(xp.float32)}


def _shares(xp: Any, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Rows that sum to 1."""
    return {name: array / xp.maximum(array.sum(axis=-1, keepdims=True), 1e-10) for name, array in outputs.items()}


_COMPARABLE: dict[str, Callable[[Any, Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]] = {
    "topk": _selected,
    "indexer_topk": _selected_keys,
    "paged_indexer_topk": _selected_paged_keys,
    "attn_dist": _shares,
}
"""What is compared in the place of outputs that may differ in another way."""
