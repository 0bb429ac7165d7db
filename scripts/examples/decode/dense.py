"""The loop that the others are compared with: NumPy, float64, attention to every token, and no cache but an array."""

from __future__ import annotations

import numpy as np

from .setting import D_VALUE, Array, Prompts, Shape, Weights, keys_of, queries_of


def decoded(shape: Shape, weights: Weights, prompts: Prompts, request: int, steps: int) -> tuple[Array, Array]:
    """A request's tokens [steps] int32, each decoded from those before it, and the first step's logits.

    A token of the window counts twice, since both sources of the sparse attention hold it.
    """
    wide = weights.on(lambda array: array.astype(np.float64))

    def keys(token: Array, before: Array, positions: Array) -> Array:
        made = keys_of(np, shape, wide, np.matmul, token, before, positions)
        return np.concatenate([made.latent, made.rope], -1)

    length = int(prompts.lengths[request])
    written = np.arange(length - 1)
    cache = np.empty((length - 1 + steps, shape.d_qk))
    cache[: length - 1] = keys(prompts.tokens(request, written), prompts.tokens(request, written - 1), written)
    before, token = (prompts.tokens(request, np.array([length - back])) for back in (2, 1))
    found, first = [], np.empty(0)
    for position in range(length - 1, length - 1 + steps):
        here = np.array([position])
        cache[here] = keys(token, before, here)
        seen = cache[: position + 1]
        q, _ = queries_of(np, shape, wide, np.matmul, token, here)
        scores = q[0] @ seen.T * shape.d_qk**-0.5
        if shape.window:
            scores[:, -shape.window :] += np.log(2)
        most = scores.max(-1, keepdims=True)
        parts = np.exp(scores - most)
        total = parts.sum(-1, keepdims=True)
        if shape.window:
            total += np.exp(wide.sink[:, None] - most)
        logits = (parts @ seen[:, :D_VALUE] / total).mean(0) @ wide.head
        before, token = token, np.array([logits.argmax()], np.int32)
        first = first if found else logits
        found.append(token)
    return np.concatenate(found), first
