"""The decode loop in CuPy: prepared calls and one CUDA graph. NumPy runs the same loop without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

import cupymla

from .setting import (
    D_INDEX,
    D_ROPE,
    D_VALUE,
    PAGE,
    Array,
    Prompts,
    Shape,
    Weights,
    keys_of,
    queries_of,
    slots_at,
    window_positions,
)

REPLAYS = 20
"""So often a graph is replayed to be timed; with what goes before, no more than `setting.ROOM`."""

_MATMUL = r"""
extern "C" __global__ void skinny_matmul(const float* x, const float* w, float* y, int rows, int width, int columns) {
    // A thread makes one column of eight rows.
    int column = blockIdx.x * blockDim.x + threadIdx.x, first = 8 * blockIdx.y;
    if (column >= columns) return;
    float sums[8] = {};
    for (int k = 0; k < width; ++k) {
        float factor = w[(long long)k * columns + column];
        for (int row = 0; row < 8; ++row) sums[row] += x[min(first + row, rows - 1) * width + k] * factor;
    }
    for (int row = 0; row < 8 && first + row < rows; ++row) y[(long long)(first + row) * columns + column] = sums[row];
}
"""


def product(x: Any, w: Any) -> Any:
    """x @ w of float32 matrices. CuPy refuses to call cuBLAS while a stream is captured, so a kernel does it."""
    if isinstance(x, np.ndarray):
        return x @ w
    import cupy

    rows, width = x.shape
    y = cupy.empty((rows, w.shape[1]), np.float32)
    arguments = (cupy.ascontiguousarray(x), w, y, *map(np.int32, (rows, width, w.shape[1])))
    _matmul()((-(-w.shape[1] // 256), -(-rows // 8)), (256,), arguments)
    return y


@functools.cache
def _matmul() -> Any:
    import cupy

    return cupy.RawKernel(_MATMUL, "skinny_matmul")


class Loop:
    """The arrays of a batch, and its step in parts. All calls are prepared: what they read and write stays in place.

    Attributes:
        parts: of a step, in their order.
        token: [B] int32, the newest token of each request.
        lengths: [B] int32, how many tokens each has, that one among them.
        logits: [B, vocabulary] float32, from which the newest token was taken.
    """

    def __init__(self, xp: Any, shape: Shape, weights: Weights, prompts: Prompts) -> None:
        self._xp, self._shape, self._prompts = xp, shape, prompts
        self._weights = weights.on(xp.asarray)
        self._tables = xp.asarray(prompts.tables)
        batch, bf16 = prompts.batch, ml_dtypes.bfloat16
        self.token, self._before, self.lengths = (xp.empty(batch, np.int32) for _ in range(3))
        self.logits = xp.empty((batch, weights.head.shape[1]), np.float32)
        self._q = xp.empty((batch, 1, shape.heads, shape.d_qk), bf16)
        self._latent, self._rope = xp.empty((batch, shape.latent), bf16), xp.empty((batch, D_ROPE), bf16)
        self._index_q = xp.empty((batch, 1, shape.index_heads, D_INDEX), bf16)
        self._index_k = xp.empty((batch, D_INDEX), bf16)
        self._slots = xp.empty(batch, np.int32)
        self._window = xp.empty((batch, 1, shape.window), np.int32)
        # 0xFF is NaN: what nobody wrote would show.
        self._caches = [self._cache(shape.token_bytes) for _ in range(2 if shape.window else 1)]
        self._index_cache = self._cache(D_INDEX + 4)
        self._write_prompts()
        self.restart()
        self._prepare()
        self.parts: Mapping[str, Callable[[], None]] = {
            "project": self._project,
            "write": self._write,
            "select": self._select,
            "attend": self._attend_to,
            "next token": self._next,
        }

    def _cache(self, token_bytes: int) -> Any:
        return self._xp.full((self._prompts.blocks, PAGE, token_bytes), 0xFF, np.uint8)

    def _write_prompts(self) -> None:
        """The keys of all prompts. Slots of -1, of the padding, are skipped."""
        for request in range(self._prompts.batch):
            token, before, positions, slots = map(self._xp.asarray, self._prompts.prompt(request))
            made = keys_of(self._xp, self._shape, self._weights, product, token, before, positions)
            latent, rope, index_k = (part.astype(ml_dtypes.bfloat16) for part in made)
            for cache in self._caches:
                cupymla.concat_and_cache_mla(latent, rope, cache, slots, cache_format=self._shape.cache_format)
            cupymla.indexer_k_quant_and_cache(index_k, self._index_cache, slots)

    def restart(self) -> None:
        """Go back to the ends of the prompts."""
        token, before = self._prompts.newest()
        for array, values in ((self.token, token), (self._before, before), (self.lengths, self._prompts.lengths)):
            array[...] = self._xp.asarray(values)

    def _prepare(self) -> None:
        xp, shape, batch = self._xp, self._shape, self._prompts.batch
        form = {"cache_format": shape.cache_format}
        arrays = self._latent, self._rope
        self._writers = [
            *(cupymla.concat_and_cache_mla.prepare(*arrays, cache, self._slots, **form) for cache in self._caches),
            cupymla.indexer_k_quant_and_cache.prepare(self._index_k, self._index_cache, self._slots),
        ]
        codes = xp.empty(self._index_q.shape, np.uint8)
        scales = xp.empty((*self._index_q.shape[:-1], 1), np.float32)
        index_weights = xp.empty((batch, 1, shape.index_heads), np.float32)
        index_weights[...] = self._weights.index_weights
        indices, count = xp.empty((batch, 1, shape.topk), np.int32), xp.empty((batch, 1), np.int32)
        self._quantize = cupymla.quantize_fp8.prepare(self._index_q, codes=codes, scales=scales)
        self._topk = cupymla.paged_indexer_topk.prepare(
            codes, self._index_cache, index_weights, self._tables, self.lengths, shape.topk,
            q_scale=scales[..., 0], indices=indices, count=count,
        )  # fmt: skip
        self._out = xp.empty((batch, 1, shape.heads, D_VALUE), ml_dtypes.bfloat16)
        lse = xp.empty((batch, 1, shape.heads), np.float32)
        if shape.window:
            self._attend = cupymla.sparse_mla_decode.prepare(
                self._q, self._caches[0], self._window, extra_k_cache=self._caches[1], extra_indices=indices,
                extra_topk_length=count, attn_sink=self._weights.sink, out=self._out, lse=lse, **form,
            )  # fmt: skip
        else:
            self._attend = cupymla.sparse_mla_decode.prepare(
                self._q, self._caches[0], indices, topk_length=count, out=self._out, lse=lse, **form
            )

    def _project(self) -> None:
        """Queries and keys of the newest tokens, and the slots that the keys go to."""
        xp, positions = self._xp, self.lengths - 1
        keys = keys_of(xp, self._shape, self._weights, product, self.token, self._before, positions)
        queries = queries_of(xp, self._shape, self._weights, product, self.token, positions)
        places = (self._latent, self._rope, self._index_k, self._q[:, 0], self._index_q[:, 0])
        for place, values in zip(places, (*keys, *queries), strict=True):
            place[...] = values.astype(ml_dtypes.bfloat16)
        self._slots[...] = slots_at(xp, self._tables, positions)
        if self._shape.window:
            newest = window_positions(xp, self._shape, self.lengths)
            self._window[:, 0] = slots_at(xp, self._tables, newest)

    def _write(self) -> None:
        for write in self._writers:
            write()

    def _select(self) -> None:
        self._quantize()
        self._topk()

    def _attend_to(self) -> None:
        self._attend()

    def _next(self) -> None:
        """The tokens that follow, which the next step takes."""
        mixed = self._out[:, 0].astype(np.float32).mean(axis=1)
        self.logits[...] = product(mixed, self._weights.head)
        self._before[...] = self.token
        self.token[...] = self.logits.argmax(-1).astype(np.int32)
        self.lengths += 1

    def step(self) -> None:
        """Decode a token of each request."""
        for part in self.parts.values():
            part()


class Graphs:
    """CUDA graphs of a loop on a GPU, with memory of their own for what they make in between."""

    def __init__(self, loop: Loop) -> None:
        import cupy

        self._cupy, self._loop = cupy, loop
        self._pool = cupy.cuda.MemoryPool()
        self._stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with self._stream, cupy.cuda.using_allocator(self._pool.malloc):
            loop.step()  # so that everything is compiled, and the pool has what it needs
            self._stream.synchronize()
            self.step = self._captured(loop.step)
            self.parts = {name: self._captured(part) for name, part in loop.parts.items()}
            loop.restart()
        self._stream.synchronize()

    def _captured(self, work: Callable[[], None]) -> Any:
        self._stream.begin_capture()
        work()
        return self._stream.end_capture()

    def decoded(self, steps: int) -> tuple[Array, Array]:
        """Tokens [steps, B] int32, a replay for each step, and the first step's logits."""
        found, first = [], None
        with self._stream:
            for _ in range(steps):
                self.step.launch(self._stream)
                found.append(self._loop.token.copy())
                first = self._loop.logits.copy() if first is None else first
            self._stream.synchronize()
            assert first is not None
            return np.stack([token.get() for token in found]), first.get()

    def microseconds(self) -> dict[str, float]:
        """A step's time, and the times of its parts, each the mean of some replays one behind the other."""
        times = {}
        for name, graph in {"step": self.step, **self.parts}.items():
            with self._stream:
                self._loop.restart()
                graph.launch(self._stream)
                start, end = (self._cupy.cuda.Event() for _ in range(2))
                start.record()
                for _ in range(REPLAYS):
                    graph.launch(self._stream)
                end.record()
                end.synchronize()
            times[name] = float(self._cupy.cuda.get_elapsed_time(start, end)) * 1e3 / REPLAYS
        return times


def decode(
    shape: Shape, weights: Weights, prompts: Prompts, steps: int, on_gpu: bool
) -> tuple[Array, Array, dict[str, float]]:
    """Tokens [steps, B], the first step's logits [B, vocabulary], and microseconds by part, none without a GPU."""
    if on_gpu:
        import cupy

        graphs = Graphs(Loop(cupy, shape, weights, prompts))
        return (*graphs.decoded(steps), graphs.microseconds())
    loop = Loop(np, shape, weights, prompts)
    found, first = [], None
    for _ in range(steps):
        loop.step()
        found.append(loop.token.copy())
        first = loop.logits.copy() if first is None else first
    assert first is not None
    return np.stack(found), first, {}
