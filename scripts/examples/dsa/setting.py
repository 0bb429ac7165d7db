"""Sizes of the model and of its training, and the text it learns from."""

from __future__ import annotations

import os
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

D_LATENT, D_ROPE = 512, 64
"""Channels of a token's latent and of its rotary key, which the operators fix."""

EVAL_BATCHES = 4


@dataclass(frozen=True)
class Setting:
    """One size.

    Attributes:
        layers, width, heads: of the transformer.
        d_nope: channels of a head's query before it is absorbed into the latent.
        d_value: channels of a head's value after it is taken out of the latent.
        d_query: width of the query bottleneck.
        index_heads, d_index: of the lightning indexer; `indexer_topk` takes 64 or 128 channels.
        batch, length: sequences and bytes of each, per step.
        topk: tokens that a query attends to.
        warm_steps: with dense attention, in which the indexer learns to imitate it.
        sparse_steps: after that, once with each kind of attention.
        eval_every: steps between evaluations.
        rate: of learning.
        text_bytes: how much text to read.
    """

    layers: int
    width: int
    heads: int
    batch: int
    length: int
    topk: int
    warm_steps: int
    sparse_steps: int
    eval_every: int
    rate: float
    text_bytes: int
    d_nope: int = 32
    d_value: int = 32
    d_query: int = 64
    index_heads: int = 4
    d_index: int = 64
    kl_weight: float = 1.0
    vocabulary: int = 256

    @property
    def sm_scale(self) -> float:
        """Scores are as large as those of the queries and keys before absorption."""
        return float((self.d_nope + D_ROPE) ** -0.5)

    @property
    def queries(self) -> int:
        """Queries of a step, those of all layers: so many KL losses it has."""
        return self.layers * self.batch * self.length


SETTINGS = {
    "test": Setting(1, 32, 2, 2, 32, 4, 3, 2, 2, 3e-3, 1 << 16),
    # As short as tells an indexer that has learned from chance.
    "brief": Setting(1, 64, 2, 2, 96, 12, 200, 3, 100, 3e-3, 1 << 20),
    "toy": Setting(2, 64, 2, 2, 96, 12, 100, 40, 20, 3e-3, 1 << 20),
    # Two minutes on an H200 in JAX: the dense attention that it is compared with is most of it.
    "full": Setting(4, 512, 16, 8, 1024, 64, 500, 500, 50, 6e-4, 1 << 24, 64, 64, 256, 8, 64),
}


class Text:
    """Python's standard library as bytes, the last twentieth kept for evaluation."""

    def __init__(self, setting: Setting, seed: int = 0) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        random.Random(seed).shuffle(files := sorted(_sources(root)))
        whole = b""
        for file in files:
            whole += file.read_bytes()
            if len(whole) >= setting.text_bytes:
                break
        if len(whole) < 40 * setting.length:
            raise SystemExit(f"there is not enough Python source under {root}")
        text = np.frombuffer(whole, np.uint8)[: setting.text_bytes]
        cut = len(text) * 19 // 20
        self._train, self._held = text[:cut], text[cut:]
        self._setting = setting
        self._seed = seed

    def batch(self, step: int) -> npt.NDArray[np.int32]:
        """[batch, length + 1] bytes from anywhere in the training text, the same ones for the same step."""
        rng = np.random.default_rng((self._seed, step))
        return self._cut(self._train, rng.integers(0, len(self._train) - self._setting.length - 1, self._setting.batch))

    def held_out(self) -> list[npt.NDArray[np.int32]]:
        """Batches of text that is not learned from, spread evenly over it."""
        count = EVAL_BATCHES * self._setting.batch
        starts = np.linspace(0, len(self._held) - self._setting.length - 1, count).astype(int)
        return [self._cut(self._held, part) for part in starts.reshape(EVAL_BATCHES, -1)]

    def _cut(self, text: npt.NDArray[np.uint8], starts: npt.NDArray[np.int_]) -> npt.NDArray[np.int32]:
        return np.stack([text[s : s + self._setting.length + 1] for s in starts]).astype(np.int32)


def _sources(root: Path) -> Iterator[Path]:
    """Python's own: what is installed beside them may be ten times as many files, and is not looked through."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in ("site-packages", "test", "tests")]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))
